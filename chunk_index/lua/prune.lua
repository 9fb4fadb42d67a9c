-- Forget members of a queue, or of the kept nodes, that are not there (deleted by other hands).
--
-- KEYS[2]   an owner's queue or kept nodes
-- ARGV[2+]  keys
-- Returns   how many were forgotten.
-- Modifies  KEYS[2].

local num_forgotten = 0
local remove = call('TYPE', KEYS[2]).ok == 'zset' and 'ZREM' or 'SREM'
for i = 2, #ARGV do
  if not load(ARGV[i]) then
    num_forgotten = num_forgotten + call(remove, KEYS[2], ARGV[i])
  end
end
return num_forgotten
