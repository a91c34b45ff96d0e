IF object_id(N'[dbo].delayline_schema', N'U') IS NULL
CREATE TABLE [dbo].delayline_schema (
    version INTEGER NOT NULL,
    revision INTEGER NULL,
    PRIMARY KEY (version)
);

IF object_id(N'[dbo].delayline_queues', N'U') IS NULL
CREATE TABLE [dbo].delayline_queues (
    name NVARCHAR(200) COLLATE Latin1_General_100_BIN2 NOT NULL,
    PRIMARY KEY (name)
);

IF object_id(N'[dbo].delayline_messages', N'U') IS NULL
CREATE TABLE [dbo].delayline_messages (
    seq BIGINT NOT NULL IDENTITY,
    queue NVARCHAR(200) COLLATE Latin1_General_100_BIN2 NOT NULL,
    id NVARCHAR(250) COLLATE Latin1_General_100_BIN2 NOT NULL,
    headers VARBINARY(max) NOT NULL,
    body VARBINARY(max) NOT NULL,
    expires DATETIME2(6) NULL,
    PRIMARY KEY (seq)
);

IF NOT EXISTS (SELECT * FROM sys.indexes WHERE name = N'delayline_messages_order' AND object_id = object_id(N'[dbo].delayline_messages'))
CREATE INDEX delayline_messages_order ON [dbo].delayline_messages (queue, seq);

IF object_id(N'[dbo].delayline_leases', N'U') IS NULL
CREATE TABLE [dbo].delayline_leases (
    store NVARCHAR(128) COLLATE Latin1_General_100_BIN2 NOT NULL,
    id NVARCHAR(250) COLLATE Latin1_General_100_BIN2 NOT NULL,
    until DATETIME2(6) NOT NULL,
    PRIMARY KEY (store, id)
);

IF object_id(N'[dbo].delayline_decisions', N'U') IS NULL
CREATE TABLE [dbo].delayline_decisions (
    id NVARCHAR(120) COLLATE Latin1_General_100_BIN2 NOT NULL,
    value NVARCHAR(120) COLLATE Latin1_General_100_BIN2 NOT NULL,
    PRIMARY KEY (id)
);

IF object_id(N'[dbo].[sales.timeouts]', N'U') IS NULL
CREATE TABLE [dbo].[sales.timeouts] (
    [Id] NVARCHAR(250) NOT NULL,
    [Destination] NVARCHAR(200) NULL,
    [State] VARBINARY(max) NULL,
    [Time] DATETIME NULL,
    [Headers] VARBINARY(max) NOT NULL,
    [RetryCount] INTEGER NOT NULL DEFAULT (0),
    PRIMARY KEY ([Id])
);

IF NOT EXISTS (SELECT * FROM sys.indexes WHERE name = N'Index_Time' AND object_id = object_id(N'[dbo].[sales.timeouts]'))
CREATE INDEX [Index_Time] ON [dbo].[sales.timeouts] ([Time]);

IF object_id(N'[dbo].delayline_journal', N'U') IS NULL
CREATE TABLE [dbo].delayline_journal (
    seq BIGINT NOT NULL IDENTITY,
    store NVARCHAR(128) COLLATE Latin1_General_100_BIN2 NOT NULL,
    event NVARCHAR(11) COLLATE Latin1_General_100_BIN2 NOT NULL,
    id NVARCHAR(250) COLLATE Latin1_General_100_BIN2 NOT NULL,
    destination NVARCHAR(200) COLLATE Latin1_General_100_BIN2 NOT NULL,
    due DATETIME2(6) NOT NULL,
    at DATETIME2(6) NOT NULL,
    retries INTEGER NOT NULL,
    PRIMARY KEY (seq)
);

IF object_id(N'[dbo].delayline_journal_exports', N'U') IS NULL
CREATE TABLE [dbo].delayline_journal_exports (
    directory NVARCHAR(250) COLLATE Latin1_General_100_BIN2 NOT NULL,
    path NVARCHAR(500) COLLATE Latin1_General_100_BIN2 NOT NULL,
    entries BIGINT NOT NULL,
    finished DATETIME2(6) NOT NULL,
    PRIMARY KEY (directory)
);

