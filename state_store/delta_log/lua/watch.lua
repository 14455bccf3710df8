-- ARGV: now, gateway, lease, watch retention, live retention. Renews watch leases; touches no log.
local now = now_ms(ARGV[1])
local answers = {}

for i = 0, #KEYS / 3 - 1 do
  watch(read_log(KEYS[3 * i + 1]), KEYS[3 * i + 3], ARGV[2], now, tonumber(ARGV[3]), ARGV[4], ARGV[5])
  answers[i + 1] = 1
end

return answers
