-- ARGV: now, token, hold, lease, number of live ones; per live one: generation, tenant, key, tokens, second; per key that
-- has used something: tenant, key, tokens of this day, of this month, number of seconds, and second, requests, tokens each.
-- Answers 1, or 0 when another rebuild has taken over. A subject's counts begin anew when a rebuild first touches it.
if is_ready() or redis.call('GET', REBUILD) ~= ARGV[2] then
  return 0
end
local now, hold_ms, lease_ms, num_live = clock(ARGV[1]), ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
redis.call('PEXPIRE', REBUILD, hold_ms)

local function touch(subjects)
  for _, subject in ipairs(subjects) do
    if redis.call('SADD', TOUCHED, subject) == 1 then
      redis.call('DEL', TAG .. 'requests:' .. subject, TAG .. 'tokens:' .. subject, TAG .. 'use:' .. subject)
    end
  end
end

local i = 6
for _ = 1, num_live do
  local generation = ARGV[i]
  if redis.call('HEXISTS', RESERVATIONS, generation) == 0 then
    local reservation = {
      tenant = ARGV[i + 1], key = ARGV[i + 2], tokens = tonumber(ARGV[i + 3]),
      second = math.min(tonumber(ARGV[i + 4]), now.second), is_bound = true,
    }
    touch(subjects_of(reservation))
    take(generation, reservation, now.ms + lease_ms, now)
  end
  i = i + 5
end

local function add_past(subject, first)
  local day_tokens, month_tokens = tonumber(ARGV[first + 2]), tonumber(ARGV[first + 3])
  bump_use(subject, now.second, 0, now)
  redis.call('HINCRBY', TAG .. 'use:' .. subject, 'day_tokens', int(day_tokens))
  redis.call('HINCRBY', TAG .. 'use:' .. subject, 'month_tokens', int(month_tokens))
  for j = 1, tonumber(ARGV[first + 4]) do
    local at = first + 2 + 3 * j
    local second = tonumber(ARGV[at])
    bump_window(TAG .. 'requests:' .. subject, second, tonumber(ARGV[at + 1]), now)
    bump_window(TAG .. 'tokens:' .. subject, second, tonumber(ARGV[at + 2]), now)
  end
end

while i <= #ARGV do
  local subjects = subjects_of({ tenant = ARGV[i], key = ARGV[i + 1] })
  touch(subjects)
  for _, subject in ipairs(subjects) do
    add_past(subject, i)
  end
  i = i + 5 + 3 * tonumber(ARGV[i + 4])
end
return 1
