-- promise slots: what the door promises for a revision, stated by the first group of it that formed. Requests that
-- were accepted before and need more can never run, so they end here, once; the door refuses such requests from now on.
-- A promise of a revision that was replaced and has no requests binds nobody: a group that has less then states that.
-- ARGV: revision, slots. Answers the promise in force.
begin(true)
local revision, slots = ARGV[1], tonumber(ARGV[2])
local promise, current = tonumber(call('HGET', PROMISES, revision)), call('HGET', META, 'revision')
if not promise then
  call('HSET', PROMISES, revision, slots)
  for _, id in ipairs(call('ZRANGE', q_key(revision), 0, -1)) do
    -- Of all that wait few need more, mostly none: a record is read whole only for those.
    local need = tonumber(call('HGET', req_key(id), 'need'))
    local r = need and need > slots and load(id)
    if r then end_request(r, 'error') end
  end
elseif slots < promise and current and current ~= revision and unfinished_of(revision) == 0 then
  call('HSET', PROMISES, revision, slots)
end
publish()
return tonumber(call('HGET', PROMISES, revision))
