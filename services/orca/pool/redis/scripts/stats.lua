-- stats: return counts for metrics, status and admission. It writes only the clock.
-- Answers {meta as pairs, wall, promise or '', oldest submitted_ms or '', groups with a living seat, those of them that
--         are formed, revisions that were replaced and may have records, requests of those that have not ended, fewest
--         slots that a formed group of the current revision has for one request, or '', groups of the current revision
--         with a living seat, tokens of a KV block of the current revision or '', counts by order}.
-- The counts by order are '' unless a group of the current revision claims by another order than arrival, and keeps the
-- index. Otherwise
-- {fastest step in ms, order classes and counts as pairs, or false while the index is being built, requests with a
-- deadline within each of DUE_MS, the arguments of the last claim of the first of these groups by name, in one string, or
-- '' if none of them is of this release}.
begin(false)
local meta = call('HGETALL', META)
local revision = call('HGET', META, 'revision')
local promise = revision and call('HGET', PROMISES, revision) or ''
local block_tokens = revision and call('HGET', BLOCKS, revision) or ''

-- A sweep may not have noted every retired revision yet. 0 means that nothing of a revision is left.
local replaced, unfinished, seen = {}, 0, {}
for _, key in ipairs({ REPLACED, RETIRED }) do
  for _, name in ipairs(call('ZRANGE', key, 0, -1)) do
    if name ~= revision and not seen[name] and call('ZSCORE', REPLACED, name) ~= '0' then
      replaced[#replaced + 1] = name
      unfinished = unfinished + unfinished_of(name)
    end
    seen[name] = true
  end
end

local revisions = { unpack(replaced) }
if revision then revisions[#revisions + 1] = revision end
local oldest
for _, name in ipairs(revisions) do
  local head = call('ZRANGE', q_key(name), 0, 0)[1]
  local submitted = head and tonumber(call('HGET', req_key(head), 'submitted_ms'))
  if submitted and submitted < (oldest or math.huge) then oldest = submitted end
end
-- Returns the counts by order. Args: steps: for each group in force its fastest step in ms, false if its last claim was
-- by arrival; arguments: of a claim by an order.
local function counts_by_order(steps, arguments)
  local are_known, is_by_order = true, false
  for _, step in ipairs(steps) do
    are_known = are_known and step and step > 0
    is_by_order = is_by_order or step
  end
  if not is_by_order or not has_index(revision) then return '' end
  local least_ms = are_known and call('HGET', steps_key(revision), 'least_ms') or '0'
  local classes, due = false, {}
  -- The field '' is no class: it says how far the index is built.
  if has_whole_index(revision) then classes = call('HGETALL', classes_key(revision)) end
  for i, within in ipairs(DUE_MS) do due[i] = call('ZCOUNT', DEADLINES, '(' .. wall, wall + within) end
  return { least_ms, classes, due, arguments }
end

local groups, formed, in_force, steps = call('ZRANGEBYSCORE', SEATS, '(' .. awake, '+inf'), {}, {}, {}
local offered, is_reported = math.huge, true
local orderly, arguments -- the first group that claims by an order, and the arguments of its last claim
for _, group in ipairs(groups) do
  -- A holder of an earlier release does not report this, and serves most of the time. The field `offer` of an earlier
  -- release is not used: it also counts memory that was free, which the group may not have when it forms again.
  local seat = call('HMGET', seat_key(group), 'holder', 'unformed', 'revision', 'lasting_offer', 'by_order', 'order')
  if seat[3] == revision then
    in_force[#in_force + 1] = group
    local claimer, step_ms = string.match(seat[5] or '', '^(.*) (%S+)$')
    steps[#steps + 1] = claimer == seat[1] and tonumber(step_ms) or false
    local orderer, found = string.match(seat[6] or '', '^(%S+) (.*)$')
    if orderer == seat[1] and (not orderly or group < orderly) then orderly, arguments = group, found end
  end
  if seat[1] ~= seat[2] then
    formed[#formed + 1] = group
    if seat[3] == revision then
      local process, slots = string.match(seat[4] or '', '^(.*) (%d+)$')
      is_reported = is_reported and process == seat[1]
      offered = math.min(offered, tonumber(slots or 0))
    end
  end
end
if not is_reported or offered == math.huge then offered = '' end
return {
  meta, wall, promise, oldest or '', groups, formed, replaced, unfinished, offered, in_force, block_tokens,
  counts_by_order(steps, arguments or ''),
}
