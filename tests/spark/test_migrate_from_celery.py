"""Celery's ETA tasks move, from kombu's delay queues and from what workers say that they hold."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from kombu import Exchange
from kombu.transport.native_delayed_delivery import (
    bind_queue_to_native_delayed_delivery_exchange,
    calculate_routing_key,
    declare_native_delayed_delivery_exchanges_and_queues,
)
from tests.eventually import PATIENCE
from tests.integration.test_rabbitmq_migration import V2
from tests.spark.arrivals import arrivals_at
from tests.spark.broker import count, in_levels
from tests.spark.celery_app import BROKER, app_at
from tests.spark.stores import StoreAt

from delayline.delayed.delivery import StoredDelivery
from delayline.errors import BackendUnavailable, BackendUnusable, ConfigurationError
from delayline.migration import Migration, Plan, preview, source_at, target_at
from delayline.migration.sources import rabbitmq_levels
from delayline.migration.sources.celery_levels import CeleryLevels, KombuDelays
from delayline.migration.verify import verify
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.admin.operations import create
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

ENDPOINT = "sales"
LEVELS = KombuDelays()
DAY = 86_400
#: How the reasons begin for which tasks stay.
WHY = ["it expires", "it goes on", "it is not ", "its argume", "its body i", "queue 'gon"]


def with_delays(url: str) -> Any:  # noqa: ANN401 - Celery's app
    """Return an app whose workers have declared their queues."""
    app = app_at(url, quorum=True)
    with app.connection_for_write() as connection:
        declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
        for queue in app.amqp.queues.values():
            queue(connection.channel()).declare()
            bind_queue_to_native_delayed_delivery_exchange(connection, queue)
    return app


@pytest.mark.sample(3, group="migration round trips")
def test_delayed_tasks_move_to_a_store_whose_endpoint_gets_them(
    spark: SparkSession, rabbitmq_url: str, postgresql_url: str
) -> None:
    # Given tasks in kombu's queues, of which some are no messages
    store, app = StoreAt(postgresql_url), with_delays(rabbitmq_url)
    asyncio.run(SqlTransport(postgresql_url).setup_infrastructure(["billing"]))
    source = source_at("celery-levels", rabbitmq_url, journal=postgresql_url)
    target = target_at(postgresql_url)
    assert target is not None
    plan = Plan(source, target, [ENDPOINT], batch_size=2)
    etas: dict[str, datetime] = {}

    def send(name: str, delay: float, **options: Any) -> None:  # noqa: ANN401 - Celery's own
        etas[name] = datetime.now(UTC) + timedelta(seconds=delay)
        given = {"eta": etas[name], "args": [name, "Größe 🚀"], "kwargs": {"n": 1}, **options}
        app.send_task("shop.remind", task_id=name, **given)

    def work() -> None:
        send("far", 100 * DAY, queue="billing", retries=2)
        send("expires", DAY, expires=2 * DAY)
        send("linked", DAY, link=app.signature("shop.then"))
        send("pickled", DAY, serializer="pickle")
        send("packed", DAY, compression="gzip")
        send("lost", DAY, queue="gone")
        with app.producer_or_acquire() as producer:
            key = calculate_routing_key(DAY, "sales")
            producer.publish("no task", exchange=Exchange("celery_delayed_27", type="topic"), routing_key=key)
        # When they are looked at, nothing changes
        [shown] = preview(plan, spark)
        assert (shown.rows, shown.unseen, count(rabbitmq_url, LEVELS)) == (7, 0, 7)
        assert sorted(reason[:10] for reason, _, _ in shown.unmovable) == WHY
        send("soon", 25)
        # and when they are moved, those that cannot be are back
        outcome = Migration(plan).run(spark)
        assert sorted(reason[:10] for reason, _ in outcome.reasons) == WHY

    delivery = StoredDelivery(SqlDelayedMessageStore(postgresql_url))
    [arrived] = arrivals_at(ENDPOINT, SqlTransport(postgresql_url), delivery, 1, work)

    # Then one arrives when it was due, with its arguments and its headers
    assert arrived.on_time(etas["soon"])
    assert json.loads(arrived.body)[:2] == [["soon", "Größe 🚀"], {"n": 1}]
    assert (arrived.headers["Celery.Task"], arrived.headers["Celery.Id"]) == ("shop.remind", "soon")
    assert arrived.headers["NServiceBus.MessageId"] == "soon"
    # another one waits for its time
    [waiting] = store.messages()
    assert (waiting.id, waiting.destination) == ("far", "billing")
    assert etas["far"] <= waiting.due < etas["far"] + timedelta(seconds=1)
    assert waiting.message.headers["Celery.Retries"] == "2"
    assert verify(source, target, spark).ok
    # and those that cannot move are where they were, as they were, for the rest of their time
    left = {(one.header.properties.headers or {}).get("id"): one for one in in_levels(rabbitmq_url, LEVELS)}
    assert set(left) == {"expires", "linked", "pickled", "packed", "lost", None}
    pickled = left["pickled"].header.properties
    assert (pickled.content_type, pickled.content_encoding) == ("application/x-python-serialize", "binary")
    assert left["packed"].header.properties.headers["compression"] == "application/x-gzip"
    assert left["linked"].header.properties.headers["timelimit"] == [None, None]
    assert bytes(left[None].body) == b"no task"


@pytest.mark.slow
def test_a_driver_that_dies_while_it_takes_tasks_loses_and_doubles_nothing(
    spark: SparkSession, rabbitmq_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given tasks that are to move to delay levels, and a driver that dies behind an acknowledgement
    app, journal = with_delays(rabbitmq_url), f"sqlite:///{tmp_path / 'journal.db'}"
    asyncio.run(create(BrokerAddress.parse(rabbitmq_url), V2))
    eta = datetime.now(UTC) + timedelta(days=1)
    for number in range(5):
        app.send_task("shop.remind", task_id=f"t{number}", queue="billing", eta=eta)
    source = source_at("celery-levels", rabbitmq_url, journal=journal)
    plan = Plan(source, target_at(rabbitmq_url), [ENDPOINT], batch_size=2)
    acknowledge = CeleryLevels._acknowledge

    async def die(self: CeleryLevels, *arguments: Any) -> None:  # noqa: ANN401 - its own
        await acknowledge(self, *arguments)
        raise BackendUnavailable("on purpose")

    monkeypatch.setattr(rabbitmq_levels, "COPIED_AT_ONCE", 2)
    with monkeypatch.context() as patched:
        patched.setattr(CeleryLevels, "_acknowledge", die)
        with pytest.raises(BackendUnavailable):
            Migration(plan).run(spark)
    # When it runs again
    assert Migration(plan).run(spark).complete
    # Then everything is there once
    assert count(rabbitmq_url, LEVELS) == 0
    found = in_levels(rabbitmq_url, V2)
    assert sorted(one.header.properties.message_id for one in found) == [f"t{number}" for number in range(5)]
    assert found[0].header.properties.headers["Celery.Task"] == "shop.remind"
    assert verify(source, plan.target, spark).ok  # type: ignore[arg-type]


def test_a_broker_without_celery_s_queues_is_reported(spark: SparkSession, rabbitmq_url: str, tmp_path: Path) -> None:
    journal = f"sqlite:///{tmp_path / 'journal.db'}"
    source = source_at("celery-levels", rabbitmq_url, journal=journal)
    with pytest.raises(BackendUnusable, match=r"no complete delay levels celery_delayed.*Celery's workers make them"):
        preview(Plan(source, None, [ENDPOINT]), spark)
    with pytest.raises(ConfigurationError, match="delays"):
        source_at("celery-levels", f"{rabbitmq_url}?delays=v1", journal=journal)


@pytest.fixture
def worker(rabbitmq_url: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Run a worker of the app, and provide the environment that its commands need."""
    environment = {**os.environ, BROKER: rabbitmq_url}
    command = [sys.executable, "-m", "celery", "-A", "tests.spark.celery_app", "worker", "-P", "solo", "-Q", "sales"]
    with (tmp_path / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--without-mingle", "--without-gossip"], env=environment, stdout=log, stderr=log
        )
        yield environment
        process.terminate()
        process.wait()