IF object_id(N'[dbo].delayline_dispatchers', N'U') IS NULL
CREATE TABLE [dbo].delayline_dispatchers (
    name NVARCHAR(120) COLLATE Latin1_General_100_BIN2 NOT NULL,
    owner NVARCHAR(120) COLLATE Latin1_General_100_BIN2 NOT NULL,
    wave BIGINT NOT NULL,
    stopping INTEGER NOT NULL,
    until DATETIME2(6) NOT NULL,
    PRIMARY KEY (name)
);

IF object_id(N'[dbo].delayline_dispatcher_shards', N'U') IS NULL
CREATE TABLE [dbo].delayline_dispatcher_shards (
    dispatcher NVARCHAR(120) COLLATE Latin1_General_100_BIN2 NOT NULL,
    shard INTEGER NOT NULL,
    wave BIGINT NOT NULL,
    place NVARCHAR(120) COLLATE Latin1_General_100_BIN2 NOT NULL,
    dispatched BIGINT NOT NULL,
    retried BIGINT NOT NULL,
    failed BIGINT NOT NULL,
    p50 FLOAT(53) NULL,
    p99 FLOAT(53) NULL,
    longest FLOAT(53) NULL,
    seen DATETIME2(6) NOT NULL,
    PRIMARY KEY (dispatcher, shard)
);

IF object_id(N'[dbo].delayline_spark_runs', N'U') IS NULL
CREATE TABLE [dbo].delayline_spark_runs (
    run NVARCHAR(250) COLLATE Latin1_General_100_BIN2 NOT NULL,
    batch BIGINT NOT NULL,
    stored BIGINT NOT NULL,
    duplicates BIGINT NOT NULL,
    rejected BIGINT NOT NULL,
    finished DATETIME2(6) NULL,
    PRIMARY KEY (run)
);

IF object_id(N'[dbo].delayline_spark_pieces', N'U') IS NULL
CREATE TABLE [dbo].delayline_spark_pieces (
    name NVARCHAR(64) COLLATE Latin1_General_100_BIN2 NOT NULL,
    run NVARCHAR(250) COLLATE Latin1_General_100_BIN2 NOT NULL,
    piece BIGINT NOT NULL,
    content VARBINARY(max) NOT NULL,
    PRIMARY KEY (name)
);

IF object_id(N'[dbo].delayline_spark_readers', N'U') IS NULL
CREATE TABLE [dbo].delayline_spark_readers (
    reader NVARCHAR(64) COLLATE Latin1_General_100_BIN2 NOT NULL,
    owner NVARCHAR(64) COLLATE Latin1_General_100_BIN2 NOT NULL,
    last BIGINT NOT NULL,
    PRIMARY KEY (reader)
);

IF object_id(N'[dbo].delayline_spark_taken', N'U') IS NULL
CREATE TABLE [dbo].delayline_spark_taken (
    reader NVARCHAR(64) COLLATE Latin1_General_100_BIN2 NOT NULL,
    claim BIGINT NOT NULL,
    id NVARCHAR(250) COLLATE Latin1_General_100_BIN2 NOT NULL,
    destination NVARCHAR(200) COLLATE Latin1_General_100_BIN2 NOT NULL,
    due DATETIME2(6) NOT NULL,
    headers VARBINARY(max) NOT NULL,
    body VARBINARY(max) NOT NULL,
    PRIMARY KEY (reader, claim)
);

IF object_id(N'[dbo].delayline_cold_tiers', N'U') IS NULL
CREATE TABLE [dbo].delayline_cold_tiers (
    store NVARCHAR(128) COLLATE Latin1_General_100_BIN2 NOT NULL,
    tier VARCHAR(16) NOT NULL,
    PRIMARY KEY (store)
);

IF object_id(N'[dbo].delayline_cold_counts', N'U') IS NULL
CREATE TABLE [dbo].delayline_cold_counts (
    [file] NVARCHAR(64) COLLATE Latin1_General_100_BIN2 NOT NULL,
    destination NVARCHAR(200) COLLATE Latin1_General_100_BIN2 NOT NULL,
    messages BIGINT NOT NULL,
    PRIMARY KEY ([file], destination)
);

