-- sweep: what is due by now, a bounded number of each kind. It begins with what frees memory and may always run.
-- ARGV: grace_ms, retention_ms, retention_least_ms, pressure_bytes, most, wanted_for_ms, passed_for_ms, closed_for_ms.
-- What this release cannot read, after a rollback, is passed over: it comes up again after passed_for_ms, so that it never
-- stands for long in front of what is due behind it.
-- Answers 1 when more may be due, 0 when all is done.
begin(false)
local grace_ms, most, passed_for_ms = tonumber(ARGV[1]), tonumber(ARGV[5]), tonumber(ARGV[7])
local more = 0
local function due(key, until_score)
  local names = call('ZRANGEBYSCORE', key, '-inf', until_score, 'LIMIT', 0, most)
  if #names == most then more = 1 end
  return names
end
local function is_readable(parent) return is_known(call('HGET', par_key(parent), 'schema')) end
local function last_reader(parent)
  local last = call('ZREVRANGE', readers_key(parent), 0, 0, 'WITHSCORES')
  return tonumber(last[2] or 0)
end

-- Retention: record, log and bytes go together, oldest end first. A parent that is still read, or that cannot be read, is
-- kept as if it had ended now.
local reserved = tonumber(call('HGET', META, 'bytes') or 0)
local function forget(parent)
  if last_reader(parent) > awake or not is_readable(parent) then
    call('ZADD', ENDED, awake, parent)
    local revision = call('HGET', req_key(parent .. '.0'), 'revision')
    if revision then call('ZADD', REPLACED, '+inf', revision) end
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
local is_behind = more == 1

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
  elseif not is_readable(parent) then
    call('ZADD', WATCH, awake + passed_for_ms, parent)
  else
    end_parent(parent, 'cancelled')
  end
end

for _, id in ipairs(due(DEADLINES, wall)) do
  local r = load(id)
  if r then
    end_request(r, 'deadline_exceeded')
  else
    call('ZADD', DEADLINES, wall + passed_for_ms, id)
  end
end

-- Processes that have left, once none of their calls can still be on its way.
call('ZREMRANGEBYSCORE', CLOSED_AT, '-inf', awake - ARGV[8])

-- Retired revisions: what waits from the oldest on, at most so many, then what its groups still run. Those passed over are
-- at most as many as may wait.
local function end_waiting(revision)
  local ended, passed = 0, 0
  while ended < most do
    local ids = call('ZRANGE', q_key(revision), passed, passed + most - 1)
    if #ids == 0 then break end
    for _, id in ipairs(ids) do
      local r = load(id)
      if not r then
        passed = passed + 1
      elseif ended < most then
        end_request(r, 'model_replaced')
        ended = ended + 1
      end
    end
  end
  return ended, passed
end

local function end_running(revision)
  local passed = 0
  for _, group in ipairs(groups_of(revision)) do
    for _, id in ipairs(call('HKEYS', own_key(group))) do
      local r = load(id)
      if r then end_request(r, 'model_replaced') else passed = passed + 1 end
    end
  end
  return passed
end

for _, revision in ipairs(due(RETIRED, awake)) do
  local ended, passed = end_waiting(revision)
  if ended == most then
    more = 1
  elseif end_running(revision) + passed > 0 then
    call('ZADD', RETIRED, awake + passed_for_ms, revision)
  else
    call('ZREM', RETIRED, revision)
  end
end
-- Replaced revisions, for those who read answers of theirs: the last record goes a retention after the last request has
-- ended, and one that was kept then begins it anew. Nothing counts records by revision: what the release before writes
-- and forgets beside this one would make such a count wrong.
local current = call('HGET', META, 'revision')
local function note_replaced(revision)
  local until_ms = tonumber(call('ZSCORE', REPLACED, revision) or math.huge)
  if revision == current then
    call('ZREM', REPLACED, revision)
  elseif unfinished_of(revision) > 0 then
    call('ZADD', REPLACED, '+inf', revision)
  elseif until_ms == math.huge then
    call('ZADD', REPLACED, awake + ARGV[2], revision)
  elseif until_ms > awake or is_behind then
    return
  elseif call('ZSCORE', RETIRED, revision) then
    call('ZADD', REPLACED, 0, revision)
  else
    call('ZREM', REPLACED, revision)
  end
end
for _, key in ipairs({ RETIRED, REPLACED }) do
  for _, revision in ipairs(call('ZRANGE', key, 0, -1)) do note_replaced(revision) end
end
publish()
return more
