-- set schema: put another number in force, if every part with a living lease reads and writes it. A part that comes
-- back later and cannot write it is refused by its own scripts.
-- ARGV: number. Answers the number in force.
begin(true)
local wanted = tonumber(ARGV[1])
if not is_known(wanted) then return schema end
for _, part in ipairs(call('ZRANGEBYSCORE', PARTS, '(' .. awake, '+inf')) do
  local oldest, newest = string.match(part, '^(%d+) (%d+) ')
  if wanted < tonumber(oldest) or wanted > tonumber(newest) then return schema end
end
if wanted < SCHEMA_OF_ORDERS then
  -- Releases before it do not keep the index of waiting requests.
  for _, key in ipairs({ RETIRED, REPLACED }) do
    for _, revision in ipairs(call('ZRANGE', key, 0, -1)) do drop_index(revision) end
  end
  drop_index(call('HGET', META, 'revision') or '')
end
call('HSET', META, 'schema', wanted)
return wanted
