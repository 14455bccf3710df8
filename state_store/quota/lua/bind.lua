-- ARGV: now, recheck; per charge: generation, tenant, key, tokens, second in which the generation was made.
-- A missing reservation is made again without a check, but for one that was settled lately: then the bind came late.
if not is_ready() then
  return NOT_READY
end
local now, recheck_ms = clock(ARGV[1]), tonumber(ARGV[2])

local function was_settled(generation)
  return tonumber(redis.call('ZSCORE', SETTLED, generation) or 0) > now.ms
end

for i = 3, #ARGV, 5 do
  local generation, reservation = ARGV[i], find(ARGV[i])
  if reservation then
    reservation.is_bound = true
    put(generation, reservation, now.ms + recheck_ms)
  elseif not was_settled(generation) then
    reservation = {
      tenant = ARGV[i + 1], key = ARGV[i + 2], tokens = tonumber(ARGV[i + 3]),
      second = math.min(tonumber(ARGV[i + 4]), now.second), is_bound = true,
    }
    take(generation, reservation, now.ms + recheck_ms, now)
  end
end
return 0
