-- enter: the group's seat for this process, all its requests given back, a new epoch above every earlier one.
-- ARGV: group, process, revision, call, reported_epoch, is_holder_dead 0|1, lease_ms.
-- Answers {'entered', epoch}, {'wait', lease left in ms}, {'closed'} or {'stale'}.
begin(true)
local group, process, revision, number = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
if call('SISMEMBER', CLOSED, process) == 1 then return { 'closed' } end
local seat = call('HMGET', seat_key(group), 'holder', 'epoch', 'last_call', 'enter_call')
local holder, epoch = seat[1] or '', tonumber(seat[2] or 0)
if holder == process then
  if number == tonumber(seat[4]) then return { 'entered', epoch } end
  if number <= tonumber(seat[3]) then return { 'stale' } end
elseif holder ~= '' and ARGV[6] == '0' and is_seat_living(group) then
  return { 'wait', call('ZSCORE', SEATS, group) - awake }
end

take_back_all(group)
epoch = math.max(epoch, tonumber(ARGV[5])) + 1
call(
  'HSET', seat_key(group), 'holder', process, 'epoch', epoch, 'revision', revision,
  'last_call', number, 'enter_call', number, 'claim_call', '', 'claim_answer', ''
)
call('ZADD', SEATS, awake + ARGV[7], group)
publish()
return { 'entered', epoch }
