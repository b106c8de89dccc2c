-- Puts new and changed objects in place of what the tables said about them, in one transaction of the caller.
-- The caller fills the temporary tables incoming (key, etag, body), gone (key), incoming_bases (base, etag, body) and
-- incoming_engines (base, etag, engine_id, body). It may run this once per batch: bases and engines stay the same.
--
-- DuckDB reads JSON slowly beside everything else it does: a ledger's text is read once (from_json), a step's result
-- once more for all its plain facts together, and the result of a score a third time, to leave its long lists out.

CREATE TEMP TABLE replaced AS SELECT key FROM incoming UNION SELECT key FROM gone;
DELETE FROM figures WHERE key IN (FROM replaced);
DELETE FROM judgements WHERE key IN (FROM replaced);
DELETE FROM steps WHERE key IN (FROM replaced);
DELETE FROM submissions WHERE key IN (FROM replaced);
DELETE FROM ledgers WHERE key IN (FROM replaced);
DELETE FROM author_events WHERE key IN (FROM replaced);
DELETE FROM author_records WHERE key IN (FROM replaced);
DELETE FROM unreadable WHERE key IN (FROM replaced) OR key LIKE 'bases/%' OR key LIKE 'engines/%';
DELETE FROM bases;
DELETE FROM engines;
DROP TABLE replaced;

CREATE TEMP TABLE documents AS
SELECT
    key, etag, doc,
    CASE
        WHEN doc IS NULL AND NOT json_valid(body) THEN 'it is not JSON'
        WHEN doc.schema IS NULL THEN 'it has no schema number'
        WHEN doc.schema <> '1' THEN 'its schema is ' || doc.schema || ', expected 1'
        WHEN doc.author IS NULL OR doc.adapter_digest IS NULL OR doc.base IS NULL
            THEN 'author, adapter_digest or base is missing'
        WHEN NOT regexp_full_match(doc.author, '[a-z0-9][a-z0-9._-]{0,63}')
            OR NOT regexp_full_match(doc.base, '[a-z0-9][a-z0-9._-]{0,63}')
            OR NOT regexp_full_match(doc.adapter_digest, '[0-9a-f]{64}')
            THEN 'author, adapter_digest or base is not spelt as it must be'
        WHEN key <> 'ledger/' || doc.author || '/' || doc.adapter_digest || '.json'
            THEN 'it is about ' || doc.author || ', adapter ' || doc.adapter_digest || ', which is not what its key says'
        WHEN doc.steps IS NULL THEN 'steps is not a list'
        WHEN doc.submissions IS NULL THEN 'submissions is not a list'
        WHEN len(list_filter(doc.submissions, lambda s: s.run IS NULL OR s.submission IS NULL)) > 0
            THEN 'a submission lacks its run or its name'
        WHEN len(list_filter(doc.steps, lambda s: coalesce(s.kind, '') NOT IN
            ('inspected', 'converted', 'checked', 'staged', 'opponents', 'scored', 'verdict'))) > 0
            THEN 'a step has a kind that is not known here'
        WHEN len(list_filter(doc.steps, lambda s: coalesce(s.outcome, '') NOT IN
            ('done', 'ready', 'quarantined', 'inconclusive', 'waiting', 'stopped'))) > 0
            THEN 'a step has an outcome that is not known here'
    END AS refusal
