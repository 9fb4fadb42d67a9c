-- Let a node be evicted again, if no node below it is pinned.
--
-- ARGV[2]  its key
-- Returns  its new value; nil if it is absent or leaving.
-- Modifies the node's flags, and the protection of its ancestors.

local node = load(ARGV[2])
if not node or has(node, LEAVING) then return nil end
if has(node, PINNED) then
  set_pinned(node, false)
  table.insert(changed.g, node.key)
  finish()
end
return head(node) .. string.sub(node.value, node.body_at)
