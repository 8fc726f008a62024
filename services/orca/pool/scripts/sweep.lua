-- sweep: what is due by now, a bounded number of each kind. It begins with what frees memory and may always run.
-- ARGV: grace_ms, retention_ms, retention_least_ms, pressure_bytes, most, wanted_for_ms.
-- Answers 1 when more may be due, 0 when all is done.
begin(false)
local grace_ms, most = tonumber(ARGV[1]), tonumber(ARGV[5])
local more = 0
local function due(key, until_score)
  local names = call('ZRANGEBYSCORE', key, '-inf', until_score, 'LIMIT', 0, most)
  if #names == most then more = 1 end
  return names
end
local function last_reader(parent)
  local last = call('ZREVRANGE', readers_key(parent), 0, 0, 'WITHSCORES')
  return tonumber(last[2] or 0)
end

-- Retention: record, log and bytes go together, oldest end first. A parent that is still read is kept as if it had
-- ended now.
local reserved = tonumber(call('HGET', META, 'bytes') or 0)
local function forget(parent)
  if last_reader(parent) > awake then
    call('ZADD', ENDED, awake, parent)
    return
  end
  local record = call('HMGET', par_key(parent), 'choices', 'schema')
  local choices = tonumber(record[1])
  for choice = 0, choices - 1 do
    local id = parent .. '.' .. choice
    local bytes = tonumber(call('HGET', req_key(id), 'bytes'))
    count('bytes', -bytes)
    reserved = reserved - bytes
    call('UNLINK', req_key(id), body_key(id), log_key(id))
  end
  count('ended', -choices)
  count('written:' .. record[2], -choices)
  call('UNLINK', par_key(parent), render_key(parent), readers_key(parent))
  call('ZREM', ENDED, parent)
end

for _, parent in ipairs(due(ENDED, awake - ARGV[2])) do forget(parent) end

-- Before its time only under pressure, and no more than relieves it: at nine tenths of the bytes, or when a submission
-- was refused for want of room.
local pressure = tonumber(ARGV[4])
local wanted = call('HMGET', META, 'wanted_bytes', 'wanted_ms')
if wanted[1] and awake - wanted[2] <= tonumber(ARGV[6]) then pressure = math.min(pressure, tonumber(wanted[1])) end
if reserved > pressure then
  for _, parent in ipairs(due(ENDED, awake - ARGV[3])) do
    if reserved <= pressure then break end
    forget(parent)
  end
end

-- Seats whose lease is over. The holder stays written down: it may still come back by a heartbeat.
for _, group in ipairs(due(SEATS, awake)) do
  take_back_all(group)
  call('ZREM', SEATS, group)
end

for _, parent in ipairs(due(WATCH, awake)) do
  local unread_at = last_reader(parent) + grace_ms
  if unread_at > awake then
    call('ZADD', WATCH, unread_at, parent)
  else
    end_parent(parent, 'cancelled')
  end
end

for _, id in ipairs(due(DEADLINES, wall)) do
  local r = load(id)
  if r then end_request(r, 'deadline_exceeded') end
end

-- Retired revisions: queued requests from the oldest on, then what its groups still run.
for _, revision in ipairs(due(RETIRED, awake)) do
  local waiting = call('ZRANGE', q_key(revision), 0, most - 1)
  for _, id in ipairs(waiting) do
    local r = load(id)
    if r then end_request(r, 'model_replaced') end
  end
  if #waiting == most then
    more = 1
  else
    for _, group in ipairs(call('ZRANGE', SEATS, 0, -1)) do
      if call('HGET', seat_key(group), 'revision') == revision then
        for _, id in ipairs(call('HKEYS', own_key(group))) do
          local r = load(id)
          if r then end_request(r, 'model_replaced') end
        end
      end
    end
    call('ZREM', RETIRED, revision)
  end
end
publish()
return more
