-- Write down hits that were counted elsewhere; each node, and all above it, counts as used now.
--
-- ARGV[2], ARGV[3], ARGV[4], ...  key, hits, time of the last one in ms; used last first, parents
--          before their children
-- Returns  how many of the nodes are there.
-- Modifies statistics, recency and place in the queue of those nodes and of those above them.

local num_touched = 0
local moment = tick((#ARGV - 1) / 3)
for i = 2, #ARGV, 3 do
  local node = load(ARGV[i])
  if node then
    node.hits = math.min(node.hits + tonumber(ARGV[i + 1]), 2 ^ 32 - 1)
    node.hit_ms = math.max(node.hit_ms, tonumber(ARGV[i + 2]))
    use(node, moment - (i - 2) / 3)
    num_touched = num_touched + 1
  end
end
finish()
return num_touched
