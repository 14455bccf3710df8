-- ARGV: now. Puts back and refunds what is in flight longer than its hold; answers how many.
if not is_ready() then
  return NOT_READY
end
local overdue = call('ZRANGEBYSCORE', IN_FLIGHT, '-inf', int(now_us(ARGV[1])))

for _, generation in ipairs(overdue) do
  put_back(generation, find(generation))
end

if #overdue > 0 then
  publish_news()
end
return #overdue
