-- heartbeat: the seat's lease full again, also if it had run out and nobody entered.
-- ARGV: group, process, lease_ms, is_formed 0|1. Answers {'seated', request, "<number> <call>", ...}, {'lost'} or {'closed'}.
begin(false)
local group, process = ARGV[1], ARGV[2]
if call('ZSCORE', CLOSED_AT, process) then return { 'closed' } end
if call('HGET', seat_key(group), 'holder') ~= process then return { 'lost' } end
call('ZADD', SEATS, awake + ARGV[3], group)
call('HSET', seat_key(group), 'unformed', ARGV[4] == '0' and process or '')
local answer = call('HGETALL', own_key(group))
table.insert(answer, 1, 'seated')
return answer
