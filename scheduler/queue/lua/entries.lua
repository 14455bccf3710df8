-- Where entries are and how they move, as in model_queue.py: waiting, delayed or in flight; counts follow.
-- In the place of the session's earmark, if it has one.
local function set_earmark(session, generation, until_us)
  local other = call('HGET', EARMARKS, session)
  if other and other ~= generation then
    call('HDEL', EARMARKED, other)
  end
  call('HSET', EARMARKS, session, generation)
  call('HSET', EARMARKED, generation, session)
  call('ZADD', EARMARK_LEASES, int(until_us), session)
end

local function release_earmark(session)
  local generation = call('HGET', EARMARKS, session)
  if generation == call('HGET', META, 'starving') then
    call('HDEL', META, 'starving')
  end
  call('HDEL', EARMARKED, generation)
  call('HDEL', EARMARKS, session)
  call('ZREM', EARMARK_LEASES, session)
end

local function expire_earmarks(now)
  for _, session in ipairs(call('ZRANGEBYSCORE', EARMARK_LEASES, '-inf', int(now))) do
    release_earmark(session)
  end
end

local function begin_waiting(generation, entry)
  local lane = lane_of(entry)
  use_lane(lane)
  call('ZADD', waiting_key(lane, entry.tenant), int(entry.order), generation)
  call('ZADD', tenants_key(lane), call('HGET', COUNTERS, entry.tenant), entry.tenant)
  call('ZADD', arrivals_key(lane), int(entry.arrival), generation)
end

local function end_waiting(generation, entry)
  local lane = lane_of(entry)
  local key = waiting_key(lane, entry.tenant)
  call('ZREM', key, generation)
  if call('EXISTS', key) == 0 then
    call('ZREM', tenants_key(lane), entry.tenant)
  end
  call('ZREM', arrivals_key(lane), generation)
  if call('HDEL', SKIPPED, generation) == 1 then -- only what is skipped can have an earmark
    local session = call('HGET', EARMARKED, generation)
    if session then
      release_earmark(session)
    end
  end
end

-- Into or out of the counts and deadlines of what is queued.
local function count(generation, entry, sign)
  bump(COUNTS, 'r' .. entry.rank, sign)
  bump(COUNTS, 'p' .. entry.rank, sign * entry.prompt_tokens)
  bump(TENANT_REQUESTS, entry.tenant, sign)
  bump(TENANT_TOKENS, entry.tenant, sign * entry.prompt_tokens)
  if entry.deadline > 0 then
    if sign > 0 then
      call('ZADD', DEADLINES, int(entry.deadline), generation)
    else
      call('ZREM', DEADLINES, generation)
    end
  end
end

-- Ends a flight without putting the entry anywhere.
local function land(generation, entry)
  call('ZREM', IN_FLIGHT, generation)
  call('HDEL', POPS, generation)
  bump(TENANT_IN_FLIGHT, entry.tenant, -1)
end

local function is_popped_as(generation, pop_id)
  return call('HGET', POPS, generation) == pop_id
end

local function add(generation, entry, packed, now)
  call('HSET', ENTRIES, generation, packed)
  activate(entry.tenant)
  count(generation, entry, 1)
  if entry.ready > now then
    call('ZADD', DELAYED, int(entry.ready), generation)
  else
    lift(entry.tenant)
    begin_waiting(generation, entry)
  end
end

-- Leaves every structure. Refunds what is in flight, if so asked.
local function discard(generation, entry, is_refunded)
  if call('HEXISTS', POPS, generation) == 1 then
    land(generation, entry)
    if is_refunded then
      add_to_active(entry.tenant, -entry.cost)
    end
  else
    count(generation, entry, -1)
    if call('ZREM', DELAYED, generation) == 0 then
      end_waiting(generation, entry)
    end
  end
  call('HDEL', ENTRIES, generation)
  settle(entry.tenant)
end

-- A hint to every scheduler, see news.py. Who may not publish queues all the same: the hint is missed, no more.
local function publish_news()
  redis.pcall('PUBLISH', 'queue:news', TAG)
end

-- From in flight to its old place, refunded and not lifted: it never left.
local function put_back(generation, entry)
  land(generation, entry)
  add_to_active(entry.tenant, -entry.cost)
  count(generation, entry, 1)
  begin_waiting(generation, entry)
end

-- Queued entries whose deadline has passed leave; what is in flight is the grant's to refuse.
local function expire(now)
  for _, generation in ipairs(call('ZRANGEBYSCORE', DEADLINES, '-inf', int(now))) do
    discard(generation, find(generation), false)
  end
end

-- Delayed entries whose time has come return to their place.
local function ripen(now)
  for _, generation in ipairs(call('ZRANGEBYSCORE', DELAYED, '-inf', int(now))) do
    local entry = find(generation)
    call('ZREM', DELAYED, generation)
    lift(entry.tenant)
    begin_waiting(generation, entry)
  end
end
