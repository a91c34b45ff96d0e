"""Circuit breakers: a fault that lasts becomes a critical error, a passing fault does not."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from delayline.events import Event, emit, is_outage

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Hashable
    from datetime import datetime

    from delayline.clock import Clock
    from delayline.observer import Observer

logger: logging.Logger = logging.getLogger(__name__)

DELAY_WHEN_ARMED: Final = timedelta(seconds=1)
DELAY_WHEN_TRIGGERED: Final = timedelta(seconds=10)
FAILURE_RATE_WINDOW: Final = timedelta(seconds=30)
#: Parts of which each tries again by itself have all done so that long after the first success of any.
ALL_RECOVERED_WITHIN: Final = timedelta(seconds=15)
FIRST_INTERVAL: Final = timedelta(seconds=1)
LONGEST_INTERVAL: Final = timedelta(seconds=60)


class BreakerState(Enum):
    """Where a breaker stands."""

    DISARMED = 0
    ARMED = 1
    TRIGGERED = 2


@dataclass
class _Repeats:
    began: datetime
    logged: datetime
    interval: timedelta = FIRST_INTERVAL
    failures: int = 1


class _Outage:
    """A back end that is out of reach, as all parts of the process see it that use it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.repeats: _Repeats = _Repeats(clock.now(), clock.now(), failures=0)
        self.members: dict[FailureLog, None] = {}
        """The parts that have failed, and have not stopped since."""
        self.ended: datetime | None = None

    @property
    def is_past(self) -> bool:
        """Whether a part that fails now fails anew."""
        return self.ended is not None and abs(self.clock.now() - self.ended) >= ALL_RECOVERED_WITHIN


class Outages:
    """The outages of a process, of which each is logged once, however many parts meet it; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outages: dict[Hashable, _Outage] = {}

    def failed(self, part: FailureLog, text: str, args: tuple[object, ...], facts: dict[str, Any]) -> None:
        """Log the first failure of an outage, and a count after 1, 2, 4 ... 60 seconds."""
        with self._lock:
            if part.outage is not None and part.outage.ended is not None and not part.outage.is_past:
                return  # it tried before the others have succeeded
            outage = part.outage = self._outages.setdefault(part.back_end, _Outage(part.clock))
            repeats, now = outage.repeats, outage.clock.now()
            outage.members[part] = None
            repeats.failures += 1
            is_first = repeats.failures == 1
            if not is_first and abs(now - repeats.logged) < repeats.interval:  # the wall clock may be set back
                return
            if not is_first:
                repeats.logged, repeats.interval = now, min(repeats.interval * 2, LONGEST_INTERVAL)
            seconds, names = (now - repeats.began).total_seconds(), ", ".join(sorted({m.name for m in outage.members}))
        if is_first:
            emit(logger, logging.WARNING, Event.OUTAGE_BEGAN, f"A back end is out of reach. {text}", *args, **facts)
            return
        counted = f"A back end is out of reach for %.0f s: %d failures of %s. {text}"
        emit(logger, logging.WARNING, Event.OUTAGE_LASTS, counted, seconds, repeats.failures, names, *args, **facts)

    def over(self, part: FailureLog) -> None:
        """Log the end of the part's outage, unless another part has ended it."""
        with self._lock:
            outage, part.outage = part.outage, None
            if outage is None or outage.ended is not None:
                return
            outage.ended = outage.clock.now()
            outage.members.clear()
            self._outages.pop(part.back_end, None)
            seconds = (outage.ended - outage.repeats.began).total_seconds()
        text = "The back end is in reach again, after %.0f s and %d failures."
        emit(logger, logging.WARNING, Event.OUTAGE_ENDED, text, seconds, outage.repeats.failures)

    def has(self, back_end: Hashable) -> bool:
        """Return whether an outage of the back end lasts."""
        with self._lock:
            return back_end in self._outages

    def left(self, part: FailureLog) -> None:
        """Forget a part that has stopped; the outage too if it was the last."""
        with self._lock:
            outage, part.outage = part.outage, None
            if outage is not None and outage.ended is None:
                outage.members.pop(part, None)
                if not outage.members:
                    self._outages.pop(part.back_end, None)


_outages = Outages()


def _begin_anew() -> None:
    """In a child process nothing has failed yet."""
    global _outages
    _outages = Outages()


os.register_at_fork(after_in_child=_begin_anew)


def is_out_of_reach(back_end: Hashable) -> bool:
    """Return whether an outage of the back end lasts, as any part of the process has met it; from any thread."""
    return _outages.has(back_end)


def back_end_of(part: object) -> Hashable:
    """Return what stands for the back end of a transport or a store: equal for two of the same database."""
    domain: Hashable | None = getattr(part, "transaction_domain", None)
    return id(part) if domain is None else domain


