-- ARGV: now, hold in ms, most entries, id of this pop, most tokens of each class.
-- Answers: generation, packed entry, pop id, ...
-- Class order, then arrival. The first entry that does not fit ends the pop: nothing overtakes it.
if not is_ready() then
  return NOT_READY
end
local CHUNK = 64
local now = now_ms(ARGV[1])
local held_until = int(now + tonumber(ARGV[2]))
local entries_left, tokens_taken = tonumber(ARGV[3]), 0
local answers = {}

local function take(generation, entry, packed)
  local pop_id = ARGV[4] .. ':' .. #answers / 3
  redis.call('ZREM', class_key(entry.rank), generation)
  redis.call('ZADD', IN_FLIGHT, held_until, generation)
  redis.call('HSET', POPS, generation, pop_id)
  entries_left, tokens_taken = entries_left - 1, tokens_taken + entry.max_tokens
  for _, value in ipairs({generation, packed, pop_id}) do
    answers[#answers + 1] = value
  end
end

-- Takes heads of one class, and drops expired ones; false when the pop is over.
local function pop_class(rank)
  while entries_left > 0 do
    local heads = redis.call('ZRANGE', class_key(rank), 0, CHUNK - 1)
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
