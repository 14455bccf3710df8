-- ARGV: now, tenant, key, limits of the tenant, limits of the key. Answers as `answer`; changes nothing.
if not is_ready() then
  return NOT_READY
end
return answer(measure_both(ARGV[2], ARGV[3], 4, { requests = 1, tokens = 0 }, clock(ARGV[1])))
