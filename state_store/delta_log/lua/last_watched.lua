-- ARGV: now. Answers per generation: when it was last watched in ms (now while it is), or -1. Writes nothing.
local now = now_ms(ARGV[1])
local answers = {}

for i = 0, #KEYS / 3 - 1 do
  local latest = redis.call('ZRANGE', KEYS[3 * i + 3], -1, -1, 'WITHSCORES')[2]
  answers[i + 1] = latest and math.min(tonumber(latest), now) or -1
end

return answers
