-- ARGV: now, gateway, lease, watch retention, live retention; per generation: the reader's sequence number.
-- Answers per generation: its view. What is not in it will be pushed: registering and reading are one step.
local now = now_ms(ARGV[1])
local answers = {}

for i = 0, #KEYS / 3 - 1 do
  local log_key, deltas_key, watchers_key = KEYS[3 * i + 1], KEYS[3 * i + 2], KEYS[3 * i + 3]
  local log = read_log(log_key)
  watch(log, watchers_key, ARGV[2], now, tonumber(ARGV[3]), ARGV[4], ARGV[5])
  answers[i + 1] = view(log, log and deltas_after(deltas_key, tonumber(ARGV[i + 6])))
end

return answers
