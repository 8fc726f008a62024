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

-- Returns the classes of the index of a revision, the number of waiting requests in it, how far it is built ('' for no
-- index), and true if this release gives the names of all its classes.
local function read_classes(revision)
  local pairs_of, classes, indexed, built, is_known = call('HGETALL', classes_key(revision)), {}, 0, '', true
  for i = 1, #pairs_of, 2 do
    local name, count = pairs_of[i], pairs_of[i + 1]
    if name == '' then
      built = count
    else
      indexed = indexed + count
      local priority, prompt, output, fewest, kind, goal = class_named(name)
      is_known = is_known and priority ~= nil
      classes[#classes + 1] = {
        name = name, priority = priority, prompt = prompt, output = output, fewest = fewest, kind = kind, goal = goal,
      }
    end
  end
  return classes, indexed, built, is_known
end

-- Builds the next part of the index of a revision if it is not whole, from the oldest request on. It begins again if the
-- index does not count what waits, or has names of classes that this release does not give: a part of another release has
-- queued or claimed something. It also does so if this release may read what the builder could not.
-- Args: most: requests that the claim may take; the index gets at least as many.
-- Returns the classes.
local function keep_index(revision, most)
  local classes, indexed, built, is_known = read_classes(revision)
  local unreadable, newest, last = string.match(built, '^(%d+) (%d+) (%S+)$')
  if last == 'inf' then
    local is_readable_now = unreadable ~= '0' and tonumber(newest) < SCHEMA_NEWEST
    local is_counted = indexed + unreadable == call('ZCARD', q_key(revision))
    if is_known and is_counted and not is_readable_now then return classes end
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
  return (read_classes(revision))
end

-- Puts the classes in order, those with the most utility per cost first, with what the order makes of each.
local function weigh(classes, order)
  for _, class in ipairs(classes) do
    local prompt, output, fewest = middle_of(class.prompt), middle_of(class.output), middle_of(class.fewest)
    local expected = math.max(fewest, math.min(order.outputs[class.prompt] or math.huge, output))
    class.utility = 2 ^ -class.priority * (order.is_by_length and 1 / (prompt + expected) or 1)
    class.density = class.utility / (order.prompt_cost * prompt + expected)
    class.own_ms, class.expected_ms, class.window_ms = 0, 0, math.huge
    if class.kind ~= 'none' or class.goal > 0 then
      local longest = math.max(longest_of(class.fewest), expected)
      local is_end = class.kind == 'end'
      class.own_ms = order.prompt_token_ms * longest_of(class.prompt) + order.step_ms * (is_end and longest or 1)
      class.expected_ms = order.prompt_token_ms * prompt + order.step_ms * (is_end and expected or 1)
      if class.goal > 0 then class.window_ms = lower_bound(class.goal) - class.own_ms end
    end
  end
  table.sort(classes, function(a, b) return a.density > b.density end)
end

-- Returns a score as text that Redis reads as the same number, with a bracket if the range is without it.
local function bound_text(score, is_in) return string.format(is_in and '%.17g' or '(%.17g', score) end

-- Returns the member of a class with the lowest score, and this score, infinite if there is none. Most readers need no
-- more than this, and a claim has several readers of each class.
local function first_of(revision, class)
  if not class.first_score then
    local found = call('ZRANGE', waiting_class_key(revision, class.name), 0, 0, 'WITHSCORES')
    class.first_member, class.first_score = found[1], tonumber(found[2] or math.huge)
  end
  return class.first_member, class.first_score
end

local function add_item(reader, member, score)
  local arrival, id = string.match(member, '^(%d+) (.*)$')
  reader.items[#reader.items + 1] = {
    id = id, member = member, arrival = tonumber(arrival), starts_by = score + reader.add_ms, class = reader.class,
  }
end

