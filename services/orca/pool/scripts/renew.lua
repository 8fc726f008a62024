-- renew: full lease again for reader entries that are still there.
-- ARGV: reader_lease_ms, grace_ms, then per entry: parent, reader.
begin(false)
for i = 3, #ARGV, 2 do
  local parent, reader = ARGV[i], ARGV[i + 1]
  if call('ZSCORE', readers_key(parent), reader) then
    call('ZADD', readers_key(parent), awake + ARGV[1], reader)
    watch_readers(parent, 0, tonumber(ARGV[2]))
  end
end
