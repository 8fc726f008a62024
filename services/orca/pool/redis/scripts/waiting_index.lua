-- The index of waiting requests by order class (order/order_class.py). Only revisions whose groups claim by an order have
-- one: such claims build it, from the oldest request on, a bounded number with each. From the first of them on the hash
-- `classes` has the field '', and every script that queues a request or takes it out of the queue keeps the index. The
-- field is "<unreadable> <newest> <arrival>": the number of waiting requests that the builder could not read, the newest
-- schema number of that release, and the arrival up to which the index is built, 'inf' if it is whole. What came later is
-- not in it yet.

-- Returns the arrival up to which the index of a revision is built, nil if it has none.
local function indexed_to(revision)
  local arrival = string.match(redis.call('HGET', classes_key(revision), '') or '', ' (%S+)$')
  return arrival == 'inf' and math.huge or tonumber(arrival)
end

local function has_index(revision) return indexed_to(revision) ~= nil end
local function has_whole_index(revision) return indexed_to(revision) == math.huge end

local function waiting_class_key(revision, class) return waiting_key(revision .. '/' .. class) end

-- Returns the class of a waiting request, and its score and member there. Members of equal scores are in order of
-- arrival.
local function place_in_index(r)
  -- Tokens of earlier claims; a script that ends the request has counted them before.
  r.logged = r.logged or (tonumber(r.number) > 0 and redis.call('XLEN', log_key(r.id)) or 0)
  return class_of(r), r.deadline or r.submitted_ms, string.format('%016d %s', r.arrival, r.id)
end

-- Adds a request; harmless if it is there, as its count is not raised then.
local function put_in_index(r)
  local class, score, member = place_in_index(r)
  local added = redis.call('ZADD', waiting_class_key(r.revision, class), score, member)
  if added == 1 then redis.call('HINCRBY', classes_key(r.revision), class, 1) end
end

local function add_to_index(r)
  if tonumber(r.arrival) <= (indexed_to(r.revision) or 0) then put_in_index(r) end
end

local function take_from_class(revision, class, member)
  if redis.call('ZREM', waiting_class_key(revision, class), member) == 0 then return end
  if redis.call('HINCRBY', classes_key(revision), class, -1) == 0 then
    redis.call('HDEL', classes_key(revision), class)
  end
end

local function remove_from_index(r)
  if not has_index(r.revision) then return end
  local class, _, member = place_in_index(r)
  take_from_class(r.revision, class, member)
end

local function drop_index(revision)
  for _, class in ipairs(redis.call('HKEYS', classes_key(revision))) do
    redis.call('UNLINK', waiting_class_key(revision, class))
  end
  redis.call('UNLINK', classes_key(revision))
end
