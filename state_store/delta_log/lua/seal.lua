-- ARGV: now, terminal retention; per generation: id, attempt, packed end record or ''.
-- Answers per generation: its view, without deltas.
local now, retention_ms = now_ms(ARGV[1]), ARGV[2]
local pushes, answers = {}, {}

for i = 0, #KEYS / 3 - 1 do
  local log_key, deltas_key, watchers_key = KEYS[3 * i + 1], KEYS[3 * i + 2], KEYS[3 * i + 3]
  local id, attempt, terminal = unpack(ARGV, 3 * i + 3, 3 * i + 5)
  attempt = tonumber(attempt)
  terminal = terminal ~= '' and terminal
  local log = read_log(log_key)
  if log and not log.terminal then
    if attempt >= log.attempt then
      -- An attempt that was never opened here is closed too: its late open must be refused.
      log.attempt, log.is_open = attempt, false
      redis.call('HSET', log_key, 'attempt', int(attempt), 'open', '0')
    end
    if terminal then
      log.terminal, log.is_open = terminal, false
      redis.call('HSET', log_key, 'terminal', terminal, 'open', '0')
      gather(pushes, watchers_key, now, pack_push(id, log.attempt, log.last, log.last_chain, nil, terminal))
      keep(log_key, deltas_key, now, retention_ms)
      redis.call('PEXPIRE', watchers_key, retention_ms)
    end
  elseif not log and terminal then
    -- Nothing more will come: without a log that takes them along, those who watch would be remembered for long.
    gather(pushes, watchers_key, now, pack_push(id, attempt, 0, string.rep('\000', 8), nil, terminal))
    redis.call('DEL', watchers_key)
  end
  answers[i + 1] = view(log, {})
end

publish(pushes)
return answers
