-- Answers the number of queued entries per class, by rank.
if not is_ready() then
  return NOT_READY
end
local answers = {}

for rank = 0, NUM_CLASSES - 1 do
  answers[rank + 1] = redis.call('ZCARD', class_key(rank))
end

return answers