IF object_id(N'[dbo].delayline_cold_tombstones', N'U') IS NULL
CREATE TABLE [dbo].delayline_cold_tombstones (
    [file] NVARCHAR(64) COLLATE Latin1_General_100_BIN2 NOT NULL,
    id NVARCHAR(250) COLLATE Latin1_General_100_BIN2 NOT NULL,
    destination NVARCHAR(200) COLLATE Latin1_General_100_BIN2 NOT NULL,
    PRIMARY KEY ([file], id)
);

IF object_id(N'[dbo].delayline_cold_files', N'U') IS NULL
CREATE TABLE [dbo].delayline_cold_files (
    name NVARCHAR(64) COLLATE Latin1_General_100_BIN2 NOT NULL,
    store NVARCHAR(128) COLLATE Latin1_General_100_BIN2 NOT NULL,
    state NVARCHAR(16) COLLATE Latin1_General_100_BIN2 NOT NULL,
    due_hour NVARCHAR(10) COLLATE Latin1_General_100_BIN2 NOT NULL,
    messages BIGINT NOT NULL,
    min_due BIGINT NOT NULL,
    max_due BIGINT NOT NULL,
    changed DATETIME2(6) NOT NULL,
    PRIMARY KEY (name)
);

IF NOT EXISTS (SELECT * FROM sys.indexes WHERE name = N'delayline_cold_files_order' AND object_id = object_id(N'[dbo].delayline_cold_files'))
CREATE INDEX delayline_cold_files_order ON [dbo].delayline_cold_files (store, state, min_due);

IF object_id(N'[dbo].delayline_migrations', N'U') IS NULL
CREATE TABLE [dbo].delayline_migrations (
    run NVARCHAR(40) COLLATE Latin1_General_100_BIN2 NOT NULL,
    state NVARCHAR(40) COLLATE Latin1_General_100_BIN2 NOT NULL,
    parameters VARBINARY(max) NOT NULL,
    started DATETIME2(6) NOT NULL,
    finished DATETIME2(6) NULL,
    PRIMARY KEY (run)
);

IF object_id(N'[dbo].delayline_migration_parts', N'U') IS NULL
CREATE TABLE [dbo].delayline_migration_parts (
    run NVARCHAR(40) COLLATE Latin1_General_100_BIN2 NOT NULL,
    part BIGINT NOT NULL,
    endpoint NVARCHAR(250) COLLATE Latin1_General_100_BIN2 NOT NULL,
    source_table NVARCHAR(250) COLLATE Latin1_General_100_BIN2 NOT NULL,
    owner NVARCHAR(250) COLLATE Latin1_General_100_BIN2 NULL,
    target NVARCHAR(250) COLLATE Latin1_General_100_BIN2 NOT NULL,
    held NVARCHAR(250) COLLATE Latin1_General_100_BIN2 NOT NULL,
    rows BIGINT NOT NULL,
    batches BIGINT NOT NULL,
    PRIMARY KEY (run, part)
);

IF object_id(N'[dbo].delayline_migration_batches', N'U') IS NULL
CREATE TABLE [dbo].delayline_migration_batches (
    run NVARCHAR(40) COLLATE Latin1_General_100_BIN2 NOT NULL,
    part BIGINT NOT NULL,
    batch BIGINT NOT NULL,
    rows BIGINT NOT NULL,
    state NVARCHAR(40) COLLATE Latin1_General_100_BIN2 NOT NULL,
    attempts BIGINT NOT NULL,
    PRIMARY KEY (run, part, batch)
);

IF object_id(N'[dbo].delayline_migration_aside', N'U') IS NULL
CREATE TABLE [dbo].delayline_migration_aside (
    run NVARCHAR(40) COLLATE Latin1_General_100_BIN2 NOT NULL,
    part BIGINT NOT NULL,
    batch BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    number BIGINT NOT NULL,
    id VARBINARY(max) NOT NULL,
    reason NVARCHAR(1000) COLLATE Latin1_General_100_BIN2 NOT NULL,
    PRIMARY KEY (run, part, batch, attempt, number)
);
