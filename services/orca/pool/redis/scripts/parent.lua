-- parent: return what renders it, and all its requests. It writes nothing.
-- ARGV: parent.
-- Answers {on_disconnect, owner, render, {body or false, arrival, submitted_ms} for each choice}; false if there is no
--         such parent.
local parent = ARGV[1]
local record = call('HMGET', par_key(parent), 'choices', 'on_disconnect', 'owner')
local render = call('GET', render_key(parent))
if not record[1] or not render then return false end
local answer = { record[2], record[3], render }
for choice = 0, tonumber(record[1]) - 1 do
  local id = parent .. '.' .. choice
  local r = call('HMGET', req_key(id), 'arrival', 'submitted_ms')
  answer[#answer + 1] = { call('GET', body_key(id)), r[1], r[2] }
end
return answer
