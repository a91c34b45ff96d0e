"""Jobs and streams whose workers, executors, drivers and database are killed again and again: each message counts once.

A broker, which has no transaction with the database, gets what was under way at a kill again, and no more.

`make test-all` kills a few of each. The examination takes an hour; `DELAYLINE_KILLS_SEED` repeats its choices:

    DELAYLINE_KILLS=200 pytest --log-cli-level=warning tests/spark/test_many_kills.py
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from tests.conftest import running
from tests.eventually import eventually
from tests.integration.test_rabbitmq_migration import V2
from tests.servers.mariadb import MariadbServer
from tests.servers.postgresql import PostgresqlServer
from tests.spark.broker import in_levels
from tests.spark.daemon import PLACE
from tests.spark.pipeline_process import kill_session, processes_of
from tests.spark.stores import ENDPOINT, StoreAt

from delayline.bulk.jobs import JobName, PieceParameters
from delayline.bulk.level_pieces import SENT_AT_ONCE
from delayline.spark import JobTarget, schedule, schedule_stream, spark_session
from delayline.spark.options import StoreOptions
from delayline.spark.pieces import PIECES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Engine

logger: logging.Logger = logging.getLogger(__name__)

KILLS: Final = int(os.environ.get("DELAYLINE_KILLS", "6"))
SEED: Final = os.environ.get("DELAYLINE_KILLS_SEED", "1")
#: Rows of a job, and of all files of a stream: enough for some seconds of work, as the table is slow.
ROWS: Final = 3000
FILES: Final = 6
#: The same of a job for a broker, which is faster.
ROWS_SENT: Final = 120_000
#: Tasks of a job that run at once.
TASKS: Final = 2
FOLDER: Final = "files.parquet"
MOST_RUNS: Final = 5  # that a job may need beside those that were killed: a dead database ends a job
RUN_PATIENCE: Final = 600
DUE: Final = datetime(2040, 1, 1, tzinfo=UTC)
SETTINGS: Final = {
    "spark.task.maxFailures": "1000",
    "spark.deploy.maxExecutorRetries": "-1",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.minTaskRuntime": "500ms",
    "spark.sql.shuffle.partitions": "8",
    "spark.sql.adaptive.coalescePartitions.enabled": "false",
    "spark.ui.enabled": "false",
}
SLOW: Final = {
    "postgresql": [
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(0.002); RETURN NEW; END $$",
        'CREATE TRIGGER slow BEFORE INSERT ON "sales.timeouts" FOR EACH ROW EXECUTE FUNCTION slow()',
    ],
    "mariadb": ["CREATE TRIGGER slow BEFORE INSERT ON `sales.timeouts` FOR EACH ROW SET @slow = SLEEP(0.002)"],
}
DRIVERS: Final = {"mariadb": "mariadb+pymysql", "postgresql": "postgresql+psycopg"}
PROGRAM: Final = "import sys; from tests.spark.test_many_kills import drive; drive(*sys.argv[1:])"


class Server(Protocol):
    """A database server of the test's own."""

    def start(self) -> None: ...
    def kill(self) -> None: ...
    def new_database(self) -> str: ...


def drive(kind: str, url: str, folder: str, name: str, broker: str | None = None) -> None:
    """Run a job, or a stream to its end, as a driver with two executors."""
    spark = spark_session(f"local-cluster[{TASKS},1,1024]", conf=SETTINGS)
    target = JobTarget(url, endpoint=ENDPOINT, job_folder=f"{folder}/jobs", delay_levels=broker)
    if kind != "stream":
        schedule(f"{folder}/{FOLDER}", target, run=name, atomic="piece" if kind == "batch" else "job", spark=spark)
        return
    source = spark.readStream.schema(spark.read.parquet(f"{folder}/{FOLDER}").schema).option("maxFilesPerTrigger", "1")
    query = schedule_stream(
        source.parquet(f"{folder}/{FOLDER}"), target, checkpoint=f"{folder}/checkpoint", trigger={"availableNow": True}
    )
    query.awaitTermination()


class Consumer:
    """Takes what is stored while the jobs run, as a dispatcher does, so that what is stored again is seen."""

    def __init__(self, url: str) -> None:
        product, _, rest = url.partition("://")
        self.engine: Engine = create_engine(f"{DRIVERS[product]}://{rest}", pool_pre_ping=True)
        self._table = self.engine.dialect.identifier_preparer.quote(f"{ENDPOINT}.timeouts")
        with self.engine.begin() as connection:
            for statement in (*SLOW[product], "CREATE TABLE taken (id VARCHAR(100))"):
                connection.execute(text(statement))

    def take(self) -> int:
        """Move stored messages to `taken` in one transaction; return how many."""
        locked = f"SELECT id FROM {self._table} LIMIT 500 FOR UPDATE SKIP LOCKED"  # noqa: S608 - quoted
        with self.engine.begin() as connection:
            ids = [{"id": key} for key in connection.scalars(text(locked))]
            if ids:
                connection.execute(text("INSERT INTO taken VALUES (:id)"), ids)
                delete = f"DELETE FROM {self._table} WHERE id = :id"  # noqa: S608 - quoted
                connection.execute(text(delete), ids)
        return len(ids)

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """Take again and again."""
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(0.05):
                with contextlib.suppress(DBAPIError):  # the database is away
                    self.take()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def taken(self) -> Counter[str]:
        """Return how often each message was stored, after the last."""
        while self.take():
            pass
        with self.engine.begin() as connection:
            return Counter(connection.scalars(text("SELECT id FROM taken")))


