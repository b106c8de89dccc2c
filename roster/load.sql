-- Puts new and changed objects in place of what the tables said about them, in one transaction of the caller.
-- The caller fills the temporary tables incoming (key, etag, body), gone (key) and incoming_bases (base, etag, body).

CREATE TEMP TABLE parsed AS
SELECT
    key,
    etag,
    body,
    json_valid(body) AS is_json,
    CASE WHEN json_valid(body) THEN from_json(body, '{
        "schema": "VARCHAR", "author": "VARCHAR", "adapter_digest": "VARCHAR", "base": "VARCHAR",
        "submissions": [{"run": "VARCHAR", "submission": "VARCHAR"}],
        "steps": [{
            "kind": "VARCHAR", "step_key": "VARCHAR", "attempt": "INTEGER", "code_version": "VARCHAR",
            "inputs": "JSON", "outcome": "VARCHAR", "result": "JSON",
            "started_at": "VARCHAR", "finished_at": "VARCHAR", "worker": "VARCHAR", "flow_run": "VARCHAR"
        }]
    }') END AS doc
FROM incoming;

CREATE TEMP TABLE judged AS
SELECT
    *,
    CASE
        WHEN NOT is_json THEN 'it is not JSON'
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
        WHEN json_type(body, '$.steps') IS DISTINCT FROM 'ARRAY' THEN 'steps is not a list'
        WHEN json_type(body, '$.submissions') IS DISTINCT FROM 'ARRAY' THEN 'submissions is not a list'
        WHEN len(list_filter(doc.submissions, lambda s: s.run IS NULL OR s.submission IS NULL)) > 0
            THEN 'a submission lacks its run or its name'
        WHEN len(list_filter(doc.steps, lambda s: coalesce(s.kind, '') NOT IN
            ('inspected', 'converted', 'checked', 'staged', 'opponents', 'scored', 'verdict'))) > 0
            THEN 'a step has a kind that is not known here'
        WHEN len(list_filter(doc.steps, lambda s: coalesce(s.outcome, '') NOT IN
            ('done', 'ready', 'quarantined', 'inconclusive', 'waiting', 'stopped'))) > 0
            THEN 'a step has an outcome that is not known here'
    END AS refusal
FROM parsed;

CREATE TEMP TABLE replaced AS SELECT key FROM incoming UNION SELECT key FROM gone;
DELETE FROM figures WHERE key IN (FROM replaced);
DELETE FROM steps WHERE key IN (FROM replaced);
DELETE FROM submissions WHERE key IN (FROM replaced);
DELETE FROM ledgers WHERE key IN (FROM replaced);
DELETE FROM unreadable WHERE key IN (FROM replaced) OR key LIKE 'bases/%';
DELETE FROM bases;

INSERT INTO unreadable SELECT key, etag, refusal FROM judged WHERE refusal IS NOT NULL;

INSERT INTO ledgers
SELECT key, etag, doc.author, doc.adapter_digest, doc.base, body FROM judged WHERE refusal IS NULL;

INSERT INTO submissions
SELECT DISTINCT key, entry.run, entry.submission
FROM (SELECT key, unnest(doc.submissions) AS entry FROM judged WHERE refusal IS NULL);

INSERT INTO steps
SELECT
    key, author, base, adapter_digest, position, step.kind, step.step_key, step.attempt, step.code_version,
    step.inputs, step.outcome, step.result ->> '$.code', step.result ->> '$.reason', step.result,
    step.started_at, step.finished_at, step.worker, step.flow_run
FROM (
    SELECT
        key, doc.author AS author, doc.base AS base, doc.adapter_digest AS adapter_digest,
        unnest(doc.steps) AS step, generate_subscripts(doc.steps, 1) - 1 AS position
    FROM judged WHERE refusal IS NULL
);

-- A number that is no finite number is left out, with the reason, before any comparison can meet it: DuckDB sorts NaN
-- as the greatest value and holds it equal to itself.
INSERT INTO figures
SELECT
    key, position, name,
    finite_or_null(found),
    CASE WHEN finite_or_null(found) IS NULL THEN name || ' is ' || found || ', not a finite number' END
FROM (
    SELECT key, position, entry.name AS name, entry.found AS found
    FROM (
        SELECT key, position, unnest(list_concat(
            [
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
                lambda author: {'name': 'wrong:' || author, 'found': result ->> ('$.wrong."' || author || '"')}
            )
        )) AS entry
        FROM steps
        WHERE kind = 'verdict' AND outcome IN ('done', 'ready', 'quarantined', 'inconclusive')
          AND key IN (SELECT key FROM incoming)
    )
    WHERE entry.found IS NOT NULL
);

INSERT INTO unreadable
SELECT
    'bases/' || base || '/base.json', etag,
    CASE WHEN NOT json_valid(body) THEN 'it is not JSON' ELSE 'served_model is missing' END
FROM incoming_bases
WHERE NOT json_valid(body) OR CASE WHEN json_valid(body) THEN body ->> '$.served_model' END IS NULL;

INSERT INTO bases
SELECT base, etag, body ->> '$.served_model', body -> '$.exclusions', body
FROM incoming_bases
WHERE 'bases/' || base || '/base.json' NOT IN (SELECT key FROM unreadable);

DROP TABLE parsed;
DROP TABLE judged;
DROP TABLE replaced;
