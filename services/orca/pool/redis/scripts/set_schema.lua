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
call('HSET', META, 'schema', wanted)
return wanted
