"""The hot statements on generations: hand-written, one per batch, arrays in through `unnest`.

Locks are taken in one order everywhere, so that batches do not deadlock: sessions, then generations, then request keys,
each by id. Ids that come in by a join are named once more by ANY(...): only that lets the planner leave out the other days, whose many
indexes it would look at for milliseconds. `:now` is `coalesce(%(now)s, now())`, the database's clock unless a test replaces it.
"""

from state_store.transitions import MAX_ATTEMPTS, MAX_CHARGED_ATTEMPTS

_NOW = "coalesce(%(now)s::timestamptz, now())"
_COLUMNS = """
    g.generation_id, g.tenant_id, g.key_id, g.request_id, g.model, g.model_revision, g.model_precision, g.priority_class,
    g.state, g.attempt, g.charged_attempts, g.session_id, g.nonce, g.prompt_token_ids, g.sampling, g.grace, g.traceparent,
    g.cancel_cause, g.created_at, g.queue_deadline_at, g.deadline_at, g.started_at, g.finished_at, g.finish_reason,
    g.error_reason, g.error_message, g.matched_stop, g.cached_prompt_tokens, g.output_tokens, g.is_stored,
    g.texts_deleted_at, g.deleted_prompt_tokens
"""
_SUMMARY = """
    g.generation_id, g.tenant_id, g.key_id, g.request_id, g.model, g.model_revision, g.model_precision, g.priority_class,
    g.state, g.attempt, g.charged_attempts, g.session_id, g.is_stored, g.texts_deleted_at,
    octet_length(g.prompt_token_ids) / 4 + g.deleted_prompt_tokens AS num_prompt_tokens,
    (g.sampling ->> 'seed')::bigint AS seed, g.cancel_cause, g.created_at, g.queue_deadline_at, g.deadline_at, g.started_at,
    g.finished_at, g.finish_reason, g.error_reason, g.error_message, g.cached_prompt_tokens, g.output_tokens
"""
_NO_ATTEMPT_LEFT = f"g.charged_attempts >= {MAX_CHARGED_ATTEMPTS} OR g.attempt >= {MAX_ATTEMPTS}"


def _filled(statement: str) -> str:
    """The statement with the repeated parts in place; they are constants of this file."""
    parts = {":columns": _COLUMNS, ":summary": _SUMMARY, ":now": _NOW, ":no_attempt_left": _NO_ATTEMPT_LEFT}
    for name, part in parts.items():
        statement = statement.replace(name, part)
    return statement


SUBMIT = _filled("""
WITH item AS (
    SELECT * FROM unnest(
        %(generation_ids)s::uuid[], %(tenant_ids)s::text[], %(key_ids)s::text[], %(request_ids)s::text[],
        %(request_hashes)b::bytea[], %(requeue_ofs)s::uuid[], %(models)s::text[], %(revisions)s::text[],
        %(precisions)s::text[], %(classes)s::text[], %(prompts)b::bytea[], %(samplings)s::text[], %(graces)s::interval[],
        %(queue_timeouts)s::interval[], %(deadlines)s::interval[], %(traceparents)s::text[], %(stored)s::bool[]
    ) WITH ORDINALITY AS i (
        generation_id, tenant_id, key_id, request_id, request_hash, requeue_of, model, model_revision, model_precision,
        priority_class, prompt_token_ids, sampling, grace, queue_timeout, deadline, traceparent, is_stored, position
    )
), claimed AS (
    INSERT INTO request_keys AS k (tenant_id, request_id, generation_id, request_hash)
    SELECT tenant_id, request_id, generation_id, request_hash FROM item
    WHERE NOT EXISTS (
        SELECT FROM generations g
        WHERE g.generation_id = item.generation_id AND g.generation_id = ANY(%(generation_ids)s::uuid[])
    )
    ORDER BY position
    ON CONFLICT (tenant_id, request_id) DO UPDATE
        SET generation_id = excluded.generation_id, request_hash = excluded.request_hash, expires_at = NULL
        WHERE k.expires_at < :now
    RETURNING k.generation_id
)
INSERT INTO generations (
    generation_id, tenant_id, key_id, request_id, requeue_of, model, model_revision, model_precision, priority_class, state,
    prompt_token_ids, sampling, grace, traceparent, created_at, queued_at, queue_deadline_at, deadline_at, is_stored
)
SELECT generation_id, tenant_id, key_id, request_id, requeue_of, model, model_revision, model_precision, priority_class,
    'QUEUED', prompt_token_ids, sampling::jsonb, grace, traceparent, :now, :now, :now + queue_timeout, :now + deadline,
    is_stored
FROM item JOIN claimed USING (generation_id)
ORDER BY generation_id
RETURNING generation_id, created_at
""")

