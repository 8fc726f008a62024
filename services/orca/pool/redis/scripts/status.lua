-- status: a request as it is, also one whose record this release cannot load. Writes nothing.
-- ARGV: request, then fields of its record.
-- Answers {the fields' values, body or false, length of the log, what its last entry holds as pairs}.
local id = ARGV[1]
local last = call('XREVRANGE', log_key(id), '+', '-', 'COUNT', 1)[1]
return {
  call('HMGET', req_key(id), unpack(ARGV, 2)), call('GET', body_key(id)), call('XLEN', log_key(id)),
  last and last[2] or {},
}
