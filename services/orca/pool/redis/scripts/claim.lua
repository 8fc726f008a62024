-- claim: own requests of the revision that fit into the free slots, the oldest first or by another order (order.lua).
-- ARGV: group, process, revision, call, free_slots, total_slots, block_tokens, most, and for another order the
--       arguments of script_format.order_arguments.
-- Answers {'claimed', blocked 0|1, waiting, by another order 0|1, then per request
--             {request, number, arrival, submitted_ms, alone 0|1, slack_ms, body, token, ...}},
--         {'lost'}, {'closed'} or {'stale'}.
-- slack_ms: from this claim to the end of the start window; '' unless it is the first claim, and by another order.
begin(true)
local group, process, revision, number = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local free, total, block, most = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local claim_call = process .. '/' .. ARGV[4]
local order = schema >= SCHEMA_OF_ORDERS and order_of_claim(9) or nil

-- Returns a request's part of the answer; nil if the record has gone since (a repeated call long after).
local function describe(id, claim_number)
  local record = call('HMGET', req_key(id), 'arrival', 'submitted_ms', 'failures', 'starts_by_ms', 'first_claimed_ms')
  if not record[1] then return nil end
  local alone = is_alone(tonumber(record[3] or 0)) and 1 or 0
  local slack_ms = claim_number == 1 and record[4] and record[4] - record[5] or ''
  local answer = { id, claim_number, record[1], record[2], alone, slack_ms, call('GET', body_key(id)) }
  for _, log_entry in ipairs(call('XRANGE', log_key(id), '-', '+')) do
    if log_entry[2][1] == 'token' then answer[#answer + 1] = log_entry[2][2] end
  end
  return answer
end

if call('ZSCORE', CLOSED_AT, process) then return { 'closed' } end
local seat = call('HMGET', seat_key(group), 'holder', 'epoch', 'last_call', 'claim_call', 'claim_answer')
if seat[1] ~= process then return { 'lost' } end
if number == tonumber(seat[4]) then
  local fields = {}
  for field in string.gmatch(seat[5], '%S+') do fields[#fields + 1] = field end
  local is_blocked, by_order = string.match(fields[1], '^(%d):?(%d?)$')
  local answer = { 'claimed', tonumber(is_blocked), tonumber(fields[2]), tonumber(by_order) or 0 }
  for i = 3, #fields, 2 do answer[#answer + 1] = describe(fields[i], tonumber(fields[i + 1])) end
  return answer
end
if number <= tonumber(seat[3]) then return { 'stale' } end
if not is_seat_living(group) then return { 'lost' } end

-- Returns true if it is reserved for another living seat. A mark ends with the lease and the epoch in which it was
-- made.
local function is_marked_for_another(r)
  if not r.mark then return false end
  local epoch, name = string.match(r.mark, '^(%d+) (.*)$')
  return name ~= group and is_seat_living(name) and call('HGET', seat_key(name), 'epoch') == epoch
end

local function own(r)
  remove_from_index(r)
  r.number = r.number + 1
  call(
    'HSET', req_key(r.id), 'state', 'owned', 'number', r.number, 'call', claim_call, 'group', group, 'process', process,
    'trial', 1
  )
  local is_first = call('HSETNX', req_key(r.id), 'first_claimed_ms', wall) == 1
  if is_first and r.starts_by then call('HSET', req_key(r.id), 'starts_by_ms', math.floor(r.starts_by)) end
  if r.mark then call('HDEL', req_key(r.id), 'mark') end
  call('ZREM', q_key(revision), r.id)
  call('HSET', own_key(group), r.id, r.number .. ' ' .. claim_call)
  count('queued_prompt_tokens', -r.prompt_tokens)
end

-- Reserves a request that does not fit now for this group, unless it is reserved for another one.
local function may_reserve(r)
  if is_marked_for_another(r) then return false end
  call('HSET', req_key(r.id), 'mark', seat[2] .. ' ' .. group)
  return true
end

-- Oldest first. A request that does not fit now is reserved for this group, and nothing younger is admitted. It is
-- skipped instead if it is reserved for another group, or if this group could never hold it: a reservation by such a
-- group would never end. PASSED_MAX bounds what a walk may skip: expired, marked for others, or of an unknown schema.
local function choose_by_arrival()
  local CHUNK = 64
  local chosen, passed, stop = {}, 0, most <= 0
  while not stop do
    local ids = call('ZRANGE', q_key(revision), passed, passed + CHUNK - 1)
    for _, id in ipairs(ids) do
      local r = load(id)
      if r and is_expired(r) then r = nil end
      local slots = r and slots_of(r.need, r.source, block)
      if r and slots <= free then
        free = free - slots
        chosen[#chosen + 1] = r
        if #chosen >= most then return chosen, 0 end
      elseif r and slots <= total and may_reserve(r) then
        return chosen, 1
      end
    end
    passed = passed + CHUNK
    stop = #ids < CHUNK or passed - #chosen > PASSED_MAX
  end
  return chosen, 0
end

local chosen, blocked
if order then
  local classes = keep_index(revision, most)
  local room = {
    requests = most, slots = free, total_slots = total, tokens = order.free_tokens, total_tokens = order.total_tokens,
    block = block,
  }
  chosen, blocked = choose_by_order(revision, classes, order, room, may_reserve)
else
  chosen, blocked = choose_by_arrival()
end

for _, r in ipairs(chosen) do own(r) end
count('queued', -#chosen)
count('owned', #chosen)
local waiting = call('ZCARD', q_key(revision))
local by_order = order and 1 or 0
local answer, stored = { 'claimed', blocked, waiting, by_order }, { blocked .. ':' .. by_order, waiting }
for _, r in ipairs(chosen) do
  answer[#answer + 1] = describe(r.id, r.number)
  stored[#stored + 1] = r.id .. ' ' .. r.number
end
call(
  'HSET', seat_key(group), 'last_call', number, 'claim_call', number, 'claim_answer', table.concat(stored, ' '),
  'by_order', order and process .. ' ' .. ARGV[15] or '',
  'order', order and process .. ' ' .. table.concat(ARGV, ' ', 9) or ''
)
publish()
return answer
