-- The views of the catalog: all rules about what adapters' histories and operators' acts mean together. Each rule is
-- written once, here; what follows from one ledger alone is in load.sql. comments.sql says what each column is.
--
-- A question about one author must not cost what the whole catalog costs: joins name the author, so that DuckDB can
-- take the author's rows before it does anything else.

CREATE VIEW history AS
SELECT
    author, base, adapter_digest, position, kind, attempt, outcome, code, reason, code_version, step_key,
    started_at, finished_at, seconds, engine_seconds, worker, flow_run
FROM steps;

CREATE VIEW verdicts AS
FROM judgements;

-- A verdict is stale when a step behind it was done by another version of the code, or when it was measured on another
-- engine than the one that the base has now: vLLM itself has changed how it reads adapters.
CREATE VIEW stale AS
SELECT
    s.key, s.author, s.base, s.adapter_digest, s.kind, s.code_version AS recorded, w.version AS current
FROM steps s JOIN step_versions w ON w.kind = s.kind
WHERE s.is_behind_verdict AND s.code_version IS DISTINCT FROM w.version
UNION ALL
SELECT l.key, l.author, l.base, l.adapter_digest, 'engine', l.engine_id, e.engine_id
FROM ledgers l JOIN engines e ON e.base = l.base
WHERE l.engine_id <> e.engine_id;

CREATE VIEW author_acts AS
SELECT author, position, act, base, adapter_digest, who, "at", why FROM author_events;

-- What operators' acts come to. Those without a base are of every base. A purge is a retirement before which nothing
-- counts; a release ends holds and retirements; a pin lasts until it is undone. An author whose record cannot be read is
-- held: it may be one that must not be served.
CREATE VIEW author_states AS
WITH unknown AS (
    SELECT split_part(key, '/', 2) AS author, reason FROM unreadable WHERE suffix(key, '/_author.json')
),
acted AS (
    SELECT author FROM author_events UNION SELECT author FROM unknown
),
places AS (
    SELECT author, base FROM ledgers WHERE author IN (FROM acted)
    UNION SELECT author, base FROM author_events WHERE base IS NOT NULL
),
everywhere AS (
    FROM places UNION ALL SELECT author, NULL FROM acted WHERE author NOT IN (SELECT author FROM places)
),
applied AS (
    SELECT
        p.author, p.base, e.position, e.act, e.adapter_digest,
        {'act': e.act, 'why': e.why, 'who': e.who, 'at': e."at", 'digest': e.adapter_digest} AS event
    FROM everywhere p JOIN author_events e ON e.author = p.author AND (e.base IS NULL OR e.base = p.base)
    QUALIFY e.position >= coalesce(
        max(CASE WHEN e.act = 'purge' THEN e.position END) OVER (PARTITION BY p.author, p.base), 0
    )
),
last_acts AS (
    SELECT
        author, base,
        arg_max(event, position) FILTER (WHERE act IN ('hold', 'release')) AS hold,
        arg_max(event, position) FILTER (WHERE act IN ('retire', 'purge', 'release')) AS retirement,
        arg_max(event, position) FILTER (WHERE act IN ('pin', 'unpin')) AS pin
    FROM applied GROUP BY author, base
),
in_force AS (
    SELECT
        author, base,
        CASE WHEN hold.act = 'hold' THEN hold END AS hold,
        CASE WHEN retirement.act <> 'release' THEN retirement END AS retirement,
        CASE WHEN pin.act = 'pin' THEN pin END AS pin
    FROM last_acts
)
SELECT
    author, base, hold IS NOT NULL AS held, retirement IS NOT NULL AS retired, pin.digest AS pinned_digest,
    coalesce(retirement, hold, pin).act AS act, coalesce(retirement, hold, pin).why AS why,
    coalesce(retirement, hold, pin).who AS who, coalesce(retirement, hold, pin)."at" AS since
FROM in_force
WHERE coalesce(retirement, hold, pin) IS NOT NULL
UNION ALL
SELECT
    p.author, p.base, true, false, NULL, 'unreadable', 'the record of what operators did cannot be read: ' || u.reason,
    NULL, NULL
FROM everywhere p JOIN unknown u ON u.author = p.author;

