"""Errors of unknown kind: the back end's while they meet every message of one destination, else the message's."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit import conftest
from tests.unit.conftest import Scenario, build, delayed

from delayline.delayed.blame import EVIDENCE_FOR, GONE_AFTER, Blame
from delayline.delayed.set_aside import SetAside
from delayline.errors import BackendUnavailable, DispatchFailed, QueueNotFound
from delayline.events import Event
from delayline.testing import Fault, Signals
from delayline.testing.clock import settle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from delayline.message import DelayedMessage
    from delayline.spi import TransportOperation
    from delayline.testing.clock import ManualClock
    from delayline.transaction import Transaction

SCOPES = pytest.mark.parametrize("way", conftest.SCOPES)
#: A batch fails as a whole, as in SQL, or message by message, as on a broker that confirms each.
SINGLY = pytest.mark.parametrize("singly", [False, True], ids=["as a whole", "singly"])
NUMBER = 5


class Refused(Exception):
    """An error of a driver that nobody knows."""

    def __init__(self, text: str = "refused", sqlstate: str | None = None) -> None:
        super().__init__(text)
        self.sqlstate = sqlstate


@pytest.fixture
def signals() -> Iterator[Signals]:
    with Signals() as signals:
        yield signals


def refuse(
    scenario: Scenario, refused: Callable[[TransportOperation], bool], *, singly: bool, error: type[Exception] = Refused
) -> None:
    """Let the transport refuse the operations."""

    def failure(sent: Sequence[TransportOperation]) -> Exception:
        failures: dict[int, Exception] = {
            position: error(f"{operation.message.id} is refused")
            for position, operation in enumerate(sent)
            if refused(operation)
        }
        return DispatchFailed(failures) if singly and len(failures) == len(sent) else error("refused")

    scenario.faults.inject(Fault("dispatch", failure, when=lambda sent: any(map(refused, sent))))


async def start(scenario: Scenario) -> None:
    await scenario.transport.setup_infrastructure(["out", "other"])
    await scenario.endpoint.start()
    await settle()


async def put(scenario: Scenario, *ids: str, **settings: Any) -> None:  # noqa: ANN401
    await scenario.put(*[delayed(id, **settings) for id in ids])


IDS = [f"m{number}" for number in range(NUMBER)]


@SCOPES
@SINGLY
async def test_an_error_that_meets_every_message_counts_against_none(
    clock: ManualClock, way: str, singly: bool, signals: Signals
) -> None:
    scenario = build(clock, **conftest.SCOPES[way])
    # Given a destination that takes no message, for a reason that nobody knows
    refuse(scenario, lambda operation: operation.destination == "out", singly=singly)
    await put(scenario, *IDS)
    await start(scenario)
    await clock.advance(20)
    # Then all stay, and the breaker is armed
    assert (await scenario.ids("error"), signals.count(Event.BACKED_OFF)) == ([], 0)
    assert sorted((message.id, message.number_of_retries) for message in await scenario.pending()) == [
        (id, 0) for id in IDS
    ]
    assert signals.count(Event.BREAKER_ARMED) == 1
    # And once it takes them again, all arrive
    scenario.faults.heal()
    await clock.advance(15)
    assert sorted(await scenario.ids("out")) == IDS
    assert (await scenario.ids("error"), scenario.critical) == ([], [])
    await scenario.endpoint.stop()


@SCOPES
async def test_such_an_error_that_lasts_is_critical(clock: ManualClock, way: str) -> None:
    scenario = build(clock, **conftest.SCOPES[way])
    refuse(scenario, lambda operation: True, singly=False)
    await put(scenario, *IDS)
    await start(scenario)
    await clock.advance(60)
    assert set(scenario.critical) == {"Failed to dispatch delayed messages to destination"}
    assert len(await scenario.pending()) == NUMBER
    await scenario.endpoint.stop()


@SCOPES
@SINGLY
@pytest.mark.parametrize("bad", [["m0"], ["m4"], ["m0", "m1"], ["m1", "m3"]], ids=" ".join)
async def test_a_message_that_fails_while_others_go_has_failed(
    clock: ManualClock, way: str, singly: bool, bad: list[str]
) -> None:
    scenario = build(clock, **conftest.SCOPES[way])
    refuse(scenario, lambda operation: operation.destination == "out" and operation.message.id in bad, singly=singly)
    await put(scenario, *IDS)
    await start(scenario)
    await clock.advance(3)
    assert sorted(await scenario.ids("error")) == bad
    assert sorted(await scenario.ids("out")) == [id for id in IDS if id not in bad]
    assert (await scenario.pending(), scenario.critical) == ([], [])
    await scenario.endpoint.stop()


@SCOPES
@pytest.mark.parametrize(
    "attempts",
    [[IDS, IDS, ["m0"]], [["m3", "m4"]], [["m2"], BackendUnavailable("away")]],
    ids=["ends", "begins, and is over", "becomes an outage"],
)
async def test_a_fault_that_changes_within_a_batch_counts_against_no_message(
    clock: ManualClock,
    way: str,
    attempts: list[list[str] | BackendUnavailable],
    signals: Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a permission is given back while messages are published one after the other."""
    scenario = build(clock, **conftest.SCOPES[way])
    # Given a destination that refuses these ids at each attempt, and sends what goes beside them
    to_come, send = iter(attempts), scenario.queues.dispatch

    async def dispatch(operations: Sequence[TransportOperation], transaction: Transaction | None = None) -> None:
        refused = next(to_come, [])
        if isinstance(refused, BackendUnavailable):
            raise refused
        failures: dict[int, Exception] = {
            position: Refused() for position, operation in enumerate(operations) if operation.message.id in refused
        }
        await send([each for position, each in enumerate(operations) if position not in failures], transaction)
        if failures:
            raise DispatchFailed(failures)

    monkeypatch.setattr(scenario.queues, "dispatch", dispatch)
    await put(scenario, *IDS)
    await start(scenario)
    # When it takes some of a batch
    await clock.advance(30)
    # Then all arrive, and no attempt was counted
    assert sorted(await scenario.ids("out")) == IDS
    assert [signals.count(event) for event in (Event.BACKED_OFF, Event.MOVED_TO_ERROR)] == [0, 0]
    await scenario.endpoint.stop()


