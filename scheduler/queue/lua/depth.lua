-- ARGV: now. Answers: queued requests of each class, their prompt tokens, then delayed, in flight, tenants with entries.
if not is_ready() then
  return NOT_READY
end
expire(now_us(ARGV[1]))
local answers = {}

for _, field in ipairs({'r', 'p'}) do
  for rank = 0, NUM_CLASSES - 1 do
    answers[#answers + 1] = tonumber(call('HGET', COUNTS, field .. rank) or '0')
  end
end
answers[#answers + 1] = call('ZCARD', DELAYED)
answers[#answers + 1] = call('ZCARD', IN_FLIGHT)
answers[#answers + 1] = call('HLEN', COUNTERS)

return answers