CREATE VIEW adapters AS
SELECT
    l.key, l.author, l.base, l.adapter_digest, l.run, l.submission, l.submissions,
    l.state, l.code, l.reason, l.last_step, l.last_position, l.last_at,
    l.verdict, l.verdict_position, l.output_digest,
    l.own, l.base_bpb, l.control, l.margin, l.interval_lower, l.interval_upper, l.wrong_adapters, l.measured_at,
    l.engine_id, l.format, l.rank, l.max_lora_rank, l.is_3d_lora_weight, l.needs_mixed_format, l.uri, b.served_model,
    s.key IS NOT NULL AS stale,
    CASE WHEN l.verdict = 'ready' THEN list_filter([
        CASE WHEN l.own IS NULL OR l.base_bpb IS NULL OR l.bad_numbers IS NOT NULL THEN {
            'code': 'bad_number',
            'reason': coalesce(l.bad_numbers, 'own or base has no figure in the verdict')
        } END,
        CASE WHEN l.check_fault IS NOT NULL THEN {
            'code': 'check_failed',
            'reason': 'the last check of what its verdict is about ended as ' || l.check_fault
                || ', and scores do not make up for that'
        } END,
        CASE WHEN l.uri IS NULL OR l.format IS NULL OR l.rank IS NULL OR l.max_lora_rank IS NULL
                OR l.is_3d_lora_weight IS NULL OR l.needs_mixed_format IS NULL THEN {
            'code': 'not_staged',
            'reason': 'no complete converted and staged steps are recorded for output '
                || coalesce(l.output_digest, '(none)')
        } END,
        CASE WHEN l.format NOT IN ('per-expert', 'stacked', 'slots')
                OR NOT regexp_full_match(l.output_digest, '[0-9a-f]{64}')
                OR greatest(l.rank, l.max_lora_rank) > 512 THEN {
            'code': 'not_serveable',
            'reason': 'format ' || l.format || ', rank ' || l.rank || ', output digest ' || l.output_digest
                || ': vLLM or the roster cannot take that'
        } END,
        CASE WHEN b.base IS NULL THEN {
            'code': 'base_not_registered', 'reason': 'base ' || l.base || ' is not registered'
        } END,
        CASE WHEN s.key IS NOT NULL AND NOT m.serve_stale THEN {
            'code': 'stale', 'reason': 'its verdict is stale, and serve_stale is off'
        } END
    ], lambda fault: fault IS NOT NULL) END AS faults
FROM ledgers l
CROSS JOIN meta m
LEFT JOIN bases b ON b.base = l.base
LEFT JOIN (SELECT DISTINCT key, author FROM stale) s ON s.key = l.key AND s.author = l.author;

CREATE VIEW unservable AS
SELECT author, base, adapter_digest, run, submission, last_at, fault.code AS code, fault.reason AS reason
FROM (SELECT *, unnest(faults) AS fault FROM adapters);

-- THE rule of what is served. Waiting, stopped or quarantined steps elsewhere take nothing away from a ready verdict.
CREATE VIEW rule AS
SELECT
    a.base, a.author, a.adapter_digest, a.run, a.submission, a.served_model,
    a.output_digest, a.uri, a.format, a.rank, a.max_lora_rank, a.is_3d_lora_weight, a.needs_mixed_format,
    a.own, a.base_bpb, a.control, a.margin, a.interval_lower, a.interval_upper, a.wrong_adapters, a.measured_at,
    a.stale, a.key
FROM adapters a LEFT JOIN author_states s ON s.author = a.author AND s.base = a.base
WHERE a.verdict = 'ready' AND len(a.faults) = 0
    AND NOT coalesce(s.held OR s.retired, false)
    AND coalesce(a.adapter_digest = s.pinned_digest, true)
QUALIFY row_number() OVER (
    PARTITION BY a.author, a.base ORDER BY coalesce(a.submission, '') DESC, a.adapter_digest DESC
) = 1;

-- What the rule says is worked out once a sync and kept (serve.sql); nothing changes between two syncs.
CREATE VIEW ready AS
FROM served;

