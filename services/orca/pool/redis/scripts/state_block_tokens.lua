-- state block tokens: set how many tokens a KV block of a revision's groups has. The first group states it. Another
-- group may replace it only if nobody relies on it: no other group of the revision lives, and none of its requests is
-- left.
-- ARGV: group, revision, tokens. Answers the number in force.
begin(true)
local group, revision, tokens = ARGV[1], ARGV[2], tonumber(ARGV[3])
local stated = tonumber(call('HGET', BLOCKS, revision))
local function is_relied_on()
  for _, other in ipairs(groups_of(revision)) do
    if other ~= group and is_seat_living(other) then return true end
  end
  return unfinished_of(revision) > 0
end
if stated ~= tokens and not (stated and is_relied_on()) then
  call('HSET', BLOCKS, revision, tokens)
  return tokens
end
return stated
