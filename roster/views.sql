-- The views of the catalog: all rules about what an adapter's history means. Each rule is written once, here.

CREATE VIEW history AS
SELECT
    s.author, s.base, s.adapter_digest, s.position, s.kind, s.attempt, s.outcome, s.code, s.reason,
    s.code_version, s.step_key, s.started_at, s.finished_at,
    date_diff('second', try_cast(s.started_at AS TIMESTAMP), try_cast(s.finished_at AS TIMESTAMP)) AS seconds,
    s.worker, s.flow_run
FROM steps s;
COMMENT ON VIEW history IS 'Every step of every adapter, in the ledger''s order.';

CREATE VIEW verdicts AS
WITH figured AS (
    SELECT
        key, position,
        max(value) FILTER (WHERE name = 'own') AS own,
        max(value) FILTER (WHERE name = 'base') AS base_bpb,
        max(value) FILTER (WHERE name = 'base_again') AS base_again,
        max(value) FILTER (WHERE name = 'control') AS control,
        max(value) FILTER (WHERE name = 'margin') AS margin,
        max(value) FILTER (WHERE name = 'lower') AS interval_lower,
        max(value) FILTER (WHERE name = 'upper') AS interval_upper,
        string_agg(problem, '; ' ORDER BY name) AS bad_numbers
    FROM figures
    GROUP BY key, position
)
SELECT
    s.key, s.author, s.base, s.adapter_digest, s.position, s.attempt, s.outcome, s.code,
    from_json(s.result -> '$.codes', '["VARCHAR"]') AS codes,
    s.reason,
    list_transform(from_json(s.result -> '$.problems', '[{"message": "VARCHAR"}]'), lambda problem: problem.message)
        AS messages,
    s.inputs ->> '$.inspected' AS inspected,
    s.result ->> '$.output_digest' AS output_digest,
    p.own, p.base_bpb, p.base_again, p.control, p.margin, p.interval_lower, p.interval_upper,
    coalesce(len(json_keys(s.result, '$.wrong')), 0)::INTEGER AS wrong_adapters,
    p.bad_numbers,
    coalesce(s.result ->> '$.measured_at', s.finished_at) AS measured_at,
    s.position = max(s.position) OVER (PARTITION BY s.key) AS latest
FROM steps s LEFT JOIN figured p USING (key, position)
WHERE s.kind = 'verdict' AND s.outcome IN ('done', 'ready', 'quarantined', 'inconclusive');
COMMENT ON VIEW verdicts IS 'Every terminal verdict, with its figures in bits per byte; latest marks the one that counts for its adapter.';

CREATE VIEW stale AS
WITH behind AS (
    SELECT
        s.key, s.author, s.base, s.adapter_digest, s.kind, s.code_version,
        s.position = max(s.position) OVER (PARTITION BY s.key, s.kind) AS last_of_kind
    FROM steps s
    JOIN (
        SELECT key, max(position) AS position FROM steps
        WHERE kind = 'verdict' AND outcome IN ('done', 'ready', 'quarantined', 'inconclusive') GROUP BY key
    ) v ON v.key = s.key AND s.position <= v.position
    WHERE s.outcome IN ('done', 'ready', 'quarantined', 'inconclusive')
)
SELECT b.key, b.author, b.base, b.adapter_digest, b.kind, b.code_version AS recorded, w.version AS current
FROM behind b JOIN step_versions w USING (kind)
WHERE b.last_of_kind AND b.code_version IS DISTINCT FROM w.version;
COMMENT ON VIEW stale IS 'One row per step behind a latest verdict that was done by another version of the code than the current one.';

