-- Shared by all scripts of the admission queue: the structures of one model, numbers, and how an entry is read.
--
-- KEYS[1] is the model's hash tag; every key begins with it, so all of a model are in one slot. Tenants are escaped names
-- (no braces, no colons). Times are µs since 1970 and counters millionths of a token: whole numbers that doubles hold exactly.
local TAG = KEYS[1]
local MARKER = TAG .. ':marker'
local ENTRIES = TAG .. ':entries' -- hash: generation -> packed entry, wherever it is
local IN_FLIGHT = TAG .. ':in_flight' -- sorted set: generation by the end of its hold
local POPS = TAG .. ':pops' -- hash: generation in flight -> pop id
local DELAYED = TAG .. ':delayed' -- sorted set: generation by the time it is ready
local DEADLINES = TAG .. ':deadlines' -- sorted set: queued generation by its deadline
local COUNTS = TAG .. ':counts' -- hash: r<rank> queued requests, p<rank> their prompt tokens
local TENANT_REQUESTS = TAG .. ':tenant_requests' -- hash: tenant -> queued requests
local TENANT_TOKENS = TAG .. ':tenant_tokens' -- hash: tenant -> their prompt tokens
local TENANT_IN_FLIGHT = TAG .. ':tenant_in_flight' -- hash: tenant -> requests in flight
local COUNTERS = TAG .. ':counters' -- hash: tenant with entries -> counter
local IDLE = TAG .. ':idle_counters' -- sorted set: tenant without entries by counter
local META = TAG .. ':meta' -- hash: floor, turn, window, popped, popped_before, starving (generation)
local SKIPPED = TAG .. ':skipped' -- hash: waiting generation -> since when it is skipped
local EARMARKS = TAG .. ':earmarks' -- hash: session -> generation
local EARMARKED = TAG .. ':earmarked' -- hash: generation -> session
local EARMARK_LEASES = TAG .. ':earmark_leases' -- sorted set: session by the end of its earmark
local NUM_CLASSES, NUM_LANES = 3, 6
local NOT_READY = -1

local function call(...)
  return redis.call(...)
end

local function int(number)
  return string.format('%.0f', number)
end

local function now_us(override)
  if override ~= '' then
    return tonumber(override)
  end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function is_ready()
  return call('EXISTS', MARKER) == 1
end

-- Byte order; Lua's own comparison of strings follows the server's locale.
local function is_before(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then
      return x < y
    end
  end
  return #a < #b
end

-- Of a hash of counts whose zeros are not kept.
local function bump(key, field, by)
  if by ~= 0 and call('HINCRBY', key, field, int(by)) == 0 then
    call('HDEL', key, field)
  end
end

-- A lane is a class and whether its entries are charged: charged ones are looked at only where a session may take one.
local function lane_of(entry)
  return entry.rank * 2 + entry.charged
end

local function tenants_key(lane) -- sorted set: waiting tenant by counter
  return TAG .. ':tenants:' .. lane
end

-- Lanes where somebody waits, looked up once in a script; one that falls empty stays in the list.
local lanes_in_use
local function used_lanes()
  if not lanes_in_use then
    lanes_in_use = {}
    for lane = 0, NUM_LANES - 1 do
      if call('EXISTS', tenants_key(lane)) == 1 then
        lanes_in_use[#lanes_in_use + 1] = lane
      end
    end
  end
  return lanes_in_use
end

local function is_lane_used(lane)
  for _, used in ipairs(used_lanes()) do
    if used == lane then
      return true
    end
  end
  return false
end

local function use_lane(lane)
  if not is_lane_used(lane) then
    lanes_in_use[#lanes_in_use + 1] = lane
  end
end

local function arrivals_key(lane) -- sorted set: waiting generation by arrival
  return TAG .. ':arrivals:' .. lane
end

local function waiting_key(lane, tenant) -- sorted set: waiting generation by order_at
  return TAG .. ':waiting:' .. lane .. ':' .. tenant
end

local function decode(packed)
  local fields = cmsgpack.unpack(packed)
  return {
    attempt = fields[1], rank = fields[2], charged = fields[3], tenant = fields[4], cost = fields[5],
    prompt_tokens = fields[6], max_tokens = fields[7], order = fields[8], arrival = fields[9], deadline = fields[10],
    ready = fields[11]
  }
end

local function find(generation)
  local packed = call('HGET', ENTRIES, generation)
  return packed and decode(packed), packed
end
