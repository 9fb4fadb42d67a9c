-- Give a node another body, with more documents or a later expiry, and pin it.
--
-- KEYS[2]  the node
-- ARGV[2]  its key
-- ARGV[3]  its body as it was read
-- ARGV[4]  its new body, of the same owner, model and size
-- ARGV[5]  1 to pin it
-- Returns  its new value; 0 if the body is another one by now, so that it must be read again;
--          nil if the node is absent or leaving.
-- Modifies the record, its documents, its expiry, and with a pin the protection of its ancestors.

local node = load(ARGV[2])
if not node or has(node, LEAVING) then return nil end
if string.sub(node.value, node.body_at) ~= ARGV[3] then return 0 end

call('SET', KEYS[2], head(node) .. ARGV[4])
local new = parse(node.key, head(node) .. ARGV[4])
nodes[node.key] = new
for _, name in ipairs(document_names(new)) do
  call('SADD', document_key(new, name), new.key)
end
if new.expires < NEVER then call('ZADD', SHARD .. 'x', new.expires, new.key) end
if ARGV[5] == '1' then set_pinned(new, true) end
table.insert(changed.g, new.key)
finish()
return head(new) .. ARGV[4]
