-- heartbeat: give the seat a full lease again, also if it had run out and nobody entered.
-- ARGV: group, process, lease_ms, is_formed 0|1, the most slots that one request may need, or empty.
-- Answers {'seated', request, "<number> <call>", ...}, {'lost'} or {'closed'}.
begin(false)
local group, process = ARGV[1], ARGV[2]
if call('ZSCORE', CLOSED_AT, process) then return { 'closed' } end
if call('HGET', seat_key(group), 'holder') ~= process then return { 'lost' } end
call('ZADD', SEATS, awake + ARGV[3], group)
local is_formed, slots = ARGV[4] == '1', ARGV[5]
call(
  'HSET', seat_key(group), 'unformed', is_formed and '' or process,
  'lasting_offer', is_formed and slots ~= '' and process .. ' ' .. slots or ''
)
local answer = call('HGETALL', own_key(group))
table.insert(answer, 1, 'seated')
return answer