@SCOPES
@pytest.mark.parametrize("retries", [0, 2])
async def test_a_message_alone_has_failed(clock: ManualClock, way: str, retries: int) -> None:
    scenario = build(clock, number_of_retries=retries, **conftest.SCOPES[way])
    tried: list[str] = []
    refuse(scenario, lambda operation: operation.destination == "out", singly=False)
    scenario.faults.inject(
        Fault("dispatch", before=lambda: tried.append("!"), when=lambda sent: sent[0].destination == "out")
    )
    await put(scenario, "bad")
    await start(scenario)
    await clock.advance(10 * retries)
    assert (await scenario.ids("error"), await scenario.pending()) == (["bad"], [])
    assert len(tried) == 1 + retries
    await scenario.endpoint.stop()


@pytest.mark.parametrize("way", ["one transaction", "the store's transaction", "no transaction"])
async def test_messages_due_a_moment_apart_count_as_due_together(clock: ManualClock, way: str) -> None:
    scenario = build(clock, **conftest.SCOPES[way])
    refuse(scenario, lambda operation: operation.destination == "out", singly=False)
    await scenario.put(*[delayed(id, after=0.3 * position) for position, id in enumerate(IDS)])
    await start(scenario)
    await clock.advance(20)
    assert (await scenario.ids("error"), len(await scenario.pending())) == ([], NUMBER)
    scenario.faults.heal()
    await clock.advance(15)
    assert sorted(await scenario.ids("out")) == IDS
    await scenario.endpoint.stop()


async def test_a_message_that_others_follow_fails_by_itself_once_they_go(scenario: Scenario) -> None:
    refuse(scenario, lambda operation: operation.message.id == "bad" and operation.destination == "out", singly=False)
    await scenario.put(delayed("bad"), delayed("good", after=0.5))
    await start(scenario)
    await scenario.clock.advance(2)
    assert (await scenario.ids("error"), await scenario.ids("out")) == (["bad"], ["good"])
    await scenario.endpoint.stop()


async def test_one_message_after_the_other_loses_no_second_one_to_a_fault_of_the_back_end(scenario: Scenario) -> None:
    """Each was alone when it failed."""
    refuse(scenario, lambda operation: operation.destination == "out", singly=False)
    await scenario.put(*[delayed(id, after=4 * position) for position, id in enumerate(IDS)])
    await start(scenario)
    await scenario.clock.advance(30)
    assert (await scenario.ids("error"), len(await scenario.pending())) == (["m0"], NUMBER - 1)
    await scenario.endpoint.stop()


async def test_long_after_another_one_a_message_alone_has_failed(scenario: Scenario) -> None:
    refuse(scenario, lambda operation: operation.destination == "out", singly=False)
    await put(scenario, "first")
    await start(scenario)
    await scenario.clock.advance(EVIDENCE_FOR.total_seconds() + 1)
    await put(scenario, "second")
    await scenario.clock.advance(60)
    assert (await scenario.ids("error"), scenario.critical) == (["first", "second"], [])
    await scenario.endpoint.stop()


@SCOPES
@SINGLY
async def test_a_destination_that_takes_nothing_holds_up_no_other(clock: ManualClock, way: str, singly: bool) -> None:
    scenario = build(clock, batch_size=10, **conftest.SCOPES[way])
    refuse(scenario, lambda operation: operation.destination == "out", singly=singly)
    await put(scenario, *[f"bad{number:02}" for number in range(30)])
    await start(scenario)
    for number in range(60):
        await put(scenario, f"{number:02}", to="other")
        await clock.advance(1)
    assert sorted(await scenario.ids("other")) == [f"{number:02}" for number in range(60)]
    assert (await scenario.ids("error"), scenario.critical, len(await scenario.pending())) == ([], [], 30)
    # And the first message that it takes brings the others
    scenario.faults.heal()
    await put(scenario, "good")
    await clock.advance(5)
    assert (len(await scenario.ids("out")), await scenario.pending()) == (31, [])
    await scenario.endpoint.stop()