FROM (
    SELECT key, etag, body, try(from_json(body, '{
        "schema": "VARCHAR", "author": "VARCHAR", "adapter_digest": "VARCHAR", "base": "VARCHAR",
        "submissions": [{"run": "VARCHAR", "submission": "VARCHAR"}],
        "steps": [{
            "kind": "VARCHAR", "step_key": "VARCHAR", "attempt": "INTEGER", "code_version": "VARCHAR",
            "inputs": "JSON", "outcome": "VARCHAR", "result": "JSON",
            "started_at": "VARCHAR", "finished_at": "VARCHAR", "worker": "VARCHAR", "flow_run": "VARCHAR"
        }]
    }')) AS doc
    FROM incoming WHERE NOT suffix(key, '/_author.json')
);

INSERT INTO unreadable SELECT key, etag, refusal FROM documents WHERE refusal IS NOT NULL;

CREATE TEMP TABLE new_submissions AS
SELECT DISTINCT key, entry.run AS run, entry.submission AS submission
FROM (SELECT key, unnest(doc.submissions) AS entry FROM documents WHERE refusal IS NULL);
INSERT INTO submissions FROM new_submissions ORDER BY key, submission;

-- What a step says, with its plain facts out of the JSON. A purged step holds nothing that counts any more.
CREATE TEMP TABLE new_steps AS
SELECT
    * EXCLUDE (facts, needs),
    facts[1] AS code, facts[2] AS reason, facts[3] AS output_digest, facts[4] AS engine_id, facts[5] AS measured_at,
    facts[6] AS format, try_cast(facts[7] AS INTEGER) AS rank, try_cast(facts[8] AS INTEGER) AS max_lora_rank,
    try_cast(facts[9] AS BOOLEAN) AS is_3d_lora_weight, try_cast(facts[10] AS BOOLEAN) AS needs_mixed_format,
    facts[11] AS uri, try_cast(facts[12] AS INTEGER) AS available,
    CASE WHEN kind = 'scored' THEN finite_or_null(facts[13]) END AS engine_seconds,
    needs[1] AS of_inspected, needs[2] AS of_scored, needs[3] AS of_own, needs[4] AS of_output,
    needs[5] IS NOT NULL AS purged,
    outcome IN ('done', 'ready', 'quarantined', 'inconclusive') AS is_final
FROM (
    SELECT
        key, author, base, adapter_digest, position, step.kind AS kind, step.step_key AS step_key,
        step.attempt AS attempt, step.code_version AS code_version, step.inputs AS inputs, step.outcome AS outcome,
        step.result AS result, step.started_at AS started_at, step.finished_at AS finished_at,
        step.worker AS worker, step.flow_run AS flow_run,
        date_diff('second', try_cast(step.started_at AS TIMESTAMP), try_cast(step.finished_at AS TIMESTAMP)) AS seconds,
        json_extract_string(step.result, [
            '$.code', '$.reason', '$.output_digest', '$.engine_id', '$.measured_at',
            '$.format', '$.rank', '$.max_lora_rank', '$.is_3d_lora_weight', '$.needs_mixed_format',
            '$.uri', '$.available', '$.seconds'
        ]) AS facts,
        json_extract_string(step.inputs, ['$.inspected', '$.scored', '$.own', '$.output', '$.purged']) AS needs
    FROM (
        SELECT
            key, doc.author AS author, doc.base AS base, doc.adapter_digest AS adapter_digest,
            unnest(doc.steps) AS step, generate_subscripts(doc.steps, 1) - 1 AS position
        FROM documents WHERE refusal IS NULL
    )
);

-- The verdict that counts: the last one that is final.
CREATE TEMP TABLE latest AS
SELECT
    key, max(position) AS position, arg_max(output_digest, position) AS output_digest,
    arg_max(of_inspected, position) AS of_inspected
FROM new_steps WHERE kind = 'verdict' AND is_final AND NOT purged GROUP BY key;

-- An adapter may be inspected several times: for other statements, and once more when scores decided its packing. The
-- inspection that counts is the one that the latest verdict names, unless a later run has inspected the adapter since;
-- the check that counts is that of the verdict's output, or a later one.
INSERT INTO steps
SELECT
    * EXCLUDE (counts),
    coalesce(position = max(CASE WHEN counts THEN position END) OVER (PARTITION BY key, kind), false)
FROM (
    SELECT
        s.key, author, base, adapter_digest, s.position, kind, step_key, attempt, code_version, inputs, outcome, code,
        reason,
        CASE WHEN kind = 'scored' THEN json_merge_patch(result, '{"units": null, "subjects": null}') ELSE result END
            AS result,
        started_at, finished_at, seconds, engine_seconds, worker, flow_run, purged,
        coalesce(s.position = max(CASE WHEN is_final AND NOT purged AND s.position <= v.position THEN s.position END)
            OVER (PARTITION BY s.key, kind), false) AS is_behind_verdict,
        CASE kind
            WHEN 'inspected' THEN json_type(result, '$.packing') = 'OBJECT'
                AND (s.position > v.position OR coalesce(step_key = v.of_inspected, true))
            WHEN 'checked' THEN json_type(result, '$.checks') = 'ARRAY'
                AND (s.position > v.position OR coalesce(of_output = v.output_digest, true))
        END AS counts
    FROM new_steps s LEFT JOIN latest v ON v.key = s.key
)
ORDER BY key, position;

-- A number that is no finite number is left out, with the reason, before any comparison can meet it: DuckDB sorts NaN
-- as the greatest value and holds it equal to itself.
CREATE TEMP TABLE new_figures AS
SELECT
    key, author, base, adapter_digest, position, latest, name, finite_or_null(found) AS value,
    CASE WHEN finite_or_null(found) IS NULL THEN name || ' is ' || found || ', not a finite number' END AS problem,
    finite_or_null(difference ->> '$.mean') AS difference, finite_or_null(difference ->> '$.lower') AS difference_lower,
    finite_or_null(difference ->> '$.upper') AS difference_upper
FROM (
    SELECT
        key, author, base, adapter_digest, position, latest, entry.name AS name, entry.found AS found,
        differences -> ('$."' || entry.name || '"') AS difference
    FROM (
        SELECT
            s.key, author, base, adapter_digest, s.position, s.position = v.position AS latest,
            result -> '$.differences' AS differences,
            unnest(list_concat([
                {'name': 'own', 'found': result ->> '$.own'},
                {'name': 'base', 'found': result ->> '$.base'},
                {'name': 'base_again', 'found': result ->> '$.base_again'},
                {'name': 'control', 'found': result ->> '$.control'},
                {'name': 'margin', 'found': result ->> '$.margin'},
                {'name': 'lower', 'found': result ->> '$.interval[0]'},
                {'name': 'upper', 'found': result ->> '$.interval[1]'}
            ],
            list_transform(
                coalesce(json_keys(result, '$.wrong'), []),
                lambda other: {'name': 'wrong:' || other, 'found': result ->> ('$.wrong."' || other || '"')}
            ))) AS entry
        FROM new_steps s JOIN latest v ON v.key = s.key
        WHERE kind = 'verdict' AND is_final AND NOT purged
    )
    WHERE entry.found IS NOT NULL
);
INSERT INTO figures FROM new_figures ORDER BY key, position, name;

-- The engine of a verdict is the one that the score it names was measured on; a refusal before any score has none.
CREATE TEMP TABLE new_judgements AS
SELECT
    s.key, author, base, adapter_digest, s.position, attempt, outcome, code,
    from_json(result -> '$.codes', '["VARCHAR"]') AS codes,
    reason,
    list_transform(from_json(result -> '$.problems', '[{"message": "VARCHAR"}]'), lambda problem: problem.message)
        AS messages,
    s.of_inspected AS inspected, e.engine_id, s.output_digest,
    f.own, f.base_bpb, f.base_again, f.control, f.margin, f.interval_lower, f.interval_upper,
    coalesce(len(json_keys(result, '$.wrong')), 0)::INTEGER AS wrong_adapters,
    f.bad_numbers,
    coalesce(s.measured_at, finished_at) AS measured_at,
    s.position = v.position AS latest
FROM new_steps s
JOIN latest v ON v.key = s.key
LEFT JOIN (
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
    FROM new_figures GROUP BY key, position
) f ON f.key = s.key AND f.position = s.position
LEFT JOIN (
    SELECT key, step_key, arg_max(engine_id, position) AS engine_id
    FROM new_steps WHERE kind = 'scored' AND is_final GROUP BY key, step_key
) e ON e.key = s.key AND e.step_key = s.of_scored
WHERE kind = 'verdict' AND is_final AND NOT purged;
INSERT INTO judgements FROM new_judgements ORDER BY key, position;

-- One row of everything that follows from a ledger alone. What is served is the output that the latest verdict names;
-- `opponents` are those it was scored against, `others_then` all that there were.
INSERT INTO ledgers
WITH submitted AS (
    SELECT
        key, arg_max(run, submission) AS run, max(submission) AS submission, count(*) AS submissions,
        min(submission) AS first_submission
    FROM new_submissions GROUP BY key
),
worked AS (
    SELECT
        key, count(*) AS steps, coalesce(sum(seconds), 0) AS seconds, coalesce(sum(engine_seconds), 0) AS engine_seconds,
        max(position) AS last_position, arg_max(kind, position) AS last_step,
        min(finished_at) FILTER (WHERE kind = 'verdict' AND outcome = 'ready') AS first_ready_at
    FROM new_steps GROUP BY key
),
converted AS (
    SELECT
        s.key, arg_max({
            'format': s.format, 'rank': s.rank, 'max_lora_rank': s.max_lora_rank,
            'is_3d': s.is_3d_lora_weight, 'mixed': s.needs_mixed_format
        }, s.position) AS form
    FROM new_steps s JOIN latest v ON v.key = s.key AND v.output_digest = s.output_digest
    WHERE s.kind = 'converted' AND s.outcome = 'done' GROUP BY s.key
),
staged AS (
    SELECT s.key, arg_max({'uri': s.uri}, s.position) AS place
    FROM new_steps s JOIN latest v ON v.key = s.key AND v.output_digest = s.output_digest
    WHERE s.kind = 'staged' AND s.outcome = 'done' GROUP BY s.key
),
chosen AS (
    SELECT
        s.key, arg_max({'opponents': json_array_length(s.result, '$.opponents'), 'available': s.available}, s.position)
            AS choice
    FROM new_steps s JOIN latest v ON v.key = s.key AND s.position < v.position
    WHERE s.kind = 'opponents' AND s.outcome = 'done' AND coalesce(s.of_own = v.output_digest, true)
    GROUP BY s.key
),
-- A check that is done already is not recorded once more: one that passed counts for each verdict after it, whatever
-- other checks, against other references, came between.
tested AS (
    SELECT
        s.key, arg_max({'outcome': s.outcome, 'code': s.code}, s.position) AS last,
        max(s.position) > any_value(v.position) OR NOT bool_or(s.outcome = 'done') AS counts
    FROM new_steps s JOIN latest v ON v.key = s.key
    WHERE s.kind = 'checked' AND s.is_final AND NOT s.purged AND coalesce(s.of_output = v.output_digest, true)
    GROUP BY s.key
)
SELECT
    d.key, d.etag, d.doc.author, d.doc.base, d.doc.adapter_digest,
    u.run, u.submission, coalesce(u.submissions, 0), u.first_submission,
    CASE
        WHEN n.position IS NULL THEN 'in_progress'
        WHEN n.purged THEN 'purged'
        WHEN n.position = v.position THEN v.outcome
        WHEN n.outcome IN ('waiting', 'stopped', 'quarantined', 'inconclusive') THEN n.outcome
        ELSE 'in_progress'
    END,
    n.code, n.reason, n.kind, n.position, n.finished_at,
    v.outcome, v.position, v.output_digest,
    v.own, v.base_bpb, v.base_again, v.control, v.margin, v.interval_lower, v.interval_upper,
    v.wrong_adapters, v.bad_numbers, v.measured_at, v.engine_id, v.inspected,
    c.form.format, c.form.rank, c.form.max_lora_rank, c.form.is_3d, c.form.mixed, g.place.uri,
    o.choice.opponents, o.choice.available,
    coalesce(w.steps, 0), coalesce(w.seconds, 0), coalesce(w.engine_seconds, 0), w.first_ready_at,
    CASE WHEN t.counts AND t.last.outcome <> 'done' THEN t.last.outcome || coalesce(' (' || t.last.code || ')', '') END
FROM documents d
LEFT JOIN submitted u ON u.key = d.key
LEFT JOIN worked w ON w.key = d.key
LEFT JOIN new_steps n ON n.key = d.key AND n.position = w.last_position
LEFT JOIN new_judgements v ON v.key = d.key AND v.latest
LEFT JOIN converted c ON c.key = d.key
LEFT JOIN staged g ON g.key = d.key
LEFT JOIN chosen o ON o.key = d.key
LEFT JOIN tested t ON t.key = d.key
WHERE d.refusal IS NULL
ORDER BY d.key;

DROP TABLE documents;
DROP TABLE new_submissions;
DROP TABLE new_steps;
DROP TABLE latest;
DROP TABLE new_figures;
DROP TABLE new_judgements;

-- What operators did about authors.
CREATE TEMP TABLE records AS
SELECT
    key, etag, body, doc,
    CASE
        WHEN doc IS NULL AND NOT json_valid(body) THEN 'it is not JSON'
        WHEN doc.schema IS NULL THEN 'it has no schema number'
        WHEN doc.schema <> '1' THEN 'its schema is ' || doc.schema || ', expected 1'
        WHEN key IS DISTINCT FROM 'ledger/' || doc.author || '/_author.json'
            THEN 'it is about ' || coalesce(doc.author, 'nobody') || ', which is not what its key says'
        WHEN NOT regexp_full_match(doc.author, '[a-z0-9][a-z0-9._-]{0,63}') THEN 'author is not spelt as it must be'
        WHEN doc.events IS NULL THEN 'events is not a list'
        WHEN len(list_filter(doc.events, lambda e: coalesce(e.act, '') NOT IN
            ('hold', 'release', 'retire', 'pin', 'unpin', 'purge'))) > 0
            THEN 'an event has an act that is not known here'
        WHEN len(list_filter(doc.events, lambda e: e.who IS NULL OR e."at" IS NULL OR e.why IS NULL)) > 0
            THEN 'an event lacks who, at or why'
        WHEN len(list_filter(doc.events, lambda e: e.act = 'pin' AND (e.base IS NULL OR e.adapter_digest IS NULL))) > 0
            THEN 'a pin lacks its base or its adapter digest'
    END AS refusal
FROM (
    SELECT key, etag, body, try(from_json(body, '{
        "schema": "VARCHAR", "author": "VARCHAR",
        "events": [{
            "act": "VARCHAR", "base": "VARCHAR", "adapter_digest": "VARCHAR", "who": "VARCHAR", "at": "VARCHAR",
            "why": "VARCHAR"
        }]
    }')) AS doc
    FROM incoming WHERE suffix(key, '/_author.json')
);

INSERT INTO unreadable SELECT key, etag, refusal FROM records WHERE refusal IS NOT NULL;

INSERT INTO author_records SELECT key, etag, doc.author, body FROM records WHERE refusal IS NULL ORDER BY key;

INSERT INTO author_events
SELECT key, author, position, event.act, event.base, event.adapter_digest, event.who, event."at", event.why
FROM (
    SELECT
        key, doc.author AS author, unnest(doc.events) AS event, generate_subscripts(doc.events, 1) - 1 AS position
    FROM records WHERE refusal IS NULL
)
ORDER BY key, position;

DROP TABLE records;

INSERT INTO unreadable
SELECT
    'bases/' || base || '/base.json', etag,
    CASE WHEN NOT json_valid(body) THEN 'it is not JSON' ELSE 'served_model is missing' END
FROM incoming_bases
WHERE NOT json_valid(body) OR CASE WHEN json_valid(body) THEN body ->> '$.served_model' END IS NULL;

INSERT INTO bases
SELECT base, etag, body ->> '$.served_model', body -> '$.exclusions', body
FROM incoming_bases
WHERE 'bases/' || base || '/base.json' NOT IN (SELECT key FROM unreadable)
ORDER BY base;

INSERT INTO unreadable
SELECT
    'engines/' || base || '.json', etag,
    CASE WHEN json_valid(body) THEN 'it is no engine.json that is known here' ELSE 'it is not JSON' END
FROM incoming_engines
WHERE engine_id IS NULL OR NOT json_valid(body);

INSERT INTO engines
SELECT base, etag, engine_id, body ->> '$.vllm_version', body
FROM incoming_engines
WHERE 'engines/' || base || '.json' NOT IN (SELECT key FROM unreadable)
ORDER BY base;
