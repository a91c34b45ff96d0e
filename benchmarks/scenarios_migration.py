"""A million timeouts of .NET move from PostgreSQL, against what the sink takes when nothing is in front of it."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from typing import TYPE_CHECKING

import psycopg

from benchmarks import bare_rabbitmq as bare
from benchmarks.bare import SENT_HEADERS
from benchmarks.common import DESTINATION, NAME, Figures, scaled
from benchmarks.servers import postgresql
from benchmarks.servers_rabbitmq import rabbitmq
from delayline import SqlDelayedMessageStore

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

ROWS = scaled(1_000_000)
SINK = scaled(100_000)
TABLE = f'"{NAME}_TimeoutData"'
STORE = f'"{NAME}.timeouts"'
CREATE = f"""
create table {TABLE}(
    "Id" uuid not null, "Destination" character varying(200), "SagaId" uuid, "State" bytea,
    "Time" timestamp, "Headers" text, "PersistenceVersion" character varying(23), primary key ("Id"));
create index "{NAME}_TimeoutData_TimeIdx" on {TABLE} ("Time" asc);
create index "{NAME}_TimeoutData_SagaIdx" on {TABLE} ("SagaId" asc);
"""
FILL = f"""
INSERT INTO {TABLE} SELECT gen_random_uuid(), '{DESTINATION}', gen_random_uuid(), convert_to(repeat('b', 256), 'UTF8'),
now() at time zone 'utc' + interval '1 day' + make_interval(secs => mod(n::bigint * 7919, 2592000)),
replace(%s::text, 'NUMBER', n::text),
'6.0.0.0' FROM generate_series(1, %s) AS n
"""  # noqa: S608 - ours
READ = f"""COPY (SELECT "Id"::text, "Destination", "Time" AT TIME ZONE 'utc', convert_to("Headers", 'UTF8'), "State", 0
FROM {TABLE}) TO STDOUT (FORMAT binary)"""  # noqa: S608 - ours
WRITE = f"COPY {STORE} (id, destination, due, headers, body, retry_count) FROM STDIN (FORMAT binary)"
HELD = '"bench_held"'
TAKE_ASIDE = (
    f'CREATE TABLE {HELD} AS SELECT row_number() OVER (ORDER BY "Time", "Id") AS number, * FROM {TABLE}',  # noqa: S608 - ours
    f"ALTER TABLE {HELD} ADD PRIMARY KEY (number)",
    f"DELETE FROM {TABLE}",  # noqa: S608 - ours
)
LONG = 86_400


async def migrate_million(folder: Path) -> Figures:
    """1 000 000 timeouts to a store and to RabbitMQ's levels, against COPY to COPY, and frames encoded before."""
    return await asyncio.to_thread(_migrate, folder)


def _migrate(folder: Path) -> Figures:
    from delayline.spark import spark_session

    del folder
    spark = spark_session("local[2]")
    figures: Figures = {}
    with postgresql(databases=2) as [source, store]:
        asyncio.run(SqlDelayedMessageStore(store).setup_infrastructure(NAME))
        _fill(source)
        figures["preview seconds"] = _previewed(source, store, spark)
        before = _copied(source, store)
        _emptied(store)
        seconds = _moved(source, store, spark)
        _fill(source)
        raw = 2 * ROWS / (before + _copied(source, store))  # which varies by a third
        figures["driver's most resident MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        figures |= {"to a store seconds": seconds, "COPY to COPY /s": raw, "to a store ratio": ROWS / seconds / raw}
        _fill(source)
        safe = ROWS / _copied(source, store, taken_aside=True)
        figures |= {
            "moved to a holding table, then COPY to COPY /s": safe,
            "to a store, of that": ROWS / seconds / safe,
        }
    with postgresql() as [source], rabbitmq() as broker:
        asyncio.run(_levels(broker))
        raw = bare.encoded_rate(broker, bare.to_levels(SINK, DESTINATION, LONG))
        _fill(source)
        seconds = _moved(source, broker, spark)
        figures |= {"to levels seconds": seconds, "frames /s": raw, "to levels ratio": ROWS / seconds / raw}
    spark.stop()
    return figures


def _fill(url: str) -> None:
    headers = dict(SENT_HEADERS)
    headers["NServiceBus.MessageId"] = "NUMBER"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"DROP TABLE IF EXISTS {TABLE}")
        for statement in filter(str.strip, CREATE.split(";")):
            connection.execute(statement)
        connection.execute(FILL, (json.dumps(headers, indent=2), ROWS))
        connection.execute(f"ANALYZE {TABLE}")
        connection.execute("CHECKPOINT")


def _previewed(source: str, target: str, spark: SparkSession) -> float:
    from delayline.migration import Plan, preview, source_at, target_at

    plan = Plan(source_at("nservicebus-sql", source), target_at(target), [NAME])
    spark.range(10).count()  # a session's first job takes its time
    started = time.perf_counter()
    [found] = preview(plan, spark)
    assert (found.rows, found.problems, found.unmovable) == (ROWS, [], []), found
    return time.perf_counter() - started


def _emptied(store: str) -> None:
    with psycopg.connect(store, autocommit=True) as connection:
        connection.execute(f"TRUNCATE {STORE}")
        connection.execute("CHECKPOINT")


def _moved(source: str, target: str, spark: SparkSession) -> float:
    from delayline.migration import Migration, Plan, source_at, target_at

    started = time.perf_counter()
    outcome = Migration(Plan(source_at("nservicebus-sql", source), target_at(target), [NAME])).run(spark)
    assert outcome.complete, outcome
    return time.perf_counter() - started


def _copied(source: str, target: str, *, taken_aside: bool = False) -> float:
    """Return the seconds it takes to copy from server to server as bytes, into a store that is emptied before.

    taken_aside: from a table into which the rows go first, in the order of their due times, as a migration takes them.
    """
    _emptied(target)
    with psycopg.connect(source, autocommit=True) as reader, psycopg.connect(target, autocommit=True) as writer:
        started = time.perf_counter()
        for statement in TAKE_ASIDE if taken_aside else ():
            reader.execute(statement)
        copied = READ.replace(TABLE, HELD) if taken_aside else READ
        with reader.cursor().copy(copied) as read, writer.cursor().copy(WRITE) as write:
            for piece in read:
                write.write(piece)
        return time.perf_counter() - started


async def _levels(url: str) -> None:
    from delayline.rabbitmq.address import BrokerAddress
    from delayline.rabbitmq.admin.operations import create
    from delayline.rabbitmq.infrastructure import DelayInfrastructure

    await create(BrokerAddress.parse(url), DelayInfrastructure.v2())
    await bare.declare(url, DESTINATION)
