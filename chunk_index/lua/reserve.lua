-- Set bytes aside in an account. Opened by `account.lua`.
--
-- ARGV[2]  now, ms; reservations that ended by then are given back first
-- ARGV[3]  the reservation: its id, 16 bytes, and its size, 8 bytes little endian
-- ARGV[4]  when it ends, ms
-- ARGV[5]  most bytes of the account; empty for its own quota, if it has one
-- Returns  0 if the bytes are set aside; else how many must be given back first.
-- Modifies the account and its reservations.

end_overdue(tonumber(ARGV[2]))
local size = size_of(ARGV[3])
local quota = tonumber(ARGV[5]) or tonumber(call('HGET', KEYS[1], 'quota'))
local used = tonumber(call('HGET', KEYS[1], 'used')) or 0
if quota and used + size > quota then return used + size - quota end
call('ZADD', KEYS[2], ARGV[4], ARGV[3])
add('used', size)
add('reserved', size)
list_owner()
return 0
