-- read: many logs, each from an index on. Writes nothing, so it also runs when memory is full.
-- ARGV: limit, then per log: request, start.
-- Answers per log that has anything there: {which (from 0), token, ..., and behind them {reason, count, stop or ''}};
-- {which} alone when there is no such request.
local answer = {}
for i = 2, #ARGV, 2 do
  -- One entry more than asked for: the end comes with the last token that it counts.
  local from = string.format('%.0f-0', ARGV[i + 1] + 1)
  local entries = call('XRANGE', log_key(ARGV[i]), from, '+', 'COUNT', ARGV[1] + 1)
  if #entries > 0 then
    local log = { i / 2 - 1 }
    for j, entry in ipairs(entries) do
      local fields = entry[2]
      log[j + 1] = fields[1] == 'token' and fields[2] or { fields[2], fields[4], fields[6] or '' }
    end
    answer[#answer + 1] = log
  elseif call('EXISTS', req_key(ARGV[i])) == 0 then
    answer[#answer + 1] = { i / 2 - 1 }
  end
end
return answer
