"""A store returns bodies, headers, names and instants unchanged."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Final

import pytest

from delayline.errors import ConfigurationError, InvalidDueTime, InvalidMessage
from delayline.message import DelayedMessage, Message
from delayline.testing.conformance.messages import (
    AT,
    AWKWARD_HEADERS,
    HOSTILE_NAMES,
    LOOKALIKES,
    TICK,
    delayed,
    same,
)
from delayline.testing.conformance.store_fixtures import StoreFixtures, closed, opened

if TYPE_CHECKING:
    from pathlib import Path

    from delayline.delayed.store import DelayedMessageStore

MEGABYTE = 1024 * 1024
INSTANTS = {
    "one microsecond": datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
    "last microsecond": datetime(2026, 1, 1, 23, 59, 59, 999_999, tzinfo=UTC),
    "not a float": datetime(2255, 6, 5, 23, 47, 34, 740_993, tzinfo=UTC),
    "after 2038": datetime(2038, 1, 19, 3, 14, 8, tzinfo=UTC),
    "leap day": datetime(2028, 2, 29, 12, tzinfo=UTC),
    "the end of time": datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    "before 1970": datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    "far past": datetime(1900, 1, 1, tzinfo=UTC),
}
END_OF_TIME = INSTANTS["the end of time"]


#: Bytes that every back end has room for in an endpoint's name.
SHORT_NAME: Final = 50


class StoreContent(StoreFixtures):
    """Round trips."""

    @pytest.mark.parametrize(
        "body",
        [b"", b"\x00", bytes(range(256)) * 4, "größe 🚚".encode(), b"\xef\xbb\xbf{}", b"x" * (5 * MEGABYTE)],
        ids=["empty", "nul", "every byte", "text", "byte order mark", "5 MB"],
    )
    async def test_a_body_survives(self, store: DelayedMessageStore, body: bytes) -> None:
        """Any bytes, none to five megabytes, or to the store's limit, which its error names."""
        if len(body) > self.largest_body:
            with pytest.raises(InvalidMessage, match=str(len(body))):
                await store.store(delayed(body=body))
            assert await store.next_due() is None
            return
        await store.store(delayed(body=body))
        same(await store.fetch_next_due(AT), delayed(body=body))

    async def test_headers_survive(self, store: DelayedMessageStore) -> None:
        """Astral characters, control characters, empty names and values, quotes."""
        await store.store(delayed(headers=AWKWARD_HEADERS))
        found = await store.fetch_next_due(AT)
        same(found, delayed(headers=AWKWARD_HEADERS))
        assert found is not None
        assert dict(found.message.headers) == AWKWARD_HEADERS

    async def test_no_headers_survive(self, store: DelayedMessageStore) -> None:
        """A message without headers stays one."""
        await store.store(delayed(headers={}))
        found = await store.fetch_next_due(AT)
        assert found is not None
        assert dict(found.message.headers) == {}

    @pytest.mark.parametrize(
        "encoded",
        [b"", b"not json", b"\xff\xfe\x00\xd8", b"[1, 2]", b'{"a": null}', b'{"a" : "b"}  ', b'{"half": "'],
        ids=["empty", "not json", "not utf-8", "a list", "null", "spaces", "cut"],
    )
    async def test_damaged_headers_survive_untouched(self, store: DelayedMessageStore, encoded: bytes) -> None:
        """A store never parses headers: damaged ones reach the error queue unchanged."""
        damaged = DelayedMessage(Message.from_encoded("m", encoded, b"body"), "billing", AT)
        await store.store(damaged)
        found = await store.fetch_next_due(AT)
        same(found, damaged)
        assert found is not None
        assert found.message.encoded_headers == encoded
        assert await store.increment_failure_count(found) is True
        again = await store.fetch_next_due(AT)
        assert again is not None
        assert again.message.encoded_headers == encoded

    @pytest.mark.parametrize("due", INSTANTS.values(), ids=INSTANTS.keys())
    async def test_due_times_are_exact(self, store: DelayedMessageStore, due: datetime) -> None:
        """To the microsecond, or rounded up by less than a step; up to the year 9999 and back before 1970."""
        if END_OF_TIME - due < self.step - TICK:
            with pytest.raises(InvalidDueTime):
                await store.store(delayed(due=due))
            return
        await store.store(delayed(due=due))
        kept = await store.next_due()
        assert kept is not None
        assert timedelta(0) <= kept - due < self.step
        if due < END_OF_TIME:
            assert await store.fetch_next_due(due - timedelta(microseconds=1)) is None
        same(await store.fetch_next_due(kept), delayed(due=kept))

    async def test_due_times_are_ordered_over_the_centuries(self, store: DelayedMessageStore) -> None:
        """Instants compare as instants, not as text or floats."""
        instants = {name: due for name, due in INSTANTS.items() if END_OF_TIME - due >= self.step - TICK}
        for name, due in reversed(instants.items()):
            await store.store(delayed(name, due))
        fetched = [message for _ in instants if (message := await store.fetch_next_due(END_OF_TIME))]
        assert [message.id for message in fetched] == sorted(instants, key=lambda name: instants[name])
        assert all(timedelta(0) <= message.due - instants[message.id] < self.step for message in fetched)

    async def test_at_may_be_in_any_zone(self, store: DelayedMessageStore) -> None:
        """Aware datetimes are instants: the zone they are written in does not matter."""
        await store.store(delayed())
        zone = timezone(timedelta(hours=-9, minutes=-30))
        assert await store.fetch_next_due((AT - timedelta(seconds=1)).astimezone(zone)) is None
        same(await store.fetch_next_due(AT.astimezone(zone)), delayed())

    @pytest.mark.parametrize("name", HOSTILE_NAMES)
    async def test_hostile_ids_and_destinations(self, store: DelayedMessageStore, name: str) -> None:
        """Names are data: never quoted wrongly, folded, trimmed or cut."""
        message = delayed(name, destination=name)
        await store.store(message)
        await store.store(message)
        found = await store.fetch_next_due(AT)
        same(found, message)
        assert found is not None
        assert await store.fetch_next_due(AT) is None
        assert await store.increment_failure_count(found) is True
        assert await store.remove(found) is True
        assert await store.remove(found) is False

    async def test_the_longest_id_fits(self, store: DelayedMessageStore) -> None:
        """250 characters, and the last one counts."""
        for last in "ab":
            await store.store(delayed("i" * 249 + last))
        for last in "ab":
            same(await store.fetch_next_due(AT), delayed("i" * 249 + last))

    @pytest.mark.parametrize(("one", "other"), LOOKALIKES)
    async def test_lookalike_ids_are_different(self, store: DelayedMessageStore, one: str, other: str) -> None:
        """An id is equal to itself alone: no case folding, no accents dropped, no normal forms."""
        await store.store(delayed(one))
        if self.folds_ids:
            with contextlib.suppress(InvalidMessage):  # refused rather than dropped
                await store.store(delayed(other))
                assert await store.remove(delayed(other)) is True
            same(await store.fetch_next_due(AT), delayed(one))
            return
        await store.store(delayed(other))
        assert await store.remove(delayed(other)) is True
        same(await store.fetch_next_due(AT), delayed(one))

    @pytest.mark.parametrize("name", HOSTILE_NAMES)
    async def test_hostile_endpoint_names(self, tmp_path: Path, name: str) -> None:
        """Whatever the endpoint is called its store works: names are quoted, not pasted, or refused when too long."""
        try:
            store = await opened(await self.make_store(tmp_path), name)
        except ConfigurationError as error:
            assert len(name.encode()) > SHORT_NAME, f"{name!r} is not long"
            assert name in str(error)
            return
        await store.store(delayed(f"of {len(name)}"))
        found = await store.fetch_next_due(AT)
        same(found, delayed(f"of {len(name)}"))
        assert found is not None
        assert await store.remove(found) is True
        await closed(store)
