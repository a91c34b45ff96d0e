"""`on_conflict` of a send: what happens to a pending message with the same id."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from delayline import ConfigurationError, DuplicateMessage, Endpoint, InvalidMessage, SyncEndpoint
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

DAY = timedelta(days=1)


@pytest.fixture
async def shop(tmp_path: Path) -> AsyncIterator[Endpoint]:
    url = f"sqlite:///{tmp_path}/shop.db"
    endpoint = Endpoint(
        "shop", transport=SqlTransport(url), delayed_delivery=SqlDelayedMessageStore(url), setup_infrastructure=True
    )
    async with endpoint:
        yield endpoint


async def bodies(shop: Endpoint) -> list[bytes]:
    return [one.message.body for one in await shop.delayed.pending()]


async def test_a_send_returns_its_result(shop: Endpoint) -> None:
    """Given a pending message, when its id is sent again, then the result says if it was stored, kept or replaced."""
    first = await shop.send("shop", b"1", delay=DAY, message_id="a", on_conflict="raise")
    kept = await shop.send("shop", b"2", delay=DAY, message_id="a", on_conflict="keep")
    assert (first, first.result, kept.result, await bodies(shop)) == ("a", "stored", "kept", [b"1"])
    replaced = await shop.send("shop", b"3", delay=2 * DAY, message_id="a", on_conflict="replace")
    assert (replaced.result, await bodies(shop)) == ("replaced", [b"3"])
    assert (await shop.send("shop", b"4", delay=DAY)).result is None


async def test_a_pending_id_is_an_error_on_request(shop: Endpoint) -> None:
    """Given a pending message, when its id is sent again with raise, then nothing is stored."""
    await shop.send("shop", b"1", delay=DAY, message_id="a")
    with pytest.raises(DuplicateMessage, match="'a' is pending already, and nothing was stored"):
        await shop.send("shop", b"2", delay=DAY, message_id="a", on_conflict="raise")
    assert await bodies(shop) == [b"1"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"delay": DAY}, "give message_id"),
        ({"message_id": "a"}, "a delay or time"),
        ({"delay": DAY, "message_id": "a", "on_conflict": "ignore"}, "'keep', 'replace' or 'raise', not 'ignore'"),
    ],
)
async def test_sends_that_cannot_conflict_are_refused(shop: Endpoint, given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidMessage, match=text):
        await shop.send("shop", b"", **{"on_conflict": "replace", **given})


async def test_a_transaction_of_the_user_excludes_it(shop: Endpoint, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="exclude each other"):
        await shop.send("shop", b"", delay=DAY, message_id="a", transaction="default", on_conflict="replace")


def test_blocking_senders_report_it_too(tmp_path: Path) -> None:
    """Given SyncEndpoint, when an id is replaced, then the result says so."""
    url = f"sqlite:///{tmp_path}/shop.db"
    with SyncEndpoint(
        Endpoint("shop", transport=SqlTransport(url), delayed_delivery=SqlDelayedMessageStore(url))
    ) as shop:
        shop.send("shop", b"1", delay=DAY, message_id="a")
        assert shop.send("shop", b"2", delay=DAY, message_id="a", on_conflict="replace").result == "replaced"