@SCOPES
async def test_errors_of_several_kinds_are_several_messages_faults(clock: ManualClock, way: str) -> None:
    scenario = build(clock, **conftest.SCOPES[way])
    for id, sqlstate in [("a", "P0001"), ("b", "P0002")]:
        scenario.faults.inject(
            Fault(
                "dispatch",
                Refused("no", sqlstate),
                when=lambda sent, id=id: any(each.message.id == id and each.destination == "out" for each in sent),
            )
        )
    await put(scenario, "a", "b")
    await start(scenario)
    await clock.advance(3)
    assert sorted(await scenario.ids("error")) == ["a", "b"]
    await scenario.endpoint.stop()


async def test_pythons_own_exceptions_are_the_messages_fault(scenario: Scenario) -> None:
    """They come of the code that met the message."""
    refuse(scenario, lambda operation: operation.destination == "out", singly=False, error=ValueError)
    await put(scenario, *IDS)
    await start(scenario)
    assert sorted(await scenario.ids("error")) == IDS
    await scenario.endpoint.stop()


async def test_a_message_in_doubt_that_is_deleted_leaves_the_other_one_alone(clock: ManualClock) -> None:
    scenario = build(clock)
    refuse(scenario, lambda operation: operation.destination == "out", singly=False)
    await put(scenario, "a", "b")
    await start(scenario)
    scenario.memory._delete(["a"])
    await clock.advance(180)
    assert (await scenario.ids("error"), await scenario.pending()) == (["b"], [])
    await scenario.endpoint.stop()


@SCOPES
@pytest.mark.parametrize("gone", ["deleted", "with their queue"])
async def test_the_poller_sleeps_when_messages_in_doubt_are_gone(clock: ManualClock, way: str, gone: str) -> None:
    scenario = build(clock, **conftest.SCOPES[way])
    # Given messages that all fail alike
    refuse(scenario, lambda operation: operation.destination == "out", singly=True)
    await put(scenario, *IDS)
    await start(scenario)
    await clock.advance(0.1)
    # When an operator deletes them, or their queue, after which they go to the error queue
    if gone == "deleted":
        scenario.memory._delete(IDS)
    else:
        scenario.faults.heal()
        refuse(scenario, lambda operation: operation.destination == "out", singly=True, error=QueueNotFound)
    await clock.advance(20)
    # Then the poller does not look for messages while no time passes
    looked = len(scenario.faults.recorded("next_due"))
    for _ in range(20):
        await settle()
    assert len(scenario.faults.recorded("next_due")) == looked
    assert len(await scenario.ids("error")) == (0 if gone == "deleted" else NUMBER)
    await scenario.endpoint.stop()


async def failed_alike(blame: Blame, messages: Sequence[DelayedMessage]) -> None:
    """Let messages fail alike while others go elsewhere, and set them aside."""
    blame.sent([delayed("other", to="other")])
    failures: list[tuple[DelayedMessage, Exception]] = [(message, Refused()) for message in messages]
    assert await blame.own(failures, others_left=False, others_follow=follows) == []
    assert all(map(blame.set_aside, messages))
    assert blame.verdict() is None


async def follows(message: DelayedMessage) -> bool:
    return False


async def test_messages_that_wait_to_be_tried_are_not_forgotten(clock: ManualClock) -> None:
    # Given more messages in doubt than are tried again in this time while others are always due
    aside = SetAside()
    blame, messages = Blame(aside, clock), [delayed(f"m{number:03}") for number in range(100)]
    await failed_alike(blame, messages)
    tried: set[str] = set()
    for _ in range(120):
        await clock.advance(5)
        probes = blame.to_try(clock.now(), idle=False)
        tried |= {message.id for message in probes}
        aside.try_now(probes)
        await failed_alike(blame, probes)
    # Then each is tried in its turn
    assert tried == {message.id for message in messages}


async def test_messages_that_others_have_taken_are_forgotten(clock: ManualClock) -> None:
    aside = SetAside()
    blame, messages = Blame(aside, clock), [delayed("a"), delayed("b")]
    await failed_alike(blame, messages)
    # Given messages that are shown to fail by themselves, others in doubt, and another process that takes them all
    blame.sent([delayed("c")])
    blame.verdict()
    await failed_alike(blame, [delayed("d"), delayed("e")])
    aside.try_now(blame.to_try(clock.now() + timedelta(seconds=5), idle=True))
    assert blame.is_open
    # When they are not seen again
    await clock.advance(GONE_AFTER.total_seconds() + 1)
    assert blame.to_try(clock.now(), idle=True) == ()
    # Then nothing is in doubt
    assert not blame.is_open
