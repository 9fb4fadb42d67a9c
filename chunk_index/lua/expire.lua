-- Remove nodes that are expired or leaving, and all below them, leaves first.
--
-- ARGV[2]  most nodes to remove
-- ARGV[3]  now, ms
-- Returns  1 if nothing more is due, else 0; then key and value of each node that left.
-- Modifies all keys of those nodes; forgets the expiry of nodes that are not there.

local limit = tonumber(ARGV[2])
local due = call('ZRANGEBYSCORE', SHARD .. 'x', '-inf', ARGV[3], 'LIMIT', 0, limit)
for _, key in ipairs(due) do
  local node = load(key)
  if not node then
    call('ZREM', SHARD .. 'x', key)
  elseif limit > 0 then
    limit = remove_tree(node, limit)
  end
end
local is_done = call('ZCOUNT', SHARD .. 'x', '-inf', ARGV[3]) == 0 and 1 or 0
finish()
return { is_done, unpack(left) }
