-- Shared by all transitions. The key builders of keys.py stand above this text, the transition's own text below it.
--
-- A script changes everything or nothing. Redis checks its memory only before the first write of a script, so the first
-- write decides: `begin` makes it, before anything else is changed. Scripts that may need memory begin with a write
-- that Redis refuses when memory is full. Scripts that only move or free data begin with one that it never refuses, so
-- that a full pool can drain.

local call = redis.call
local wall  -- wall clock, Unix ms
local awake  -- the pool's awake time in ms, this script included
local schema  -- the number in force, under which records are written

local function is_known(number)
  number = tonumber(number)
  return number and SCHEMA_OLDEST <= number and number <= SCHEMA_NEWEST
end

-- Adds the time since the last script to the awake time: at least nothing, at most one second (protocol: awake time).
local function begin(may_grow)
  local time = call('TIME')
  wall = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  local meta = call('HMGET', META, 'schema', 'awake_ms', 'wall_ms')
  schema = tonumber(meta[1] or SCHEMA_NEWEST)
  if not is_known(schema) then
    error('ORCASCHEMA ' .. schema .. ' is in force, this release writes ' .. SCHEMA_OLDEST .. ' to ' .. SCHEMA_NEWEST)
  end
  local passed = wall - tonumber(meta[3] or wall)
  awake = tonumber(meta[2] or 0) + math.min(math.max(passed, 0), 1000)
  if not may_grow then call('HDEL', META, '') end
  call('HSET', META, 'schema', schema, 'awake_ms', awake, 'wall_ms', wall)
end

local function count(field, change)
  if change ~= 0 then call('HINCRBY', META, field, change) end
end

-- Called when all is done: the run of this Redis if it may still delay the write of this script (durability.py),
-- otherwise ''.
local delaying_run
local function unwritten_run()
  if not delaying_run then
    local is_syncing = string.find(call('INFO', 'persistence'), 'aof_pending_bio_fsync:[1-9]')
    delaying_run = is_syncing and string.match(call('INFO', 'server'), 'run_id:(%x+)') or ''
  end
  return delaying_run
end

-- Hints for those who wait, published in one message when the script ends. A hint is never the truth. A line
-- "+<revision>" means that the revision has work; a line "<request> <entries>" is the new length of a log. A line
-- "=<token>,..." after it holds the last of these entries as the log has them, and the reason of the end as the last
-- one if the log has ended. A reader of all entries before them need not read these.
local news = {}
local contents = {} -- by the position of their line in `news`
local function publish()
  if #news == 0 then return end
  if next(contents) and unwritten_run() == '' then
    for position, content in pairs(contents) do news[position] = news[position] .. '\n=' .. content end
  end
  call('PUBLISH', NEWS, table.concat(news, '\n'))
end

local function parent_of(id) return string.match(id, '^(.*)%.%d+$') end

local FIELDS = {
  'schema', 'state', 'revision', 'arrival', 'prompt_tokens', 'max_new', 'bytes', 'token_bytes', 'deadline',
  'number', 'call', 'group', 'need', 'source', 'mark', 'trial', 'failures', 'submitted_ms', 'deadline_later', 'priority',
  'fewest', 'goal',
}
-- Returns the record of a request, or nil if there is none that this release can read.
local function load(id)
  local values = call('HMGET', req_key(id), unpack(FIELDS))
  if not is_known(values[1]) then return nil end
  local r = { id = id }
  for i, field in ipairs(FIELDS) do r[field] = values[i] end
  r.failures = tonumber(r.failures or 0)
  return r
end

-- Returns true after its deadline: the sweep will end it, and nothing of it is computed until then.
local function is_expired(r) return r.deadline and tonumber(r.deadline) <= wall end

-- Returns the slots of a request whose block tables have `need` and `source` tokens: each has whole blocks.
local function slots_of(need, source, block)
  local slots = math.ceil(need / block) * block
  return source and slots + math.ceil(source / block) * block or slots
end

-- Returns what the promise of a revision is compared with: the tokens of the only block table, or the slots of both.
local function promised_need(revision, need, source)
  if not tonumber(source) then return tonumber(need) end
  return slots_of(tonumber(need), tonumber(source), tonumber(call('HGET', BLOCKS, revision) or 1))
end

local function is_seat_living(group)
  local lease = call('ZSCORE', SEATS, group)
  return lease and tonumber(lease) > awake
end

