"""A large partition is cut into slices, the earliest due first."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.spark.kills import DriverKilled
from tests.spark.legacy import LATER, Legacy, some
from tests.spark.stores import StoreAt

from delayline.errors import BackendUnavailable
from delayline.migration import Migration, Plan, source_at, target_at
from delayline.migration.journal import HeldPartition
from delayline.migration.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

ENDPOINT = "sales"


@pytest.fixture(params=["postgresql", "mariadb"])
def legacy(request: pytest.FixtureRequest) -> Legacy:
    return Legacy(request.getfixturevalue(f"{request.param}_url"), ENDPOINT)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[HeldPartition]:
    """Have slices of 2, 8 and then 9 rows, and return the held partitions."""
    monkeypatch.setattr("delayline.migration.holding_table.FIRST_ROWS", 2)
    monkeypatch.setattr("delayline.migration.holding_table.SLICE_ROWS", 9)
    take, partitions = Migration._hold_slice, []

    def noted(self: Migration, *arguments: Any) -> HeldPartition:  # noqa: ANN401 - as they are
        partitions.append(take(self, *arguments))
        return partitions[-1]

    monkeypatch.setattr(Migration, "_hold_slice", noted)
    return partitions


def plan(legacy: Legacy, url: str) -> Plan:
    return Plan(legacy.source, target_at(url), [ENDPOINT], batch_size=4)


@pytest.mark.parametrize("then", ["resume", "abort"])
def test_slices_that_are_not_held_yet_stay_in_the_source(
    spark: SparkSession, legacy: Legacy, store: StoreAt, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    # Given more rows than one slice has, some due at the same time, and a driver that dies in between
    monkeypatch.setattr("delayline.migration.holding_table.SLICE_ROWS", 4)
    rows = [replace(one, time=LATER + timedelta(seconds=one.number // 3)) for one in some(10)]
    legacy.add(ENDPOINT, *rows)
    ids, take, calls = legacy.ids(ENDPOINT), Migration._hold_slice, []

    def die_at_third(self: Migration, *arguments: Any) -> HeldPartition:  # noqa: ANN401 - as they are
        calls.append(arguments)
        if len(calls) == 3:
            raise DriverKilled
        return take(self, *arguments)

    with monkeypatch.context() as patched, pytest.raises(DriverKilled):
        patched.setattr(Migration, "_hold_slice", die_at_third)
        Migration(plan(legacy, store.url)).run(spark)
    moved, left = store.ids(), legacy.ids(ENDPOINT)
    assert moved
    assert left
    assert moved + left == ids
    # When it is resumed, or aborted
    if then == "resume":
        assert Migration(plan(legacy, store.url)).resume(spark).complete
    else:
        Migration(plan(legacy, store.url)).abort()
    # Then each is in one place, and nothing is held
    assert (store.ids(), legacy.ids(ENDPOINT)) == ((ids, []) if then == "resume" else (moved, left))
    verified = verify(legacy.source, target_at(store.url), spark)  # type: ignore[arg-type]
    assert (verified.ok, verified.waiting) == (True, len(store.ids()))


def test_the_first_slice_is_small_and_the_others_grow(
    spark: SparkSession, legacy: Legacy, store: StoreAt, taken: list[HeldPartition]
) -> None:
    # Given more rows than two slices of any size take, written latest first
    legacy.add(ENDPOINT, *(replace(one, time=LATER - timedelta(seconds=one.number)) for one in some(20)))
    ids = legacy.ids(ENDPOINT)
    # When they move
    assert Migration(plan(legacy, store.url)).run(spark).complete
    # Then the first due rows are in the first slice, four times as many in the next, up to the limit of a slice
    assert [(partition.rows, partition.batches) for partition in taken] == [(2, 1), (8, 2), (9, 3), (1, 1)]
    assert (store.ids(), legacy.ids(ENDPOINT)) == (ids, [])


@pytest.mark.parametrize(("first", "slices"), [(6, [10, 9, 1]), (20, [20])])
def test_the_first_slice_has_the_earliest_due_times(
    spark: SparkSession, legacy: Legacy, store: StoreAt, taken: list[HeldPartition], first: int, slices: list[int]
) -> None:
    # Given more rows than the first slice takes, all due at the earliest time
    legacy.add(ENDPOINT, *(replace(one, time=LATER + timedelta(seconds=max(first, one.number))) for one in some(20)))
    # When they move, then they are in it all the same
    assert Migration(plan(legacy, store.url)).run(spark).complete
    assert ([partition.rows for partition in taken], len(store.ids())) == (slices, 20)


def test_a_file_is_written_to_by_one_at_a_time(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a store in a file with more messages than one slice has
    monkeypatch.setattr("delayline.migration.holding_table.SLICE_ROWS", 4)
    old, new = (StoreAt(f"sqlite:///{tmp_path / name}.db") for name in ("old", "new"))
    ids = [f"m{number}" for number in range(10)]
    for number, one in enumerate(ids):
        old.put(one, due=LATER + timedelta(seconds=number))
    steps: list[str] = []
    for step in ("_hold_slice", "_deliver"):
        real = getattr(Migration, step)

        def noted(self: Migration, *arguments: Any, _real: Any = real, _step: str = step) -> Any:  # noqa: ANN401 - as it is
            done = _real(self, *arguments)
            steps.append(_step)
            return done

        monkeypatch.setattr(Migration, step, noted)
    # When they move
    source = source_at("delayline", old.url)
    assert Migration(Plan(source, target_at(new.url), [ENDPOINT], batch_size=4)).run(spark).complete
    # Then no slice is held while tasks have to write to the file
    assert steps == ["_hold_slice", "_deliver"] * 3
    assert (old.ids(), new.ids()) == ([], ids)


def test_a_slice_that_fails_leaves_a_run_to_resume(
    spark: SparkSession, legacy: Legacy, store: StoreAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a source that is lost for a moment, behind the first slice
    monkeypatch.setattr("delayline.migration.holding_table.SLICE_ROWS", 4)
    legacy.add(ENDPOINT, *some(10))
    hold, calls = Migration._hold, []

    def fail_at_second(self: Migration, *arguments: Any, **named: Any) -> HeldPartition:  # noqa: ANN401 - as they are
        calls.append(named)
        if len(calls) == 2:
            raise BackendUnavailable("on purpose")
        return hold(self, *arguments, **named)

    with monkeypatch.context() as patched, pytest.raises(BackendUnavailable, match="on purpose"):
        patched.setattr(Migration, "_hold", fail_at_second)
        Migration(plan(legacy, store.url)).run(spark)
    assert (len(store.ids()), len(legacy.ids(ENDPOINT))) == (4, 6)
    # When it goes on, then everything moves, and no table is left that holds nothing
    reported: list[tuple[int, int]] = []
    resumed = Migration(plan(legacy, store.url), progress=lambda *numbers: reported.append(numbers))
    assert resumed.resume(spark).complete
    assert (len(store.ids()), reported[-1]) == (10, (10, 10))
    assert len([name for name in legacy.everything() if name.startswith("delayline_holding")]) == 3
