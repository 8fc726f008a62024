-- latencies: return the counts of one period of a revision (latency_bins.py). It writes nothing.
-- ARGV: revision, period; an empty period asks for the time alone.
-- Answers {awake ms, fields of the counts as pairs}.
local awake_ms = tonumber(call('HGET', META, 'awake_ms') or 0)
if ARGV[2] == '' then return { awake_ms, {} } end
return { awake_ms, call('HGETALL', latencies_key(ARGV[1] .. ':' .. ARGV[2])) }
