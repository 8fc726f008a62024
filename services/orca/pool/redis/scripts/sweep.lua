-- sweep: carry out what is due by now, a bounded number of each kind. It begins with what frees memory and may always
-- run.
-- ARGV: grace_ms, retention_ms, retention_least_ms, pressure_bytes, most, wanted_for_ms, skip_ms, closed_for_ms,
-- forgotten_for_ms.
-- A record that this release cannot read, after a rollback, is skipped. It is due again after skip_ms, so that it never
-- blocks for long what is due after it.
-- Answers 1 if more may be due, 0 if all is done.
begin(false)
local grace_ms, most, skip_ms = tonumber(ARGV[1]), tonumber(ARGV[5]), tonumber(ARGV[7])
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

-- Retention: record, log and bytes go together, oldest end first. A parent that still has a reader, or that this
-- release cannot read, is kept as if it had ended now.
local reserved = tonumber(call('HGET', META, 'bytes') or 0)
local function forget(parent)
  if last_reader(parent) > awake or not is_readable(parent) then
    call('ZADD', ENDED, awake, parent)
    local revision = call('HGET', req_key(parent .. '.0'), 'revision')
    if revision then call('ZADD', REPLACED, '+inf', revision) end
    return
  end
  reserved = reserved - forget_parent(parent)
end

for _, parent in ipairs(due(ENDED, awake - ARGV[2])) do forget(parent) end
local is_behind = more == 1

-- Before its time a parent goes only under pressure, and no more than relieve it: at nine tenths of the bytes, or after
-- a submission was refused because the pool was full.
local pressure = tonumber(ARGV[4])
local wanted = call('HMGET', META, 'wanted_bytes', 'wanted_ms')
if wanted[1] and awake - wanted[2] <= tonumber(ARGV[6]) then pressure = math.min(pressure, tonumber(wanted[1])) end
if reserved > pressure then
  for _, parent in ipairs(due(ENDED, awake - ARGV[3])) do
    if reserved <= pressure then break end
    forget(parent)
  end
end

-- Seats whose lease is over. The seat keeps its holder: it may still come back by a heartbeat.
for _, group in ipairs(due(SEATS, awake)) do
  take_back_all(group)
  call('ZREM', SEATS, group)
end

for _, parent in ipairs(due(WATCH, awake)) do
  local unread_at = last_reader(parent) + grace_ms
  if unread_at > awake then
    call('ZADD', WATCH, unread_at, parent)
  elseif not is_readable(parent) then
    call('ZADD', WATCH, awake + skip_ms, parent)
  else
    end_parent(parent, 'cancelled')
  end
end

for _, id in ipairs(due(DEADLINES, wall)) do
  local r = load(id)
  if r then
    end_request(r, 'deadline_exceeded')
  else
    call('ZADD', DEADLINES, wall + skip_ms, id)
  end
end

-- Processes that have left are forgotten once none of their calls can still be on its way.
call('ZREMRANGEBYSCORE', CLOSED_AT, '-inf', awake - ARGV[8])
-- So are the names of parents that were forgotten on demand.
call('ZREMRANGEBYSCORE', FORGOTTEN, '-inf', awake - ARGV[9])

-- So are counts of lengths, latencies and deadlines, a period at a time.
for _, name in ipairs(due(PERIODS, awake)) do
  call('UNLINK', lengths_key(name), latencies_key(name), outcomes_key(name))
  call('ZREM', PERIODS, name)
end

-- Retired revisions: end the waiting requests from the oldest on, at most so many, then those that its groups still
-- run. At most as many are skipped as may wait.
local function end_waiting(revision)
  local ended, skipped = 0, 0
  while ended < most do
    local ids = call('ZRANGE', q_key(revision), skipped, skipped + most - 1)
    if #ids == 0 then break end
    for _, id in ipairs(ids) do
      local r = load(id)
      if not r then
        skipped = skipped + 1
      elseif ended < most then
        end_request(r, 'model_replaced')
        ended = ended + 1
      end
    end
  end
  return ended, skipped
end

local function end_running(revision)
  local skipped = 0
  for _, group in ipairs(groups_of(revision)) do
    for _, id in ipairs(call('HKEYS', own_key(group))) do
      local r = load(id)
      if r then end_request(r, 'model_replaced') else skipped = skipped + 1 end
    end
  end
  return skipped
end

for _, revision in ipairs(due(RETIRED, awake)) do
  local ended, skipped = end_waiting(revision)
  if ended == most then
    more = 1
  elseif end_running(revision) + skipped > 0 then
    call('ZADD', RETIRED, awake + skip_ms, revision)
  else
    call('ZREM', RETIRED, revision)
  end
end

-- Replaced revisions, for gateways that render their answers: the last record goes a retention after the last request
-- has ended, and a record that is kept then begins another retention. Nothing counts records by revision: the release
-- before this one, which may run beside it, writes and forgets records without such a count.
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
    drop_index(revision)
    call('UNLINK', steps_key(revision))
  end
end
for _, key in ipairs({ RETIRED, REPLACED }) do
  for _, revision in ipairs(call('ZRANGE', key, 0, -1)) do note_replaced(revision) end
end
publish()
return more
