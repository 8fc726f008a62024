-- commit: the tokens of a step and the ends it brought, each request checked by itself.
-- ARGV[1]: a line per entry: "<request> <claim number> <claim call> <index> <reason or -> <n> <token> ...". The n tokens
-- that are not plain ids are the next n arguments instead; with a reason: one more, stop or ''.
-- Answers a digit per entry: 1 applied, 2 already there, 3 ended, 4 not yours.
begin(true)
local APPLIED, ALREADY_THERE, ENDED_NOW, NOT_YOURS = 1, 2, 3, 4
local TOLD_MAX = 64 -- tokens of a log that are told as they are: each gateway hears of all

-- Are these tokens, and the end where there is one, what the log holds from `index` on?
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

-- Token 0 is there: when it came, and the deadline that holds from now on.
local function note_first_token(id)
  call('HSET', req_key(id), 'first_token_ms', wall)
  local later = call('HGET', req_key(id), 'deadline_later')
  if not later then return end
  call('HDEL', req_key(id), 'deadline_later', 'deadline')
  if later == '' then
    call('ZREM', DEADLINES, id)
  else
    call('HSET', req_key(id), 'deadline', later)
    call('ZADD', DEADLINES, later, id)
  end
end

local function commit_entry(id, number, claim_call, index, tokens, are_plain, reason, stop)
  -- Only these five, which stand first in the record: the rest is needed when a request ends or goes back.
  local log, r = log_key(id), call('HMGET', req_key(id), 'schema', 'state', 'number', 'call', 'trial')
  local state = r[2]
  if not is_known(r[1]) then return NOT_YOURS end
  if r[3] ~= number or r[4] ~= claim_call or state == 'queued' then
    return state == 'ended' and ENDED_NOW or NOT_YOURS
  end
  if state == 'ended' then
    return reason ~= '' and is_there(id, index, tokens, reason, stop) and ALREADY_THERE or ENDED_NOW
  end
  -- No entry is ever taken out of a log by itself and ids have no gaps, so the length says that the last id is `i-0`.
  local length = call('XLEN', log)
  if index ~= length then
    if index < length and reason == '' and is_there(id, index, tokens, reason, stop) then return ALREADY_THERE end
    -- A gap, or another value at an index already there: owner and log disagree, whoever takes it next starts anew.
    take_back(load(id))
    return NOT_YOURS
  end
  for i, token in ipairs(tokens) do
    append_token(log, r[1], number, index + i, token)
  end
  if index == 0 and #tokens > 0 then note_first_token(id) end
  -- The first commit of a claim acquits: the request has run, and did the group no harm.
  if r[5] == '1' then call('HSET', req_key(id), 'trial', '', 'failures', 0) end
  if reason ~= '' then
    end_request(load(id), reason, stop)
  else
    news[#news + 1] = id .. ' ' .. (index + #tokens)
  end
  if are_plain and #tokens <= TOLD_MAX and (stop or '') == '' then
    if reason ~= '' then tokens[#tokens + 1] = reason end
    contents[#news] = table.concat(tokens, ',')
  end
  return APPLIED
end

local answers, at = {}, 2
for line in string.gmatch(ARGV[1], '[^\n]+') do
  local id, number, claim_call, index, reason, packed, ids =
    string.match(line, '^(%S+) (%d+) (%S*) (%d+) (%S+) (%d+)(.*)$')
  local tokens, stop = {}, nil
  for token in string.gmatch(ids, '%d+') do tokens[#tokens + 1] = token end
  for _ = 1, tonumber(packed) do
    tokens[#tokens + 1] = ARGV[at]
    at = at + 1
  end
  if reason == '-' then
    reason = ''
  else
    stop = ARGV[at]
    at = at + 1
  end
  answers[#answers + 1] = commit_entry(
    id, number, claim_call, tonumber(index), tokens, packed == '0', reason, stop
  )
end
publish()
return table.concat(answers)
