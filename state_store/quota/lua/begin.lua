-- ARGV: token, hold. Answers READY, BUSY (another rebuilds) or BEGUN; what is left of a rebuild that died is forgotten.
if is_ready() then
  return 'READY'
end
local owner = redis.call('GET', REBUILD)
if owner and owner ~= ARGV[1] then
  return 'BUSY'
end
redis.call('DEL', RESERVATIONS, CHECKS, SETTLED, CONCURRENT, RESERVED, TOUCHED)
redis.call('SET', REBUILD, ARGV[1], 'PX', ARGV[2])
return 'BEGUN'
