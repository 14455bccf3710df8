-- Counts against limits, for look and reserve. A limit is '' where there is none; they come in the order of QuotaKind.
local NUM_KINDS = 5

local function left_at_ms(second)
  return (second + WINDOW_S + 1) * 1000
end

-- When the oldest seconds that make up `excess` have left the window.
local function wait_for_window(key, excess, now)
  for _, bucket in ipairs(buckets_of(key, now)) do
    excess = excess - bucket[2]
    if excess <= 0 then
      return left_at_ms(bucket[1]) - now.ms
    end
  end
  return left_at_ms(now.second) - now.ms
end

local function measure_window(key, limit, ask, now)
  local window = read_window(key, now)
  local measure = { used = window.total, reset = 0, wait = -1, ask = ask, fresh = left_at_ms(now.second) - now.ms }
  if window.newest then
    measure.reset = left_at_ms(window.newest) - now.ms
  end
  if ask > 0 and window.total + ask > limit then
    measure.wait = wait_for_window(key, window.total + ask - limit, now)
  end
  return measure
end

local function measure_concurrent(subject, limit, ask)
  local used = tonumber(redis.call('HGET', CONCURRENT, subject) or 0)
  local is_over = ask > 0 and used + ask > limit
  return { used = used, reset = 0, wait = is_over and LIVE_RETRY_MS or -1, ask = ask, fresh = 0 }
end

-- Tokens since `first_day`, kept under `name`; they are free again at `end_day`.
local function measure_use(subject, name, limit, ask, days, now)
  local known = redis.call('HMGET', TAG .. 'use:' .. subject, name, name .. '_tokens')
  local used = tonumber(known[1]) == days.first and tonumber(known[2]) or 0
  local until_end = days.next * DAY_S * 1000 - now.ms
  local measure = { used = used, reset = used > 0 and until_end or 0, wait = -1, ask = ask, fresh = until_end }
  if ask > 0 and used + ask > limit then
    -- Live generations mostly cost less than they have reserved.
    local reserved = tonumber(redis.call('HGET', RESERVED, subject) or 0)
    measure.wait = used - reserved + ask <= limit and LIVE_RETRY_MS or until_end
  end
  return measure
end

local function measure_all(subject, first, asks, now)
  local limits, measures = {}, {}
  for i = 1, NUM_KINDS do
    limits[i] = tonumber(ARGV[first + i - 1]) or false
  end
  if limits[1] then
    measures[1] = measure_window(TAG .. 'requests:' .. subject, limits[1], asks.requests, now)
  end
  if limits[2] then
    measures[2] = measure_window(TAG .. 'tokens:' .. subject, limits[2], asks.tokens, now)
  end
  if limits[3] then
    measures[3] = measure_concurrent(subject, limits[3], asks.requests)
  end
  if limits[4] then
    local days = { first = now.day, next = now.day + 1 }
    measures[4] = measure_use(subject, 'day', limits[4], asks.tokens, days, now)
  end
  if limits[5] then
    local days = { first = now.month, next = now.next_month }
    measures[5] = measure_use(subject, 'month', limits[5], asks.tokens, days, now)
  end
  return measures
end

-- Measures of the tenant (limits from ARGV[first]) and of the key, and whether one of them has to wait.
local function measure_both(tenant, key, first, asks, now)
  local both, must_wait = {}, false
  local parts = {
    measure_all('tenant:' .. tenant, first, asks, now), measure_all('key:' .. key, first + NUM_KINDS, asks, now),
  }
  for part = 1, 2 do
    for i = 1, NUM_KINDS do
      local measure = parts[part][i] or false
      both[#both + 1] = measure
      must_wait = must_wait or (measure and measure.wait >= 0)
    end
  end
  return both, must_wait
end

-- Per limit: used (-1 where there is no limit), ms until all of it is free again, ms to wait (-1: fits). With `is_charged`
-- as it is after what was asked for has been charged.
local function answer(both, must_wait, is_charged)
  local flat = { must_wait and 1 or 0 }
  for _, measure in ipairs(both) do
    local used, reset = -1, 0
    if measure then
      used, reset = measure.used, measure.reset
      if is_charged and measure.ask > 0 then
        used, reset = used + measure.ask, measure.fresh
      end
    end
    flat[#flat + 1] = used
    flat[#flat + 1] = reset
    flat[#flat + 1] = measure and measure.wait or -1
  end
  return flat
end
