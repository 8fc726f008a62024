-- read: return many logs, each from an index on. It writes nothing, so it also runs when memory is full.
-- ARGV: limit, tokens_max, bytes_max, and a line per log: "<request> <start>". Each log has the limit; all logs share
-- the other bounds.
-- Answers the logs that have an entry there. First a line for each log of which only plain ids are read:
--     "<position of the log, from 0> <cut 0|1> <token> ..."
-- Then for each other log {position, cut 0|1, token, ..., and last {reason, count, stop or ''} if the end is there}, or
-- {position} alone if there is no such request. The lines are one element, because a reader parses each element of an
-- answer by itself, and a step has hundreds.
local limit, tokens_left, bytes_left = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local PIECE = 256 -- entries at a time: their bytes are known only after the call

-- Appends to `found` what the bounds allow. Returns true if the log goes on after it.
local function read_log(id, start, found)
  if tokens_left <= 0 or bytes_left <= 0 then return call('XLEN', log_key(id)) > start end
  local count, most = 0, math.min(limit, tokens_left)
  while true do
    -- One entry more than allowed: the end comes with the last token that it counts.
    local asked = math.min(PIECE, most - count + 1)
    local from = string.format('%.0f-0', start + count + 1)
    local entries = call('XRANGE', log_key(id), from, '+', 'COUNT', asked)
    for _, entry in ipairs(entries) do
      local fields = entry[2]
      if fields[1] ~= 'token' then
        found[#found + 1] = { fields[2], fields[4], fields[6] or '' }
        return false
      end
      if count == most or bytes_left <= 0 then return true end
      found[#found + 1] = fields[2]
      count, tokens_left, bytes_left = count + 1, tokens_left - 1, bytes_left - #fields[2]
    end
    if #entries < asked then return false end
  end
end

local answer, lines, position = { '' }, {}, 0
for id, start in string.gmatch(ARGV[4], '(%S+) (%d+)') do
  local log = { position, 0 }
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
    answer[#answer + 1] = { position }
  end
  position = position + 1
end
answer[1] = table.concat(lines, '\n')
return answer
