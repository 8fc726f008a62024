-- deadline counts: return how many requests of a revision that had a deadline were in time, by periods (length_bins.py).
-- It writes nothing.
-- ARGV: revision.
-- Answers {awake ms, then per period with such requests, the newest first: number, in time, late}.
local awake_ms = tonumber(call('HGET', META, 'awake_ms') or 0)
local newest, answer = math.floor(awake_ms / PERIOD_MS), { awake_ms }
for period = newest, math.max(0, newest - PERIODS_KEPT + 1), -1 do
  local counts = call('HMGET', outcomes_key(ARGV[1] .. ':' .. period), 'in_time', 'late')
  if counts[1] or counts[2] then
    answer[#answer + 1] = period
    answer[#answer + 1] = counts[1] or '0'
    answer[#answer + 1] = counts[2] or '0'
  end
end
return answer
