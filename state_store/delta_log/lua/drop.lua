-- Answers per generation how many of its keys there were; none is left. Only for those that Postgres knows to be over: an
-- absent log takes no append, and no attempt of it will be opened any more.
local answers = {}

for i = 0, #KEYS / 3 - 1 do
  answers[i + 1] = redis.call('DEL', KEYS[3 * i + 1], KEYS[3 * i + 2], KEYS[3 * i + 3])
end

return answers
