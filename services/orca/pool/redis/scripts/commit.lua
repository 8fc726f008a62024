-- commit: append the tokens and ends of a step, each request checked by itself.
-- ARGV[1]: a line per entry: "<request> <claim number> <claim call> <index> <reason or -> <n> <token> ...". The index of
-- a first token may be "0@<ms from this claim to the first step>". If its tokens are not plain ids, they are the next n
-- arguments instead. With a reason one more argument follows: stop or ''.
-- Answers a digit per entry: 1 applied, 2 already there, 3 ended, 4 not yours.
begin(true)
local APPLIED, ALREADY_THERE, ENDED_NOW, NOT_YOURS = 1, 2, 3, 4
local CONTENTS_MAX = 64 -- tokens of a log that are published with their hint: every gateway gets every hint

-- Returns true if the log already holds these tokens from `index` on, and the end if there is one.
local function is_there(id, index, tokens, reason, stop)
  local size = #tokens + (reason ~= '' and 1 or 0)
  local entries = call('XRANGE', log_key(id), (index + 1) .. '-0', '+', 'COUNT', size)
  if #entries < size then return false end
  for i, token in ipairs(tokens) do
    if entries[i][2][1] ~= 'token' or entries[i][2][2] ~= token then return false end
  end
  local last = entries[size][2]
  return reason == '' or (last[1] == 'end' and last[2] == reason and (last[6] or '') == stop)
end

-- Records the time of token 0, and that of the first step if this is the first claim: an earlier one may have had a step
-- without a token. From now on the deadline of the end is in force, and the other one has been met or not.
local function note_first_token(id, number, waited_ms)
  call('HSET', req_key(id), 'first_token_ms', wall)
  local claimed = waited_ms and number == '1' and tonumber(call('HGET', req_key(id), 'first_claimed_ms'))
  if claimed then call('HSET', req_key(id), 'first_step_ms', claimed + waited_ms) end
  local found = call('HMGET', req_key(id), 'deadline', 'deadline_later')
  local deadline, later = found[1], found[2]
  if not later then return end
  call('HSET', req_key(id), 'first_in_time', deadline and wall > tonumber(deadline) and 0 or 1)
  call('HDEL', req_key(id), 'deadline_later', 'deadline')
  if later == '' then
    call('ZREM', DEADLINES, id)
  else
    call('HSET', req_key(id), 'deadline', later)
    call('ZADD', DEADLINES, later, id)
  end
end

-- Counts the lengths of an answer that ended by itself (length_bins.py). It adds to one or two fields, however many there
-- are.
local function count_lengths(name, period, r, output, reason)
  local cell = bin_of(tonumber(r.prompt_tokens)) .. ',' .. bin_of(output)
  if call('HINCRBY', lengths_key(name), cell, 1) == 1 then
    call('ZADD', PERIODS, (period + PERIODS_KEPT) * PERIOD_MS, name)
  end
  if reason == 'length' then call('HINCRBY', lengths_key(name), 'cut', 1) end
end

-- Counts its latencies, too (latency_bins.py): it adds to at most one field of each. The period ends as that of the
-- lengths does.
local function count_latencies(name, r, output)
  local key = latencies_key(name)
  local times = call('HMGET', req_key(r.id), 'submitted_ms', 'first_step_ms', 'first_claimed_ms', 'first_token_ms')
  local function add(latency, from, till, parts)
    if from and till and parts > 0 then
      call('HINCRBY', key, latency .. ',' .. latency_bin_of(1000 * (till - from) / parts), 1)
    end
  end
  local submitted, step, first = tonumber(times[1]), tonumber(times[2] or times[3]), tonumber(times[4])
  add(0, step, wall, 1)
  add(1, submitted, wall, 1)
  add(2, step, first, 1)
  add(3, submitted, first, 1)
  add(4, first, wall, output - 1)
  call('HSETNX', key, 'first_ms', awake)
end

