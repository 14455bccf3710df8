-- ARGV: now, gateway. Ends the gateway's leases now; one that ended before stays as it is. Touches no log.
local now = now_ms(ARGV[1])
local answers = {}

for i = 0, #KEYS / 3 - 1 do
  local lease_end = redis.call('ZSCORE', KEYS[3 * i + 3], ARGV[2])
  local is_live = lease_end and tonumber(lease_end) > now
  if is_live then
    redis.call('ZADD', KEYS[3 * i + 3], int(now), ARGV[2])
  end
  answers[i + 1] = is_live and 1 or 0
end

return answers
