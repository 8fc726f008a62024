-- promise slots: set what submit promises for a revision; the first group of it that formed does so. Requests that were
-- accepted before and need more can never run, so they end here, once; submit refuses such requests from now on. Nobody
-- relies on the promise of a revision that was replaced and has no requests, so a group with fewer slots lowers it.
-- ARGV: revision, slots, and as JSON the reason for their clients, with %d for both numbers.
-- Answers the promise in force.
begin(true)
local revision, slots = ARGV[1], tonumber(ARGV[2])
local promise, current = tonumber(call('HGET', PROMISES, revision)), call('HGET', META, 'revision')
if not promise then
  call('HSET', PROMISES, revision, slots)
  for _, id in ipairs(call('ZRANGE', q_key(revision), 0, -1)) do
    -- Few waiting requests need more, mostly none: the whole record is read only for those.
    local needs = call('HMGET', req_key(id), 'need', 'source')
    local need = needs[1] and promised_need(revision, needs[1], needs[2])
    local r = need and need > slots and load(id)
    if r then end_request(r, 'error', string.format(ARGV[3], need, slots)) end
  end
elseif slots < promise and current and current ~= revision and unfinished_of(revision) == 0 then
  call('HSET', PROMISES, revision, slots)
end
publish()
return tonumber(call('HGET', PROMISES, revision))
