-- ARGV: now, hold in ms, most entries, id of this pop, most tokens of each class, most charged entries.
-- Answers: generation, packed entry, pop id, ...
-- Class order, then arrival. The first entry that does not fit ends the pop: nothing overtakes it. Charged entries beyond
-- their number stay where they are and are overtaken; a pop looks past MAX_PASSED of them in a class.
if not is_ready() then
  return NOT_READY
end
local CHUNK, MAX_PASSED = 64, 1024
local now = now_ms(ARGV[1])
local held_until = int(now + tonumber(ARGV[2]))
local entries_left, tokens_taken, charged_left = tonumber(ARGV[3]), 0, tonumber(ARGV[8])
local answers = {}

local function take(generation, entry, packed)
  local pop_id = ARGV[4] .. ':' .. #answers / 3
  redis.call('ZREM', class_key(entry.rank), generation)
  redis.call('ZADD', IN_FLIGHT, held_until, generation)
  redis.call('HSET', POPS, generation, pop_id)
  entries_left, tokens_taken = entries_left - 1, tokens_taken + entry.max_tokens
  charged_left = charged_left - entry.charged
  for _, value in ipairs({generation, packed, pop_id}) do
    answers[#answers + 1] = value
  end
end

-- Takes heads of one class, and drops expired ones; false when the pop is over.
local function pop_class(rank)
  local passed = 0
  while entries_left > 0 and passed < MAX_PASSED do
    local heads = redis.call('ZRANGE', class_key(rank), passed, passed + CHUNK - 1)
    if #heads == 0 then
      return true
    end
    for _, generation in ipairs(heads) do
      local entry, packed = find(generation)
      if entries_left < 1 then
        return false
      elseif not entry then
        redis.call('ZREM', class_key(rank), generation)
      elseif entry.deadline > 0 and entry.deadline <= now then
        drop(generation, entry)
      elseif entry.charged > charged_left then
        passed = passed + 1
      elseif tokens_taken + entry.max_tokens > tonumber(ARGV[5 + rank]) then
        return false
      else
        take(generation, entry, packed)
      end
    end
  end
  return false
end

for rank = 0, NUM_CLASSES - 1 do
  if not pop_class(rank) then
    break
  end
end

return answers
