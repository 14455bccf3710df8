-- ARGV: per charge: tenant, what its counter grows by.
if not is_ready() then
  return NOT_READY
end

for i = 1, #ARGV, 2 do
  charge(ARGV[i], tonumber(ARGV[i + 1]))
end

return 0
