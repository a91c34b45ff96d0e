CREATE TABLE delayline_schema (
    version INTEGER NOT NULL,
    revision INTEGER,
    PRIMARY KEY (version)
);

CREATE TABLE delayline_queues (
    name VARCHAR(200) COLLATE utf8mb4_nopad_bin NOT NULL,
    PRIMARY KEY (name)
);

CREATE TABLE delayline_messages (
    seq BIGINT NOT NULL AUTO_INCREMENT,
    queue VARCHAR(200) COLLATE utf8mb4_nopad_bin NOT NULL,
    id VARCHAR(250) COLLATE utf8mb4_nopad_bin NOT NULL,
    headers LONGBLOB NOT NULL,
    `body` LONGBLOB NOT NULL,
    expires DATETIME(6),
    PRIMARY KEY (seq)
);

CREATE INDEX delayline_messages_order ON delayline_messages (queue, seq);

CREATE TABLE delayline_decisions (
    id VARCHAR(120) COLLATE utf8mb4_nopad_bin NOT NULL,
    value VARCHAR(120) COLLATE utf8mb4_nopad_bin NOT NULL,
    PRIMARY KEY (id)
);

CREATE TABLE `sales.timeouts` (
    seq BIGINT NOT NULL AUTO_INCREMENT,
    id VARCHAR(250) COLLATE utf8mb4_nopad_bin NOT NULL,
    destination VARCHAR(200) COLLATE utf8mb4_nopad_bin NOT NULL,
    due DATETIME(6) NOT NULL,
    headers LONGBLOB NOT NULL,
    `body` LONGBLOB NOT NULL,
    retry_count INTEGER NOT NULL,
    leased_until DATETIME(6),
    PRIMARY KEY (seq),
    UNIQUE (id)
);

CREATE INDEX `sales.timeouts.Index_Time` ON `sales.timeouts` (due, seq);

CREATE TABLE delayline_journal (
    seq BIGINT NOT NULL AUTO_INCREMENT,
    store VARCHAR(128) COLLATE utf8mb4_nopad_bin NOT NULL,
    event VARCHAR(11) COLLATE utf8mb4_nopad_bin NOT NULL,
    id VARCHAR(250) COLLATE utf8mb4_nopad_bin NOT NULL,
    destination VARCHAR(200) COLLATE utf8mb4_nopad_bin NOT NULL,
    due DATETIME(6) NOT NULL,
    at DATETIME(6) NOT NULL,
    retries INTEGER NOT NULL,
    PRIMARY KEY (seq)
);

CREATE TABLE delayline_journal_exports (
    directory VARCHAR(250) COLLATE utf8mb4_nopad_bin NOT NULL,
    path VARCHAR(500) COLLATE utf8mb4_nopad_bin NOT NULL,
    entries BIGINT NOT NULL,
    finished DATETIME(6) NOT NULL,
    PRIMARY KEY (directory)
);

CREATE TABLE delayline_dispatchers (
    name VARCHAR(120) COLLATE utf8mb4_nopad_bin NOT NULL,
    owner VARCHAR(120) COLLATE utf8mb4_nopad_bin NOT NULL,
    wave BIGINT NOT NULL,
    stopping INTEGER NOT NULL,
    until DATETIME(6) NOT NULL,
    PRIMARY KEY (name)
);

CREATE TABLE delayline_dispatcher_shards (
    dispatcher VARCHAR(120) COLLATE utf8mb4_nopad_bin NOT NULL,
    shard INTEGER NOT NULL,
    wave BIGINT NOT NULL,
    place VARCHAR(120) COLLATE utf8mb4_nopad_bin NOT NULL,
    dispatched BIGINT NOT NULL,
    retried BIGINT NOT NULL,
    failed BIGINT NOT NULL,
    p50 FLOAT(53),
    p99 FLOAT(53),
    longest FLOAT(53),
    seen DATETIME(6) NOT NULL,
    PRIMARY KEY (dispatcher, shard)
);

CREATE TABLE delayline_spark_runs (
    run VARCHAR(250) COLLATE utf8mb4_nopad_bin NOT NULL,
    batch BIGINT NOT NULL,
    stored BIGINT NOT NULL,
    duplicates BIGINT NOT NULL,
    rejected BIGINT NOT NULL,
    finished DATETIME(6),
    PRIMARY KEY (run)
);

CREATE TABLE delayline_spark_pieces (
    name VARCHAR(64) COLLATE utf8mb4_nopad_bin NOT NULL,
    run VARCHAR(250) COLLATE utf8mb4_nopad_bin NOT NULL,
    piece BIGINT NOT NULL,
    content LONGBLOB NOT NULL,
    PRIMARY KEY (name)
);