-- Reads the requests of a class between two scores, by rising scores, twice as many with each call.
-- Args: add_ms: from a score to the end of the start window.
local function reader_of(revision, class, low, is_low_in, high, is_high_in, add_ms)
  local reader = {
    key = waiting_class_key(revision, class.name), class = class, add_ms = add_ms, items = {}, place = 1,
    low = low, is_low_in = is_low_in, high = high, is_high_in = is_high_in,
  }
  local member, score = first_of(revision, class)
  if score > high or score == high and not (is_high_in and member) then
    reader.is_whole = true
  elseif score > low or score == low and is_low_in then
    add_item(reader, member, score)
  end
  return reader
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
      local low, high = bound_text(reader.low, reader.is_low_in), bound_text(reader.high, reader.is_high_in)
      local found = call('ZRANGEBYSCORE', reader.key, low, high, 'WITHSCORES', 'LIMIT', #reader.items, chunk)
      reader.is_whole = #found < 2 * chunk
      for i = 1, #found, 2 do add_item(reader, found[i], tonumber(found[i + 1])) end
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
    call('HSET', steps_key(revision), 'least_ms', bound_text(own_ms, true))
    known = own_ms
  end
  return own_ms > 0 and known or 0
end

-- Returns the time before its deadline within which a request of the class may be too late.
local function late_within_ms(class, order, least_step_ms)
  if class.kind == 'none' or class.own_ms <= 0 then return 0 end
  if order.drop == 'expected' then return class.expected_ms end
  return math.min(class.own_ms, least_step_ms * (class.kind == 'first' and 1 or longest_of(class.fewest)))
end

-- Ends what is too late: a claim looks at a bounded number of requests, those with the soonest deadlines of all classes.
local function drop_late(revision, classes, order)
  local least_step_ms = shared_least_step(revision, order.least_step_ms)
  if order.drop == 'never' then return end
  local readers = {}
  for _, class in ipairs(classes) do
    local within_ms = late_within_ms(class, order, least_step_ms)
    if within_ms > 0 then
      readers[#readers + 1] = reader_of(revision, class, wall, false, wall + within_ms, false, 0)
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
      if wall + least_ms > tonumber(r.deadline) then
        end_request(r, 'deadline_exceeded', LATE)
        item.class.first_score = nil
      end
    end
  end
end

-- Returns a row that is being filled: its methods take requests, and `chosen` has what was taken.
-- Args: room: requests, slots, total_slots, tokens, total_tokens, block. What is taken makes it smaller.
local function row_of(room)
  local row, passed = { chosen = {}, stale = {} }, 0

  function row.has_places() return room.requests > 0 and room.slots > 0 and passed <= PASSED_MAX end
  function row.has_room() return row.has_places() and room.tokens > 0 end
  function row.has_slots(item) return item.slots <= room.slots end
  function row.may_fit_later(item) return item.slots <= room.total_slots end

  -- Returns true if this release can read the request, it waits, and its deadline has not passed.
  function row.is_there(item)
    if item.r == nil then
      local r = load(item.id)
      if (r and r.state or call('HGET', req_key(item.id), 'state')) ~= 'queued' then
        row.stale[#row.stale + 1] = item  -- readers count places, so it stays there until the end of the claim
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
    local prompt, output = lower_bound(class.prompt), lower_bound(class.output)
    return math.min(prompt, room.total_tokens) > room.tokens or slots_of(prompt + output, nil, room.block) > room.slots
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
local function divide(revision, classes, order)
  local patient, in_time, late = {}, {}, {}
  for _, class in ipairs(classes) do
    local function add(readers, ...) readers[#readers + 1] = reader_of(revision, class, ...) end
    if class.kind == 'none' then
      local passed_at, goal_from = wall - order.patience_ms, math.huge
      add(patient, -math.huge, true, passed_at, true, order.patience_ms)
      if class.window_ms < order.patience_ms then
        goal_from = wall - class.window_ms
        add(in_time, goal_from, true, math.huge, true, class.window_ms)
      end
      add(in_time, passed_at, false, goal_from, false, order.patience_ms)
    else
      local from = wall + class.own_ms
      add(in_time, from, true, math.huge, true, -class.own_ms)
      add(late, wall, false, from, false, -class.own_ms)
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
  if order.share == 0 then return 0 end
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
  if #prefix > 0 then useful = math.max(1, math.ceil(order.share * #prefix - ROUNDING)) end
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

-- Fills a row. Returns 1 if a request that does not fit has reserved the group, otherwise 0.
local function fill(row, revision, classes, order, may_reserve)
  local patient, in_time, late = divide(revision, classes, order)
  if take_patient(row, patient, may_reserve) then return 1 end
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
  return 0
end

-- Chooses the requests of a claim.
-- Args: classes: of keep_index; room: of row_of.
-- Returns them in the order in which they were chosen, and 1 if one that does not fit has reserved the group.
local function choose_by_order(revision, classes, order, room, may_reserve)
  weigh(classes, order)
  drop_late(revision, classes, order)
  -- If all that waits has a place, the order decides nothing, so prompts need not fill one step after the other.
  if call('ZCARD', q_key(revision)) <= room.requests then
    room.tokens, room.total_tokens = math.huge, math.huge
  end
  local row = row_of(room)
  local blocked = fill(row, revision, classes, order, may_reserve)
  for _, item in ipairs(row.stale) do take_from_class(revision, item.class.name, item.member) end
  return row.chosen, blocked
end
