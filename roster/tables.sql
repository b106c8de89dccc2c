-- The tables of the catalog: what the ledger says, cut into rows and not interpreted (views.sql does that).
--
-- There is no primary key, no unique index and no foreign key on purpose: DuckDB checks them too eagerly when one
-- transaction deletes and inserts the same key, and a log with such a pair may not replay after a kill (duckdb#15836,
-- #18732, #20246). One writer, which replaces all rows of a ledger in one transaction, keeps the rows unique.
-- Times are the ledger's own text, ISO 8601 in UTC: they sort as they stand.

CREATE MACRO finite_or_null(found) AS
    CASE WHEN isfinite(try_cast(found AS DOUBLE)) THEN try_cast(found AS DOUBLE) END;

CREATE TABLE meta (
    schema_version VARCHAR NOT NULL,
    synced_at VARCHAR NOT NULL,
    max_opponents INTEGER NOT NULL CHECK (max_opponents >= 0)
);
COMMENT ON TABLE meta IS 'One row: which schema this file has, when it was last synced, how many wrong adapters a score uses at most.';

CREATE TABLE step_versions (
    kind VARCHAR NOT NULL,
    version VARCHAR NOT NULL
);
COMMENT ON TABLE step_versions IS 'The version each step has in the code that synced last. A verdict made with another one is stale.';

CREATE TABLE bases (
    base VARCHAR NOT NULL,
    etag VARCHAR NOT NULL,
    served_model VARCHAR NOT NULL,
    exclusions JSON,
    body JSON NOT NULL
);
COMMENT ON TABLE bases IS 'One row per registered base model; body is its base.json.';

CREATE TABLE ledgers (
    key VARCHAR NOT NULL,
    etag VARCHAR NOT NULL,
    author VARCHAR NOT NULL,
    adapter_digest VARCHAR NOT NULL,
    base VARCHAR NOT NULL,
    body JSON NOT NULL
);
COMMENT ON TABLE ledgers IS 'One row per adapter: its ledger object in the store, at the ETag it was read with.';

CREATE TABLE submissions (
    key VARCHAR NOT NULL,
    run VARCHAR NOT NULL,
    submission VARCHAR NOT NULL
);
COMMENT ON TABLE submissions IS 'One row per time an adapter was submitted. Submissions compare as text; the highest is the latest.';

CREATE TABLE steps (
    key VARCHAR NOT NULL,
    author VARCHAR NOT NULL,
    base VARCHAR NOT NULL,
    adapter_digest VARCHAR NOT NULL,
    position INTEGER NOT NULL CHECK (position >= 0),
    kind VARCHAR NOT NULL,
    step_key VARCHAR,
    attempt INTEGER,
    code_version VARCHAR,
    inputs JSON,
    outcome VARCHAR NOT NULL,
    code VARCHAR,
    reason VARCHAR,
    result JSON,
    started_at VARCHAR,
    finished_at VARCHAR,
    worker VARCHAR,
    flow_run VARCHAR
);
COMMENT ON TABLE steps IS 'One row per step in a ledger, in the ledger''s order (position counts from 0).';

CREATE TABLE figures (
    key VARCHAR NOT NULL,
    position INTEGER NOT NULL,
    name VARCHAR NOT NULL,
    value DOUBLE CHECK (value IS NULL OR isfinite(value)),
    problem VARCHAR,
    CHECK (value IS NOT NULL OR problem IS NOT NULL)
);
COMMENT ON TABLE figures IS 'One row per number in a verdict: own, base, base_again, control, wrong:<author>, margin, lower, upper. Not finite: NULL, and the problem says what was found.';

CREATE TABLE unreadable (
    key VARCHAR NOT NULL,
    etag VARCHAR NOT NULL,
    reason VARCHAR NOT NULL
);
COMMENT ON TABLE unreadable IS 'One row per object of the store that is no ledger or base.json we know how to read.';
