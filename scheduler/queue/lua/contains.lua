-- ARGV: per question: generation, attempt. Answers per question: 1 when exactly this attempt is queued or in flight.
if not is_ready() then
  return NOT_READY
end
local answers = {}

for i = 1, #ARGV, 2 do
  local entry = find(ARGV[i])
  answers[#answers + 1] = entry and entry.attempt == tonumber(ARGV[i + 1]) and 1 or 0
end

return answers
