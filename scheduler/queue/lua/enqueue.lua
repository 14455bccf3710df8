-- ARGV: bound of a class's queue, or '' for none (allowed without the marker); per entry: generation, packed entry.
-- Answers per entry: ADDED, PRESENT or FULL.
local bound = tonumber(ARGV[1])
if bound and not is_ready() then
  return NOT_READY
end
local answers = {}

local function judge(entry, known, generation)
  if known and known.attempt >= entry.attempt then
    return 'PRESENT'
  end
  if bound then
    local num_queued = redis.call('ZCARD', class_key(entry.rank))
    if known and redis.call('ZSCORE', class_key(entry.rank), generation) then
      num_queued = num_queued - 1
    end
    if num_queued >= bound then
      return 'FULL'
    end
  end
  return 'ADDED'
end

for i = 2, #ARGV, 2 do
  local generation, packed = ARGV[i], ARGV[i + 1]
  local entry, known = decode(packed), find(generation)
  local status = judge(entry, known, generation)
  if status == 'ADDED' then
    if known then
      drop(generation, known)
    end
    redis.call('HSET', ENTRIES, generation, packed)
    put(generation, entry)
  end
  answers[#answers + 1] = status
end

return answers
