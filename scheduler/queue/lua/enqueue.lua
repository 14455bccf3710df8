-- ARGV: now, 1 when this fills the queue before it has its marker, then per entry: generation, packed entry.
-- Answers per entry: ADDED or PRESENT.
if ARGV[2] ~= '1' and not is_ready() then
  return NOT_READY
end
local now = now_us(ARGV[1])
local answers = {}

for i = 3, #ARGV, 2 do
  local generation, packed = ARGV[i], ARGV[i + 1]
  local entry, known = decode(packed), find(generation)
  if known and known.attempt >= entry.attempt then
    answers[#answers + 1] = 'PRESENT'
  else
    if known then
      -- Only a grant makes a newer attempt: the charge of what is in flight stands.
      discard(generation, known, false)
    end
    add(generation, entry, packed, now)
    answers[#answers + 1] = 'ADDED'
  end
end

publish_news()
return answers
