-- renew: give reader entries that are still there a full lease again. The time at which their parent counts as unread
-- does not move with them: the sweep checks the entries at that time.
-- ARGV: reader_lease_ms, then per entry: parent, reader.
begin(false)
for i = 2, #ARGV, 2 do
  call('ZADD', readers_key(ARGV[i]), 'XX', awake + ARGV[1], ARGV[i + 1])
end
