"""The server's clock decides what is due, whatever this machine's clock says."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from delayline import Endpoint, StoredDelivery
from delayline.clock import SystemClock
from delayline.events import Event
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.sql.server_clock import STALE_AFTER, ServerClock
from delayline.testing import Signals

if TYPE_CHECKING:
    from delayline import Message, MessageContext

HOUR = timedelta(hours=1)
PATIENCE = 20.0


class WrongClock:
    """This machine's clock, off by as much as `off` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.off = timedelta(0)
        monkeypatch.setattr(SystemClock, "now", lambda _: datetime.now(UTC) + self.off)


@pytest.fixture(params=["postgresql", "mariadb"])
def server_url(request: pytest.FixtureRequest) -> str:
    """Provide an empty database on a server of either kind."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> WrongClock:
    return WrongClock(monkeypatch)


@pytest.mark.parametrize("off", [HOUR, -HOUR, timedelta(days=4000)], ids=["ahead", "behind", "years ahead"])
async def test_a_wrong_clock_makes_nothing_early_or_late(server_url: str, wrong: WrongClock, off: timedelta) -> None:
    # Given a machine whose clock is wrong
    wrong.off = off
    handled: list[datetime] = []
    endpoint = Endpoint(
        "orders",
        transport=SqlTransport(server_url),
        delayed_delivery=StoredDelivery(SqlDelayedMessageStore(server_url)),
    )

    @endpoint.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled.append(datetime.now(UTC))

    with Signals() as signals:
        async with endpoint:
            # When a message is delayed, and the clock jumps back meanwhile
            sent = datetime.now(UTC)
            await endpoint.send("orders", b"", delay=timedelta(seconds=1))
            wrong.off = -off
            await signals.wait_for(Event.HANDLED, timeout=PATIENCE)
    # Then it comes when it was to come: the server here has this machine's true clock
    assert timedelta(seconds=1) <= handled[0] - sent < timedelta(seconds=10)


async def test_two_machines_agree_by_the_servers_clock(postgresql_url: str, wrong: WrongClock) -> None:
    # Given two stores of one endpoint on machines an hour apart
    store = SqlDelayedMessageStore(postgresql_url)
    await SqlTransport(postgresql_url).setup_infrastructure(["orders"])
    transport = SqlTransport(postgresql_url)
    await transport.start()
    # When either asks for the time
    wrong.off = HOUR
    ahead = store.clock().now()
    wrong.off = -HOUR
    behind = store.clock().now()
    await transport.stop()
    # Then it is the server's
    assert abs(ahead - behind) < timedelta(seconds=10)
    assert abs(ahead - datetime.now(UTC)) < timedelta(seconds=10)


def test_what_the_server_said_is_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a steady clock under our hands, and a clock that has heard the server
    steady, asked = [100.0], list[None]()
    monkeypatch.setattr("delayline.sql.server_clock.time.clock_gettime", lambda _: steady[0])
    clock = ServerClock(lambda: asked.append(None))
    said = datetime(2030, 1, 1, tzinfo=UTC)
    clock.hear(said)
    # When time goes by
    steady[0] += 12.5
    # Then it goes on, and asks again only when what it heard is stale
    assert clock.now() == said + timedelta(seconds=12.5)
    assert asked == []
    steady[0] += STALE_AFTER
    assert clock.now() == said + timedelta(seconds=12.5 + STALE_AFTER)
    assert asked == [None]


def test_before_the_server_is_asked_it_is_this_machines_clock(wrong: WrongClock) -> None:
    wrong.off = HOUR
    clock = ServerClock(lambda: None)
    assert clock.now() - datetime.now(UTC) > timedelta(minutes=59)
