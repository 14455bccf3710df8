-- KEYS: the shard's beginning. ARGV: now. Answers, in ms, when this was first asked since the shard began or was emptied.
redis.call('SET', KEYS[1], int(now_ms(ARGV[1])), 'NX')
return tonumber(redis.call('GET', KEYS[1]))
