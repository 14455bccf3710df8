-- ARGV: now; generations. Gives back, bound or not, what is still due: a bind since the comparison has moved its check.
if not is_ready() then
  return NOT_READY
end
local now = clock(ARGV[1])
for i = 2, #ARGV do
  local reservation, due_ms = find(ARGV[i]), redis.call('ZSCORE', CHECKS, ARGV[i])
  if reservation and due_ms and tonumber(due_ms) <= now.ms then
    finish(ARGV[i], reservation, 0, 0, now)
  end
end
return 0
