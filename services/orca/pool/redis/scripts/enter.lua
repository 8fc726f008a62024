-- enter: give the group's seat to this process and all its requests back, under a new epoch above every earlier one.
-- ARGV: group, process, revision, call, reported_epoch, is_holder_dead 0|1, lease_ms, then per request that ran when
--       the engine failed from inside: id, claim number, claim call.
-- Answers {'entered', epoch, "<request> ..." that failed and are queued again, "<request> ..." that ended as poison},
--         {'wait', lease left in ms}, {'closed'} or {'stale'}.
begin(true)
local group, process, revision, number = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
if call('ZSCORE', CLOSED_AT, process) then return { 'closed' } end
local seat = call('HMGET', seat_key(group), 'holder', 'epoch', 'last_call', 'enter_call', 'failed', 'poisoned')
local holder, epoch = seat[1] or '', tonumber(seat[2] or 0)
if holder == process then
  if number == tonumber(seat[4]) then return { 'entered', epoch, seat[5] or '', seat[6] or '' } end
  if number <= tonumber(seat[3]) then return { 'stale' } end
elseif holder ~= '' and ARGV[6] == '0' and is_seat_living(group) then
  return { 'wait', call('ZSCORE', SEATS, group) - awake }
end

-- Each blamed request that is still on trial has failed once more. The last failure allowed ends the request.
local failed, poisoned = {}, {}
for i = 8, #ARGV, 3 do
  local r = load(ARGV[i])
  local is_blamed = r and r.state == 'owned' and r.group == group and r.number == ARGV[i + 1] and r.call == ARGV[i + 2]
  if is_blamed and r.trial == '1' then
    local failures = r.failures + 1
    call('HSET', req_key(r.id), 'trial', '', 'failures', failures)
    if failures < FAILURES_MAX then
      failed[#failed + 1] = r.id
    else
      poisoned[#poisoned + 1] = r.id
      end_request(r, 'error')
    end
  end
end
take_back_all(group)
failed, poisoned = table.concat(failed, ' '), table.concat(poisoned, ' ')
epoch = math.max(epoch, tonumber(ARGV[5])) + 1
call(
  'HSET', seat_key(group), 'holder', process, 'epoch', epoch, 'revision', revision, 'last_call', number, 'enter_call',
  number, 'claim_call', '', 'claim_answer', '', 'failed', failed, 'poisoned', poisoned, 'unformed', process,
  'by_order', ''
)
call('ZADD', SEATS, awake + ARGV[7], group)
publish()
return { 'entered', epoch, failed, poisoned }