class FailureLog:
    """Logs a failure that repeats: the first time in full, then a count after 1, 2, 4 ... 60 seconds.

    The failures between are logged at DEBUG, so that each of them remains an event. Events are counted apart; only the
    first failure of all has a traceback. An outage is logged at WARNING at most: what does not pass becomes a critical
    error. Of the parts that share a back end an outage is logged once.

    Args:
        clock: Measures the intervals.
        name: What fails.
        back_end: Stands for the back end that an outage is of (`back_end_of`); None where none is known.
    """

    def __init__(self, clock: Clock, name: str = "", back_end: Hashable | None = None) -> None:
        self.clock = clock
        self.name = name
        self.back_end = back_end
        self.outage: _Outage | None = None
        """The outage that it has met last; None after a success."""
        self._repeats: dict[Event, _Repeats] = {}

    def log_failure(
        self,
        logger: logging.Logger,
        level: int,
        event: Event,
        text: str,
        *args: object,
        exception: BaseException | None = None,
        **facts: object,
    ) -> None:
        """Log `text % args` as `emit` does, or briefly if the same event was logged a moment ago.

        Args:
            logger: The caller's logger.
            level: The level of the first line and of the counted failures.
            event: The event of the record, by which records are counted.
            text: The text, with `%` placeholders.
            args: The values for the placeholders.
            exception: The error whose traceback is logged with the first failure.
            facts: The facts of the record.
        """
        if is_outage(exception):
            if self.back_end is not None:
                emit(logger, logging.DEBUG, event, text, *args, exception=exception, **facts)
                _outages.failed(self, text, args, facts)
                return
            level = min(level, logging.WARNING)
        now = self.clock.now()
        repeats = self._repeats.get(event)
        if repeats is None:
            shown = None if self._repeats else exception
            self._repeats[event] = _Repeats(now, now)
            emit(logger, level, event, text, *args, exception=shown, **facts)
            return
        repeats.failures += 1
        if abs(now - repeats.logged) < repeats.interval:  # the wall clock may be set back
            emit(logger, logging.DEBUG, event, text, *args, exception=None, **facts)
            return
        repeats.logged, repeats.interval = now, min(repeats.interval * 2, LONGEST_INTERVAL)
        seconds = (now - repeats.began).total_seconds()
        counted = f"Still failing, %d attempts in %.0f s: {text}"
        emit(logger, level, event, counted, repeats.failures, seconds, *args, exception=None, **facts)

    def over(self) -> bool:
        """Begin anew with the next failure; return whether there were any, apart from outages that are logged once."""
        failed = bool(self._repeats)
        self._repeats.clear()
        if self.outage is not None:
            _outages.over(self)
        return failed

    def leave(self) -> None:
        """Take no part in an outage any more, as nothing is tried. Idempotent."""
        if self.outage is not None:
            _outages.left(self)


