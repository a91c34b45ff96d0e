"""The cold tier without Spark: the catalog, and listing, cancelling and rescheduling in both tiers."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

import pytest
from tests.integration.cold_rows import hold, opened_tiers, rows

from delayline import ConfigurationError, DelayedMessage, Message, TransactionMode
from delayline.bulk import TwoTierStore
from delayline.bulk.cold_catalog import ColdFile, FileState, hour_of
from delayline.bulk.cold_folder import ColdFolder, HourWriter
from delayline.clock import to_microseconds
from delayline.errors import BackendUnusable
from delayline.spi import DueCount, Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from delayline.delayed.columns import StoredRow

NOON = datetime(2030, 1, 2, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
FIRST = datetime(1, 1, 1, tzinfo=UTC)
LAST = datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'delayline.db'}"
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
async def store(url: str, tmp_path: Path) -> AsyncIterator[TwoTierStore]:
    async with opened_tiers(url, tmp_path) as store:
        yield store


async def put(store: TwoTierStore, *messages: tuple[str, datetime]) -> None:
    await store.store_many([DelayedMessage(Message(one, {}, b""), "billing", due) for one, due in messages])


def ids(messages: Sequence[DelayedMessage]) -> list[str]:
    return [message.id for message in messages]


async def test_pending_messages_of_both_tiers_are_listed_by_due_time(store: TwoTierStore) -> None:
    await put(store, ("hot", NOON), ("hot far", NOON + 3 * HOUR))
    await hold(store, ("a", NOON + HOUR), ("b", NOON + HOUR), ("c", NOON + 4 * HOUR))
    await hold(store, ("d", NOON + HOUR + timedelta(minutes=1)), destination="shipping")
    assert ids(await store.pending()) == ["hot", "a", "b", "d", "hot far", "c"]
    assert ids(await store.pending(limit=2, offset=1)) == ["a", "b"]
    assert ids(await store.pending(destination="shipping")) == ["d"]
    [_, message, *_] = await store.pending()
    assert message == DelayedMessage(Message("a", {"n": "ü"}, b"a"), "billing", NOON + HOUR)


async def test_nothing_was_ever_held(store: TwoTierStore) -> None:
    assert ids(await store.pending()) == []
    assert list(await store.count_by_due(HOUR)) == []
    assert await store.cancel("a") is Outcome.NOT_PENDING


async def test_both_tiers_are_counted_by_hours_and_by_less(store: TwoTierStore) -> None:
    await put(store, ("hot", NOON))
    await hold(store, ("a", NOON + timedelta(minutes=1)), ("b", NOON + timedelta(minutes=59)), ("c", NOON + HOUR))
    await store.cancel("b")
    assert list(await store.count_by_due(HOUR)) == [DueCount(NOON, "billing", 2), DueCount(NOON + HOUR, "billing", 1)]
    quarter = timedelta(minutes=15)
    assert [one.count for one in await store.count_by_due(quarter)] == [2, 1]
    assert sum(one.count for one in await store.count_by_due(timedelta(days=365))) == 3


async def test_due_times_at_the_edges_are_held_and_counted(store: TwoTierStore) -> None:
    files = await hold(store, ("first", FIRST), ("last", LAST))
    assert [one.due_hour for one in files] == ["0001010100", "9999123123"]
    assert [(one.id, one.due) for one in await store.pending()] == [("first", FIRST), ("last", LAST)]
    assert [one.start for one in await store.count_by_due(HOUR)] == [
        FIRST,
        LAST.replace(minute=0, second=0, microsecond=0),
    ]


async def test_a_cancelled_message_is_gone_once(store: TwoTierStore) -> None:
    await hold(store, ("a", NOON), ("b", NOON))
    assert await store.cancel("a") is Outcome.DONE
    assert await store.cancel("a") is Outcome.NOT_PENDING
    assert await store.cancel("nobody") is Outcome.NOT_PENDING
    assert ids(await store.pending()) == ["b"]


async def test_an_id_that_was_cancelled_may_be_held_again(store: TwoTierStore) -> None:
    await hold(store, ("a", NOON))
    await store.cancel("a")
    await hold(store, ("a", NOON + HOUR))
    assert [(one.id, one.due) for one in await store.pending()] == [("a", NOON + HOUR)]


async def test_several_cancel_the_same_message_and_one_has_done_it(store: TwoTierStore) -> None:
    await hold(store, ("a", NOON), ("b", NOON))
    outcomes = await asyncio.gather(*(store.cancel("a") for _ in range(4)))
    assert sorted(outcomes) == [Outcome.DONE, *[Outcome.NOT_PENDING] * 3]


async def test_a_rescheduled_message_waits_in_the_store(store: TwoTierStore) -> None:
    await hold(store, ("a", NOON), ("b", NOON))
    assert await store.reschedule("a", NOON + 5 * HOUR) is Outcome.DONE
    assert [(one.id, one.due, one.message.body) for one in await store.pending()] == [
        ("b", NOON, b"b"),
        ("a", NOON + 5 * HOUR, b"a"),
    ]
    assert await store.next_due() == NOON + 5 * HOUR
    assert await store.reschedule("a", NOON - HOUR) is Outcome.DONE
    assert ids(await store.pending()) == ["a", "b"]


async def test_a_message_that_is_promoted_while_it_is_looked_for_is_cancelled_in_the_store(store: TwoTierStore) -> None:
    # Given a message that is found in a file
    [file] = await hold(store, ("a", NOON))
    find = store._folder.find

    def promoted_meanwhile(files: Sequence[ColdFile], message_id: str) -> dict[str, StoredRow]:
        # When its file is promoted before it can be cancelled there
        found = find(files, message_id)
        asyncio.run_coroutine_threadsafe(promote(), loop).result(20)
        return found

    async def promote() -> None:
        async with store.transaction() as transaction:
            retire = partial(store._catalog.retire, names=[file.name], state=FileState.PROMOTED)
            await store._database.write(retire, transaction)
            await store.store(DelayedMessage(Message("a", {}, b""), "billing", NOON), transaction)

    loop = asyncio.get_running_loop()
    store._folder.find = promoted_meanwhile  # type: ignore[method-assign]
    # Then it is cancelled where it is now
    assert await store.cancel("a") is Outcome.DONE
    assert ids(await store.pending()) == []


async def test_files_that_are_not_in_the_catalog_are_ignored(store: TwoTierStore) -> None:
    await hold(store, ("a", NOON))
    writer = HourWriter(ColdFolder(store._folder.path, "other"))
    writer.write(rows(("stray", NOON)))
    writer.close()
    assert ids(await store.pending()) == ["a"]
    assert await store.cancel("stray") is Outcome.NOT_PENDING


async def test_stores_of_one_database_share_a_folder_and_nothing_else(store: TwoTierStore, url: str) -> None:
    other = TwoTierStore(url, cold_tier=store._folder.path)
    await other.setup_infrastructure("shop")
    await other.initialize("shop", TransactionMode.RECEIVE_ONLY)
    await hold(store, ("a", NOON))
    await hold(other, ("b", NOON))
    assert (ids(await store.pending()), ids(await other.pending())) == (["a"], ["b"])
    assert await other.cancel("a") is Outcome.NOT_PENDING
    await other.close()


async def test_a_file_that_is_missing_or_changed_is_reported(store: TwoTierStore) -> None:
    [file] = await hold(store, ("a", NOON), ("b", NOON))
    await store._database.write(partial(store._catalog.register, files=[]))
    changed = file._replace(messages=3)
    with pytest.raises(BackendUnusable, match="has 2 rows, but the catalog lists 3"):
        list(store._folder.batches(changed))
    store._folder.delete(file.name, file.due_hour)
    with pytest.raises(BackendUnusable, match="name the folder of the cold tier"):
        await store.pending()
    assert [one.count for one in await store.count_by_due(HOUR)] == [2]


async def test_bytes_that_are_not_parquet_are_reported(store: TwoTierStore, tmp_path: Path) -> None:
    [file] = await hold(store, ("a", NOON))
    (tmp_path / "cold" / f"due_hour={file.due_hour}" / f"{file.name}.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(BackendUnusable, match="cannot read"):
        await store.pending()


async def test_a_forecast_counts_both_tiers(store: TwoTierStore) -> None:
    # Given messages in the store and in files of two hours, one of them cancelled
    await put(store, ("hot", NOON), ("hot far", NOON + 3 * HOUR))
    await hold(store, ("a", NOON + HOUR), ("b", NOON + HOUR), ("c", NOON + 4 * HOUR))
    await hold(store, ("d", NOON + HOUR), destination="shipping")
    assert await store.cancel("b") is Outcome.DONE
    # When their due times are counted between whole hours
    found = await store.due_forecast([NOON + HOUR, NOON + 4 * HOUR], by_destination=True)
    # Then the numbers are exact, and say which tier has the messages
    assert [dict(one.destinations) for one in found.buckets] == [
        {"billing": 1},
        {"billing": 2, "shipping": 1},
        {"billing": 1},
    ]
    assert [one.count for one in found.buckets] == [1, 3, 1]
    assert (found.exact, found.earliest) == (True, NOON)
    cold = await store.cold_forecast([NOON + HOUR, NOON + 4 * HOUR])
    assert ([one.count for one in cold.buckets], cold.earliest) == ([0, 2, 1], NOON + HOUR)


async def test_a_forecast_divides_an_hour_of_the_files(store: TwoTierStore) -> None:
    # Given ten messages of one hour in a file
    await hold(store, *((f"m{number}", NOON + number * timedelta(minutes=1)) for number in range(10)))
    # When edges divide the hour
    half, later = NOON + timedelta(minutes=30), NOON + timedelta(minutes=45)
    found = await store.due_forecast([NOON - HOUR, half, later, NOON + 2 * HOUR])
    # Then its messages are divided by time, marked as estimates, and none is missing
    assert [(one.count, one.exact) for one in found.buckets] == [
        (0, True),
        (5, False),
        (2, False),
        (3, False),
        (0, True),
    ]


def test_an_hour_of_many_messages_is_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delayline.bulk.cold_folder.ROWS_A_FILE", 10)
    writer = HourWriter(ColdFolder(str(tmp_path), "t"))
    for first in range(0, 100, 4):
        writer.write(
            rows(*((f"m{number}", NOON + number * timedelta(minutes=1)) for number in range(first, first + 4)))
        )
    files = writer.close()
    assert [one.messages for one in files] == [12, 12, 12, 12, 12, 12, 12, 12, 4]
    assert {one.due_hour for one in files} == {"2030010212", "2030010213"}
    for file in files:
        due = [row.due for row in ColdFolder(str(tmp_path)).rows([file], {})]
        assert (to_microseconds(due[0]), to_microseconds(due[-1])) == (file.min_due, file.max_due)
        assert {hour_of(file.min_due), hour_of(file.max_due)} == {file.due_hour}


@pytest.mark.parametrize("path", ["nowhere://bucket/x", "s3//"])
def test_a_place_that_cannot_be_is_refused(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "://" in path:
        with pytest.raises(ConfigurationError, match="Give a folder, or a URI"):
            ColdFolder(path)
    else:
        assert ColdFolder(path).path == str(tmp_path / "s3")
