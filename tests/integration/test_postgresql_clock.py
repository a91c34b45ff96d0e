"""The server's clock decides which messages are due, for any clock of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Self

import pytest
from click.testing import CliRunner
from sqlalchemy.engine import make_url
from tests.eventually import PATIENCE

from delayline import Endpoint, StoredDelivery
from delayline.cli import main
from delayline.clock import SystemClock
from delayline.events import Event
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.sql.server_clock import BOUNDS_STALE_AFTER, DRIFT, ServerClock, steady
from delayline.testing import Signals
from delayline.timeouts import SqlTimeoutPersister, TimeoutManagerDelivery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from datetime import tzinfo
    from pathlib import Path

    from delayline import Message, MessageContext
    from delayline.spi import DelayedDelivery

HOUR = timedelta(hours=1)
DELAY = timedelta(seconds=3)
NUMBER = 20


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


@contextlib.asynccontextmanager
async def slow_answers(url: str) -> AsyncIterator[str]:
    """Provide the URL of a link to the server whose answers take up to half a second, at random."""
    parsed, rng = make_url(url), random.Random(5)  # noqa: S311 - no secret
    tasks = set[asyncio.Task[None]]()

    async def forward(source: asyncio.StreamReader, target: asyncio.StreamWriter, longest: float) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await source.read(1 << 16):
                    await asyncio.sleep(rng.uniform(0, longest))
                    target.write(data)
        finally:
            target.transport.abort()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection(parsed.host, parsed.port)
        tasks.add(asyncio.create_task(forward(reader, requests, 0)))
        tasks.add(asyncio.create_task(forward(answers, writer, 0.5)))

    async with await asyncio.start_server(accept, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        yield parsed.set(port=port).render_as_string(hide_password=False)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # until the aborted connections are closed


def store_at(url: str, *, polling: bool) -> DelayedDelivery:
    return StoredDelivery(SqlDelayedMessageStore(url), polling=polling)


def manager_at(url: str, *, polling: bool) -> DelayedDelivery:
    return TimeoutManagerDelivery(SqlTimeoutPersister(url), polling=polling)


@pytest.mark.parametrize("off", [HOUR, -HOUR], ids=["ahead", "behind"])
@pytest.mark.parametrize("delivery", [store_at, manager_at])
@pytest.mark.sample(2)
async def test_answers_on_a_slow_link_make_nothing_early(
    server_url: str, wrong: WrongClock, off: timedelta, delivery: Callable[..., DelayedDelivery]
) -> None:
    # Given an endpoint near its server, and a sender whose clock is wrong at the end of a slow link
    called: dict[str, float] = {}
    stored: dict[str, float] = {}
    handled: dict[str, float] = {}
    all_handled = asyncio.Event()
    near = Endpoint("orders", transport=SqlTransport(server_url), delayed_delivery=delivery(server_url, polling=True))

    @near.handler
    async def handle(message: Message, context: MessageContext) -> None:
        handled[message.id] = time.monotonic()
        if len(handled) == NUMBER:
            all_handled.set()

    async with slow_answers(server_url) as far_url, near:
        wrong.off = off
        sender = Endpoint(
            "orders", transport=SqlTransport(far_url), delayed_delivery=delivery(far_url, polling=False), send_only=True
        )
        async with sender:

            async def send(message_id: str) -> None:
                called[message_id] = time.monotonic()
                await sender.send("orders", b"", message_id=message_id, delay=DELAY)
                stored[message_id] = time.monotonic()

            # When it sends messages with a delay
            async with asyncio.TaskGroup() as sending:
                for number in range(NUMBER):
                    sending.create_task(send(str(number)))
                    await asyncio.sleep(0.02)
            async with asyncio.timeout(PATIENCE):
                await all_handled.wait()
    # Then each is handled after the delay, and within a moment of it, or of the end of a send that took longer
    delay = DELAY.total_seconds()
    assert [one for one in called if handled[one] - called[one] < delay] == []
    assert max(handled[one] - max(called[one] + delay, stored[one]) for one in called) < PATIENCE / 2


@pytest.mark.parametrize("off", [HOUR, -HOUR], ids=["ahead", "behind"])
@pytest.mark.sample(1)
async def test_a_poller_on_a_slow_link_sends_nothing_early(server_url: str, wrong: WrongClock, off: timedelta) -> None:
    # Given an endpoint whose clock is wrong at the end of a slow link
    wrong.off = off
    called: dict[str, float] = {}
    waited: list[float] = []
    with Signals() as signals:
        async with slow_answers(server_url) as far_url:
            endpoint = Endpoint(
                "orders", transport=SqlTransport(far_url), delayed_delivery=store_at(far_url, polling=True)
            )

            @endpoint.handler
            async def handle(message: Message, context: MessageContext) -> None:
                waited.append(time.monotonic() - called[message.id])

            # When it sends to itself with a delay
            async with endpoint:
                for number in range(5):
                    called[str(number)] = time.monotonic()
                    await endpoint.send("orders", b"", message_id=str(number), delay=DELAY)
                await signals.wait_for(Event.HANDLED, 5, timeout=3 * PATIENCE)
    # Then each is handled after the delay
    assert min(waited) >= DELAY.total_seconds()


class BehindMachine(datetime):
    """This machine's clock as the command line reads it: an hour behind."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return super().now(tz) - HOUR


