-- ARGV: now, limit. Answers the generations to compare with Postgres, the longest due first.
if not is_ready() then
  return NOT_READY
end
return redis.call('ZRANGEBYSCORE', CHECKS, '-inf', int(clock(ARGV[1]).ms), 'LIMIT', 0, ARGV[2])
