-- Remove nodes that name a document, and all below them, leaves first.
--
-- KEYS[2]  the document's nodes
-- ARGV[2]  most nodes to remove
-- Returns  1 if no node names it any more, else 0; then key and value of each node that left.
-- Modifies all keys of those nodes; forgets nodes that are not there.

local limit = tonumber(ARGV[2])
for _, key in ipairs(call('SRANDMEMBER', KEYS[2], limit)) do
  local node = load(key)
  if not node then
    call('SREM', KEYS[2], key)
  elseif limit > 0 then
    limit = remove_tree(node, limit)
  end
end
local is_done = call('EXISTS', KEYS[2]) == 0 and 1 or 0
finish()
return { is_done, unpack(left) }
