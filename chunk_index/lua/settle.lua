-- End a reservation, if it has not ended, and change the account by what came of it. Opened by
-- `account.lua`.
--
-- ARGV[2]  now, ms; reservations that ended by then are given back first
-- ARGV[3]  the reservation: its id, 16 bytes, and its size, 8 bytes little endian; or empty
-- ARGV[4]  bytes published, negative for bytes removed
-- Returns  bytes used now.
-- Modifies the account and its reservations.

-- A full Redis allows this write, and then all others of the script.
local ended = call('ZREM', KEYS[2], ARGV[3])
local change = tonumber(ARGV[4])
if ended == 1 then
  local size = size_of(ARGV[3])
  add('reserved', -size)
  change = change - size
end
if change ~= 0 then add('used', change) end
end_overdue(tonumber(ARGV[2]))
if tonumber(ARGV[4]) > 0 then list_owner() end
return tonumber(call('HGET', KEYS[1], 'used')) or 0
