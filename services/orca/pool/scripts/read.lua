-- read: many logs, each from an index on. Writes nothing, so it also runs when memory is full.
-- ARGV: limit, tokens_max, bytes_max, then per log: request, start. The limit is each log's, the others are shared.
-- Answers per log that has anything there: {which (from 0), cut 0|1, token, ..., and behind them
--         {reason, count, stop or ''}}; {which} alone when there is no such request.
local limit, tokens_left, bytes_left = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local PIECE = 256 -- entries at a time: how many bytes they have shows only behind the call

-- Appends to `found` what there is room for. Is there more?
local function read_log(id, start, found)
  if tokens_left <= 0 or bytes_left <= 0 then return call('XLEN', log_key(id)) > start end
  local taken, most = 0, math.min(limit, tokens_left)
  while true do
    -- One entry more than may be taken: the end comes with the last token that it counts.
    local asked = math.min(PIECE, most - taken + 1)
    local from = string.format('%.0f-0', start + taken + 1)
    local entries = call('XRANGE', log_key(id), from, '+', 'COUNT', asked)
    for _, entry in ipairs(entries) do
      local fields = entry[2]
      if fields[1] ~= 'token' then
        found[#found + 1] = { fields[2], fields[4], fields[6] or '' }
        return false
      end
      if taken == most or bytes_left <= 0 then return true end
      found[#found + 1] = fields[2]
      taken, tokens_left, bytes_left = taken + 1, tokens_left - 1, bytes_left - #fields[2]
    end
    if #entries < asked then return false end
  end
end

local answer = {}
for i = 4, #ARGV, 2 do
  local log = { i / 2 - 2, 0 }
  local is_cut = read_log(ARGV[i], tonumber(ARGV[i + 1]), log)
  if is_cut then log[2] = 1 end
  if is_cut or #log > 2 then
    answer[#answer + 1] = log
  elseif call('EXISTS', req_key(ARGV[i])) == 0 then
    answer[#answer + 1] = { i / 2 - 2 }
  end
end
return answer
