-- Make a node findable below its parent, which counts as used.
--
-- KEYS[2]  the node
-- ARGV[2]  its key
-- ARGV[3]  its value as `codec.encode_record` makes it
-- ARGV[4]  now, ms
-- ARGV[5]  microseconds per byte that this shard takes for the mean as long as it has none
-- Returns  0 stored, 1 present, 2 its parent cannot take it, 3 expired, leaving or not ours.
-- Modifies all of the node's and its ancestors' keys, if it returns 0; keeps the payload value that
-- belongs to the record, if it returns 0 or 1.

local now = tonumber(ARGV[4])

local function is_open(node)
  return not has(node, LEAVING) and node.expires > now
end

local present = load(ARGV[2])
if present then
  if not is_open(present) then return 3 end
  call('PERSIST', value_key(present))
  return 1
end
if call('EXISTS', KEYS[2]) == 1 then return 3 end

local node = parse(ARGV[2], ARGV[3])
local parent = node.parent and load(node.parent)
if node.parent and not (parent and is_open(parent)) then return 2 end

if means().cost <= 0 then means().cost = tonumber(ARGV[5]) end
if node.compute > 0 then
  means().cost = smoothed(means().cost, node.compute / math.max(node.bytes, 1))
end
local moment = tick(2)
if parent then
  local following = parent.first and load(parent.first)
  if following then
    following.previous = node.key
    save(following)
  end
  node.next = parent.first
  parent.first = node.key
  parent.children = parent.children + 1
  if is_protected(node) then protect(parent, 1) end
  use(parent, moment)
end
node.used = moment - 1
lift(node, node.used + bonus(node))
call('SET', KEYS[2], head(node) .. string.sub(ARGV[3], node.body_at))
call('PERSIST', value_key(node))
enqueue(node)
count(node, 1)
if node.expires < NEVER then call('ZADD', SHARD .. 'x', node.expires, node.key) end
for _, name in ipairs(document_names(node)) do
  call('SADD', document_key(node, name), node.key)
end
table.insert(changed.n, node.key)
finish()
return 0
