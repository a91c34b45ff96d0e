"""Timeouts move to a store with a cold tier: near ones to the store, far ones to files."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from tests.spark.arrivals import arrivals_at
from tests.spark.kills import KillingTarget, TaskKills
from tests.spark.legacy import LATER, Legacy, Timeout
from tests.spark.stores import StoreAt, frame
from tests.spark.test_migrate_cli import Shell
from tests.spark.test_migrate_interrupted import dying
from tests.spark.tiers import Tiers

from delayline import SqlTransport
from delayline.delayed.delivery import StoredDelivery
from delayline.errors import BackendUnavailable, BackendUnusable, ConfigurationError
from delayline.migration import Migration, Plan, preview, target_at
from delayline.migration.journal import MigrationJournal
from delayline.migration.targets.cold_tier import TiersSession
from delayline.migration.verify import verify
from delayline.sql import SqlDelayedMessageStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from delayline.bulk.batches import BatchName
    from delayline.migration.target import Staged, Target

ENDPOINT = "sales"
FAR = datetime(9000, 1, 1, tzinfo=UTC)


@pytest.fixture
def legacy(mariadb_url: str) -> Legacy:
    return Legacy(mariadb_url, ENDPOINT)


def cold(tiers: Tiers, **how: Any) -> Target:  # noqa: ANN401 - target_at's own
    found = target_at(tiers.hot.url, cold_tier=str(tiers.folder), **how)
    assert found is not None
    return found


@pytest.mark.sample(3, group="migration round trips")
def test_near_messages_arrive_and_far_ones_are_stored_in_files(
    spark: SparkSession, legacy: Legacy, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given timeouts overdue, soon due and far off, and of those that cannot move one whose id is in the tier already
    soon = (datetime.now(UTC) + timedelta(seconds=20)).replace(microsecond=0)
    store, target = tiers.hot, cold(tiers)
    legacy.add(
        ENDPOINT,
        Timeout(1, ENDPOINT, datetime(2020, 1, 1, tzinfo=UTC)), Timeout(2, ENDPOINT, soon, state="früh".encode()),
        Timeout(3, time=LATER), Timeout(4, time=FAR, state=None), Timeout(5, time=LATER + timedelta(hours=2)),
        Timeout(6, time=LATER), Timeout(7, "gone"), Timeout(8, None),
    )  # fmt: skip
    monkeypatch.setattr("delayline.migration.run.ROUND_ROWS", 3)
    plan = Plan(legacy.source, target, [ENDPOINT], batch_size=3)
    asyncio.run(SqlTransport(store.url).setup_infrastructure(["billing"]))
    asyncio.run(SqlDelayedMessageStore(store.url, journal=True).setup_infrastructure(ENDPOINT))
    tiers.schedule(frame(spark, Timeout(6).id, "other"))

    def work() -> None:
        # When they are looked at, nothing changes
        files = tiers.files()
        [shown] = preview(plan, spark)
        assert (shown.rows, sorted(number for _, number, _ in shown.unmovable)) == (8, [1, 1])
        assert tiers.files() == files
        # and when they are moved, those that cannot go are back
        outcome = Migration(plan).run(spark)
        assert sorted(reason for reason, _ in outcome.reasons) == [
            "a message with this id is pending in the target's store already: cancel one of the two",
            "destination must be a text of 1 to 200 characters",
            "queue 'gone' does not exist at the target: start its endpoint once, or run delayline setup --queue NAME",
        ]
        assert legacy.ids(ENDPOINT) == [Timeout(number).id for number in (6, 7, 8)]
        assert store.ids() == [Timeout(number).id for number in (1, 2)]
        verified = verify(legacy.source, target, spark)
        assert (verified.ok, verified.moved, verified.waiting, verified.repeatable) == (True, 5, 5, [])
        # and the store's journal has events of both tiers
        with psycopg.connect(store.url) as connection:
            journaled = connection.execute("SELECT id FROM delayline_journal WHERE event = 'scheduled'").fetchall()
        assert sorted(one for (one,) in journaled) == sorted([*(Timeout(n).id for n in range(1, 7)), "other"])

    arrived = arrivals_at(ENDPOINT, SqlTransport(store.url), StoredDelivery(SqlDelayedMessageStore(store.url)), 2, work)

    # Then they arrive when they are due
    assert [one.body for one in arrived] == [b"{}", "früh".encode()]
    assert arrived[1].on_time(soon)
    assert arrived[0].headers["Ключ 🔑"] == "Größe"
    # the others wait in files, as they were
    waiting = {one.id: one for one in tiers.messages()}
    assert set(waiting) == {Timeout(number).id for number in (3, 4, 5, 6)} | {"other"}
    assert (waiting[Timeout(4).id].due, waiting[Timeout(4).id].message.body) == (FAR, b"")
    assert waiting[Timeout(3).id].message.headers["NServiceBus.MessageId"] == "message-3"
    assert store.ids() == []
    # and verify knows them wherever they are
    assert tiers.promote(LATER + timedelta(minutes=1)).stored == 3
    verified = verify(legacy.source, target, spark)
    assert (verified.ok, verified.waiting, verified.gone, verified.missing) == (True, 3, 2, [])
    # and reports cancelled messages as missing
    tiers.cancel(Timeout(5).id)
    assert list(verify(legacy.source, target, spark).missing) == [Timeout(5).id]


@pytest.mark.parametrize(
    ("where", "step", "after"),
    [
        (TiersSession, "commit", False),
        (TiersSession, "commit", True),
        (MigrationJournal, "mark", False),
        (Migration, "_end", False),
    ],
)
@pytest.mark.parametrize("then", ["resume", "abort"])
@pytest.mark.sample(1)
def test_a_driver_that_dies_at_any_step_loses_and_doubles_nothing(
    spark: SparkSession, legacy: Legacy, tiers: Tiers, monkeypatch: pytest.MonkeyPatch, where: type, step: str,
    after: bool, then: str,
) -> None:  # fmt: skip
    # Given a driver that dies at a step
    near = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    legacy.add(ENDPOINT, *(Timeout(number, time=near if number % 2 else LATER) for number in range(1, 9)))
    ids, plan = legacy.ids(ENDPOINT), Plan(legacy.source, cold(tiers), [ENDPOINT], batch_size=4)
    with dying(monkeypatch, where, step, after=after):
        Migration(plan).run(spark)
    # When it is resumed, or aborted
    if then == "resume":
        assert Migration(plan).resume(spark).complete
    else:
        Migration(plan).abort()
    # Then each message is in one place
    moved = then == "resume" or (step, after) != ("commit", False)
    assert (tiers.ids(), legacy.ids(ENDPOINT)) == ((ids, []) if moved else ([], ids))
    verified = verify(legacy.source, cold(tiers), spark)
    assert (verified.ok, verified.moved, verified.restored) == (True, 8 * moved, 8 * (not moved))
    assert verified.repeatable == []


@pytest.mark.slow
def test_rows_of_killed_tasks_are_ignored(spark: SparkSession, legacy: Legacy, tiers: Tiers, tmp_path: Path) -> None:
    # Given a task that is killed behind its last batch, when others have staged some
    near = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    legacy.add(ENDPOINT, *(Timeout(number, time=near if number % 2 else LATER) for number in range(1, 9)))
    ids = legacy.ids(ENDPOINT)
    (tmp_path / "kills").mkdir()
    target = KillingTarget(cold(tiers), TaskKills(tmp_path / "kills", 1, Timeout(8).id))
    # When the migration runs, and the task is tried again
    assert Migration(Plan(legacy.source, target, [ENDPOINT], batch_size=2)).run(spark).complete  # type: ignore[arg-type]
    # Then each message is there once
    assert (tiers.ids(), len(tiers.hot.ids()), legacy.ids(ENDPOINT)) == (ids, 4, [])
    assert verify(legacy.source, cold(tiers), spark).ok


def test_files_of_a_round_that_fails_hold_nothing(
    spark: SparkSession, legacy: Legacy, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    legacy.add(ENDPOINT, *(Timeout(number) for number in range(1, 4)))
    plan = Plan(legacy.source, cold(tiers), [ENDPOINT])

    def fail(*_: object, **__: object) -> None:
        raise BackendUnavailable("on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(TiersSession, "_register", fail)
        with pytest.raises(BackendUnavailable):
            Migration(plan).run(spark)
    assert (len(tiers.files()), tiers.ids()) == (1, [])
    assert Migration(plan).resume(spark).complete
    assert tiers.ids() == [Timeout(number).id for number in range(1, 4)]


def test_a_round_whose_batches_were_closed_commits_nothing(
    spark: SparkSession, legacy: Legacy, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a driver that is overtaken by an abort
    legacy.add(ENDPOINT, *(Timeout(number) for number in range(1, 4)))
    ids, plan, commit = legacy.ids(ENDPOINT), Plan(legacy.source, cold(tiers), [ENDPOINT]), TiersSession.commit

    def close_and_commit(self: TiersSession, staged: Sequence[Staged], attempts: Mapping[BatchName, int]) -> None:
        cold(tiers).close(ENDPOINT, list(attempts))
        commit(self, staged, attempts)

    with monkeypatch.context() as patched, pytest.raises(BackendUnavailable, match="abort of this migration has begun"):
        patched.setattr(TiersSession, "commit", close_and_commit)
        Migration(plan).run(spark)
    # Then nothing is in either tier, and the abort gives everything back
    assert tiers.ids() == []
    Migration(plan).abort()
    assert (tiers.ids(), legacy.ids(ENDPOINT)) == ([], ids)


def test_a_tier_that_cannot_be_is_refused_before_anything_moves(
    spark: SparkSession, legacy: Legacy, tiers: Tiers, tmp_path: Path
) -> None:
    legacy.add(ENDPOINT, Timeout(1))
    tables = legacy.everything()
    (tmp_path / "file").write_text("in the way")
    for wrong, error, why in (
        ({"url": tiers.hot.url, "cold_tier": str(tmp_path / "file")}, BackendUnusable, "cannot look through"),
        ({"url": f"sqlite:///{tmp_path / 'none.db'}", "cold_tier": "x"}, BackendUnusable, "none.db"),
        ({"url": tiers.hot.url, "cold_tier": "ftp://me:hunter2@host"}, ConfigurationError, r"ftp://\*\*\*@host"),
        ({"url": "amqp://broker", "cold_tier": "x"}, ConfigurationError, "nothing moves to a cold tier of"),
    ):
        with pytest.raises(error, match=why):
            Migration(Plan(legacy.source, target_at(**wrong), [ENDPOINT])).run(spark)  # type: ignore[arg-type]
    assert legacy.everything() == tables


def test_commands_take_the_tier(
    spark: SparkSession, legacy: Legacy, store: StoreAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, tier = Shell(legacy.url, store.url, monkeypatch), ("--cold-tier", str(tmp_path / "cold"))
    legacy.add(ENDPOINT, Timeout(1), Timeout(2, time=FAR))
    moved = shell.document("run", "--all-endpoints", *tier, "--hot-horizon", "500000d")
    assert (moved["moved"], store.ids()) == (2, [Timeout(1).id])
    verified = shell.document("verify", *tier)
    assert (verified["ok"], verified["waiting"]) == (True, 2)
    assert "give that target" in shell.run("verify", code=2)
