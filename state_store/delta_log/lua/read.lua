-- ARGV: per generation: the reader's sequence number. Answers per generation: its view. Writes nothing.
local answers = {}

for i = 0, #KEYS / 3 - 1 do
  local log = read_log(KEYS[3 * i + 1])
  answers[i + 1] = view(log, log and deltas_after(KEYS[3 * i + 2], tonumber(ARGV[i + 1])))
end

return answers
