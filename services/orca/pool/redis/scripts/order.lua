-- The order of claims other than arrival: DAS, Algorithm 1 of the TCB paper (section 5.2), over order classes.
-- memory/ordered_claim.py is its twin: both give the same answers. The script `claim` begins with this text.
--
-- Requests are claimed in stages:
--   patience     those without a deadline whose patience has passed, the oldest first; only they reserve a group
--   U            the first p = ceil(eta * s) of the s requests that are the longest prefix by utility per cost that fits
--   D            the others with a utility of at least q * mean utility of U, by the end of their start windows
--   rest         all others, by utility per cost
--   late         those whose start window is over and whose deadline is not, in the order of `rest`
-- What does not fit is passed over. Ties go by the end of the start window, then by arrival.
--
-- The start window of a request without a deadline ends with its patience. With a goal for its first token it ends
-- sooner, until the goal cannot be met any more. Then patience decides again: a goal makes no request late.

-- Most requests that one call reads. The first call for a class reads one, since a claim takes none of most classes.
local CHUNK = 64

-- Returns the order of a claim; nil if it is that of arrival. Args: from: the first of its arguments.
local function order_of_claim(from)
  if (ARGV[from] or '') == '' then return nil end
  local order = {
    share = tonumber(ARGV[from]), is_by_length = ARGV[from + 1] == 'inverse_length',
    patience_ms = tonumber(ARGV[from + 2]), drop = ARGV[from + 3], prompt_token_ms = tonumber(ARGV[from + 4]),
    step_ms = tonumber(ARGV[from + 5]), least_step_ms = tonumber(ARGV[from + 6]),
    prompt_cost = tonumber(ARGV[from + 7]), q = tonumber(ARGV[from + 8]),
    free_tokens = tonumber(ARGV[from + 9]), total_tokens = tonumber(ARGV[from + 10]), outputs = {},
  }
  for i = from + 11, #ARGV, 2 do order.outputs[tonumber(ARGV[i])] = tonumber(ARGV[i + 1]) end
  return order
end

-- Builds the next part of the index of a revision if it is not whole, from the oldest request on. It begins again if the
-- index does not count what waits, or has names of classes that this release does not give: a part of another release has
-- queued or claimed something. It also does so if this release may read what the builder could not.
-- Args: most: requests that the claim may take; the index gets at least as many.
-- Returns the hash of the classes and their counts, as pairs.
local function keep_index(revision, most)
  local counts, indexed, built, is_known = call('HGETALL', classes_key(revision)), 0, '', true
  for i = 1, #counts, 2 do
    if counts[i] == '' then
      built = counts[i + 1]
    else
      indexed, is_known = indexed + counts[i + 1], is_known and class_named(counts[i]) ~= nil
    end
  end
  local unreadable, newest, last = string.match(built, '^(%d+) (%d+) (%S+)$')
  if last == 'inf' then
    local is_readable_now = unreadable ~= '0' and tonumber(newest) < SCHEMA_NEWEST
    if is_known and indexed + unreadable == call('ZCARD', q_key(revision)) and not is_readable_now then return counts end
    last = nil
  end
  if not (last and is_known) then
    drop_index(revision)
    unreadable, newest, last = 0, SCHEMA_NEWEST, 0
  end
  local size = math.max(INDEXED_AT_ONCE, most)
  local found = call('ZRANGEBYSCORE', q_key(revision), '(' .. last, '+inf', 'WITHSCORES', 'LIMIT', 0, size)
  for i = 1, #found, 2 do
    local r = load(found[i])
    if r then put_in_index(r) else unreadable = unreadable + 1 end
  end
  last = #found == 2 * size and found[#found] or 'inf'
  newest = math.min(newest, SCHEMA_NEWEST)
  call('HSET', classes_key(revision), '', string.format('%d %d %s', unreadable, newest, last))
  return call('HGETALL', classes_key(revision))
end

-- Returns a number that orders classes of equal density, in Python and in Lua.
local function rank_of(priority, prompt, output, fewest, kind, goal)
  return ((((priority + 8) * 128 + prompt) * 128 + output) * 512 + fewest * 4 + KINDS[kind]) * 128 + goal
end

