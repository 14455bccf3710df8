-- ARGV: now, live retention; per generation: id, attempt, base, chain of the base.
-- Answers per generation: opened (0 or 1), attempt, base, its chain, end, its chain, deltas.
local now, retention_ms = now_ms(ARGV[1]), ARGV[2]
local pushes, answers = {}, {}

for i = 0, #KEYS / 3 - 1 do
  local log_key, deltas_key, watchers_key = KEYS[3 * i + 1], KEYS[3 * i + 2], KEYS[3 * i + 3]
  local id, attempt, base, base_chain = unpack(ARGV, 4 * i + 3, 4 * i + 6)
  attempt, base = tonumber(attempt), tonumber(base)
  local log = read_log(log_key)
  local is_opened = not log or (not log.terminal and log.attempt < attempt)
  if is_opened then
    -- Postgres holds the output up to the base: a log that ends before it, or says otherwise, has lost data.
    local known = log and log.last >= base and (chain_at(log, deltas_key, base) or base_chain)
    if known ~= base_chain then
      redis.call('DEL', log_key, deltas_key)
      log = {base = base, base_chain = base_chain, last = base, last_chain = base_chain}
      redis.call('HSET', log_key, 'base', int(base), 'base_chain', base_chain, 'end', int(base), 'end_chain', base_chain)
    end
    log.attempt = attempt
    redis.call('HSET', log_key, 'attempt', int(attempt), 'open', '1')
    keep(log_key, deltas_key, now, retention_ms)
    redis.call('PEXPIRE', watchers_key, retention_ms)
    gather(pushes, watchers_key, now, pack_push(id, attempt, log.last, log.last_chain))
  end
  answers[i + 1] = {
    is_opened and 1 or 0, log.attempt, log.base, log.base_chain, log.last, log.last_chain, deltas_after(deltas_key, log.base),
  }
end

publish(pushes)
return answers