CREATE VIEW authors AS
WITH uploaded AS (
    SELECT
        author, base, count(*)::INTEGER AS adapters,
        arg_max({
            'digest': adapter_digest, 'run': run, 'state': state, 'code': code, 'submission': submission
        }, coalesce(submission, '') || ' ' || adapter_digest) AS newest
    FROM ledgers GROUP BY author, base
)
SELECT
    u.author, u.base,
    CASE
        WHEN s.retired THEN 'retired'
        WHEN s.held THEN 'held'
        WHEN r.adapter_digest IS NOT NULL THEN 'ready'
        WHEN u.newest.state = 'ready' THEN 'unservable'
        ELSE u.newest.state
    END AS state,
    r.adapter_digest IS NOT NULL AS is_ready,
    r.adapter_digest AS ready_digest, r.run AS ready_run, coalesce(r.stale, false) AS stale,
    u.adapters, u.newest.digest AS newest_digest, u.newest.run AS newest_run, u.newest.submission AS newest_submission,
    u.newest.state AS newest_state, coalesce(u.newest.code, '') AS newest_code,
    coalesce(s.held, false) AS held, coalesce(s.retired, false) AS retired,
    CASE WHEN s.held OR s.retired THEN s.why END AS held_why, s.pinned_digest
FROM uploaded u
LEFT JOIN ready r ON r.author = u.author AND r.base = u.base
LEFT JOIN author_states s ON s.author = u.author AND s.base = u.base;

CREATE VIEW scores AS
SELECT
    author, base, adapter_digest, name AS subject, value AS bpb, problem,
    difference, difference_lower, difference_upper
FROM figures
WHERE latest AND name NOT IN ('margin', 'lower', 'upper');

CREATE VIEW checks AS
SELECT
    author, base, adapter_digest, number, entry ->> '$.name' AS name,
    try_cast(entry ->> '$.passed' AS BOOLEAN) AS passed, entry ->> '$.detail' AS detail
FROM (
    SELECT
        author, base, adapter_digest,
        unnest(result -> '$.checks[*]') AS entry,
        generate_subscripts(result -> '$.checks[*]', 1) AS number
    FROM steps WHERE kind = 'checked' AND is_current
);

CREATE VIEW layouts AS
SELECT
    author, base, adapter_digest, result ->> '$.format' AS source_format,
    result ->> '$.orientation' AS orientation, result -> '$.packing' AS packing
FROM steps WHERE kind = 'inspected' AND is_current;

CREATE VIEW evidence AS
SELECT
    author, base, adapter_digest, parameter, value, decided_by, number,
    entry ->> '$.source' AS source, entry ->> '$.says' AS says, entry ->> '$.strength' AS strength,
    entry ->> '$.detail' AS detail,
    CASE WHEN value <> 'mixed' THEN (entry ->> '$.says') = value END AS agrees
FROM (
    SELECT
        author, base, adapter_digest, parameter, decision ->> '$.value' AS value,
        decision ->> '$.decided_by' AS decided_by,
        unnest(decision -> '$.evidence[*]') AS entry,
        generate_subscripts(decision -> '$.evidence[*]', 1) AS number
    FROM (
        SELECT author, base, adapter_digest, parameter, packing -> ('$."' || parameter || '"') AS decision
        FROM (
            SELECT author, base, adapter_digest, packing, unnest(json_keys(packing)) AS parameter FROM layouts
        )
    )
);

-- Nothing of a retired author is waited for or to be mended.
CREATE VIEW waiting AS
SELECT
    l.author, l.base, l.adapter_digest, l.run, l.submission, l.state, l.code, l.reason, l.last_step,
    l.last_at AS since, l.verdict
FROM ledgers l LEFT JOIN author_states s ON s.author = l.author AND s.base = l.base
WHERE l.state IN ('waiting', 'stopped') AND NOT coalesce(s.retired, false);

CREATE VIEW problems AS
SELECT
    a.author, a.base, a.adapter_digest, a.run, a.problem, a.code, a.reason, a.last_at AS since,
    r.adapter_digest AS served_instead
FROM (
    SELECT author, base, adapter_digest, run, submission, last_at, state AS problem, code, reason
    FROM ledgers WHERE state IN ('quarantined', 'inconclusive', 'stopped')
    UNION ALL
    SELECT author, base, adapter_digest, run, submission, last_at, 'unservable', code, reason FROM unservable
) a
LEFT JOIN ready r ON r.author = a.author AND r.base = a.base
LEFT JOIN author_states s ON s.author = a.author AND s.base = a.base
WHERE (r.adapter_digest IS NULL OR coalesce(a.submission, '') >= coalesce(r.submission, ''))
    AND NOT coalesce(s.retired, false)
