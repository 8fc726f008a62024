-- report: record that a part of the deployment lives, and the schema numbers that it reads and writes.
-- ARGV: part, lease_ms. Answers the number in force.
begin(false)
call('ZREMRANGEBYSCORE', PARTS, '-inf', awake)
call('ZADD', PARTS, awake + ARGV[2], SCHEMA_OLDEST .. ' ' .. SCHEMA_NEWEST .. ' ' .. ARGV[1])
return schema
