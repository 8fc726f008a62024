-- set promise: what the door promises for a revision, stated anew where it still promises what the caller saw. Nothing
-- ends: who lowers it asks what was accepted before and needs more (larger_requests). A number takes the place of another.
-- ARGV: revision, slots, the promise that is expected. Answers the promise in force; false where there is none.
begin(false)
local revision, slots, expected = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local promise = tonumber(call('HGET', PROMISES, revision))
if promise ~= expected then return promise or false end
call('HSET', PROMISES, revision, slots)
return slots
