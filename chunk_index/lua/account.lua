-- Opens every script on an account; the operation's own file follows.
--
-- KEYS[1]  the account
-- KEYS[2]  its reservations
-- KEYS[3]  only for the account of all: the owners that have an account
-- ARGV[1]  the owner
-- Units: bytes, milliseconds.

if redis.replicate_commands then redis.replicate_commands() end

local call = redis.call
local MAX_ENDED = 64 -- in one call

local function size_of(reservation)
  return (struct.unpack('<I8', reservation, 17))
end

-- Add to a field that is never negative; one that comes to nothing is forgotten.
local function add(field, change)
  if call('HINCRBY', KEYS[1], field, change) <= 0 then call('HDEL', KEYS[1], field) end
end

local function end_overdue(now)
  local overdue = call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, MAX_ENDED)
  for _, reservation in ipairs(overdue) do
    call('ZREM', KEYS[2], reservation)
    add('used', -size_of(reservation))
    add('reserved', -size_of(reservation))
  end
end

local function list_owner()
  if KEYS[3] then call('SADD', KEYS[3], ARGV[1]) end
end
