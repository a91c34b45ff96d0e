CREATE TABLE delayline_schema (
    version INTEGER NOT NULL,
    revision INTEGER,
    PRIMARY KEY (version)
);

CREATE TABLE delayline_queues (
    name VARCHAR(200) NOT NULL,
    PRIMARY KEY (name)
);

CREATE TABLE delayline_messages (
    seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    queue VARCHAR(200) NOT NULL,
    id VARCHAR(250) NOT NULL,
    headers BLOB NOT NULL,
    body BLOB NOT NULL,
    expires BIGINT
);

CREATE INDEX delayline_messages_order ON delayline_messages (queue, seq);

CREATE TABLE delayline_decisions (
    id VARCHAR(120) NOT NULL,
    value VARCHAR(120) NOT NULL,
    PRIMARY KEY (id)
);

CREATE TABLE "sales.timeouts" (
    seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    id VARCHAR(250) NOT NULL,
    destination VARCHAR(200) NOT NULL,
    due BIGINT NOT NULL,
    headers BLOB NOT NULL,
    body BLOB NOT NULL,
    retry_count INTEGER NOT NULL,
    UNIQUE (id)
);

CREATE INDEX "sales.timeouts.Index_Time" ON "sales.timeouts" (due, seq);

CREATE TABLE delayline_journal (
    seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    store VARCHAR(128) NOT NULL,
    event VARCHAR(11) NOT NULL,
    id VARCHAR(250) NOT NULL,
    destination VARCHAR(200) NOT NULL,
    due BIGINT NOT NULL,
    at BIGINT NOT NULL,
    retries INTEGER NOT NULL
);

CREATE TABLE delayline_journal_exports (
    directory VARCHAR(250) NOT NULL,
    path VARCHAR(500) NOT NULL,
    entries BIGINT NOT NULL,
    finished BIGINT NOT NULL,
    PRIMARY KEY (directory)
);

CREATE TABLE delayline_dispatchers (
    name VARCHAR(120) NOT NULL,
    owner VARCHAR(120) NOT NULL,
    wave BIGINT NOT NULL,
    stopping INTEGER NOT NULL,
    until BIGINT NOT NULL,
    PRIMARY KEY (name)
);

CREATE TABLE delayline_dispatcher_shards (
    dispatcher VARCHAR(120) NOT NULL,
    shard INTEGER NOT NULL,
    wave BIGINT NOT NULL,
    place VARCHAR(120) NOT NULL,
    dispatched BIGINT NOT NULL,
    retried BIGINT NOT NULL,
    failed BIGINT NOT NULL,
    p50 FLOAT,
    p99 FLOAT,
    longest FLOAT,
    seen BIGINT NOT NULL,
    PRIMARY KEY (dispatcher, shard)
);

CREATE TABLE delayline_spark_runs (
    run VARCHAR(250) NOT NULL,
    batch BIGINT NOT NULL,
    stored BIGINT NOT NULL,
    duplicates BIGINT NOT NULL,
    rejected BIGINT NOT NULL,
    finished BIGINT,
    PRIMARY KEY (run)
);

CREATE TABLE delayline_spark_pieces (
    name VARCHAR(64) NOT NULL,
    run VARCHAR(250) NOT NULL,
    piece BIGINT NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (name)
);

CREATE TABLE delayline_spark_readers (
    reader VARCHAR(64) NOT NULL,
    owner VARCHAR(64) NOT NULL,
    last BIGINT NOT NULL,
    PRIMARY KEY (reader)
);

CREATE TABLE delayline_spark_taken (
    reader VARCHAR(64) NOT NULL,
    claim BIGINT NOT NULL,
    id VARCHAR(250) NOT NULL,
    destination VARCHAR(200) NOT NULL,
    due BIGINT NOT NULL,
    headers BLOB NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (reader, claim)
);

CREATE TABLE delayline_cold_tiers (
    store VARCHAR(128) NOT NULL,
    tier VARCHAR(16) NOT NULL,
    PRIMARY KEY (store)
);

CREATE TABLE delayline_cold_counts (
    file VARCHAR(64) NOT NULL,
    destination VARCHAR(200) NOT NULL,
    messages BIGINT NOT NULL,
    PRIMARY KEY (file, destination)
);

CREATE TABLE delayline_cold_tombstones (
    file VARCHAR(64) NOT NULL,
    id VARCHAR(250) NOT NULL,
    destination VARCHAR(200) NOT NULL,
    PRIMARY KEY (file, id)
);

CREATE TABLE delayline_cold_files (
    name VARCHAR(64) NOT NULL,
    store VARCHAR(128) NOT NULL,
    state VARCHAR(16) NOT NULL,
    due_hour VARCHAR(10) NOT NULL,
    messages BIGINT NOT NULL,
    min_due BIGINT NOT NULL,
    max_due BIGINT NOT NULL,
    changed BIGINT NOT NULL,
    PRIMARY KEY (name)
);

CREATE INDEX delayline_cold_files_order ON delayline_cold_files (store, state, min_due);

CREATE TABLE delayline_migrations (
    run VARCHAR(40) NOT NULL,
    state VARCHAR(40) NOT NULL,
    parameters BLOB NOT NULL,
    started BIGINT NOT NULL,
    finished BIGINT,
    PRIMARY KEY (run)
);

CREATE TABLE delayline_migration_parts (
    run VARCHAR(40) NOT NULL,
    part BIGINT NOT NULL,
    endpoint VARCHAR(250) NOT NULL,
    source_table VARCHAR(250) NOT NULL,
    owner VARCHAR(250),
    target VARCHAR(250) NOT NULL,
    held VARCHAR(250) NOT NULL,
    rows BIGINT NOT NULL,
    batches BIGINT NOT NULL,
    PRIMARY KEY (run, part)
);

CREATE TABLE delayline_migration_batches (
    run VARCHAR(40) NOT NULL,
    part BIGINT NOT NULL,
    batch BIGINT NOT NULL,
    rows BIGINT NOT NULL,
    state VARCHAR(40) NOT NULL,
    attempts BIGINT NOT NULL,
    PRIMARY KEY (run, part, batch)
);

CREATE TABLE delayline_migration_aside (
    run VARCHAR(40) NOT NULL,
    part BIGINT NOT NULL,
    batch BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    number BIGINT NOT NULL,
    id BLOB NOT NULL,
    reason VARCHAR(1000) NOT NULL,
    PRIMARY KEY (run, part, batch, attempt, number)
);
