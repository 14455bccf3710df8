-- ARGV: now, then tenants. Answers what bounds are checked against: now, the pop count's window and its two numbers, tenants
-- with entries, queued requests and prompt tokens of each class, then those of each tenant asked for.
if not is_ready() then
  return NOT_READY
end
local now = now_us(ARGV[1])
expire(now)
local answers = {now}

local function answer(key, field)
  answers[#answers + 1] = tonumber(call('HGET', key, field) or '0')
end

for _, field in ipairs({'window', 'popped', 'popped_before'}) do
  answer(META, field)
end
answers[#answers + 1] = call('HLEN', COUNTERS)
for rank = 0, NUM_CLASSES - 1 do
  answer(COUNTS, 'r' .. rank)
  answer(COUNTS, 'p' .. rank)
end
for i = 2, #ARGV do
  answer(TENANT_REQUESTS, ARGV[i])
  answer(TENANT_TOKENS, ARGV[i])
end

return answers
