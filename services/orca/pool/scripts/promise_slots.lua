-- promise slots: what the door promises for a revision, stated by the first group of it that formed. Requests that
-- were accepted before and need more can never run, so they end here, once; the door refuses such requests from now on.
-- ARGV: revision, slots. Answers the promise in force.
begin(true)
local revision, slots = ARGV[1], tonumber(ARGV[2])
if call('HSETNX', PROMISES, revision, slots) == 1 then
  for _, id in ipairs(call('ZRANGE', q_key(revision), 0, -1)) do
    local r = load(id)
    if r and tonumber(r.need) > slots then end_request(r, 'error') end
  end
end
publish()
return tonumber(call('HGET', PROMISES, revision))