-- Returns the classes with waiting requests, those with the most utility per cost first.
-- Args: counts: of keep_index.
local function classes_of(revision, counts, order)
  local classes = {}
  for i = 1, #counts, 2 do
    local name = counts[i]
    if name ~= '' then
      local priority, prompt, output, fewest, kind, goal = class_named(name)
      local expected = math.max(middle_of(fewest), math.min(order.outputs[prompt] or math.huge, middle_of(output)))
      local utility = 2 ^ -priority * (order.is_by_length and 1 / (middle_of(prompt) + expected) or 1)
      local own_ms, expected_ms = 0, 0
      if kind ~= 'none' or goal > 0 then
        local longest = math.max(longest_of(fewest), expected)
        own_ms = order.prompt_token_ms * longest_of(prompt) + order.step_ms * (kind == 'end' and longest or 1)
        expected_ms = order.prompt_token_ms * middle_of(prompt) + order.step_ms * (kind == 'end' and expected or 1)
      end
      classes[#classes + 1] = {
        name = name, kind = kind, key = waiting_class_key(revision, name), utility = utility,
        density = utility / (order.prompt_cost * middle_of(prompt) + expected), own_ms = own_ms,
        expected_ms = expected_ms, window_ms = goal > 0 and lower_bound(goal) - own_ms or math.huge,
        least_tokens = lower_bound(prompt), least_total = lower_bound(prompt) + lower_bound(output),
        most_fewest = longest_of(fewest),
        rank = rank_of(priority, prompt, output, fewest, kind, goal),
      }
    end
  end
  table.sort(classes, function(a, b)
    if a.density ~= b.density then return a.density > b.density end
    return a.rank < b.rank
  end)
  return classes
end

local function score_text(number) return string.format('%.17g', number) end

-- Reads the requests of a class between two scores, by rising scores, twice as many with each call.
local function reader_of(class, low, high, add_ms)
  return { class = class, low = low, high = high, add_ms = add_ms, items = {}, place = 1 }
end

