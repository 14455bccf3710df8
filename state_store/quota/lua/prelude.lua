-- Shared by all scripts of the quotas. The keys of one shard, always in this order: its marker, the reservations (hash:
-- generation -> packed reservation), the checks (sorted set: generation -> when it is compared with Postgres, ms), the
-- generations settled lately (sorted set: generation -> until when that is remembered, ms), live generations and their
-- reserved tokens by subject (two hashes), the token of a running rebuild, and the subjects that it has touched (set).
-- A subject is 'tenant:<id>' or 'key:<id>'. Its own keys carry the same hash tag: requests and tokens of the last minute
-- (hashes: second -> count), and the tokens of its last day and month (hash).
local MARKER, RESERVATIONS, CHECKS, SETTLED, CONCURRENT, RESERVED, REBUILD, TOUCHED = unpack(KEYS)
local TAG = string.sub(MARKER, 1, -#'marker' - 1)
local NOT_READY = -1
local WINDOW_S, DAY_S, HOUR_MS = 60, 86400, 3600000
local WINDOW_KEPT_MS = (WINDOW_S + 10) * 1000
local LIVE_RETRY_MS = 1000

local function int(number)
  return string.format('%.0f', number)
end

-- A month is named by its first day, a day by its number since 1970. Howard Hinnant, "chrono-Compatible Low-Level Date
-- Algorithms", civil_from_days.
local function month_of(day)
  local of_era = (day + 719468) % 146097
  local year = math.floor(
    (of_era - math.floor(of_era / 1460) + math.floor(of_era / 36524) - math.floor(of_era / 146096)) / 365
  )
  local of_year = of_era - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  local month = math.floor((5 * of_year + 2) / 153)
  return day - (of_year - math.floor((153 * month + 2) / 5))
end

local function day_of(second)
  return math.floor(second / DAY_S)
end

local function clock(override)
  local ms = tonumber(override)
  if not ms then
    local time = redis.call('TIME')
    ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  end
  local second = math.floor(ms / 1000)
  local day = day_of(second)
  local month = month_of(day)
  return { ms = ms, second = second, day = day, month = month, next_month = month_of(month + 31) }
end

local function is_ready()
  return redis.call('EXISTS', MARKER) == 1
end

local function has_left(second, now)
  return second < now.second - WINDOW_S
end

local function bump(key, field, by)
  if redis.call('HINCRBY', key, field, int(by)) <= 0 then
    redis.call('HDEL', key, field)
  end
end

-- A window keeps its counts by the second, their total, the first second that it may hold ('from') and the newest that it
-- does: so that neither a look nor a charge reads every second. The total is less what has left since the last write.
local function read_window(key, now)
  local known = redis.call('HMGET', key, 'total', 'from', 'newest')
  local newest = tonumber(known[3])
  if not newest or has_left(newest, now) then
    return { total = 0, gone = {} }
  end
  local window = { total = tonumber(known[1]), from = tonumber(known[2]), newest = newest, gone = {} }
  if has_left(window.from, now) then
    for second = window.from, now.second - WINDOW_S - 1 do
      window.gone[#window.gone + 1] = int(second)
    end
    for _, number in ipairs(redis.call('HMGET', key, unpack(window.gone))) do
      window.total = window.total - (tonumber(number) or 0)
    end
    window.from = now.second - WINDOW_S
  end
  return window
end

-- The seconds of a window that count, with their counts, the oldest first.
local function buckets_of(key, now)
  local flat, buckets = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do
    local second = tonumber(flat[i])
    if second and not has_left(second, now) then
      buckets[#buckets + 1] = { second, tonumber(flat[i + 1]) }
    end
  end
  table.sort(buckets, function(one, other) return one[1] < other[1] end)
  return buckets
end

local function bump_window(key, second, by, now)
  if by == 0 or has_left(second, now) then
    return
  end
  local window = read_window(key, now)
  if not window.newest then
    redis.call('DEL', key)
    window.from, window.newest = second, second
  elseif #window.gone > 0 then
    redis.call('HDEL', key, unpack(window.gone))
  end
  local total, newest = window.total + by, math.max(window.newest, second)
  if total <= 0 then
    redis.call('DEL', key)
    return
  end
  bump(key, int(second), by)
  if by < 0 and second == newest then
    local buckets = buckets_of(key, now)
    newest = buckets[#buckets][1]
  end
  redis.call('HSET', key, 'total', int(total), 'from', int(math.min(window.from, second)), 'newest', int(newest))
  redis.call('PEXPIRE', key, WINDOW_KEPT_MS)
end

-- Tokens of this day and month; what belongs to an earlier one counts no more.
local function bump_use(subject, second, tokens, now)
  local key, day = TAG .. 'use:' .. subject, day_of(second)
  local known = redis.call('HMGET', key, 'day', 'month')
  if tonumber(known[1]) ~= now.day then
    redis.call('HSET', key, 'day', now.day, 'day_tokens', 0)
  end
  if tonumber(known[2]) ~= now.month then
    redis.call('HSET', key, 'month', now.month, 'month_tokens', 0)
  end
  if day == now.day then
    redis.call('HINCRBY', key, 'day_tokens', int(tokens))
  end
  if month_of(day) == now.month then
    redis.call('HINCRBY', key, 'month_tokens', int(tokens))
  end
  redis.call('PEXPIRE', key, int(now.next_month * DAY_S * 1000 - now.ms + HOUR_MS))
end

local function subjects_of(reservation)
  return { 'tenant:' .. reservation.tenant, 'key:' .. reservation.key }
end

-- Adds to (or takes from) what a reservation counts in the windows it was charged to.
local function count(reservation, requests, tokens, now)
  for _, subject in ipairs(subjects_of(reservation)) do
    bump_window(TAG .. 'requests:' .. subject, reservation.second, requests, now)
    bump_window(TAG .. 'tokens:' .. subject, reservation.second, tokens, now)
    bump_use(subject, reservation.second, tokens, now)
  end
end

local function find(generation)
  local packed = redis.call('HGET', RESERVATIONS, generation)
  if not packed then
    return nil
  end
  local fields = cmsgpack.unpack(packed)
  return { tenant = fields[1], key = fields[2], tokens = fields[3], second = fields[4], is_bound = fields[5] }
end

local function put(generation, reservation, due_ms)
  local fields = { reservation.tenant, reservation.key, reservation.tokens, reservation.second, reservation.is_bound }
  redis.call('HSET', RESERVATIONS, generation, cmsgpack.pack(fields))
  redis.call('ZADD', CHECKS, int(due_ms), generation)
end

-- A new reservation: charged to every count.
local function take(generation, reservation, due_ms, now)
  put(generation, reservation, due_ms)
  count(reservation, 1, reservation.tokens, now)
  for _, subject in ipairs(subjects_of(reservation)) do
    redis.call('HINCRBY', CONCURRENT, subject, 1)
    redis.call('HINCRBY', RESERVED, subject, int(reservation.tokens))
  end
end

-- The reservation ends: its place is free, and it counts `requests` and `tokens` from now on.
local function finish(generation, reservation, requests, tokens, now)
  redis.call('HDEL', RESERVATIONS, generation)
  redis.call('ZREM', CHECKS, generation)
  count(reservation, requests - 1, tokens - reservation.tokens, now)
  for _, subject in ipairs(subjects_of(reservation)) do
    bump(CONCURRENT, subject, -1)
    bump(RESERVED, subject, -reservation.tokens)
  end
end