-- TAKE BACK: queue it at its old place and raise its claim number, so that a commit on its way is refused. Its trial
-- ends, and `failures` stays as it is: an enter that blames the request has counted before.
local function take_back(r)
  call(
    'HSET', req_key(r.id), 'state', 'queued', 'number', r.number + 1, 'call', '', 'group', '', 'process', '',
    'trial', ''
  )
  call('ZADD', q_key(r.revision), r.arrival, r.id)
  add_to_index(r)
  call('HDEL', own_key(r.group), r.id)
  count('owned', -1)
  count('queued', 1)
  count('queued_prompt_tokens', r.prompt_tokens)
  news[#news + 1] = '+' .. r.revision
end

local function take_back_all(group)
  for _, id in ipairs(call('HKEYS', own_key(group))) do
    local r = load(id)
    if r then take_back(r) end
  end
end

-- Returns true if a request with so many failures must run alone until its next commit (poison.py).
local function is_alone(failures) return failures >= FAILURES_IN_COMPANY end

-- Appends entry `position` (from 1) to a log. An entry holds the number of the claim that wrote it; an end decided by
-- the pool itself has the latest number. No script reads it. Along a log it never falls, which an outside observer can
-- check.
local function append_token(log, number, position, token)
  call('XADD', log, position .. '-0', 'token', token, 'claim', number)
end

local function append_end(log, number, position, reason, stop)
  call('XADD', log, position .. '-0', 'end', reason, 'count', position - 1, 'stop', stop, 'claim', number)
end

-- Counts a request that had a deadline, in time or late (order/deadline_outcome.py). Ends from outside say nothing.
local function count_deadline(r, reason)
  local is_whole = OWN_ENDS[reason]
  if not is_whole and reason ~= 'deadline_exceeded' then return end
  local first_in_time = call('HGET', req_key(r.id), 'first_in_time')
  if not r.deadline and not first_in_time then return end
  local is_late = not is_whole or first_in_time == '0' or (r.deadline and wall > tonumber(r.deadline))
  local period = math.floor(awake / PERIOD_MS)
  local name = r.revision .. ':' .. period
  if call('HINCRBY', outcomes_key(name), is_late and 'late' or 'in_time', 1) == 1 then
    call('ZADD', PERIODS, (period + PERIODS_KEPT) * PERIOD_MS, name)
  end
end

-- END: write the log's last entry, leave queue and group, and release the bytes that it will not use. Number and call
-- stay, so that a repetition of the commit that brought the end is recognised.
local function end_request(r, reason, stop)
  local length = call('XLEN', log_key(r.id))
  r.logged = length
  append_end(log_key(r.id), r.number, length + 1, reason, stop or '')
  if r.state == 'queued' then
    call('ZREM', q_key(r.revision), r.id)
    remove_from_index(r)
    count('queued', -1)
    count('queued_prompt_tokens', -r.prompt_tokens)
    count('unserved_ever', 1)
  else
    call('HDEL', own_key(r.group), r.id)
    count('owned', -1)
  end
  if r.deadline then call('ZREM', DEADLINES, r.id) end
  count_deadline(r, reason)
  local unused = (r.max_new - length) * r.token_bytes
  call(
    'HSET', req_key(r.id), 'state', 'ended', 'group', '', 'process', '', 'bytes', r.bytes - unused, 'ended_ms', wall
  )
  count('bytes', -unused)
  count('ended', 1)
  count('ended_ever', 1)
  local parent = parent_of(r.id)
  if call('HINCRBY', par_key(parent), 'left', -1) == 0 then
    call('ZADD', ENDED, awake, parent)
    call('ZREM', WATCH, parent)
  end
  news[#news + 1] = r.id .. ' ' .. (length + 1)
end

-- Returns the groups that own requests of a revision: the seat's revision decides, as entering gives all others back.
local function groups_of(revision)
  local found = {}
  for _, group in ipairs(call('ZRANGE', SEATS, 0, -1)) do
    if call('HGET', seat_key(group), 'revision') == revision then found[#found + 1] = group end
  end
  return found
end

-- Counts the requests of a revision that have not ended.
local function unfinished_of(revision)
  local found = call('ZCARD', q_key(revision))
  for _, group in ipairs(groups_of(revision)) do found = found + #call('HKEYS', own_key(group)) end
  return found
end

local function end_parent(parent, reason)
  for choice = 0, tonumber(call('HGET', par_key(parent), 'choices') or 0) - 1 do
    local r = load(parent .. '.' .. choice)
    if r and r.state ~= 'ended' then end_request(r, reason) end
  end
end

-- FORGET: remove a parent whose requests have all ended, with its records, and release its bytes. Returns their number.
local function forget_parent(parent)
  local record = call('HMGET', par_key(parent), 'choices', 'schema')
  local choices, released = tonumber(record[1]), 0
  for choice = 0, choices - 1 do
    local id = parent .. '.' .. choice
    released = released + tonumber(call('HGET', req_key(id), 'bytes'))
    call('UNLINK', req_key(id), body_key(id), log_key(id))
  end
  count('bytes', -released)
  count('ended', -choices)
  count('written:' .. record[2], -choices)
  call('UNLINK', par_key(parent), render_key(parent), readers_key(parent))
  call('ZREM', ENDED, parent)
  return released
end

-- Counts a parent as unread from the grace after its last reader on. `at_least` is the time at which one just left, or
-- 0.
local function watch_readers(parent, at_least, grace_ms)
  if not call('ZSCORE', WATCH, parent) then return end
  local last = call('ZREVRANGE', readers_key(parent), 0, 0, 'WITHSCORES')
  call('ZADD', WATCH, math.max(tonumber(last[2] or 0), at_least) + grace_ms, parent)
end