UNION ALL
SELECT
    s.author, s.base, s.pinned_digest, a.run, 'pin_not_ready', 'pin_not_ready',
    'pinned to ' || s.pinned_digest || ', ' || CASE
        WHEN a.key IS NULL THEN 'which ' || s.author || ' has not uploaded for ' || s.base
        WHEN len(a.faults) > 0 THEN 'which cannot be served (' || a.faults[1].reason || ')'
        ELSE 'whose state is ' || a.state
    END || ': nobody is served meanwhile',
    s.since, NULL
FROM author_states s
LEFT JOIN ready r ON r.author = s.author AND r.base = s.base
LEFT JOIN adapters a ON a.author = s.author AND a.base = s.base AND a.adapter_digest = s.pinned_digest
WHERE s.pinned_digest IS NOT NULL AND NOT s.held AND NOT s.retired AND r.adapter_digest IS NULL
UNION ALL
SELECT NULL, NULL, NULL, NULL, 'unreadable', 'unreadable', key || ': ' || reason, NULL, NULL FROM unreadable;

CREATE VIEW author_times AS
WITH named AS (
    SELECT l.author, l.base, count(DISTINCT u.run)::INTEGER AS runs
    FROM ledgers l JOIN submissions u ON u.key = l.key GROUP BY l.author, l.base
),
worked AS (
    SELECT
        author, base, sum(steps)::INTEGER AS steps, sum(seconds)::BIGINT AS seconds,
        sum(engine_seconds) AS engine_seconds,
        left(min(first_submission), len(min(first_submission)) - 9) AS first_submission_at,
        min(first_ready_at) AS ready_at
    FROM ledgers GROUP BY author, base
)
SELECT
    w.author, w.base, coalesce(n.runs, 0) AS runs, w.steps, w.seconds, w.engine_seconds,
    w.first_submission_at, w.ready_at,
    date_diff('second', try_cast(w.first_submission_at AS TIMESTAMP), try_cast(w.ready_at AS TIMESTAMP))
        AS seconds_to_ready
FROM worked w LEFT JOIN named n ON n.author = w.author AND n.base = w.base;

-- `others_then` counts all other authors that were served at the choice. More of them now is asked for too: an author
-- that the choice passes over for a reason not known here must not make it be repeated for ever.
-- Half of the wanted opponents is enough: each new author would otherwise have all earlier ones scored again.
CREATE VIEW thin_verdicts AS
WITH few AS MATERIALIZED (
    SELECT
        r.base, r.author, r.adapter_digest, r.output_digest, r.run,
        coalesce(l.opponents, r.wrong_adapters) AS opponents, l.others_then, m.max_opponents
    FROM ready r JOIN ledgers l ON l.key = r.key CROSS JOIN meta m
    WHERE 2 * coalesce(l.opponents, r.wrong_adapters) < m.max_opponents
),
excluded AS (
    SELECT base, pair ->> 0 AS one, pair ->> 1 AS other
    FROM (SELECT base, unnest(exclusions -> '$[*]') AS pair FROM bases)
),
no_opponents AS (
    SELECT base, one AS author, other FROM excluded
    UNION SELECT base, other, one FROM excluded
    UNION SELECT f.base, f.author, r.author FROM few f JOIN ready r USING (base, output_digest)
    UNION SELECT f.base, f.author, r.author FROM few f JOIN ready r USING (base, adapter_digest)
),
ruled_out AS (
    SELECT n.base, n.author, count(*) AS authors
    FROM no_opponents n JOIN ready r ON r.base = n.base AND r.author = n.other
    GROUP BY ALL
),
served_on AS (
    SELECT base, count(*) AS authors FROM ready GROUP BY base
)
SELECT
    f.base, f.author, f.adapter_digest, f.run, f.opponents,
    least(s.authors - o.authors, f.max_opponents)::INTEGER AS wanted
FROM few f JOIN ruled_out o ON o.base = f.base AND o.author = f.author JOIN served_on s ON s.base = f.base
WHERE 2 * f.opponents < least(s.authors - o.authors, f.max_opponents)
    AND (f.others_then IS NULL OR s.authors - 1 > f.others_then);
