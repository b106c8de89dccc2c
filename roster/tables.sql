-- The tables of the catalog: what the store's objects say, cut into rows. What depends on one ledger alone is worked out
-- once, when the ledger is read (load.sql), so that no question has to read JSON; what depends on more is in views.sql.
--
-- There is no primary key, no unique index and no foreign key on purpose: DuckDB checks them too eagerly when one
-- transaction deletes and inserts the same key, and a log with such a pair may not replay after a kill (duckdb#15836,
-- #18732, #20246). One writer, which replaces all rows of an object in one transaction, keeps the rows unique.
-- Times are the store's own text, ISO 8601 in UTC: they sort as they stand.

CREATE MACRO finite_or_null(found) AS
    CASE WHEN isfinite(try_cast(found AS DOUBLE)) THEN try_cast(found AS DOUBLE) END;

CREATE TABLE meta (
    schema_version VARCHAR NOT NULL,
    synced_at VARCHAR NOT NULL,
    max_opponents INTEGER NOT NULL CHECK (max_opponents >= 0),
    serve_stale BOOLEAN NOT NULL
);

CREATE TABLE step_versions (
    kind VARCHAR NOT NULL,
    version VARCHAR NOT NULL
);

CREATE TABLE bases (
    base VARCHAR NOT NULL,
    etag VARCHAR NOT NULL,
    served_model VARCHAR NOT NULL,
    exclusions JSON,
    body JSON NOT NULL
);

CREATE TABLE engines (
    base VARCHAR NOT NULL,
    etag VARCHAR NOT NULL,
    engine_id VARCHAR NOT NULL,
    vllm_version VARCHAR,
    body JSON NOT NULL
);

CREATE TABLE author_records (
    key VARCHAR NOT NULL,
    etag VARCHAR NOT NULL,
    author VARCHAR NOT NULL,
    body JSON NOT NULL
);

CREATE TABLE author_events (
    key VARCHAR NOT NULL,
    author VARCHAR NOT NULL,
    position INTEGER NOT NULL CHECK (position >= 0),
    act VARCHAR NOT NULL,
    base VARCHAR,
    adapter_digest VARCHAR,
    who VARCHAR NOT NULL,
    "at" VARCHAR NOT NULL,
    why VARCHAR NOT NULL
);

CREATE TABLE ledgers (
    key VARCHAR NOT NULL,
    etag VARCHAR NOT NULL,
    author VARCHAR NOT NULL,
    base VARCHAR NOT NULL,
    adapter_digest VARCHAR NOT NULL,
    run VARCHAR,
    submission VARCHAR,
    submissions INTEGER NOT NULL,
    first_submission VARCHAR,
    state VARCHAR NOT NULL,
    code VARCHAR,
    reason VARCHAR,
    last_step VARCHAR,
    last_position INTEGER,
    last_at VARCHAR,
    verdict VARCHAR,
    verdict_position INTEGER,
    output_digest VARCHAR,
    own DOUBLE,
    base_bpb DOUBLE,
    base_again DOUBLE,
    control DOUBLE,
    margin DOUBLE,
    interval_lower DOUBLE,
    interval_upper DOUBLE,
    wrong_adapters INTEGER,
    bad_numbers VARCHAR,
    measured_at VARCHAR,
    engine_id VARCHAR,
    inspected VARCHAR,
    format VARCHAR,
    rank INTEGER,
    max_lora_rank INTEGER,
    is_3d_lora_weight BOOLEAN,
    needs_mixed_format BOOLEAN,
    uri VARCHAR,
    opponents INTEGER,
    others_then INTEGER,
    steps INTEGER NOT NULL,
    seconds BIGINT NOT NULL,
    engine_seconds DOUBLE NOT NULL,
    first_ready_at VARCHAR,
    check_fault VARCHAR
);

CREATE TABLE submissions (
    key VARCHAR NOT NULL,
    run VARCHAR NOT NULL,
    submission VARCHAR NOT NULL
);

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
    inputs JSON USING COMPRESSION zstd,
    outcome VARCHAR NOT NULL,
    code VARCHAR,
    reason VARCHAR,
    result JSON USING COMPRESSION zstd,
    started_at VARCHAR,
    finished_at VARCHAR,
    seconds BIGINT,
    engine_seconds DOUBLE,
    worker VARCHAR,
    flow_run VARCHAR,
    purged BOOLEAN NOT NULL,
    is_behind_verdict BOOLEAN NOT NULL,
    is_current BOOLEAN NOT NULL
);

CREATE TABLE judgements (
    key VARCHAR NOT NULL,
    author VARCHAR NOT NULL,
    base VARCHAR NOT NULL,
    adapter_digest VARCHAR NOT NULL,
    position INTEGER NOT NULL CHECK (position >= 0),
    attempt INTEGER,
    outcome VARCHAR NOT NULL,
    code VARCHAR,
    codes VARCHAR[],
    reason VARCHAR,
    messages VARCHAR[],
    inspected VARCHAR,
    engine_id VARCHAR,
    output_digest VARCHAR,
    own DOUBLE,
    base_bpb DOUBLE,
    base_again DOUBLE,
    control DOUBLE,
    margin DOUBLE,
    interval_lower DOUBLE,
    interval_upper DOUBLE,
    wrong_adapters INTEGER NOT NULL,
    bad_numbers VARCHAR,
    measured_at VARCHAR,
    latest BOOLEAN NOT NULL
);

CREATE TABLE figures (
    key VARCHAR NOT NULL,
    author VARCHAR NOT NULL,
    base VARCHAR NOT NULL,
    adapter_digest VARCHAR NOT NULL,
    position INTEGER NOT NULL,
    latest BOOLEAN NOT NULL,
    name VARCHAR NOT NULL,
    value DOUBLE CHECK (value IS NULL OR isfinite(value)),
    problem VARCHAR,
    difference DOUBLE,
    difference_lower DOUBLE,
    difference_upper DOUBLE,
    CHECK (value IS NOT NULL OR problem IS NOT NULL)
);

CREATE TABLE served (
    base VARCHAR NOT NULL,
    author VARCHAR NOT NULL,
    adapter_digest VARCHAR NOT NULL,
    run VARCHAR,
    submission VARCHAR,
    served_model VARCHAR NOT NULL,
    output_digest VARCHAR NOT NULL,
    uri VARCHAR NOT NULL,
    format VARCHAR NOT NULL,
    rank INTEGER NOT NULL,
    max_lora_rank INTEGER NOT NULL,
    is_3d_lora_weight BOOLEAN NOT NULL,
    needs_mixed_format BOOLEAN NOT NULL,
    own DOUBLE NOT NULL,
    base_bpb DOUBLE NOT NULL,
    control DOUBLE,
    margin DOUBLE,
    interval_lower DOUBLE,
    interval_upper DOUBLE,
    wrong_adapters INTEGER NOT NULL,
    measured_at VARCHAR,
    stale BOOLEAN NOT NULL,
    key VARCHAR NOT NULL
);

CREATE TABLE unreadable (
    key VARCHAR NOT NULL,
    etag VARCHAR NOT NULL,
    reason VARCHAR NOT NULL
);