CREATE TABLE delayline_spark_readers (
    reader VARCHAR(64) COLLATE utf8mb4_nopad_bin NOT NULL,
    owner VARCHAR(64) COLLATE utf8mb4_nopad_bin NOT NULL,
    last BIGINT NOT NULL,
    PRIMARY KEY (reader)
);

CREATE TABLE delayline_spark_taken (
    reader VARCHAR(64) COLLATE utf8mb4_nopad_bin NOT NULL,
    claim BIGINT NOT NULL,
    id VARCHAR(250) COLLATE utf8mb4_nopad_bin NOT NULL,
    destination VARCHAR(200) COLLATE utf8mb4_nopad_bin NOT NULL,
    due DATETIME(6) NOT NULL,
    headers LONGBLOB NOT NULL,
    `body` LONGBLOB NOT NULL,
    PRIMARY KEY (reader, claim)
);

CREATE TABLE delayline_cold_tiers (
    store VARCHAR(128) COLLATE utf8mb4_nopad_bin NOT NULL,
    tier VARCHAR(16) NOT NULL,
    PRIMARY KEY (store)
);

CREATE TABLE delayline_cold_counts (
    file VARCHAR(64) COLLATE utf8mb4_nopad_bin NOT NULL,
    destination VARCHAR(200) COLLATE utf8mb4_nopad_bin NOT NULL,
    messages BIGINT NOT NULL,
    PRIMARY KEY (file, destination)
);

CREATE TABLE delayline_cold_tombstones (
    file VARCHAR(64) COLLATE utf8mb4_nopad_bin NOT NULL,
    id VARCHAR(250) COLLATE utf8mb4_nopad_bin NOT NULL,
    destination VARCHAR(200) COLLATE utf8mb4_nopad_bin NOT NULL,
    PRIMARY KEY (file, id)
);

CREATE TABLE delayline_cold_files (
    name VARCHAR(64) COLLATE utf8mb4_nopad_bin NOT NULL,
    store VARCHAR(128) COLLATE utf8mb4_nopad_bin NOT NULL,
    state VARCHAR(16) COLLATE utf8mb4_nopad_bin NOT NULL,
    due_hour VARCHAR(10) COLLATE utf8mb4_nopad_bin NOT NULL,
    messages BIGINT NOT NULL,
    min_due BIGINT NOT NULL,
    max_due BIGINT NOT NULL,
    changed DATETIME(6) NOT NULL,
    PRIMARY KEY (name)
);

CREATE INDEX delayline_cold_files_order ON delayline_cold_files (store, state, min_due);

CREATE TABLE delayline_migrations (
    run VARCHAR(40) COLLATE utf8mb4_nopad_bin NOT NULL,
    state VARCHAR(40) COLLATE utf8mb4_nopad_bin NOT NULL,
    parameters LONGBLOB NOT NULL,
    started DATETIME(6) NOT NULL,
    finished DATETIME(6),
    PRIMARY KEY (run)
);

CREATE TABLE delayline_migration_parts (
    run VARCHAR(40) COLLATE utf8mb4_nopad_bin NOT NULL,
    part BIGINT NOT NULL,
    endpoint VARCHAR(250) COLLATE utf8mb4_nopad_bin NOT NULL,
    source_table VARCHAR(250) COLLATE utf8mb4_nopad_bin NOT NULL,
    owner VARCHAR(250) COLLATE utf8mb4_nopad_bin,
    target VARCHAR(250) COLLATE utf8mb4_nopad_bin NOT NULL,
    held VARCHAR(250) COLLATE utf8mb4_nopad_bin NOT NULL,
    `rows` BIGINT NOT NULL,
    batches BIGINT NOT NULL,
    PRIMARY KEY (run, part)
);

CREATE TABLE delayline_migration_batches (
    run VARCHAR(40) COLLATE utf8mb4_nopad_bin NOT NULL,
    part BIGINT NOT NULL,
    batch BIGINT NOT NULL,
    `rows` BIGINT NOT NULL,
    state VARCHAR(40) COLLATE utf8mb4_nopad_bin NOT NULL,
    attempts BIGINT NOT NULL,
    PRIMARY KEY (run, part, batch)
);

CREATE TABLE delayline_migration_aside (
    run VARCHAR(40) COLLATE utf8mb4_nopad_bin NOT NULL,
    part BIGINT NOT NULL,
    batch BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    number BIGINT NOT NULL,
    id LONGBLOB NOT NULL,
    reason VARCHAR(1000) COLLATE utf8mb4_nopad_bin NOT NULL,
    PRIMARY KEY (run, part, batch, attempt, number)
);
