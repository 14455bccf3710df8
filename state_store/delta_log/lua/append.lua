-- ARGV: now, live retention; per delta: generation id, attempt, first, last, chain before, chain after, packed delta.
-- Answers per delta: status, end, its chain. Never creates a log.
local now, retention_ms = now_ms(ARGV[1]), tonumber(ARGV[2])
local pushes, answers = {}, {}

local function judge(log, deltas_key, attempt, first, last, chain_before, chain)
  if log.terminal or log.attempt > attempt then
    return 'STALE'
  elseif log.attempt < attempt then
    return 'UNOPENED'
  elseif not log.is_open then
    return 'STALE'
  elseif last <= log.last then
    -- A sender whose output differs from the log's must not go on.
    return (chain_at(log, deltas_key, last) or chain) == chain and 'DUP' or 'STALE'
  elseif first ~= log.last + 1 then
    return 'GAP'
  end
  return chain_before == log.last_chain and 'OK' or 'STALE'
end

for i = 0, #KEYS / 3 - 1 do
  local log_key, deltas_key, watchers_key = KEYS[3 * i + 1], KEYS[3 * i + 2], KEYS[3 * i + 3]
  local id, attempt, first, last, chain_before, chain, delta = unpack(ARGV, 7 * i + 3, 7 * i + 9)
  attempt, first, last = tonumber(attempt), tonumber(first), tonumber(last)
  local log = read_log(log_key)
  if not log then
    answers[i + 1] = {'ABSENT', 0, string.rep('\000', 8)}
  else
    local status = judge(log, deltas_key, attempt, first, last, chain_before, chain)
    if status == 'OK' then
      redis.call('XADD', deltas_key, int(last) .. '-0', 'delta', delta, 'chain', chain)
      redis.call('HSET', log_key, 'end', int(last), 'end_chain', chain)
      if log.last == log.base or now - log.kept_at > retention_ms / 4 then
        keep(log_key, deltas_key, now, retention_ms)
        redis.call('PEXPIRE', watchers_key, retention_ms)
      end
      log.last, log.last_chain = last, chain
      gather(pushes, watchers_key, now, pack_push(id, attempt, last, chain, delta))
    end
    answers[i + 1] = {status, log.last, log.last_chain}
  end
end

publish(pushes)
return answers
