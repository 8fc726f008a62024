-- submit: queue all requests of a parent, reserve their bytes, add the first reader. A known parent gets only the
-- reader's entry.
-- ARGV: PARENT_ARGUMENTS, then REQUEST_ARGUMENTS per request (script_format.py).
-- Answers {'ok', first arrival, submitted_ms}, {'known'} or {'revision' | 'promise' | 'queue' | 'tokens' | 'bytes' |
--         'taken' | 'forgotten' | 'schema', the revision, bound or schema number in force, the awake ms since the name
--         was forgotten, or '', and for 'promise' the need}.
begin(true)

-- Returns the arguments after the first `before`, by their names.
local function arguments_after(before, names)
  local arguments = {}
  for i, name in ipairs(names) do arguments[name] = ARGV[before + i] end
  return arguments
end

local given = arguments_after(0, PARENT_ARGUMENTS)
local parent, revision, reader = given.parent, given.revision, given.reader
local reader_lease_ms, grace_ms = tonumber(given.reader_lease_ms), tonumber(given.grace_ms)
local bytes_max, bytes, choices = tonumber(given.bytes_max), tonumber(given.reserved), tonumber(given.choices)
local max_queued, max_queued_prompt_tokens = tonumber(given.max_queued), tonumber(given.max_queued_prompt_tokens)
local requests = {} -- choice i at i + 1
for choice = 0, choices - 1 do
  requests[choice + 1] = arguments_after(#PARENT_ARGUMENTS + choice * #REQUEST_ARGUMENTS, REQUEST_ARGUMENTS)
end

if call('EXISTS', par_key(parent)) == 1 then
  if call('HGET', par_key(parent), 'digest') ~= given.digest then return { 'taken', '' } end
  call('ZADD', readers_key(parent), awake + reader_lease_ms, reader)
  watch_readers(parent, 0, grace_ms)
  return { 'known' }
end
-- It may come late, and readers of the log that is gone may not have noticed.
local forgotten_at = call('ZSCORE', FORGOTTEN, parent)
if forgotten_at then return { 'forgotten', awake - forgotten_at } end
local meta = call('HMGET', META, 'revision', 'queued', 'bytes', 'arrival', 'queued_prompt_tokens')
local promise = tonumber(call('HGET', PROMISES, revision) or math.huge)
if meta[1] ~= revision then return { 'revision', meta[1] or '' } end
local prompt_tokens, need = 0, 0
for _, request in ipairs(requests) do
  if tonumber(request.schema_least) > schema then return { 'schema', schema } end
  need = math.max(need, promised_need(revision, request.need, request.source))
  prompt_tokens = prompt_tokens + request.prompt_tokens
end
if need > promise then return { 'promise', promise, need } end
if tonumber(meta[2] or 0) + choices > max_queued then return { 'queue', max_queued } end
local waiting_tokens = tonumber(meta[5] or 0)
if waiting_tokens > 0 and waiting_tokens + prompt_tokens > max_queued_prompt_tokens then
  return { 'tokens', max_queued_prompt_tokens }
end
if tonumber(meta[3] or 0) + bytes > bytes_max then
  -- The next sweep frees memory for it, as far as ended requests use it.
  if bytes <= bytes_max then call('HSET', META, 'wanted_bytes', bytes_max - bytes, 'wanted_ms', awake) end
  return { 'bytes', bytes_max }
end

-- Until the first token the sooner deadline is in force; after it (commit) only the deadline of the end.
local function set_deadlines(id, to_end, to_first_token)
  local sooner = math.min(to_end or math.huge, to_first_token or math.huge)
  if sooner == math.huge then return end
  call('HSET', req_key(id), 'deadline', wall + sooner)
  call('ZADD', DEADLINES, wall + sooner, id)
  if to_first_token then call('HSET', req_key(id), 'deadline_later', to_end and wall + to_end or '') end
end

local arrival, is_indexed = tonumber(meta[4] or 0), has_whole_index(revision)
for i, request in ipairs(requests) do
  local id = parent .. '.' .. (i - 1)
  call(
    'HSET', req_key(id), 'schema', schema, 'state', 'queued', 'number', 0, 'call', '', 'trial', '',
    'revision', revision,
    'arrival', arrival + i, 'submitted_ms', wall, 'need', request.need, 'prompt_tokens', request.prompt_tokens,
    'max_new', request.max_new, 'bytes', request.reserved, 'token_bytes', request.token_bytes
  )
  for _, field in ipairs({ 'source', 'priority', 'fewest', 'goal' }) do
    if request[field] ~= '' then call('HSET', req_key(id), field, request[field]) end
  end
  call('SET', body_key(id), request.body)
  call('ZADD', q_key(revision), arrival + i, id)
  set_deadlines(id, tonumber(request.deadline_ms), tonumber(request.first_token_deadline_ms))
  if is_indexed then put_in_index(load(id)) end
end
call(
  'HSET', par_key(parent), 'schema', schema, 'choices', choices, 'left', choices,
  'on_disconnect', given.on_disconnect, 'owner', given.owner, 'digest', given.digest
)
if given.conversation ~= '' then call('HSET', par_key(parent), 'conversation', given.conversation) end
call('SET', render_key(parent), given.render)
call('ZADD', readers_key(parent), awake + reader_lease_ms, reader)
if given.on_disconnect == 'cancel' then call('ZADD', WATCH, awake + reader_lease_ms + grace_ms, parent) end
count('arrival', choices)
count('written:' .. schema, choices)
count('queued', choices)
count('queued_prompt_tokens', prompt_tokens)
count('bytes', bytes)
news[1] = '+' .. revision
publish()
return { 'ok', arrival + 1, wall }
