-- set revision: make it the current one if the generation is newer. The first may come before any group, a later one
-- only once a group of it has formed (it has promised slots). The replaced one gets the time at which its requests end.
-- ARGV: revision, generation, retire_ms. Answers the revision in force.
begin(true)
local revision, generation = ARGV[1], tonumber(ARGV[2])
local meta = call('HMGET', META, 'revision', 'generation')
if meta[1] then
  local is_formed = revision == meta[1] or call('HEXISTS', PROMISES, revision) == 1
  if generation <= tonumber(meta[2]) or not is_formed then return meta[1] end
  if revision ~= meta[1] then call('ZADD', RETIRED, awake + ARGV[3], meta[1]) end
end
call('ZREM', RETIRED, revision)
call('ZREM', REPLACED, revision)
call('HSET', META, 'revision', revision, 'generation', generation)
return revision
