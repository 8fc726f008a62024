-- set promise: what the door promises for a revision, stated anew where it promises something. Nothing ends: who lowers
-- it asks what was accepted before and needs more (larger_requests).
-- ARGV: revision, slots. Answers the promise in force; false where there is none.
begin(true)
local revision, slots = ARGV[1], tonumber(ARGV[2])
if call('HEXISTS', PROMISES, revision) == 0 then return false end
call('HSET', PROMISES, revision, slots)
return slots
