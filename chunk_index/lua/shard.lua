-- Opens every script on a shard; the operation's own file follows. The constants of `policy` stand
-- above it: MAX_HITS, MAX_WORTH_LOSS, MAX_WORTH_GAIN, SMOOTHING, START_AGE, MAX_LIFTS.
--
-- KEYS[1]  the shard's totals, pic1:{T}:t; all other keys have its prefix, and so its slot
-- ARGV[1]  sender, 8 bytes: named in announcements
-- Units: clock and priorities in microseconds of the server, other times in ms, sizes in bytes.
--
-- Nodes are read once and changed in place. A value that is not ours counts as absent and is left
-- as it is. A link to a node that is not there ends the walk and nothing else.

if redis.replicate_commands then redis.replicate_commands() end

local call = redis.call
local SHARD = string.sub(KEYS[1], 1, 10)
local MAGIC, NONE = 'PIC\1', string.rep('\0', 16)
local HEAD, LINKS, BODY = '<c4BI4I8I4I4I8I8c16', '<c16c16c16', '<I4I4I8c8c8I8I4'
local HEAD_LEN, LINKS_LEN, BODY_LEN = 57, 48, 44
local NEVER = 2 ^ 64
local PINNED, LEAVING, HAS_PARENT = 1, 2, 4

local nodes = {} -- by key; false is absent
local left = {} -- key, value, key, value of what was removed
local changed = { g = {}, n = {} } -- announced at the end
local shard -- clock and means, once needed

local function has(node, flag)
  return bit.band(node.flags, flag) ~= 0
end

local function is_protected(node)
  return has(node, PINNED) or node.protected > 0
end

local function linked(key, digest)
  if digest ~= NONE then return string.sub(key, 1, 1) .. digest end
end

local function digest_of(key)
  return key and string.sub(key, 2) or NONE
end

-- A name of the body and the position behind it.
local function name_at(value, at)
  local size = string.byte(value, at)
  if size == 255 then
    return string.format('%08x%08x', struct.unpack('>I4I4', value, at + 1)), at + 9
  end
  return string.sub(value, at + 1, at + size), at + 1 + size
end

