-- ARGV: now, tenant, key, limits of the tenant, limits of the key, generation, tokens, lease.
-- Checks all limits, then charges all. Answers as `answer`.
if not is_ready() then
  return NOT_READY
end
local now, tenant, key = clock(ARGV[1]), ARGV[2], ARGV[3]
local generation, tokens, lease_ms = ARGV[14], tonumber(ARGV[15]), tonumber(ARGV[16])
if redis.call('HEXISTS', RESERVATIONS, generation) == 1 then
  return answer(measure_both(tenant, key, 4, { requests = 0, tokens = 0 }, now))
end
local measures, must_wait = measure_both(tenant, key, 4, { requests = 1, tokens = tokens }, now)
if must_wait then
  return answer(measures, must_wait)
end
local reservation = { tenant = tenant, key = key, tokens = tokens, second = now.second, is_bound = false }
take(generation, reservation, now.ms + lease_ms, now)
return answer(measures, must_wait, true)
