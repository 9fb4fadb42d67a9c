-- Say that a server lives, and forget those that have not said so for long.
--
-- KEYS[1]  servers
-- KEYS[2]  their models
-- ARGV[1]  the server
-- ARGV[2]  digest of its model
-- ARGV[3]  now, ms
-- ARGV[4]  who was heard last before this moment, ms, is dead
-- Returns  how many live.
-- Modifies both keys.

local dead = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. ARGV[4], 'LIMIT', 0, 64)
for _, server in ipairs(dead) do
  redis.call('ZREM', KEYS[1], server)
  redis.call('HDEL', KEYS[2], server)
end
redis.call('ZADD', KEYS[1], ARGV[3], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return redis.call('ZCARD', KEYS[1])
