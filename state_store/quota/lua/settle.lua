-- ARGV: now, how long a settlement is remembered; per generation: generation, used tokens.
if not is_ready() then
  return NOT_READY
end
local now, kept_ms = clock(ARGV[1]), tonumber(ARGV[2])
for i = 3, #ARGV, 2 do
  local reservation = find(ARGV[i])
  if reservation then
    finish(ARGV[i], reservation, 1, tonumber(ARGV[i + 1]), now)
  end
  redis.call('ZADD', SETTLED, int(now.ms + kept_ms), ARGV[i])
end
redis.call('ZREMRANGEBYSCORE', SETTLED, '-inf', int(now.ms))
redis.call('PEXPIRE', SETTLED, kept_ms)
return 0
