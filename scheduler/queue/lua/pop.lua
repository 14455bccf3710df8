-- Which entries a pop takes, as in selection.py.
-- ARGV: now, id of this pop, most entries, hold, patience, time to starve, earmark lease, most heads of a class to look past,
-- most of one tenant, most beside them that are too large for all sessions, limit of counters, rate window, the classes' wait
-- thresholds, then per session: id, most entries and most tokens of each class, capacity, most charged entries. Durations in µs.
-- Answers a list of generation, packed entry, pop id, session, 1 if urgent, ... and one of the sessions that are kept for an
-- entry, with its rank: 0 while it starves.
if not is_ready() then
  return NOT_READY
end
local TURN = 8
local now, pop_id, max_entries = now_us(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local held_until, patience, starving_after = now + tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local earmarked_until = now + tonumber(ARGV[7])
local max_passed, max_passed_of_tenant, max_oversized = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local counter_limit, window = tonumber(ARGV[11]), tonumber(ARGV[12])
local FIRST_THRESHOLD, FIRST_ROOM = 13, 16
local turn = tonumber(call('HGET', META, 'turn') or '0')
local answers, num_popped = {}, 0
local new_floor -- what the tenant served last had before
local passed, num_seen = {}, 0
local looks = {} -- by rank, what was looked past of a class: none uses up another's
for rank = 0, NUM_CLASSES - 1 do
  looks[rank] = {num_passed = 0, num_passed_by_tenant = {}, num_oversized = 0, closed_tenants = {}, is_over = false}
end
local starving_head -- the first that was looked past and starves, and its entry
local walked = {} -- tenants at the front of a lane without a head

-- What the entries taken change in structures that nothing in this script reads before its end: written in one piece.
local flights, pops, deadlines, changes = {}, {}, {}, {}

local function change(key, field, by)
  changes[key] = changes[key] or {}
  changes[key][field] = (changes[key][field] or 0) + by
end

local function take(generation, entry, packed, room, rank)
  end_waiting(generation, entry)
  if starving == generation then
    starving = nil
  end
  if starving_head and starving_head.generation == generation then
    starving_head = nil
  end
  walked = {}
  for _, other in ipairs(rooms) do
    if other.earmark == generation then
      other.earmark = nil
    end
  end
  local id = pop_id .. ':' .. num_popped
  flights[#flights + 1], flights[#flights + 2] = int(held_until), generation
  pops[#pops + 1], pops[#pops + 2] = generation, id
  if entry.deadline > 0 then
    deadlines[#deadlines + 1] = generation
  end
  change(COUNTS, 'r' .. entry.rank, -1)
  change(COUNTS, 'p' .. entry.rank, -entry.prompt_tokens)
  change(TENANT_REQUESTS, entry.tenant, -1)
  change(TENANT_TOKENS, entry.tenant, -entry.prompt_tokens)
  change(TENANT_IN_FLIGHT, entry.tenant, 1)
  new_floor = active_counter(entry.tenant)
  if entry.cost ~= 0 then
    set_active_counter(entry.tenant, new_floor + entry.cost)
  end
  room.num_popped, room.tokens_popped = room.num_popped + 1, room.tokens_popped + entry.max_tokens
  room.num_charged = room.num_charged + entry.charged
  num_popped, turn = num_popped + 1, (turn + 1) % TURN
  for _, value in ipairs({generation, packed, id, room.session, rank < entry.rank and 1 or 0}) do
    answers[#answers + 1] = value
  end
end

local function keep(room, generation, entry, rank)
  room.earmark, room.earmarked, room.earmark_rank = generation, entry, rank
  set_earmark(room.session, generation, earmarked_until)
end

-- When it is the turn of age, what starves gets its session, closed to all others and with a place left for it: its own, one
-- that is kept for nothing, or any. One of a model at a time: the classes above get 7 of 8 even while many starve.
local function keep_for_starving()
  if not starving_head or turn ~= TURN - 1 or starving then
    return
  end
  local generation, entry = starving_head.generation, starving_head.entry
  local function is_able(room)
    return could_hold(room, entry) and room.num_popped < room.max_entries[0]
  end
  local room = roomiest(0, function(each)
    return each.earmark == generation and is_able(each)
  end) or roomiest(0, function(each)
    return not each.earmark and is_able(each)
  end) or roomiest(0, is_able)
  if not room then
    return
  end
  for _, other in ipairs(rooms) do
    if other.earmark == generation then
      other.earmark = nil
    end
  end
  local session = call('HGET', EARMARKED, generation)
  if session then
    release_earmark(session)
  end
  keep(room, generation, entry, 0)
  starving = generation
  call('HSET', META, 'starving', generation)
end

-- Looks past a head; one that has been for long keeps a session that could hold it when empty and is kept for nothing yet.
local function pass(generation, entry)
  passed[generation], num_seen = true, num_seen + 1
  call('HSETNX', SKIPPED, generation, int(now))
  local skipped = now - tonumber(call('HGET', SKIPPED, generation))
  if skipped >= patience and call('HEXISTS', EARMARKED, generation) == 0 then
    local room = roomiest(entry.rank, function(each)
      return not each.earmark and could_hold(each, entry)
    end)
    if room then
      keep(room, generation, entry, entry.rank)
    end
  end
  if entry.rank > 0 and skipped >= starving_after and not starving_head then
    local room = roomiest(0, function(each)
      return could_hold(each, entry)
    end)
    if room then
      starving_head = {generation = generation, entry = entry}
      keep_for_starving()
    end
  end
end

-- TAKEN, PASSED, or CLOSED: it does not fit and may not be looked past. Judged by `rank`, or by 0 if it is what starves.
local function try(generation, rank, is_aged)
  local entry, packed = find(generation)
  rank = starving == generation and 0 or rank
  local wish = {rank = rank, charged = entry.charged, is_aged = is_aged, generation = generation, entry = entry}
  local room = roomiest(rank, function(each)
    return fits(each, wish)
  end)
  local seen = looks[entry.rank]
  if room then
    take(generation, entry, packed, room, rank)
    return 'TAKEN'
  elseif entry.max_tokens > largest_capacity then
    -- What would fit none of these sessions even when empty waits for another one, and must not block them.
    seen.num_oversized = seen.num_oversized + 1
    if seen.num_oversized > max_oversized then
      -- Who waits for the other session must not keep this one from the tenants that do not.
      seen.closed_tenants[entry.tenant] = true
      seen.is_over = seen.num_oversized >= 2 * max_oversized
      return 'CLOSED'
    end
    pass(generation, entry)
    return 'PASSED'
  elseif seen.num_passed >= max_passed then
    seen.is_over = true
    return 'CLOSED'
  elseif (seen.num_passed_by_tenant[entry.tenant] or 0) >= max_passed_of_tenant then
    seen.closed_tenants[entry.tenant] = true
    return 'CLOSED'
  end
  seen.num_passed = seen.num_passed + 1
  seen.num_passed_by_tenant[entry.tenant] = (seen.num_passed_by_tenant[entry.tenant] or 0) + 1
  pass(generation, entry)
  return 'PASSED'
end

-- The first of a sorted set that was not passed, and its score.
local function first_not_passed(key)
  local members = call('ZRANGE', key, 0, num_seen, 'WITHSCORES')
  for i = 1, #members, 2 do
    if not passed[members[i]] then
      return members[i], tonumber(members[i + 1])
    end
  end
end

-- The highest class of which an entry waits.
local function highest_waiting()
  for lane = 0, NUM_LANES - 1 do
    if is_lane_used(lane) and call('EXISTS', tenants_key(lane)) == 1 then
      return math.floor(lane / 2)
    end
  end
  return 0
end

-- The oldest that has waited beyond its class's threshold; as urgent while one of a higher class waits.
local function pick_aged()
  local highest = highest_waiting()
  while true do
    local oldest, oldest_arrival, oldest_rank
    for lane = 0, NUM_LANES - 1 do
      local rank = math.floor(lane / 2)
      local judged = rank > highest and 0 or rank
      local generation, arrival
      if is_lane_open(judged, lane % 2, true) then
        generation, arrival = first_not_passed(arrivals_key(lane))
      end
      if generation and arrival + tonumber(ARGV[FIRST_THRESHOLD + rank]) <= now then
        if not oldest or arrival < oldest_arrival or (arrival == oldest_arrival and is_before(generation, oldest)) then
          oldest, oldest_arrival, oldest_rank = generation, arrival, judged
        end
      end
    end
    local verdict = oldest and try(oldest, oldest_rank, true)
    if verdict ~= 'PASSED' then
      return verdict == 'TAKEN'
    end
  end
end

-- What a session was kept for goes first of its class, as soon as it fits there; what starves, of all.
local function pick_earmarked(rank)
  for _, room in ipairs(rooms) do
    local generation = room.earmark
    if generation and room.earmark_rank == rank then
      local entry, packed = find(generation)
      if fits(room, {rank = rank, charged = entry.charged, generation = generation, entry = entry}) then
        take(generation, entry, packed, room, rank)
        return true
      end
    end
  end
  return false
end

-- The first head of a lane, by counter, tenant, order and id; walks over tenants whose heads were all looked past. These
-- have none before something is taken, which also changes the order of tenants: until then the next walk begins behind them.
local function head_of_lane(lane)
  local closed_tenants = looks[math.floor(lane / 2)].closed_tenants
  if not is_lane_used(lane) then
    return nil
  end
  local index = walked[lane] or 0
  while true do
    walked[lane] = index
    local found = call('ZRANGE', tenants_key(lane), index, index, 'WITHSCORES')
    if #found == 0 then
      return nil
    end
    local tenant = found[1]
    local generation, order
    if not closed_tenants[tenant] then
      generation, order = first_not_passed(waiting_key(lane, tenant))
    end
    if generation then
      return {generation = generation, order = order, tenant = tenant, counter = tonumber(found[2])}
    end
    index = index + 1
  end
end

local function is_head_before(a, b)
  if a.counter ~= b.counter then
    return a.counter < b.counter
  elseif a.tenant ~= b.tenant then
    return is_before(a.tenant, b.tenant)
  elseif a.order ~= b.order then
    return a.order < b.order
  end
  return is_before(a.generation, b.generation)
end

-- The tenant with the smallest counter, its earliest entry; heads that do not fit are looked past.
local function pick_of_class(rank)
  while not looks[rank].is_over do
    local best
    for charged = 0, 1 do
      local head = is_lane_open(rank, charged) and head_of_lane(rank * 2 + charged)
      if head and (not best or is_head_before(head, best)) then
        best = head
      end
    end
    if not best then
      return false
    elseif try(best.generation, rank) == 'TAKEN' then
      return true
    end
  end
  return false
end

local function pick()
  keep_for_starving()
  if turn == TURN - 1 and pick_aged() then
    return true
  end
  for rank = 0, NUM_CLASSES - 1 do
    if pick_earmarked(rank) or pick_of_class(rank) then
      return true
    end
  end
  return false
end

-- One command for many values, in pieces that Lua's stack holds; none for none.
local function call_with_all(command, key, values)
  local PIECE = 2000
  for first = 1, #values, PIECE do
    call(command, key, unpack(values, first, math.min(first + PIECE - 1, #values)))
  end
end

-- Writes what was taken: flights, counts, entries popped in this window of time and in the one before, and the floor.
local function write_pops()
  call_with_all('ZADD', IN_FLIGHT, flights)
  call_with_all('HSET', POPS, pops)
  call_with_all('ZREM', DEADLINES, deadlines)
  for key, fields in pairs(changes) do
    for field, by in pairs(fields) do
      bump(key, field, by)
    end
  end
  local known = call('HMGET', META, 'window', 'popped', 'popped_before')
  local current, number = tonumber(known[1] or '0'), math.floor(now / window)
  local popped, before = tonumber(known[2] or '0'), tonumber(known[3] or '0')
  if number ~= current then
    popped, before = 0, number == current + 1 and popped or 0
  end
  call('HSET', META, 'turn', turn, 'window', int(number), 'popped', int(popped + num_popped),
    'popped_before', int(before), 'floor', int(new_floor))
end

expire(now)
ripen(now)
expire_earmarks(now)
starving = call('HGET', META, 'starving') or nil
if starving and call('HEXISTS', EARMARKED, starving) == 0 then -- released by a script that knows nothing of it
  call('HDEL', META, 'starving')
  starving = nil
end
for first = FIRST_ROOM, #ARGV, ROOM_SIZE do
  open_room(first, earmarked_until)
end
while num_popped < max_entries and pick() do
end
if num_popped > 0 then
  write_pops()
end
prune_and_rebase(counter_limit)

local kept = {}
for _, room in ipairs(rooms) do
  if room.earmark then
    kept[#kept + 1], kept[#kept + 2] = room.session, room.earmark_rank
  end
end

return {answers, kept}
