-- Virtual token counters, as in fairness.py. A tenant is active while it has an entry: its counter is in COUNTERS, and in
-- each lane it waits in. An idle tenant's is in IDLE while it is above the level: below it, lifting gives the same.
local function smallest_waiting()
  local smallest
  for _, lane in ipairs(used_lanes()) do
    local counter = tonumber(call('ZRANGE', tenants_key(lane), 0, 0, 'WITHSCORES')[2])
    if counter and (not smallest or counter < smallest) then
      smallest = counter
    end
  end
  return smallest
end

local function floor()
  return tonumber(call('HGET', META, 'floor') or '0')
end

-- No counter of a tenant that comes to wait will be below this.
local function level()
  local smallest = smallest_waiting()
  return smallest and math.min(floor(), smallest) or floor()
end

local function active_counter(tenant)
  return tonumber(call('HGET', COUNTERS, tenant))
end

local function set_active_counter(tenant, counter)
  call('HSET', COUNTERS, tenant, int(counter))
  for _, lane in ipairs(used_lanes()) do
    call('ZADD', tenants_key(lane), 'XX', int(counter), tenant)
  end
end

local function activate(tenant)
  if call('HEXISTS', COUNTERS, tenant) == 0 then
    call('HSET', COUNTERS, tenant, int(tonumber(call('ZSCORE', IDLE, tenant) or level())))
    call('ZREM', IDLE, tenant)
  end
end

-- Once the tenant has no entry any more.
local function settle(tenant)
  if call('HEXISTS', TENANT_REQUESTS, tenant) == 1 or call('HEXISTS', TENANT_IN_FLIGHT, tenant) == 1 then
    return
  end
  local counter = active_counter(tenant)
  call('HDEL', COUNTERS, tenant)
  if counter > level() then
    call('ZADD', IDLE, int(counter), tenant)
  end
end

-- Before the tenant's next entry waits: one that comes back from idleness brings no credit.
local function lift(tenant)
  for _, lane in ipairs(used_lanes()) do
    if call('ZSCORE', tenants_key(lane), tenant) then
      return
    end
  end
  local target = smallest_waiting() or floor()
  if active_counter(tenant) < target then
    call('HSET', COUNTERS, tenant, int(target))
  end
end

local function add_to_active(tenant, cost)
  if cost ~= 0 then
    set_active_counter(tenant, active_counter(tenant) + cost)
  end
end

-- Output of a tenant that may have no entry.
local function charge(tenant, cost)
  local counter = tonumber(call('HGET', COUNTERS, tenant) or '')
  if counter then
    set_active_counter(tenant, counter + cost)
  elseif cost > 0 then
    call('ZADD', IDLE, int(tonumber(call('ZSCORE', IDLE, tenant) or level()) + cost), tenant)
  end
end

-- Forgets what lifting gives back as well. Where the smallest reaches `limit` it is subtracted from all: order and
-- differences stay.
local function prune_and_rebase(limit)
  local base = level()
  call('ZREMRANGEBYSCORE', IDLE, '-inf', int(base))
  if base < limit then
    return
  end
  call('HSET', META, 'floor', int(floor() - base))
  local tenants = call('HGETALL', COUNTERS)
  for i = 1, #tenants, 2 do
    set_active_counter(tenants[i], tonumber(tenants[i + 1]) - base)
  end
  local idle = call('ZRANGE', IDLE, 0, -1, 'WITHSCORES')
  for i = 1, #idle, 2 do
    call('ZADD', IDLE, int(tonumber(idle[i + 1]) - base), idle[i])
  end
end
