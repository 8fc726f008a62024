-- read: many logs, each from an index on. Writes nothing, so it also runs when memory is full.
-- ARGV: limit, tokens_max, bytes_max, and a line per log: "<request> <start>". The limit is each log's, the others are
-- shared.
-- Answers of the logs that have anything there. First a line for each that is read no further than to plain ids:
--     "<which (from 0)> <cut 0|1> <token> ..."
-- then, for each other: {which, cut 0|1, token, ..., and behind them {reason, count, stop or ''}}; {which} alone when
-- there is no such request. A reader takes each element of an answer apart by itself, and these are hundreds at a step.
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

local answer, lines, which = { '' }, {}, 0
for id, start in string.gmatch(ARGV[4], '(%S+) (%d+)') do
  local log = { which, 0 }
  local is_cut = read_log(id, tonumber(start), log)
  if is_cut then log[2] = 1 end
  if is_cut or #log > 2 then
    local line = type(log[#log]) ~= 'table' and table.concat(log, ' ')
    if line and not string.find(line, '[^%d ]') then
      lines[#lines + 1] = line
    else
      answer[#answer + 1] = log
    end
  elseif call('EXISTS', req_key(id)) == 0 then
    answer[#answer + 1] = { which }
  end
  which = which + 1
end
answer[1] = table.concat(lines, '\n')
return answer