-- Counts an answer that ended by itself, once: nothing else ends it.
local function count_answer(r, output, reason)
  local period = math.floor(awake / PERIOD_MS)
  local name = r.revision .. ':' .. period
  count_lengths(name, period, r, output, reason)
  count_latencies(name, r, output)
end

-- Returns a token as a hint says it, "<id>" or "<id>@<cached prompt tokens>"; nil for one that says more.
local function hint_of(token)
  local cached, own = string.match(token, '^C(....)(%d+)$')
  if cached then return own .. '@' .. struct.unpack('<I4', cached) end
  return string.match(token, '^%d+$')
end

-- Publishes the entries of a commit with their hint, if it can say them.
local function publish_contents(tokens, are_plain, reason, stop)
  if #tokens > CONTENTS_MAX or (stop or '') ~= '' then return end
  if not are_plain then
    for i, token in ipairs(tokens) do
      tokens[i] = hint_of(token)
      if not tokens[i] then return end
    end
  end
  if reason ~= '' then tokens[#tokens + 1] = reason end
  contents[#news] = table.concat(tokens, ',')
end

local function commit_entry(id, number, claim_call, index, waited_ms, tokens, are_plain, reason, stop)
  -- Only these five fields, which come first in the record: the rest is needed when a request ends or goes back.
  local log, r = log_key(id), call('HMGET', req_key(id), 'schema', 'state', 'number', 'call', 'trial')
  local state = r[2]
  if not is_known(r[1]) then return NOT_YOURS end
  -- A record of an older schema cannot have the number of cached prompt tokens, with which token 0 begins.
  if index == 0 and tokens[1] and tonumber(r[1]) < SCHEMA_OF_CACHED_TOKENS then
    tokens[1] = string.gsub(tokens[1], '^C....', '')
  end
  if r[3] ~= number or r[4] ~= claim_call or state == 'queued' then
    return state == 'ended' and ENDED_NOW or NOT_YOURS
  end
  if state == 'ended' then
    return reason ~= '' and is_there(id, index, tokens, reason, stop) and ALREADY_THERE or ENDED_NOW
  end
  -- No single entry is ever removed from a log and ids have no gaps, so the length shows that the last id is `i-0`.
  local length = call('XLEN', log)
  if index ~= length then
    if index < length and reason == '' and is_there(id, index, tokens, reason, stop) then return ALREADY_THERE end
    -- A gap, or another value at an index already there: owner and log disagree, so its next owner starts from the log.
    take_back(load(id))
    return NOT_YOURS
  end
  for i, token in ipairs(tokens) do
    append_token(log, number, index + i, token)
  end
  if index == 0 and #tokens > 0 then note_first_token(id, number, waited_ms) end
  -- The first commit of a claim ends the trial: the request ran, and did the group no harm.
  if r[5] == '1' then call('HSET', req_key(id), 'trial', '', 'failures', 0) end
  if reason ~= '' then
    local ended = load(id)
    end_request(ended, reason, stop)
    if OWN_ENDS[reason] then count_answer(ended, index + #tokens, reason) end
  else
    news[#news + 1] = id .. ' ' .. (index + #tokens)
  end
  publish_contents(tokens, are_plain, reason, stop)
  return APPLIED
end

local answers, next_argument = {}, 2
for line in string.gmatch(ARGV[1], '[^\n]+') do
  local id, number, claim_call, index, waited_ms, reason, packed, ids =
    string.match(line, '^(%S+) (%d+) (%S*) (%d+)@?(%d*) (%S+) (%d+)(.*)$')
  local tokens, stop = {}, nil
  for token in string.gmatch(ids, '%d+') do tokens[#tokens + 1] = token end
  for _ = 1, tonumber(packed) do
    tokens[#tokens + 1] = ARGV[next_argument]
    next_argument = next_argument + 1
  end
  if reason == '-' then
    reason = ''
  else
    stop = ARGV[next_argument]
    next_argument = next_argument + 1
  end
  answers[#answers + 1] = commit_entry(
    id, number, claim_call, tonumber(index), tonumber(waited_ms), tokens, packed == '0', reason, stop
  )
end
publish()
return table.concat(answers)
