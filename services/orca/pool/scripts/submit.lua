-- submit: all requests of a parent queued, their bytes reserved, the first reader entered. A parent that is known gets
-- the reader's entry only.
-- ARGV: parent, revision, reader, on_disconnect, render, reader_lease_ms, grace_ms, max_queued, bytes_max, bytes, choices,
--       max_queued_prompt_tokens, owner, digest, then per request: need, prompt_tokens, max_new, bytes, token_bytes,
--       deadline_ms or '', first_token_deadline_ms or '', body.
-- Answers {'ok', first arrival, submitted_ms}, {'known'} or {'revision' | 'promise' | 'queue' | 'tokens' | 'bytes' |
--         'taken', what there is}.
begin(true)
local parent, revision, reader, on_disconnect, render = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local reader_lease_ms, grace_ms = tonumber(ARGV[6]), tonumber(ARGV[7])
local max_queued, bytes_max, bytes, choices =
  tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])
local max_queued_prompt_tokens, owner, digest = tonumber(ARGV[12]), ARGV[13], ARGV[14]
local WIDTH = 8
local function arg(choice, i) return ARGV[14 + choice * WIDTH + i] end

if call('EXISTS', par_key(parent)) == 1 then
  if call('HGET', par_key(parent), 'digest') ~= digest then return { 'taken', '' } end
  call('ZADD', readers_key(parent), awake + reader_lease_ms, reader)
  watch_readers(parent, 0, grace_ms)
  return { 'known' }
end
local meta = call('HMGET', META, 'revision', 'queued', 'bytes', 'arrival', 'queued_prompt_tokens')
local promise = tonumber(call('HGET', PROMISES, revision) or math.huge)
if meta[1] ~= revision then return { 'revision', meta[1] or '' } end
local prompt_tokens = 0
for choice = 0, choices - 1 do
  if tonumber(arg(choice, 1)) > promise then return { 'promise', promise } end
  prompt_tokens = prompt_tokens + arg(choice, 2)
end
if tonumber(meta[2] or 0) + choices > max_queued then return { 'queue', max_queued } end
local waiting_tokens = tonumber(meta[5] or 0)
if waiting_tokens > 0 and waiting_tokens + prompt_tokens > max_queued_prompt_tokens then
  return { 'tokens', max_queued_prompt_tokens }
end
if tonumber(meta[3] or 0) + bytes > bytes_max then
  -- The next sweep makes room for it, if ended requests are what is in its way.
  if bytes <= bytes_max then call('HSET', META, 'wanted_bytes', bytes_max - bytes, 'wanted_ms', awake) end
  return { 'bytes', bytes_max }
end

-- While there is no token the sooner deadline is in force, from the first one on (commit) that of the end alone.
local function set_deadlines(id, to_end, to_first_token)
  local sooner = math.min(to_end or math.huge, to_first_token or math.huge)
  if sooner == math.huge then return end
  call('HSET', req_key(id), 'deadline', wall + sooner)
  call('ZADD', DEADLINES, wall + sooner, id)
  if to_first_token then call('HSET', req_key(id), 'deadline_later', to_end and wall + to_end or '') end
end

local arrival = tonumber(meta[4] or 0)
for choice = 0, choices - 1 do
  local id = parent .. '.' .. choice
  call(
    'HSET', req_key(id), 'schema', schema, 'state', 'queued', 'number', 0, 'call', '', 'trial', '',
    'revision', revision,
    'arrival', arrival + choice + 1, 'submitted_ms', wall, 'need', arg(choice, 1), 'prompt_tokens', arg(choice, 2),
    'max_new', arg(choice, 3), 'bytes', arg(choice, 4), 'token_bytes', arg(choice, 5)
  )
  call('SET', body_key(id), arg(choice, 8))
  call('ZADD', q_key(revision), arrival + choice + 1, id)
  set_deadlines(id, tonumber(arg(choice, 6)), tonumber(arg(choice, 7)))
end
call(
  'HSET', par_key(parent), 'schema', schema, 'choices', choices, 'left', choices, 'on_disconnect', on_disconnect,
  'owner', owner, 'digest', digest
)
call('SET', render_key(parent), render)
call('ZADD', readers_key(parent), awake + reader_lease_ms, reader)
if on_disconnect == 'cancel' then call('ZADD', WATCH, awake + reader_lease_ms + grace_ms, parent) end
count('arrival', choices)
count('written:' .. schema, choices)
count('queued', choices)
count('queued_prompt_tokens', prompt_tokens)
count('bytes', bytes)
news[1] = '+' .. revision
publish()
return { 'ok', arrival + 1, wall }
