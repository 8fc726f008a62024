-- give back: return requests to the queue at their old place; skip a request under another claim.
-- ARGV per request: id, claim number, claim call.
begin(false)
for i = 1, #ARGV, 3 do
  local r = load(ARGV[i])
  if r and r.state == 'owned' and r.number == ARGV[i + 1] and r.call == ARGV[i + 2] then take_back(r) end
end
publish()
