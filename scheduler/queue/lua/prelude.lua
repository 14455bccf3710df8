-- Shared by all scripts of the admission queue. The keys of one model, always in this order: its marker, one sorted set per
-- class by rank (generation -> arrival in ms), the entries (generation -> packed entry; queued and in flight), the in-flight
-- set (generation -> end of its hold in ms) and the pops (generation -> pop id).
local MARKER, ENTRIES, IN_FLIGHT, POPS = KEYS[1], KEYS[5], KEYS[6], KEYS[7]
local NUM_CLASSES = 3
local NOT_READY = -1

local function now_ms(override)
  if override ~= '' then
    return tonumber(override)
  end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function int(number)
  return string.format('%.0f', number)
end

local function is_ready()
  return redis.call('EXISTS', MARKER) == 1
end

local function class_key(rank)
  return KEYS[2 + rank]
end

local function decode(packed)
  local fields = cmsgpack.unpack(packed)
  return {
    attempt = fields[1], rank = fields[2], max_tokens = fields[3], arrival = fields[4], deadline = fields[5],
    charged = fields[10] or 0
  }
end

local function find(generation)
  local packed = redis.call('HGET', ENTRIES, generation)
  return packed and decode(packed), packed
end

local function put(generation, entry)
  redis.call('ZADD', class_key(entry.rank), int(entry.arrival), generation)
end

-- Ends a flight without putting the entry anywhere.
local function land(generation)
  redis.call('ZREM', IN_FLIGHT, generation)
  redis.call('HDEL', POPS, generation)
end

-- Leaves every structure at once.
local function drop(generation, entry)
  redis.call('ZREM', class_key(entry.rank), generation)
  redis.call('HDEL', ENTRIES, generation)
  land(generation)
end

local function is_popped_as(generation, pop_id)
  return redis.call('HGET', POPS, generation) == pop_id
end
