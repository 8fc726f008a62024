-- leave: give everything back and free the seat if the caller holds it; close the process for ever in any case.
-- ARGV: group, process.
begin(false)
local group, process = ARGV[1], ARGV[2]
if call('HGET', seat_key(group), 'holder') == process then
  take_back_all(group)
  call('HSET', seat_key(group), 'holder', '')
  call('ZREM', SEATS, group)
end
call('ZADD', CLOSED_AT, awake, process)
publish()