def exported(environment: dict[str, str], number: int, log: Path) -> str:
    """Return what Celery's command writes once the worker holds so many tasks."""
    command = [sys.executable, "-m", "celery", "-A", "tests.spark.celery_app", "inspect", "scheduled", "--json"]
    deadline = time.monotonic() + PATIENCE
    while True:
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and sum(map(len, json.loads(answer.stdout).values())) == number:
            return answer.stdout
        assert time.monotonic() < deadline, (answer, log.read_text())


@pytest.mark.sample(3, group="migration round trips")
def test_tasks_in_workers_move_and_are_listed_as_held_by_workers_too(
    spark: SparkSession, rabbitmq_url: str, postgresql_url: str, worker: dict[str, str], tmp_path: Path
) -> None:
    # Given the output of a worker about its tasks
    app, file = app_at(rabbitmq_url, quorum=False), tmp_path / "scheduled.json"
    far = datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
    app.send_task("shop.remind", ["Größe 🚀"], {"n": 1}, task_id="far", eta=far)
    app.send_task("shop.remind", ["früh"], task_id="near", countdown=600)
    answers = json.loads(exported(worker, 2, tmp_path / "worker.log"))
    # and tasks of which it says too little
    [tasks] = answers.values()
    request = tasks[0]["request"]
    soon = datetime.now(UTC) + timedelta(seconds=20)
    tasks += [
        {"eta": soon.isoformat(), "priority": 6, "request": {**request, "id": "soon"}},
        {"eta": None, "priority": 6, "request": {**request, "id": "timeless"}},
        {"eta": far.isoformat(), "priority": 6, "request": {**request, "id": "text", "args": "('x',)"}},
        {"eta": far.isoformat(), "priority": 6, "request": {**request, "id": "nowhere", "delivery_info": None}},
        {"eta": far.isoformat()},
    ]
    file.write_text(json.dumps({**answers, "celery@idle": []}))
    store, target = StoreAt(postgresql_url), target_at(postgresql_url)
    assert target is not None
    source = source_at("celery-scheduled", str(tmp_path / "*.json"), journal=postgresql_url)
    plan = Plan(source, target, [ENDPOINT], batch_size=2)

    def work() -> None:
        [shown] = preview(plan, spark)
        assert (shown.rows, sum(number for _, number, _ in shown.unmovable)) == (7, 4)
        # When they move, those of which too little is said stay
        outcome = Migration(plan).run(spark)
        assert sum(number for _, number in outcome.reasons) == 4
        assert sorted(store.ids()) == ["far", "near", "soon"]

    delivery = StoredDelivery(SqlDelayedMessageStore(postgresql_url))
    [arrived] = arrivals_at(ENDPOINT, SqlTransport(postgresql_url), delivery, 1, work)

    # Then one arrives when it is due, and the others wait
    assert arrived.on_time(soon)
    assert arrived.headers["Celery.Task"] == "shop.remind"
    waiting = {one.id: one for one in store.messages()}
    assert set(waiting) == {"far", "near"}
    assert waiting["far"].due == far
    assert json.loads(waiting["far"].message.body)[:2] == [["Größe 🚀"], {"n": 1}]
    # workers have each of them as well, and verify says so
    verified = verify(source, target, spark)
    assert (verified.ok, {"far", "near", "soon"} <= set(verified.repeatable)) == (True, True)
    # and moved tasks do not move again
    again = Migration(plan).run(spark).progress
    assert again is not None
    assert (again.marked, again.rejected) == (4, 4)


@pytest.mark.parametrize("content", ["{", "[]", '{"w": {"error": "no"}}', '{"w": [1]}', None])
def test_a_file_that_is_not_an_export_moves_nothing(spark: SparkSession, tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "scheduled.json"
    file.mkdir() if content is None else file.write_text(content)
    journal = f"sqlite:///{tmp_path / 'journal.db'}"
    source = source_at("celery-scheduled", str(file) if content is not None else f"{file}*", journal=journal)
    with pytest.raises(BackendUnusable, match=r"scheduled\.json"):
        preview(Plan(source, None, [ENDPOINT]), spark)
    with pytest.raises(ConfigurationError, match="--endpoint"):
        preview(Plan(source, None, None), spark)