class Killer:
    """Kills a part of a running job, chosen at random, at a random moment."""

    def __init__(self, server: Server, seed: str) -> None:
        self.kills: Counter[str] = Counter()
        self._server = server
        self._random = random.Random(seed)  # noqa: S311 - repeatable

    def kill_while(self, driver: subprocess.Popen[bytes], number: int) -> int:
        """Kill up to `number` times, until the driver has ended; return its exit code."""
        while self.kills.total() < number:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return driver.wait(self._random.uniform(0.05, 2.0))
            workers = there(driver, "spark.daemon")
            if workers:  # so that none is wasted on a session that starts
                part = self._random.choices(["worker", "executor", "driver", "database"], [6, 2, 1, 1])[0]
                self.kills[part] += self._kill(part, driver, workers)
        return driver.wait(RUN_PATIENCE)

    def _kill(self, part: str, driver: subprocess.Popen[bytes], workers: Sequence[int]) -> bool:
        if part == "database":
            self._server.kill()
            self._server.start()
            return True
        if part == "driver":
            kill_session(driver.pid)
            return True
        victims = workers if part == "worker" else there(driver, "CoarseGrainedExecutorBackend")
        with contextlib.suppress(ProcessLookupError, IndexError):  # it has ended by itself
            os.kill(self._random.choice(victims), signal.SIGKILL)
            return True
        return False


def there(driver: subprocess.Popen[bytes], program: str) -> list[int]:
    """Return the processes of a driver's session that run a program."""
    return [pid for pid in processes_of(driver.pid) if program in command_of(pid)]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def write(folder: Path, prefix: str, *, rows: int = ROWS, due: datetime = DUE) -> list[str]:
    """Write the files of a job; return the ids of its messages."""
    (folder / FOLDER).mkdir(parents=True)
    for file in range(FILES):
        ids = [f"{prefix}-{file}-{number}" for number in range(rows // FILES)]
        columns = {
            "id": ids,
            "destination": ["billing"] * len(ids),
            "due": [due] * len(ids),
            "body": [b"{}"] * len(ids),
        }
        pq.write_table(pa.table(columns), folder / FOLDER / f"{file}.parquet")
    return [f"{prefix}-{file}-{number}" for file in range(FILES) for number in range(rows // FILES)]


def run_to_its_end(killer: Killer, kind: str, url: str, folder: Path, name: str, *broker: str) -> None:
    """Run a job again and again, until its driver has done it."""
    environment = {name: value for name, value in os.environ.items() if name != PLACE}
    command, log_file = [sys.executable, "-c", PROGRAM, kind, url, str(folder), name, *broker], folder / "log"
    for _ in range(MOST_RUNS + KILLS):
        with log_file.open("ab") as log:
            driver = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            code = killer.kill_while(driver, KILLS)
        finally:
            kill_session(driver.pid)
            driver.wait()
        if code == 0:
            return
    raise AssertionError(log_file.read_text()[-5000:])


@pytest.fixture(params=[PostgresqlServer, MariadbServer])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Provide a server of the test's own, which is killed."""
    with running(request.param) as server:
        yield server


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["batch", "all or nothing", "stream"])
def test_each_message_is_stored_once(kind: str, server: Server, tmp_path: Path) -> None:
    store = StoreAt(server.new_database())
    pieces = StoreOptions.of(JobTarget(store.url, endpoint=ENDPOINT).options).pieces()
    pieces.open(JobName("for its tables"), PieceParameters(0, PIECES, "keep"))
    consumer, killer, expected = Consumer(store.url), Killer(server, SEED + kind), list[str]()
    with consumer.taking():
        # Given jobs, one after another, parts of which are killed
        while killer.kills.total() < KILLS:
            name = f"job{len(expected)}"
            expected += write(tmp_path / name, name)
            # When each is run until it has ended
            run_to_its_end(killer, kind, store.url, tmp_path / name, name)
    # Then each of their messages was stored once
    eventually(lambda: consumer.take() == 0)
    taken = consumer.taken()
    consumer.engine.dispose()
    logger.warning("%s: kills %s, messages %d", kind, dict(killer.kills), len(expected))
    assert (set(expected) - set(taken), {key: times for key, times in taken.items() if times > 1}) == (set(), {})
    assert taken.total() == len(expected)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_each_message_is_sent_and_only_what_was_under_way_is_sent_again(
    server: Server, broker: str, tmp_path: Path
) -> None:
    store, killer, expected = StoreAt(server.new_database()), Killer(server, f"{SEED}levels"), list[str]()
    seen = Counter[str]()
    # Given jobs for a broker, one after another, parts of which are killed
    while killer.kills.total() < KILLS:
        name = f"job{len(expected)}"
        due = datetime.now(UTC) + timedelta(hours=12)
        expected += write(tmp_path / name, name, rows=ROWS_SENT, due=due)
        # When each is run until it has ended
        run_to_its_end(killer, "batch", store.url, tmp_path / name, name, broker)
        seen.update(one.header.properties.message_id for one in in_levels(broker, V2))
    # Then each of their messages was sent, and for each kill no more than a part of each task again
    repeated = seen.total() - len(seen)
    logger.warning("levels: kills %s, messages %d, sent again %d", dict(killer.kills), len(expected), repeated)
    assert set(expected) == set(seen)
    of_one, of_all = (
        sum(killer.kills[part] for part in parts) for parts in (("worker", "executor"), ("driver", "database"))
    )
    assert repeated <= (of_one + TASKS * of_all) * SENT_AT_ONCE