def test_delays_of_the_command_line_go_by_the_servers_clock(
    server_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(main, [*arguments, "--endpoint", "orders"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    # Given a machine that is an hour behind its server
    monkeypatch.setenv("DELAYLINE_URL", server_url)
    run("setup")
    for module in ("send", "pending"):
        monkeypatch.setattr(import_module(f"delayline.cli.{module}"), "datetime", BehindMachine)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "row", "destination": "orders", "body": "x", "delay": "30m"}\n')
    # When messages are sent and rescheduled with delays
    started = datetime.now(UTC)
    sent = json.loads(run("send", "orders", "x", "--delay", "30m", "--id", "one", "--json"))
    run("send", "orders", "x", "--delay", "1d", "--id", "moved")
    run("reschedule", "moved", "--delay", "30m")
    run("send", "--from", str(rows))
    # Then they are due after the delay by the server's clock, which is this machine's true one here
    due = {one["id"]: datetime.fromisoformat(one["due"]) for one in json.loads(run("pending", "--json"))["pending"]}
    assert due.keys() == {"one", "moved", "row"}
    assert min(due.values()) >= started + HOUR / 2
    assert max(due.values()) < datetime.now(UTC) + HOUR / 2 + timedelta(seconds=5)
    assert datetime.fromisoformat(sent["due"]) == due["one"]


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


class Steady:
    """The steady clock, set by hand; in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 100.0
        monkeypatch.setattr(
            "delayline.sql.server_clock.time.clock_gettime_ns", lambda _: round(self.seconds * 1e6) * 1000
        )


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Steady:
    return Steady(monkeypatch)


SAID = datetime(2030, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
ROUNDING = timedelta(microseconds=2)


def answer(clock: ServerClock, by_hand: Steady, said: datetime, *, before: float, after: float) -> None:
    """Have the server read its clock, that many seconds after the request and before the answer."""
    requested = steady()
    by_hand.seconds += before + after
    clock.answered(said, requested)


def test_the_time_goes_on_after_an_answer(by_hand: Steady) -> None:
    # Given a clock that has had an answer
    asked = list[None]()
    clock = ServerClock(lambda: asked.append(None))
    answer(clock, by_hand, SAID, before=0, after=0)
    # When time goes by
    by_hand.seconds += 4.5
    # Then it goes on, less certain by what clocks drift, and asks again only when the answer is stale
    true, drift = SAID + 4.5 * SECOND, 4.5 * DRIFT * SECOND
    assert true - drift - ROUNDING <= clock.now() <= true <= clock.at_latest() <= true + drift + ROUNDING
    assert asked == []
    by_hand.seconds += BOUNDS_STALE_AFTER
    assert SAID + (4.5 + BOUNDS_STALE_AFTER) * SECOND - clock.now() < 0.01 * SECOND
    clock.at_latest()
    assert asked == [None], "once, while the answer is on its way"


def test_the_true_time_is_within_the_bounds_of_an_answer(by_hand: Steady) -> None:
    # Given an answer that was on its way for 200 ms, and its request for 50 ms
    clock = ServerClock(lambda: None)
    answer(clock, by_hand, SAID, before=0.05, after=0.2)
    # Then nothing is due too early by it, and no delay ends too early
    true = SAID + 0.2 * SECOND
    assert true - 0.2 * SECOND - ROUNDING <= clock.now() <= true
    assert true <= clock.at_latest() <= true + 0.05 * SECOND + ROUNDING


def test_a_slow_answer_does_not_widen_the_bounds(by_hand: Steady) -> None:
    # Given a fast answer
    clock = ServerClock(lambda: None)
    answer(clock, by_hand, SAID, before=0.001, after=0.001)
    # When a slow one follows
    by_hand.seconds += 1
    answer(clock, by_hand, SAID + 1.301 * SECOND, before=0.3, after=0.4)
    # Then the bounds are those of the fast one, and what clocks drift meanwhile
    assert clock.at_latest() - clock.now() <= (0.002 + 2 * 1.7 * DRIFT) * SECOND + 2 * ROUNDING
    assert clock.now() <= SAID + 1.701 * SECOND <= clock.at_latest()


@pytest.mark.parametrize("jump", [HOUR, -HOUR, SECOND, -SECOND])
def test_a_server_clock_that_was_set_is_followed_at_the_next_answer(by_hand: Steady, jump: timedelta) -> None:
    clock = ServerClock(lambda: None)
    answer(clock, by_hand, SAID, before=0.001, after=0.001)
    before = steady()
    by_hand.seconds += 0.01
    # When the server's clock is set
    answer(clock, by_hand, SAID + jump + 0.102 * SECOND, before=0.1, after=0.2)
    true = SAID + jump + 0.302 * SECOND
    assert clock.now() <= true <= clock.at_latest()
    # Then an answer from before, which comes last, changes nothing
    clock.answered(SAID, before)
    assert clock.now() <= true <= clock.at_latest()


def test_a_process_that_was_suspended_between_request_and_answer(by_hand: Steady) -> None:
    clock = ServerClock(lambda: None)
    answer(clock, by_hand, SAID, before=0, after=3600)
    assert clock.now() <= SAID + HOUR <= clock.at_latest() <= SAID + HOUR + ROUNDING
    # Then the next answer narrows the bounds again
    answer(clock, by_hand, SAID + HOUR + SECOND, before=1, after=0.001)
    assert SAID + HOUR + 1.001 * SECOND - clock.now() <= 0.002 * SECOND


def test_the_resolution_of_the_servers_clock_makes_nothing_early(by_hand: Steady) -> None:
    clock = ServerClock(lambda: None, 16 * timedelta(milliseconds=1))
    answer(clock, by_hand, SAID, before=0, after=0)
    assert clock.now() <= SAID
    assert clock.at_latest() >= SAID + timedelta(milliseconds=16)


def test_before_the_server_is_asked_it_is_this_machines_clock(wrong: WrongClock) -> None:
    wrong.off = HOUR
    clock = ServerClock(lambda: None)
    assert clock.now() - datetime.now(UTC) > timedelta(minutes=59)