CREATE VIEW adapters AS
WITH submitted AS (
    SELECT key, max(submission) AS submission, arg_max(run, submission) AS run, count(*)::INTEGER AS submissions
    FROM submissions GROUP BY key
),
last_step AS (
    SELECT * FROM steps QUALIFY position = max(position) OVER (PARTITION BY key)
),
converted AS (
    SELECT
        key,
        result ->> '$.output_digest' AS output_digest,
        result ->> '$.format' AS format,
        try_cast(result ->> '$.rank' AS INTEGER) AS rank,
        try_cast(result ->> '$.max_lora_rank' AS INTEGER) AS max_lora_rank,
        try_cast(result ->> '$.is_3d_lora_weight' AS BOOLEAN) AS is_3d_lora_weight,
        try_cast(result ->> '$.needs_mixed_format' AS BOOLEAN) AS needs_mixed_format
    FROM steps WHERE kind = 'converted' AND outcome = 'done'
    QUALIFY position = max(position) OVER (PARTITION BY key, result ->> '$.output_digest')
),
staged AS (
    SELECT key, result ->> '$.output_digest' AS output_digest, result ->> '$.uri' AS uri
    FROM steps WHERE kind = 'staged' AND outcome = 'done'
    QUALIFY position = max(position) OVER (PARTITION BY key, result ->> '$.output_digest')
)
SELECT
    l.key, l.author, l.base, l.adapter_digest, u.run, u.submission, coalesce(u.submissions, 0) AS submissions,
    CASE
        WHEN n.position IS NULL THEN 'in_progress'
        WHEN n.position = v.position THEN v.outcome
        WHEN n.outcome IN ('waiting', 'stopped', 'quarantined', 'inconclusive') THEN n.outcome
        ELSE 'in_progress'
    END AS state,
    n.code, n.reason, n.kind AS last_step, n.position AS last_position, n.finished_at AS last_at,
    v.outcome AS verdict, v.position AS verdict_position, v.output_digest,
    v.own, v.base_bpb, v.control, v.margin, v.interval_lower, v.interval_upper, v.wrong_adapters, v.measured_at,
    c.format, c.rank, c.max_lora_rank, c.is_3d_lora_weight, c.needs_mixed_format, g.uri, b.served_model,
    s.key IS NOT NULL AS stale,
    CASE WHEN v.outcome = 'ready' THEN list_filter([
        CASE WHEN v.own IS NULL OR v.base_bpb IS NULL OR v.bad_numbers IS NOT NULL THEN {
            'code': 'bad_number',
            'reason': coalesce(v.bad_numbers, 'own or base has no figure in the verdict')
        } END,
        CASE WHEN g.uri IS NULL OR c.format IS NULL OR c.rank IS NULL OR c.max_lora_rank IS NULL
                OR c.is_3d_lora_weight IS NULL OR c.needs_mixed_format IS NULL THEN {
            'code': 'not_staged',
            'reason': 'no complete converted and staged steps are recorded for output '
                || coalesce(v.output_digest, '(none)')
        } END,
        CASE WHEN c.format NOT IN ('per-expert', 'stacked', 'slots')
                OR NOT regexp_full_match(v.output_digest, '[0-9a-f]{64}')
                OR greatest(c.rank, c.max_lora_rank) > 512 THEN {
            'code': 'not_serveable',
            'reason': 'format ' || c.format || ', rank ' || c.rank || ', output digest ' || v.output_digest
                || ': vLLM or the roster cannot take that'
        } END,
        CASE WHEN b.base IS NULL THEN {
            'code': 'base_not_registered', 'reason': 'base ' || l.base || ' is not registered'
        } END
    ], lambda fault: fault IS NOT NULL) END AS faults
FROM ledgers l
LEFT JOIN submitted u ON u.key = l.key
LEFT JOIN last_step n ON n.key = l.key
LEFT JOIN verdicts v ON v.key = l.key AND v.latest
LEFT JOIN converted c ON c.key = l.key AND c.output_digest = v.output_digest
LEFT JOIN staged g ON g.key = l.key AND g.output_digest = v.output_digest
LEFT JOIN bases b ON b.base = l.base
LEFT JOIN (SELECT DISTINCT key FROM stale) s ON s.key = l.key;
COMMENT ON VIEW adapters IS 'One row per adapter: its last submission, its state (what the last step says), its latest verdict (which is not the same thing), and what keeps a ready one from being served all the same (faults).';

CREATE VIEW unservable AS
SELECT author, base, adapter_digest, run, submission, last_at, fault.code AS code, fault.reason AS reason
FROM (SELECT *, unnest(faults) AS fault FROM adapters);
COMMENT ON VIEW unservable IS 'One row per reason why an adapter with a ready verdict cannot be served all the same.';

