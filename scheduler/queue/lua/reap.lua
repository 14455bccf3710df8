-- ARGV: now. Puts back what is in flight longer than its hold; answers how many.
if not is_ready() then
  return NOT_READY
end
local now = now_ms(ARGV[1])
local overdue = redis.call('ZRANGEBYSCORE', IN_FLIGHT, '-inf', int(now))

for _, generation in ipairs(overdue) do
  local entry = find(generation)
  if entry then
    put(generation, entry)
  end
  land(generation)
end

return #overdue
