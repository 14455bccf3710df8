-- ARGV: now; generations. Gives unbound reservations back whole.
if not is_ready() then
  return NOT_READY
end
local now = clock(ARGV[1])
for i = 2, #ARGV do
  local reservation = find(ARGV[i])
  if reservation and not reservation.is_bound then
    finish(ARGV[i], reservation, 0, 0, now)
  end
end
return 0
