-- Remove nodes and all below them, leaves first.
--
-- ARGV[2]   most nodes to remove
-- ARGV[3+]  keys
-- Returns   1 if nothing of them is left, else 0; then key and value of each node that left.
-- Modifies  all keys of those nodes.

local limit = tonumber(ARGV[2])
for i = 3, #ARGV do
  local node = load(ARGV[i])
  if node then limit = remove_tree(node, limit) end
end
local is_done = 1
for i = 3, #ARGV do
  if load(ARGV[i]) then is_done = 0 end
end
finish()
return { is_done, unpack(left) }
