-- forget: end what has not ended of a parent, whoever owns it, and remove the parent with all its records.
-- ARGV: parent.
-- Answers 1 if nothing of it is left, 0 if this release cannot read its record, which stays.
begin(false)
local parent = ARGV[1]
local number = call('HGET', par_key(parent), 'schema')
if not number then return 1 end
if not is_known(number) then return 0 end
end_parent(parent, 'cancelled')
forget_parent(parent)
call('ZADD', FORGOTTEN, awake, parent)
publish()
return 1