FIND_BY_REQUEST_IDS = _filled("""
SELECT k.request_hash AS key_hash, :columns
FROM request_keys k JOIN generations g ON g.generation_id = k.generation_id
WHERE (k.tenant_id, k.request_id) IN (SELECT * FROM unnest(%(tenant_ids)s::text[], %(request_ids)s::text[]))
    AND (k.expires_at IS NULL OR k.expires_at >= :now)
""")

HAS_KNOWN = _filled("""
SELECT EXISTS (
    SELECT FROM request_keys k
    WHERE (k.tenant_id, k.request_id) IN (SELECT * FROM unnest(%(tenant_ids)s::text[], %(request_ids)s::text[]))
        AND (k.expires_at IS NULL OR k.expires_at >= :now)
) OR EXISTS (SELECT FROM generations g WHERE g.generation_id = ANY(%(generation_ids)s::uuid[])) AS has_any
""")

GET = _filled("SELECT :columns FROM generations g WHERE g.generation_id = ANY(%(generation_ids)s::uuid[])")

LOCK_SESSIONS_FOR_GRANT = """
SELECT session_id, worker_id, owner_epoch, state, model_revision, model_precision FROM worker_sessions
WHERE session_id = ANY(%(session_ids)s::text[]) ORDER BY session_id FOR SHARE
"""

LOCK_GENERATIONS = """
SELECT generation_id, tenant_id, request_id, state, attempt, charged_attempts, cancel_cause, model_revision,
    model_precision
FROM generations WHERE generation_id = ANY(%(generation_ids)s::uuid[]) ORDER BY generation_id FOR NO KEY UPDATE
"""

LOCK_RUNNING_OF_SESSIONS = """
SELECT generation_id, tenant_id, request_id, state, attempt, charged_attempts, cancel_cause, model_revision,
    model_precision, session_id
FROM generations WHERE state = 'RUNNING' AND session_id = ANY(%(session_ids)s::text[])
ORDER BY generation_id FOR NO KEY UPDATE
"""

LOCK_REQUEST_KEYS = """
SELECT FROM request_keys
WHERE (tenant_id, request_id) IN (SELECT * FROM unnest(%(tenant_ids)s::text[], %(request_ids)s::text[]))
ORDER BY tenant_id, request_id FOR NO KEY UPDATE
"""

GRANT = _filled("""
WITH item AS (
    SELECT * FROM unnest(
        %(generation_ids)s::uuid[], %(after_attempts)s::int[], %(session_ids)s::text[], %(worker_ids)s::text[],
        %(nonces)s::bigint[]
    ) AS i (generation_id, after_attempt, session_id, worker_id, nonce)
), g AS (
    UPDATE generations g
    SET state = 'RUNNING', attempt = g.attempt + 1, session_id = item.session_id, nonce = item.nonce,
        started_at = coalesce(g.started_at, :now)
    FROM item
    WHERE g.generation_id = item.generation_id AND g.state = 'QUEUED' AND g.attempt = item.after_attempt
        AND g.cancel_cause IS NULL AND g.generation_id = ANY(%(generation_ids)s::uuid[])
    RETURNING :columns
), recorded AS (
    INSERT INTO attempts (generation_id, attempt, session_id, worker_id, nonce, granted_at)
    SELECT g.generation_id, g.attempt, g.session_id, item.worker_id, g.nonce, :now FROM g JOIN item USING (generation_id)
)
SELECT * FROM g
""")

REQUEUE = _filled("""
WITH g AS (
    UPDATE generations g SET state = 'QUEUED', session_id = NULL, queued_at = :now
    WHERE g.generation_id = ANY(%(generation_ids)s::uuid[]) AND g.state = 'RUNNING' AND g.cancel_cause IS NULL
    RETURNING :columns
), ended AS (
    UPDATE attempts a SET ended_at = :now FROM g
    WHERE a.generation_id = g.generation_id AND a.attempt = g.attempt AND a.ended_at IS NULL
        AND a.generation_id = ANY(%(generation_ids)s::uuid[])
)
SELECT * FROM g
""")

