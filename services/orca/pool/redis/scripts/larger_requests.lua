-- larger requests: those of a revision that have not ended and need more than so many slots. Looks at each request of the
-- revision, so it is for those who have a reason to ask. Writes the clock only.
-- ARGV: revision, slots. Answers {promise in force or '', how many, what the smallest of them needs and what the largest,
--         or 0}.
begin(false)
local revision, slots = ARGV[1], tonumber(ARGV[2])
local found, least, most = 0, math.huge, 0
local function look_at(ids)
  for _, id in ipairs(ids) do
    local need = tonumber(call('HGET', req_key(id), 'need'))
    if need and need > slots then
      found, least, most = found + 1, math.min(least, need), math.max(most, need)
    end
  end
end
look_at(call('ZRANGE', q_key(revision), 0, -1))
for _, group in ipairs(groups_of(revision)) do look_at(call('HKEYS', own_key(group))) end
return { call('HGET', PROMISES, revision) or '', found, found > 0 and least or 0, most }