-- The documents of a body, which must end where the value ends.
local function documents_at(value, at)
  local documents, num_documents = {}, string.byte(value, at)
  at = at + 1
  for i = 1, num_documents do
    local size = struct.unpack('<I2', value, at)
    documents[i] = string.sub(value, at + 2, at + 1 + size)
    at = at + 2 + size
  end
  assert(at == #value + 1)
  return documents
end

local function parse(key, value)
  local node = { key = key, value = value, body_at = HEAD_LEN + 1 }
  local magic, first, previous, following, parent, _
  magic, node.flags, node.hits, node.hit_ms, node.children, node.protected, node.priority,
    node.used, first = struct.unpack(HEAD, value)
  assert(magic == MAGIC and node.flags < 8)
  node.first = linked(key, first)
  if has(node, HAS_PARENT) then
    parent, previous, following = struct.unpack(LINKS, value, node.body_at)
    node.body_at = node.body_at + LINKS_LEN
    node.parent = linked(key, parent)
    node.previous, node.next = linked(key, previous), linked(key, following)
  end
  _, _, node.bytes, node.checksum, node.created, node.expires, node.compute =
    struct.unpack(BODY, value, node.body_at)
  assert(node.bytes < 2 ^ 53)
  node.owner, node.names_end = name_at(value, node.body_at + BODY_LEN)
  node.model, node.names_end = name_at(value, node.names_end)
  node.documents = documents_at(value, node.names_end)
  return node
end

local function node_key(key)
  return SHARD .. 'n:' .. key
end

-- The node of that key; nil if it is absent or not ours.
local function load(key)
  if nodes[key] == nil then
    local value = redis.pcall('GET', node_key(key))
    local is_ours, node = pcall(parse, key, value)
    nodes[key] = is_ours and node or false
  end
  return nodes[key] or nil
end

local function head(node)
  local packed = struct.pack(HEAD, MAGIC, node.flags, node.hits, node.hit_ms, node.children,
    node.protected, node.priority, node.used, digest_of(node.first))
  if not has(node, HAS_PARENT) then return packed end
  return packed .. struct.pack(LINKS, digest_of(node.parent), digest_of(node.previous),
    digest_of(node.next))
end

local function save(node)
  call('SETRANGE', node_key(node.key), 0, head(node))
end

-- Every name that a node's documents are found by; see `index.document_names`.
local function document_names(node)
  local names = {}
  for _, document in ipairs(node.documents) do
    names[#names + 1] = document
    names[#names + 1] = string.match(document, '^(.+)@[^@]*$')
  end
  return names
end

local function document_key(node, name)
  return SHARD .. 'd:' .. node.owner .. ':' .. redis.sha1hex(name)
end

local function value_key(node)
  return SHARD .. 'v:' .. node.key .. string.reverse(node.checksum)
end

-- Nodes and bytes of owner, model and shard; what comes to nothing is forgotten.
local function count(node, sign)
  local owners, models = SHARD .. 'o', SHARD .. 'm'
  if call('HINCRBY', owners, 'n' .. node.owner, sign) <= 0 then
    call('HDEL', owners, 'n' .. node.owner, 'b' .. node.owner)
  else
    call('HINCRBY', owners, 'b' .. node.owner, sign * node.bytes)
  end
  if call('HINCRBY', models, node.model, sign) <= 0 then call('HDEL', models, node.model) end
  call('HINCRBY', KEYS[1], 'nodes', sign)
  call('HINCRBY', KEYS[1], 'bytes', sign * node.bytes)
end

-- Put a node where its protection and priority say.
local function enqueue(node)
  local queue, kept = SHARD .. 'q:' .. node.owner, SHARD .. 'k:' .. node.owner
  if is_protected(node) then
    call('ZREM', queue, node.key)
    call('SADD', kept, node.key)
  else
    call('SREM', kept, node.key)
    call('ZADD', queue, node.priority, node.key)
  end
end

-- Pins below a node become more or fewer; goes up as long as that changes anything.
local function protect(node, change)
  while node do
    local was = is_protected(node)
    node.protected = math.max(node.protected + change, 0)
    save(node)
    if is_protected(node) == was then return end
    enqueue(node)
    node = node.parent and load(node.parent)
  end
end

-- Set or take away a node's own pin.
local function set_pinned(node, is_pinned)
  if has(node, PINNED) == is_pinned then return end
  local was = is_protected(node)
  node.flags = node.flags + (is_pinned and PINNED or -PINNED)
  save(node)
  if is_protected(node) == was then return end
  enqueue(node)
  if node.parent and load(node.parent) then
    protect(load(node.parent), is_pinned and 1 or -1)
  end
end

local function means()
  if not shard then
    local time, kept = call('TIME'), call('HMGET', KEYS[1], 'last', 'age', 'cost')
    shard = {
      clock = math.max(time[1] * 1e6 + time[2], (tonumber(kept[1]) or 0) + 1),
      age = tonumber(kept[2]) or START_AGE,
      cost = tonumber(kept[3]) or 0,
    }
  end
  return shard
end

-- Move the clock on; no two uses are at the same moment.
local function tick(steps)
  means().clock = means().clock + (steps or 1)
  return means().clock
end

local function bonus(node)
  local worth = 0
  if node.compute > 0 and means().cost > 0 then
    worth = node.compute / math.max(node.bytes, 1) / means().cost - 1
    worth = math.min(math.max(worth, -MAX_WORTH_LOSS), MAX_WORTH_GAIN)
  end
  return (math.modf(means().age * (math.min(node.hits, MAX_HITS) + worth)))
end

local function smoothed(mean, sample)
  return mean > 0 and mean + SMOOTHING * (sample - mean) or sample
end

local function requeue(node)
  save(node)
  if not is_protected(node) then
    call('ZADD', SHARD .. 'q:' .. node.owner, node.priority, node.key)
  end
end

-- Raise a node's priority, and those of the nodes above that would not stay above it; saves these
-- but not the node. If more than MAX_LIFTS would have to move, it rises as far as they let it.
local function lift(node, priority)
  local rising = { node }
  local above = node.parent and load(node.parent)
  while above and above.priority < priority + #rising and #rising <= MAX_LIFTS do
    rising[#rising + 1] = above
    above = above.parent and load(above.parent)
  end
  if above then priority = math.min(priority, above.priority - #rising) end
  for i, each in ipairs(rising) do
    if each.priority < priority + i - 1 then
      each.priority = priority + i - 1
      if i > 1 then requeue(each) end
    end
  end
end

-- A node is used at a moment of the clock: it moves back in its queue, and so do those above it.
local function use(node, moment)
  node.used = moment
  lift(node, moment + bonus(node))
  requeue(node)
end

-- Take a node without children out of its parent's list.
local function unlink(node)
  local parent = node.parent and load(node.parent)
  local previous = node.previous and load(node.previous)
  local following = node.next and load(node.next)
  if following then
    following.previous = node.previous
    save(following)
  end
  if previous then
    previous.next = node.next
    save(previous)
  elseif parent then
    parent.first = node.next
  end
  if parent then
    parent.children = math.max(parent.children - 1, 0)
    save(parent)
    if is_protected(node) then protect(parent, -1) end
  end
end

-- Remove a node without children. Its first write is one that a full Redis allows; it then allows
-- all others of the script.
local function delete(node)
  call('UNLINK', node_key(node.key), value_key(node))
  if is_protected(node) then
    call('SREM', SHARD .. 'k:' .. node.owner, node.key)
  else
    call('ZREM', SHARD .. 'q:' .. node.owner, node.key)
  end
  if node.expires < NEVER or has(node, LEAVING) then call('ZREM', SHARD .. 'x', node.key) end
  for _, name in ipairs(document_names(node)) do
    call('SREM', document_key(node, name), node.key)
  end
  nodes[node.key] = false
  unlink(node)
  count(node, -1)
  left[#left + 1] = node.key
  left[#left + 1] = node.value
  table.insert(changed.g, node.key)
end

-- Remove a node and all below it, leaves first, but at most `limit` nodes; returns what is left of
-- the limit. A node that remains is leaving: not matched, takes no child, and found by `expire`.
local function remove_tree(top, limit)
  local node = top
  while limit > 0 do
    while node.first do
      local child = load(node.first)
      if not child then
        node.first, node.children = nil, 0
      else
        node = child
      end
    end
    local parent = node.parent and load(node.parent)
    delete(node)
    limit = limit - 1
    if node == top then return limit end
    node = parent
  end
  if not has(top, LEAVING) then
    top.flags = top.flags + LEAVING
    save(top)
    call('ZADD', SHARD .. 'x', 0, top.key)
    table.insert(changed.g, top.key)
  end
  return limit
end

-- Write the clock and the means, and announce what changed.
local function finish()
  if shard then
    call('HSET', KEYS[1], 'last', shard.clock, 'age', shard.age, 'cost', shard.cost)
  end
  for kind, keys in pairs(changed) do
    if #keys > 0 then call('PUBLISH', 'pic1:changes', ARGV[1] .. kind .. table.concat(keys)) end
  end
end
