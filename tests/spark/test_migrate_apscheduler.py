"""Jobs of APScheduler's SQL job store, made by APScheduler itself, become messages."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool
from tests.spark.legacy import LATER
from tests.spark.stores import ENDPOINT, PAST, StoreAt

from delayline.migration import Migration, Plan, source_at, target_at

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


def remind(*arguments: Any, **named: Any) -> None:  # noqa: ANN401 - what a job runs
    """Be the function of a job."""


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.file}",)


@pytest.mark.parametrize("product", ["postgresql", "mariadb"])
def test_jobs_of_apscheduler_that_run_once_become_messages(
    spark: SparkSession, product: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    schedulers = pytest.importorskip("apscheduler.schedulers.background")
    jobstores = pytest.importorskip("apscheduler.jobstores.sqlalchemy")
    url = request.getfixturevalue(f"{product}_url")
    driver = {"postgresql": "postgresql+psycopg", "mariadb": "mariadb+pymysql"}[product]
    engine = create_engine(url.replace(product, driver, 1), poolclass=NullPool)
    # Given jobs that run once, overdue ones too, that repeat, that are paused, whose arguments are objects
    store = jobstores.SQLAlchemyJobStore(engine=engine)
    scheduler = schedulers.BackgroundScheduler(timezone="Europe/Berlin")
    scheduler.add_jobstore(store)
    scheduler.start(paused=True)
    scheduler.add_job(remind, "date", run_date=LATER, id="once", args=["Größe 🚀"], kwargs={"n": 1}, executor=ENDPOINT)
    scheduler.add_job(remind, "date", run_date=LATER, id="overdue", executor=ENDPOINT)
    scheduler.add_job(remind, "cron", hour=3, id="cron")
    scheduler.add_job(remind, "date", run_date=LATER, id="object", args=[LATER])
    scheduler.add_job(remind, "date", run_date=LATER, id="paused", next_run_time=None)
    scheduler.shutdown()
    engine.dispose()
    # And a hostile one, and a damaged one
    harm = tmp_path / "harm"
    with engine.begin() as connection:
        overdue = text("UPDATE apscheduler_jobs SET next_run_time = :at WHERE id = 'overdue'")
        connection.execute(overdue, {"at": PAST.timestamp()})
        for key, state in (("hostile", pickle.dumps({"func": Hostile(harm)})), ("damaged", b"\x80\x04nonsense")):
            row = text("INSERT INTO apscheduler_jobs (id, next_run_time, job_state) VALUES (:id, :at, :state)")
            connection.execute(row, {"id": key, "at": LATER.timestamp(), "state": state})
    # When they are moved
    source, target = source_at("apscheduler", url), StoreAt(f"sqlite:///{tmp_path / 'delayline.db'}")
    outcome = Migration(Plan(source, target_at(target.url), [ENDPOINT])).run(spark)
    # Then what runs once is a message for its executor, when it is due
    messages = {one.id: one for one in target.messages()}
    assert {one.id: (one.destination, one.due) for one in messages.values()} == {
        "apscheduler-once": (ENDPOINT, LATER),
        "apscheduler-overdue": (ENDPOINT, PAST),
    }
    once = messages["apscheduler-once"].message
    assert once.json() == {"args": ["Größe 🚀"], "kwargs": {"n": 1}}
    assert once.headers["APScheduler.Function"].endswith("test_migrate_apscheduler:remind")
    # And the rest is where it was, named with its reason, and nothing was run
    with engine.connect() as connection:
        left = set(connection.execute(text("SELECT id FROM apscheduler_jobs")).scalars())
    assert left == {"cron", "object", "paused", "hostile", "damaged"}
    reasons = " | ".join(reason for reason, _ in outcome.reasons)
    assert "it repeats (CronTrigger)" in reasons
    assert "its arguments are not JSON" in reasons
    assert "its state cannot be read" in reasons
    assert not harm.exists()