FINISH = _filled("""
WITH item AS (
    SELECT * FROM unnest(
        %(generation_ids)s::uuid[], %(from_states)s::text[], %(attempts)s::int[], %(states)s::text[],
        %(output_tokens)s::bigint[], %(cached_prompt_tokens)s::bigint[], %(finish_reasons)s::text[],
        %(matched_stops)s::text[], %(error_reasons)s::text[], %(error_messages)s::text[]
    ) AS i (
        generation_id, from_state, attempt, state, output_tokens, cached_prompt_tokens, finish_reason, matched_stop,
        error_reason, error_message
    )
), g AS (
    UPDATE generations g
    SET state = item.state, session_id = NULL, finished_at = :now, finish_reason = item.finish_reason,
        matched_stop = item.matched_stop, error_reason = item.error_reason, error_message = item.error_message,
        output_tokens = item.output_tokens, cached_prompt_tokens = item.cached_prompt_tokens
    FROM item
    WHERE g.generation_id = item.generation_id AND g.state = item.from_state AND g.attempt = item.attempt
        AND g.generation_id = ANY(%(generation_ids)s::uuid[])
    RETURNING :columns, item.from_state
), ended AS (
    UPDATE attempts a SET ended_at = :now, outcome = 'FINISHED', end_position = g.output_tokens FROM g
    WHERE a.generation_id = g.generation_id AND a.attempt = g.attempt AND a.outcome IS NULL AND g.from_state = 'RUNNING'
        AND a.generation_id = ANY(%(generation_ids)s::uuid[])
), ledger AS (
    INSERT INTO usage_ledger (
        generation_id, tenant_id, key_id, model, priority_class, state, prompt_tokens, cached_prompt_tokens,
        output_tokens, finished_at
    )
    SELECT generation_id, tenant_id, key_id, model, priority_class, state, octet_length(prompt_token_ids) / 4,
        cached_prompt_tokens, output_tokens, finished_at
    FROM g
), dead AS (
    INSERT INTO dead_letters (generation_id, tenant_id, reason, message, attempts, worker_ids, created_at)
    SELECT g.generation_id, g.tenant_id, g.error_reason, coalesce(g.error_message, ''), g.attempt, ARRAY(
        SELECT a.worker_id FROM attempts a
        WHERE a.generation_id = g.generation_id AND a.generation_id = ANY(%(generation_ids)s::uuid[]) ORDER BY a.attempt
    ), g.finished_at
    FROM g WHERE g.error_reason = 'ATTEMPTS_EXHAUSTED'
), expiring AS (
    UPDATE request_keys k SET expires_at = g.finished_at + %(key_kept)s::interval FROM g
    WHERE k.tenant_id = g.tenant_id AND k.request_id = g.request_id AND k.generation_id = g.generation_id
)
SELECT * FROM g
""")

RECORD_ATTEMPT_ENDS = _filled("""
WITH item AS (
    SELECT * FROM unnest(
        %(generation_ids)s::uuid[], %(attempts)s::int[], %(outcomes)s::text[], %(end_positions)s::bigint[],
        %(charges)s::bool[]
    ) AS i (generation_id, attempt, outcome, end_position, is_charged)
), ended AS (
    UPDATE attempts a
    SET ended_at = coalesce(a.ended_at, :now), outcome = item.outcome, end_position = item.end_position,
        is_charged = item.is_charged
    FROM item
    WHERE a.generation_id = item.generation_id AND a.attempt = item.attempt AND a.outcome IS NULL
        AND a.generation_id = ANY(%(generation_ids)s::uuid[])
    RETURNING a.generation_id, a.attempt, a.is_charged
), charged AS (
    UPDATE generations g SET charged_attempts = g.charged_attempts + c.charges
    FROM (SELECT generation_id, count(*) AS charges FROM ended WHERE is_charged GROUP BY generation_id) c
    WHERE g.generation_id = c.generation_id AND g.generation_id = ANY(%(generation_ids)s::uuid[])
)
SELECT generation_id, attempt FROM ended
""")

REQUEST_CANCEL = """
UPDATE generations g SET cancel_cause = i.cause
FROM unnest(%(generation_ids)s::uuid[], %(causes)s::text[]) AS i (generation_id, cause)
WHERE g.generation_id = i.generation_id AND g.state IN ('QUEUED', 'RUNNING') AND g.cancel_cause IS NULL
    AND g.generation_id = ANY(%(generation_ids)s::uuid[])
"""

