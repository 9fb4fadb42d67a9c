-- Remove nodes that are still what was planned and can be evicted, in the order given.
--
-- ARGV[2], ARGV[3], ...  key, then checksum and creation time as they stand in the value
-- Returns  1; then key and value of each node that left.
-- Modifies all keys of those nodes, and the mean age.

for i = 2, #ARGV, 2 do
  local node = load(ARGV[i])
  local is_planned = node and node.checksum .. node.created == ARGV[i + 1]
  if is_planned and node.children == 0 and not is_protected(node) then
    delete(node)
    means().age = smoothed(means().age, math.max(means().clock - node.used, 1))
  end
end
finish()
return { 1, unpack(left) }
