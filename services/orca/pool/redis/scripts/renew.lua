-- renew: full lease again for reader entries that are still there. When their parent would count as unread is not moved
-- along: the sweep looks at the entries by then.
-- ARGV: reader_lease_ms, then per entry: parent, reader.
begin(false)
for i = 2, #ARGV, 2 do
  call('ZADD', readers_key(ARGV[i]), 'XX', awake + ARGV[1], ARGV[i + 1])
end
