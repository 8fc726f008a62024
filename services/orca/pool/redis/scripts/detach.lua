-- detach: remove one reader entry. If it was the last living one, the grace counts from now.
-- ARGV: parent, reader, grace_ms.
begin(false)
local parent, reader = ARGV[1], ARGV[2]
local lease = call('ZSCORE', readers_key(parent), reader)
if lease then
  call('ZREM', readers_key(parent), reader)
  watch_readers(parent, math.min(tonumber(lease), awake), tonumber(ARGV[3]))
end
