-- stats: counts for metrics, status and admission. Writes the clock only.
-- Answers {meta as pairs, wall, promise or '', oldest submitted_ms or '', groups with a living seat, those formed}.
begin(false)
local meta = call('HGETALL', META)
local revision = call('HGET', META, 'revision')
local promise = revision and call('HGET', PROMISES, revision) or ''
local revisions = call('ZRANGE', RETIRED, 0, -1)
if revision then revisions[#revisions + 1] = revision end
local oldest
for _, name in ipairs(revisions) do
  local head = call('ZRANGE', q_key(name), 0, 0)[1]
  local submitted = head and tonumber(call('HGET', req_key(head), 'submitted_ms'))
  if submitted and submitted < (oldest or math.huge) then oldest = submitted end
end
local groups, formed = call('ZRANGEBYSCORE', SEATS, '(' .. awake, '+inf'), {}
for _, group in ipairs(groups) do
  -- A holder of the release before says nothing, and most of its time it serves.
  local seat = call('HMGET', seat_key(group), 'holder', 'unformed')
  if seat[1] ~= seat[2] then formed[#formed + 1] = group end
end
return { meta, wall, promise, oldest or '', groups, formed }
