-- conversation: return what a later call may go on from. It writes nothing.
-- ARGV: parent.
-- Answers the text, '' if there is none; false if there is no such parent.
local parent = ARGV[1]
if call('EXISTS', par_key(parent)) == 0 then return false end
return call('HGET', par_key(parent), 'conversation') or ''