-- THE rule. Waiting, stopped or quarantined steps elsewhere take nothing away from a ready verdict.
CREATE VIEW ready AS
SELECT
    base, author, adapter_digest, run, submission, served_model,
    output_digest, uri, format, rank, max_lora_rank, is_3d_lora_weight, needs_mixed_format,
    own, base_bpb, control, margin, interval_lower, interval_upper, wrong_adapters, measured_at, stale, key
FROM adapters
WHERE verdict = 'ready' AND len(faults) = 0
QUALIFY row_number() OVER (
    PARTITION BY author, base ORDER BY coalesce(submission, '') DESC, adapter_digest DESC
) = 1;
COMMENT ON VIEW ready IS 'What is served: per author and base, of the adapters whose latest terminal verdict is ready, the one with the highest submission.';

CREATE VIEW authors AS
SELECT
    a.author, a.base,
    r.adapter_digest IS NOT NULL AS is_ready,
    r.adapter_digest AS ready_digest, r.run AS ready_run, coalesce(r.stale, false) AS stale,
    count(*)::INTEGER AS adapters,
    arg_max(a.adapter_digest, coalesce(a.submission, '')) AS newest_digest,
    arg_max(a.run, coalesce(a.submission, '')) AS newest_run,
    arg_max(a.state, coalesce(a.submission, '')) AS newest_state,
    arg_max(coalesce(a.code, ''), coalesce(a.submission, '')) AS newest_code
FROM adapters a LEFT JOIN ready r ON r.author = a.author AND r.base = a.base
GROUP BY ALL;
COMMENT ON VIEW authors IS 'One row per author and base: which adapter is served, and how the newest upload fares.';

CREATE VIEW scores AS
SELECT
    s.author, s.base, s.adapter_digest, f.name AS subject, f.value AS bpb, f.problem,
    finite_or_null(s.result ->> ('$.differences."' || f.name || '".mean')) AS difference,
    finite_or_null(s.result ->> ('$.differences."' || f.name || '".lower')) AS difference_lower,
    finite_or_null(s.result ->> ('$.differences."' || f.name || '".upper')) AS difference_upper
FROM figures f
JOIN steps s USING (key, position)
JOIN verdicts v ON v.key = f.key AND v.position = f.position AND v.latest
WHERE f.name NOT IN ('margin', 'lower', 'upper');
COMMENT ON VIEW scores IS 'One row per adapter and subject (own, base, base_again, control, wrong:<author>) of its latest verdict: bits per byte, and its difference to own with the interval.';

CREATE VIEW checks AS
SELECT
    author, base, adapter_digest, number, entry ->> '$.name' AS name,
    try_cast(entry ->> '$.passed' AS BOOLEAN) AS passed, entry ->> '$.detail' AS detail
FROM (
    SELECT
        author, base, adapter_digest,
        unnest(result -> '$.checks[*]') AS entry,
        generate_subscripts(result -> '$.checks[*]', 1) AS number
    FROM (
        SELECT s.*
        FROM steps s LEFT JOIN verdicts v ON v.key = s.key AND v.latest
        WHERE s.kind = 'checked' AND json_type(s.result, '$.checks') = 'ARRAY'
            AND (s.position > v.position OR coalesce(s.inputs ->> '$.output' = v.output_digest, true))
        QUALIFY s.position = max(s.position) OVER (PARTITION BY s.key)
    )
);
COMMENT ON VIEW checks IS 'One row per check of the last check of what the latest verdict is about, or of a later conversion.';

-- An adapter may be inspected several times: for other statements, and once more when scores decided its packing. The
-- inspection that counts is the one that the latest verdict names, unless a later run has inspected the adapter since.
CREATE VIEW layouts AS
SELECT
    s.author, s.base, s.adapter_digest, s.result ->> '$.format' AS source_format,
    s.result ->> '$.orientation' AS orientation, s.result -> '$.packing' AS packing
FROM steps s LEFT JOIN verdicts v ON v.key = s.key AND v.latest
WHERE s.kind = 'inspected' AND json_type(s.result, '$.packing') = 'OBJECT'
    AND (s.position > v.position OR coalesce(s.step_key = v.inspected, true))
QUALIFY s.position = max(s.position) OVER (PARTITION BY s.key);
COMMENT ON VIEW layouts IS 'One row per adapter: how its file was read (stacked, per-expert, 3-d), and the packing of each stacked parameter.';

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
COMMENT ON VIEW evidence IS 'One row per piece of evidence about the packing of a parameter. agrees is NULL where the piece says nothing, or where the layers of the parameter differ.';