INSERT_CHUNKS = """
INSERT INTO chunks (generation_id, first_number, last_number, token_ids, text, text_ends, prev_chain, chain, logprobs)
SELECT generation_id, first_number, last_number, token_ids, text, text_ends::int[], prev_chain, chain, logprobs
FROM unnest(
    %(generation_ids)s::uuid[], %(firsts)s::bigint[], %(lasts)s::bigint[], %(token_ids)b::bytea[], %(texts)b::bytea[],
    %(text_ends)s::text[], %(prev_chains)s::bigint[], %(chains)s::bigint[], %(logprobs)b::bytea[]
) AS i (generation_id, first_number, last_number, token_ids, text, text_ends, prev_chain, chain, logprobs)
"""

STORED_ENDS = """
SELECT DISTINCT ON (generation_id) generation_id, last_number, chain FROM chunks
WHERE generation_id = ANY(%(generation_ids)s::uuid[]) ORDER BY generation_id, first_number DESC
"""

READ_OUTPUT = """
SELECT generation_id, first_number, token_ids, text, text_ends, prev_chain, chain, logprobs FROM chunks
WHERE generation_id = ANY(%(generation_ids)s::uuid[]) ORDER BY generation_id, first_number
"""

LIST_PAGE = _filled("""
SELECT :summary FROM generations g
WHERE g.tenant_id = %(tenant_id)s AND (%(all_states)s OR g.state = ANY(%(states)s::text[]))
    AND g.generation_id < %(before)s::uuid
ORDER BY g.generation_id DESC LIMIT %(limit)s
""")

FIND_GENERATIONS = _filled("""
SELECT :summary FROM generations g
WHERE g.generation_id >= %(since)s::uuid
    AND (%(tenant_id)s::text IS NULL OR g.tenant_id = %(tenant_id)s)
    AND (%(all_states)s OR g.state = ANY(%(states)s::text[]))
    AND (%(model)s::text IS NULL OR g.model = %(model)s)
    AND (%(priority_class)s::text IS NULL OR g.priority_class = %(priority_class)s)
ORDER BY g.generation_id DESC LIMIT %(limit)s
""")

QUEUED_PAGE = _filled("""
SELECT :summary FROM generations g
WHERE g.state = 'QUEUED' AND g.generation_id > %(after)s::uuid AND g.queued_at <= :now - %(min_age)s::interval
ORDER BY g.generation_id LIMIT %(limit)s
""")

OVERDUE_PAGE = _filled("""
SELECT o.*, :now AS at FROM (
    SELECT d.generation_id, d.state, d.attempt, d.deadline_at, d.queue_deadline_at FROM generations d
    WHERE d.state IN ('QUEUED', 'RUNNING') AND d.cancel_cause IS NULL AND d.deadline_at <= :now
        AND d.generation_id > %(after)s::uuid
    UNION
    SELECT q.generation_id, q.state, q.attempt, q.deadline_at, q.queue_deadline_at FROM generations q
    WHERE q.state = 'QUEUED' AND q.attempt = 0 AND q.cancel_cause IS NULL AND q.queue_deadline_at <= :now
        AND q.generation_id > %(after)s::uuid
) o
ORDER BY o.generation_id LIMIT %(limit)s
""")

QUEUED_TO_END_PAGE = _filled("""
SELECT :summary FROM generations g
WHERE g.state = 'QUEUED' AND (g.cancel_cause IS NOT NULL OR :no_attempt_left) AND g.generation_id > %(after)s::uuid
ORDER BY g.generation_id LIMIT %(limit)s
""")

GRACE_PAGE = """
SELECT g.generation_id, g.grace FROM generations g
WHERE g.state IN ('QUEUED', 'RUNNING') AND g.cancel_cause IS NULL AND g.grace IS NOT NULL
    AND g.generation_id > %(after)s::uuid
ORDER BY g.generation_id LIMIT %(limit)s
"""

RUNNING_OF_SESSIONS = _filled("""
SELECT :columns FROM generations g
WHERE g.state = 'RUNNING' AND g.session_id = ANY(%(session_ids)s::text[]) ORDER BY g.generation_id
""")

RUNNING_SUMMARIES = _filled("""
SELECT :summary FROM generations g
WHERE g.state = 'RUNNING' AND g.session_id = ANY(%(session_ids)s::text[]) ORDER BY g.generation_id
""")

ORPHANS = _filled("""
SELECT :columns FROM generations g JOIN worker_sessions s ON s.session_id = g.session_id
WHERE g.state = 'RUNNING' AND s.state <> 'LIVE' ORDER BY g.generation_id LIMIT %(limit)s
""")
