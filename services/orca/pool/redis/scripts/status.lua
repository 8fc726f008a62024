-- status: return the state of a request, also if this release cannot load its record. It writes nothing.
-- ARGV: request, then fields of its record.
-- Answers {the fields' values, body or false, length of the log, fields of its last entry as pairs, the number of
--         requests in its queue that came before it, or '' if it does not wait}.
local id = ARGV[1]
local last = call('XREVRANGE', log_key(id), '+', '-', 'COUNT', 1)[1]
local place = call('HMGET', req_key(id), 'state', 'revision', 'arrival')
return {
  call('HMGET', req_key(id), unpack(ARGV, 2)), call('GET', body_key(id)), call('XLEN', log_key(id)),
  last and last[2] or {},
  place[1] == 'queued' and call('ZCOUNT', q_key(place[2]), '-inf', '(' .. place[3]) or '',
}