CREATE VIEW waiting AS
SELECT author, base, adapter_digest, run, submission, state, code, reason, last_step, last_at AS since, verdict
FROM adapters WHERE state IN ('waiting', 'stopped');
COMMENT ON VIEW waiting IS 'Adapters whose last step waits for something or was stopped by a fault that is not theirs: they are taken up again.';

CREATE VIEW problems AS
SELECT
    a.author, a.base, a.adapter_digest, a.run, a.problem, a.code, a.reason, a.last_at AS since,
    r.adapter_digest AS served_instead
FROM (
    SELECT author, base, adapter_digest, run, submission, last_at, state AS problem, code, reason
    FROM adapters WHERE state IN ('quarantined', 'inconclusive', 'stopped')
    UNION ALL
    SELECT author, base, adapter_digest, run, submission, last_at, 'unservable', code, reason FROM unservable
) a
LEFT JOIN ready r ON r.author = a.author AND r.base = a.base
WHERE r.adapter_digest IS NULL OR coalesce(a.submission, '') >= coalesce(r.submission, '')
UNION ALL
SELECT NULL, NULL, NULL, NULL, 'unreadable', 'unreadable', key || ': ' || reason, NULL, NULL FROM unreadable;
COMMENT ON VIEW problems IS 'What someone should look at: adapters refused, undecided, stopped or unservable (unless a newer one is served), and objects that cannot be read. served_instead names the adapter that serves the author meanwhile.';

-- `available` in an opponents step counts all other authors served then. More of them now is asked for too: an author
-- that the choice passes over for a reason not known here must not make it be repeated for ever.
CREATE VIEW thin_verdicts AS
WITH served AS MATERIALIZED (
    SELECT key, base, author, adapter_digest, output_digest, run, wrong_adapters FROM ready
),
excluded AS (
    SELECT base, pair ->> 0 AS one, pair ->> 1 AS other
    FROM (SELECT base, unnest(exclusions -> '$[*]') AS pair FROM bases)
),
no_opponents AS (
    SELECT base, one AS author, other FROM excluded
    UNION SELECT base, other, one FROM excluded
    UNION SELECT a.base, a.author, b.author FROM served a JOIN served b USING (base, output_digest)
    UNION SELECT a.base, a.author, b.author FROM served a JOIN served b USING (base, adapter_digest)
),
ruled_out AS (
    SELECT n.base, n.author, count(*) AS authors
    FROM no_opponents n JOIN served s ON s.base = n.base AND s.author = n.other
    GROUP BY ALL
),
chosen AS (
    SELECT
        s.key,
        arg_max(json_array_length(s.result, '$.opponents'), s.position) AS opponents,
        arg_max(try_cast(s.result ->> '$.available' AS INTEGER), s.position) AS others_then
    FROM steps s JOIN verdicts v ON v.key = s.key AND v.latest AND s.position < v.position
    WHERE s.kind = 'opponents' AND s.outcome = 'done'
        AND coalesce(s.inputs ->> '$.own' = v.output_digest, true)
    GROUP BY s.key
),
counted AS (
    SELECT
        r.base, r.author, r.adapter_digest, r.run,
        coalesce(c.opponents, r.wrong_adapters)::INTEGER AS opponents,
        (count(*) OVER (PARTITION BY r.base) - o.authors)::INTEGER AS available,
        count(*) OVER (PARTITION BY r.base) - 1 AS others_now,
        c.others_then
    FROM served r
    JOIN ruled_out o ON o.base = r.base AND o.author = r.author
    LEFT JOIN chosen c ON c.key = r.key
)
SELECT base, author, adapter_digest, run, opponents, least(available, max_opponents) AS wanted
FROM counted CROSS JOIN meta
-- Half of them is enough: each new author would otherwise have all earlier ones scored again.
WHERE 2 * opponents < least(available, max_opponents) AND (others_then IS NULL OR others_now > others_then);
COMMENT ON VIEW thin_verdicts IS 'Served adapters that were scored against fewer than half of the wrong adapters that there are now: to be scored again. No author is an opponent of itself, of a pen name excluded in base.json, or of the same bytes.';
