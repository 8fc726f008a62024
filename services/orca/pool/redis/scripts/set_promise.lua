-- set promise: replace what submit promises for a revision, if the promise is still the one that the caller saw.
-- Nothing ends: whoever lowers it checks what was accepted before and needs more (larger_requests). It uses no memory,
-- since a number replaces another.
-- ARGV: revision, slots, the promise that is expected. Answers the promise in force; false if there is none.
begin(false)
local revision, slots, expected = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local promise = tonumber(call('HGET', PROMISES, revision))
if promise ~= expected then return promise or false end
call('HSET', PROMISES, revision, slots)
return slots
