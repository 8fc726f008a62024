-- attach: add a connection's own reader entry, with a full lease.
-- ARGV: parent, reader, reader_lease_ms, grace_ms. Answers 1, or 0 if there is no such parent.
begin(true)
local parent = ARGV[1]
if call('EXISTS', par_key(parent)) == 0 then return 0 end
call('ZADD', readers_key(parent), awake + ARGV[3], ARGV[2])
watch_readers(parent, 0, tonumber(ARGV[4]))
return 1
