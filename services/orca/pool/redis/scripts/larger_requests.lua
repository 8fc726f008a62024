-- larger requests: count the requests of a revision that have not ended and need more than `slots`. It reads each
-- request of the revision, so call it only for a reason. It writes only the clock.
-- ARGV: revision, slots.
-- Answers {promise in force or '', their number, need of the smallest or 0, need of the largest or 0}.
begin(false)
local revision, slots = ARGV[1], tonumber(ARGV[2])
local found, least, most = 0, math.huge, 0
local function count_larger(ids)
  for _, id in ipairs(ids) do
    local needs = call('HMGET', req_key(id), 'need', 'source')
    local need = needs[1] and promised_need(revision, needs[1], needs[2])
    if need and need > slots then
      found, least, most = found + 1, math.min(least, need), math.max(most, need)
    end
  end
end
count_larger(call('ZRANGE', q_key(revision), 0, -1))
for _, group in ipairs(groups_of(revision)) do count_larger(call('HKEYS', own_key(group))) end
return { call('HGET', PROMISES, revision) or '', found, found > 0 and least or 0, most }