class RepeatedFailuresOverTime(FailureLog):
    """Triggers once when failures go on for `time_to_trigger` without a success between them.

    Disarmed → armed at the first failure → triggered by the first failure at or after the time; any success disarms.
    Unlike NServiceBus's, it does not trigger by time alone: silence after a failure is not a lasting fault. While armed
    each failure waits 1 s, once triggered 10 s, to spare a failing back end. Failures are logged with `log_failure`,
    which restarts when the breaker is disarmed. Belongs to an event loop.
    """

    def __init__(
        self,
        name: str,
        *,
        time_to_trigger: timedelta,
        trigger: Callable[[Exception], None],
        clock: Clock,
        arm: Callable[[], None] = lambda: None,
        disarm: Callable[[], None] = lambda: None,
        observer: Observer | None = None,
        back_end: Hashable | None = None,
    ) -> None:
        super().__init__(clock, name, back_end)
        self._observer = observer
        self._change(BreakerState.DISARMED)
        self._time_to_trigger = time_to_trigger
        self._trigger = trigger
        self._arm = arm
        self._disarm = disarm
        self._armed_at = clock.now()
        self._failures = 0
        self._timer: asyncio.Task[None] | None = None
        self._closed = False

    def success(self) -> None:
        """Disarm. Nearly free when disarmed already. An error of the disarm action is logged and raised."""
        if self.state is BreakerState.DISARMED:
            return
        self._change(BreakerState.DISARMED)
        self._stop_timer()
        level = self._level
        self.over()
        seconds = (self.clock.now() - self._armed_at).total_seconds()
        log_text = "The circuit breaker for '%s' is now disarmed, after %d failures in %.0f s."
        emit(logger, level, Event.BREAKER_DISARMED, log_text, self.name, self._failures, seconds)
        self._run(self._disarm, "disarm")

    async def failure(self, error: Exception) -> None:
        """Note a failure, arming the breaker, then wait 1 s (10 s once triggered). Cancellable."""
        self.note(error)
        wait = DELAY_WHEN_TRIGGERED if self.state is BreakerState.TRIGGERED else DELAY_WHEN_ARMED
        await self.clock.sleep(wait.total_seconds())

    def note(self, error: Exception) -> None:
        """Note a failure without waiting."""
        if self._closed:
            return
        self._failures += 1
        if self.state is BreakerState.DISARMED:
            self._failures, self._armed_at = 1, self.clock.now()
            self._be_armed()
        elif self.state is BreakerState.ARMED and self._timer is not None and self._timer.done():
            self._trigger_for(error)

    def close(self) -> None:
        """Stop the timer; nothing arms or triggers any more. Idempotent."""
        self._closed = True
        self._stop_timer()
        self.leave()

    @property
    def _level(self) -> int:
        """The level of what the breaker does: the failure itself is logged already, an outage for all parts."""
        return logging.INFO if self.outage is None else logging.DEBUG

    def _change(self, state: BreakerState) -> None:
        self.state = state
        if self._observer is not None:
            self._observer.breaker_changed(self.name, state.value)

    def _be_armed(self) -> None:
        self._change(BreakerState.ARMED)
        self._run(self._arm, "arm")
        lasting = self.clock.sleep(self._time_to_trigger.total_seconds())
        self._timer = asyncio.get_running_loop().create_task(lasting, name=f"breaker {self.name}")
        emit(
            logger,
            self._level,
            Event.BREAKER_ARMED,
            "The circuit breaker for '%s' is armed: it triggers unless its operation works again within %g s.",
            self.name,
            self._time_to_trigger.total_seconds(),
        )

    def _trigger_for(self, error: Exception) -> None:
        self._change(BreakerState.TRIGGERED)
        emit(
            logger,
            logging.WARNING,
            Event.BREAKER_TRIGGERED,
            "The circuit breaker for '%s' will now be triggered with exception '%s'.",
            self.name,
            error,
            exception=error,
        )
        _run_trigger(self._trigger, error, self.name)

    def _run(self, action: Callable[[], None], name: str) -> None:
        try:
            action()
        except Exception as error:
            log_text = "The %s action of the circuit breaker for '%s' failed."
            emit(logger, logging.ERROR, Event.BREAKER_ACTION_FAILED, log_text, name, self.name, exception=error)
            raise

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class FailureRate:
    """Triggers on every failure beyond `maximum_per_second` × 30 within a 30 s window; never waits.

    Windows tumble from the breaker's construction on. Belongs to an event loop.
    """

    def __init__(
        self,
        name: str,
        *,
        maximum_per_second: int,
        trigger: Callable[[Exception], None],
        clock: Clock,
        observer: Observer | None = None,
    ) -> None:
        self.name = name
        self._observer = observer
        self._report(BreakerState.DISARMED)
        self._limit = maximum_per_second * int(FAILURE_RATE_WINDOW.total_seconds())
        self._trigger = trigger
        self._clock = clock
        self._started = clock.now()
        self._count = 0
        self._timer: asyncio.Task[None] | None = None

    def failure(self, error: Exception) -> None:
        """Count a failure; beyond the limit run the trigger action, whose own errors are logged."""
        self._count += 1
        if self._count == 1:
            self._report(BreakerState.ARMED)
            emit(logger, logging.WARNING, Event.BREAKER_ARMED, "The circuit breaker for '%s' is now armed.", self.name)
            self._timer = asyncio.get_running_loop().create_task(self._reset_later(), name=f"breaker {self.name}")
        if self._count <= self._limit:
            return
        self._report(BreakerState.TRIGGERED)
        emit(
            logger,
            logging.WARNING,
            Event.BREAKER_TRIGGERED,
            "The circuit breaker for '%s' will now be triggered with exception '%s'.",
            self.name,
            error,
        )
        _run_trigger(self._trigger, error, self.name)

    def close(self) -> None:
        """Stop the window's timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _report(self, state: BreakerState) -> None:
        if self._observer is not None:
            self._observer.breaker_changed(self.name, state.value)

    async def _reset_later(self) -> None:
        into_window = (self._clock.now() - self._started) % FAILURE_RATE_WINDOW
        await self._clock.sleep((FAILURE_RATE_WINDOW - into_window).total_seconds())
        self._count = 0
        self._report(BreakerState.DISARMED)
        emit(logger, logging.INFO, Event.BREAKER_DISARMED, "The circuit breaker for '%s' is now disarmed.", self.name)


async def first_of(*waits: Coroutine[None, None, object]) -> None:
    """Wait for the first of them and cancel the rest."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _run_trigger(trigger: Callable[[Exception], None], error: Exception, name: str) -> None:
    try:
        trigger(error)
    except Exception as failed:
        log_text = "The trigger action of the circuit breaker for '%s' failed."
        emit(logger, logging.CRITICAL, Event.BREAKER_ACTION_FAILED, log_text, name, exception=failed)


def is_cancelled() -> bool:
    """Return whether the running task is being cancelled; an awaited object may raise CancelledError by itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