-- Returns the first request of a reader that is neither chosen nor passed over; nil at its end.
local function head_of(reader)
  while true do
    local item = reader.items[reader.place]
    if item and not item.is_done then return item end
    if item then
      reader.place = reader.place + 1
    elseif reader.is_whole then
      return nil
    else
      local chunk = math.max(1, math.min(CHUNK, #reader.items))
      local found = call(
        'ZRANGEBYSCORE', reader.class.key, reader.low, reader.high, 'WITHSCORES', 'LIMIT', #reader.items, chunk
      )
      reader.is_whole = #found < 2 * chunk
      for i = 1, #found, 2 do
        local arrival, id = string.match(found[i], '^(%d+) (.*)$')
        local starts_by = tonumber(found[i + 1]) + reader.add_ms
        reader.items[#reader.items + 1] =
          { id = id, member = found[i], arrival = tonumber(arrival), starts_by = starts_by, class = reader.class }
      end
    end
  end
end

local function is_sooner(a, b)
  if a.starts_by ~= b.starts_by then return a.starts_by < b.starts_by end
  return a.arrival < b.arrival
end

-- Returns a function that gives the next request of some readers, which are in order of density; nil at the end.
-- Args: is_closed: returns true for a class of which no request may fit any more; nil: none is.
local function by_density(readers, is_closed)
  local first = 1
  for _, reader in ipairs(readers) do reader.place = 1 end
  return function()
    while first <= #readers do
      local best, last = nil, first
      while readers[last] and readers[last].class.density == readers[first].class.density do
        local item = not (is_closed and is_closed(readers[last].class)) and head_of(readers[last])
        if item and (not best or is_sooner(item, best)) then best = item end
        last = last + 1
      end
      if best then return best end
      first = last
    end
  end
end

-- The same by the end of the start window: a heap of readers.
local function by_window(readers, is_closed)
  local heap = {}
  local function sink(place)
    while true do
      local least, left = place, 2 * place
      for child = left, left + 1 do
        if heap[child] and is_sooner(head_of(heap[child]), head_of(heap[least])) then least = child end
      end
      if least == place then return end
      heap[place], heap[least] = heap[least], heap[place]
      place = least
    end
  end
  for _, reader in ipairs(readers) do
    reader.place = 1
    if head_of(reader) then heap[#heap + 1] = reader end
  end
  for place = math.floor(#heap / 2), 1, -1 do sink(place) end
  return function()
    while #heap > 0 do
      -- The head that was given before is chosen or passed over by now. Only the first reader changes.
      local is_over = is_closed and is_closed(heap[1].class) or not head_of(heap[1])
      if is_over then
        heap[1] = heap[#heap]
        heap[#heap] = nil
      end
      if #heap > 0 then sink(1) end
      if not is_over then
        if not (is_closed and is_closed(heap[1].class)) then return head_of(heap[1]) end
      end
    end
  end
end

-- Returns the fastest step that any group of the revision has seen: what is certain for one group is not for a faster one.
local function shared_least_step(revision, own_ms)
  local known = tonumber(call('HGET', steps_key(revision), 'least_ms'))
  if own_ms > 0 and (not known or own_ms < known) then
    call('HSET', steps_key(revision), 'least_ms', score_text(own_ms))
    known = own_ms
  end
  return own_ms > 0 and known or 0
end

-- Returns the time before its deadline within which a request of the class may be too late.
local function late_within_ms(class, order, least_step_ms)
  if class.kind == 'none' or class.own_ms <= 0 then return 0 end
  if order.drop == 'expected' then return class.expected_ms end
  return math.min(class.own_ms, least_step_ms * (class.kind == 'first' and 1 or class.most_fewest))
end

-- Ends what is too late: a claim looks at a bounded number of requests, those with the soonest deadlines of all classes.
local function drop_late(revision, classes, order)
  local least_step_ms = shared_least_step(revision, order.least_step_ms)
  if order.drop == 'never' then return end
  local readers = {}
  for _, class in ipairs(classes) do
    local within_ms = late_within_ms(class, order, least_step_ms)
    if within_ms > 0 then
      readers[#readers + 1] = reader_of(class, '(' .. wall, '(' .. score_text(wall + within_ms), 0)
    end
  end
  -- Readers count places, so nothing ends before all have been read.
  local next_late, found = by_window(readers), {}
  for i = 1, DROPS_MAX do
    found[i] = next_late()
    if not found[i] then break end
    found[i].is_done = true
  end
  for _, item in ipairs(found) do
    local r = load(item.id)
    if r and r.state == 'queued' then
      local least_ms = item.class.expected_ms
      if order.drop == 'certain' then
        local steps = math.max(1, (r.fewest or 1) - call('XLEN', log_key(r.id)))
        least_ms = least_step_ms * (item.class.kind == 'first' and 1 or steps)
      end
      if wall + least_ms > tonumber(r.deadline) then end_request(r, 'deadline_exceeded', LATE) end
    end
  end
end

-- Returns a row that is being filled: its methods take requests, and `chosen` has what was taken.
-- Args: room: requests, slots, total_slots, tokens, total_tokens, block. What is taken makes it smaller.
local function row_of(revision, room)
  local row, passed = { chosen = {} }, 0

  function row.has_places() return room.requests > 0 and room.slots > 0 and passed <= PASSED_MAX end
  function row.has_room() return row.has_places() and room.tokens > 0 end
  function row.has_slots(item) return item.slots <= room.slots end
  function row.may_fit_later(item) return item.slots <= room.total_slots end

  -- Returns true if this release can read the request, it waits, and its deadline has not passed.
  function row.is_there(item)
    if item.r == nil then
      local r = load(item.id)
      if (r and r.state or call('HGET', req_key(item.id), 'state')) ~= 'queued' then
        take_from_class(revision, item.class.name, item.member)
        r = nil
      end
      item.r = r and not is_expired(r) and r or false
      if item.r then
        place_in_index(r)
        r.starts_by = item.starts_by
        item.slots = slots_of(r.need, r.source, room.block)
        item.tokens = math.min(r.prompt_tokens + r.logged, room.total_tokens)
      end
    end
    return item.r ~= false
  end

  -- Returns true if no request of the class fits, so that a claim does not read them one by one.
  function row.is_closed(class)
    return math.min(class.least_tokens, room.total_tokens) > room.tokens
      or slots_of(class.least_total, nil, room.block) > room.slots
  end

  function row.fits(item)
    return row.is_there(item) and room.requests > 0 and row.has_slots(item) and item.tokens <= room.tokens
  end

  -- Gives a request its room. Args: sign: -1 gives the room back.
  function row.take(item, sign)
    room.requests = room.requests - sign
    room.slots, room.tokens = room.slots - sign * item.slots, room.tokens - sign * item.tokens
    item.is_done = sign == 1
  end

  function row.choose(item) row.chosen[#row.chosen + 1] = item.r end

  function row.pass_over(item)
    item.is_done = true
    passed = passed + 1
  end

  -- Takes what fits and passes over the rest. Room only shrinks here, so a class of which nothing fits stays closed.
  function row.take_all(readers, in_order)
    local next_item = in_order(readers, row.is_closed)
    while row.has_room() do
      local item = next_item()
      if not item then return end
      if row.fits(item) then
        row.take(item, 1)
        row.choose(item)
      else
        row.pass_over(item)
      end
    end
  end

  return row
end

-- Returns readers of the classes: of requests whose patience has passed, of those in time, and of late ones.
local function divide(classes, order)
  local patient, in_time, late = {}, {}, {}
  for _, class in ipairs(classes) do
    if class.kind == 'none' then
      local passed_at = score_text(wall - order.patience_ms)
      patient[#patient + 1] = reader_of(class, '-inf', passed_at, order.patience_ms)
      local goal_from = '+inf'
      if class.window_ms < order.patience_ms then
        goal_from = score_text(wall - class.window_ms)
        in_time[#in_time + 1] = reader_of(class, goal_from, '+inf', class.window_ms)
      end
      in_time[#in_time + 1] = reader_of(class, '(' .. passed_at, '(' .. goal_from, order.patience_ms)
    else
      local from = score_text(wall + class.own_ms)
      in_time[#in_time + 1] = reader_of(class, from, '+inf', -class.own_ms)
      late[#late + 1] = reader_of(class, '(' .. wall, '(' .. from, -class.own_ms)
    end
  end
  return patient, in_time, late
end

-- Takes those whose patience has passed. Their prompts may be more than the step has room for: nobody waits longer
-- because steps are filled evenly. Returns true if one that does not fit has reserved the group.
local function take_patient(row, patient, may_reserve)
  local next_item = by_window(patient)
  while row.has_places() do
    local item = next_item()
    if not item then break end
    if row.is_there(item) and row.has_slots(item) then
      row.take(item, 1)
      row.choose(item)
    elseif row.is_there(item) and row.may_fit_later(item) and may_reserve(item.r) then
      return true
    else
      row.pass_over(item)
    end
  end
  return false
end

-- Takes U: a share of the longest prefix by density that fits. Returns the utility that a request of D has at least.
local function take_useful(row, in_time, order)
  local next_item, prefix = by_density(in_time), {}
  while row.has_room() do
    local item = next_item()
    if not item then break end
    if row.fits(item) then
      row.take(item, 1)
      prefix[#prefix + 1] = item
    elseif row.is_there(item) then
      break
    else
      row.pass_over(item)
    end
  end
  local useful, utility = 0, 0
  if order.share > 0 and #prefix > 0 then useful = math.max(1, math.ceil(order.share * #prefix - ROUNDING)) end
  for i, item in ipairs(prefix) do
    if i <= useful then
      row.choose(item)
      utility = utility + item.class.utility
    else
      row.take(item, -1)
    end
  end
  return useful > 0 and order.q * (utility / useful) * (1 - ROUNDING) or 0
end

-- Chooses the requests of a claim.
-- Args: counts: of keep_index; room: of row_of.
-- Returns them in the order in which they were chosen, and 1 if one that does not fit has reserved the group.
local function choose_by_order(revision, counts, order, room, may_reserve)
  local classes = classes_of(revision, counts, order)
  drop_late(revision, classes, order)
  -- If all that waits has a place, the order decides nothing, so prompts need not fill one step after the other.
  if call('ZCARD', q_key(revision)) <= room.requests then
    room.tokens, room.total_tokens = math.huge, math.huge
  end

  local row, patient, in_time, late = row_of(revision, room), divide(classes, order)
  if take_patient(row, patient, may_reserve) then return row.chosen, 1 end
  local least, urgent = take_useful(row, in_time, order), {}
  -- A heap looks at every class, so it is made only where room is left.
  if order.share < 1 and row.has_room() then
    for _, reader in ipairs(in_time) do
      if reader.class.utility >= least then urgent[#urgent + 1] = reader end
    end
    row.take_all(urgent, by_window)
  end
  row.take_all(in_time, by_density)
  row.take_all(late, by_density)
  return row.chosen, 0
end
