-- Shared by all scripts of the delta log. Three keys per generation, in this order: the log (hash), its deltas (stream;
-- the id of an entry is `<last sequence number>-0`) and its watchers (sorted set: gateway -> lease end in ms).

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

local function read_log(key)
  local fields = redis.call('HMGET', key, 'attempt', 'open', 'base', 'base_chain', 'end', 'end_chain', 'terminal', 'kept_at')
  if not fields[1] then
    return nil
  end
  return {
    key = key,
    attempt = tonumber(fields[1]),
    is_open = fields[2] == '1',
    base = tonumber(fields[3]),
    base_chain = fields[4],
    last = tonumber(fields[5]),
    last_chain = fields[6],
    terminal = fields[7],
    kept_at = tonumber(fields[8]),
  }
end

-- Chain at a position where a delta ends; nil where none does.
local function chain_at(log, deltas_key, position)
  if position == log.last then
    return log.last_chain
  elseif position == log.base then
    return log.base_chain
  end
  local id = int(position) .. '-0'
  local entry = redis.call('XRANGE', deltas_key, id, id)[1]
  return entry and entry[2][4]
end

-- Every delta that ends behind `position`, in order.
local function deltas_after(deltas_key, position)
  local deltas = {}
  for i, entry in ipairs(redis.call('XRANGE', deltas_key, int(position + 1), '+')) do
    deltas[i] = entry[2][2]
  end
  return deltas
end

local function view(log, deltas)
  if not log then
    return {0}
  end
  return {
    1, log.attempt, log.is_open and 1 or 0, log.base, log.base_chain, log.last, log.last_chain, log.terminal or '', deltas,
  }
end

local function keep(log_key, deltas_key, now, retention_ms)
  redis.call('HSET', log_key, 'kept_at', int(now))
  redis.call('PEXPIRE', log_key, retention_ms)
  redis.call('PEXPIRE', deltas_key, retention_ms)
end

-- Ended leases say no more than the new one does: the latest lease end is when the generation was last watched. Who watches
-- an ended generation is forgotten with its log.
local function watch(log, watchers_key, gateway, now, lease_ms, retention_ms, live_retention_ms)
  redis.call('ZREMRANGEBYSCORE', watchers_key, '-inf', int(now))
  redis.call('ZADD', watchers_key, int(now + lease_ms), gateway)
  local kept_ms = retention_ms
  if log then
    kept_ms = log.terminal and redis.call('PTTL', log.key) or live_retention_ms
  end
  redis.call('PEXPIRE', watchers_key, kept_ms)
end

local function u32(number)
  return '\206' .. struct.pack('>I4', number)
end

-- One push in msgpack; see codec.py.
local function pack_push(generation_id, attempt, position, chain, delta, terminal)
  return '\150\217' .. string.char(#generation_id) .. generation_id .. u32(attempt) .. u32(position)
    .. '\196\008' .. chain .. (delta or '\192') .. (terminal or '\192')
end

local function gather(pushes, watchers_key, now, push)
  for _, gateway in ipairs(redis.call('ZRANGEBYSCORE', watchers_key, '(' .. int(now), '+inf')) do
    pushes[gateway] = pushes[gateway] or {}
    table.insert(pushes[gateway], push)
  end
end

-- One message per gateway and call.
local function publish(pushes)
  for gateway, list in pairs(pushes) do
    redis.call('PUBLISH', 'log:gw:' .. gateway, table.concat(list))
  end
end
