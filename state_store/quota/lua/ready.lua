-- ARGV: token. Answers 1, or 0 when another rebuild has taken over.
if redis.call('GET', REBUILD) ~= ARGV[1] then
  return is_ready() and 1 or 0
end
redis.call('SET', MARKER, '1')
redis.call('DEL', REBUILD, TOUCHED)
return 1
