"""Stable names of events, carried by every log record as its `event` attribute.

Log handlers, metrics and tests follow these names; the texts beside them are for people and may change.
"""

import logging
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Event(StrEnum):
    """The event of a log record."""

    ENDPOINT_STARTED = "endpoint.started"
    ENDPOINT_STOPPED = "endpoint.stopped"
    ENDPOINT_NOT_STOPPED = "endpoint.not_stopped"
    REPLY_DROPPED = "request.reply_dropped"
    LOOP_BLOCKED = "endpoint.loop_blocked"
    LOOP_STUCK = "endpoint.loop_stuck"
    LOOP_TURNS = "endpoint.loop_turns"
    NO_HANDLERS = "endpoint.no_handlers"
    CRITICAL_ERROR = "endpoint.critical_error"
    CRITICAL_ERROR_ACTION_FAILED = "endpoint.critical_error_action_failed"
    HANDLED = "receive.handled"
    HANDLED_BEFORE = "receive.handled_before"
    HANDLED_UNRECORDED = "receive.handled_unrecorded"
    HANDLER_FAILED = "receive.handler_failed"
    HANDLER_REPEATED = "receive.handler_repeated"
    RETRIED_LATER = "receive.retried_later"
    RECEIVE_FAILED = "receive.failed"
    RECEIVE_LOST = "receive.lost"
    LIMITS_UNUSABLE = "receive.limits_unusable"
    CRASHES_UNCOUNTED = "receive.crashes_uncounted"
    HANDLED_ALONE = "receive.handled_alone"
    EXPIRED = "receive.expired"
    RECEIVE_TASK_FAILED = "receive.task_failed"
    POISON_MESSAGE = "receive.poison_message"
    MOVED_TO_ERROR = "error.moved"
    DISCARDED = "receive.discarded"
    HANDLERS_CANCELLED = "receive.handlers_cancelled"
    HANDLER_BLOCKED = "receive.handler_blocked"
    ERROR_MOVE_FAILED = "error.move_failed"
    STORED = "delayed.stored"
    STORE_FAILED = "delayed.store_failed"
    SEND_ABANDONED = "send.abandoned"
    UNHEARD = "publish.unheard"
    SUBSCRIBER_GONE = "publish.subscriber_gone"
    WOKE = "delayed.woke"
    SLEEPS = "delayed.sleeps"
    FETCHED = "delayed.fetched"
    FETCH_FAILED = "delayed.fetch_failed"
    DISPATCHED = "delayed.dispatched"
    DISPATCH_FAILED = "delayed.dispatch_failed"
    REMOVED = "delayed.removed"
    REMOVE_FAILED = "delayed.remove_failed"
    ALREADY_REMOVED = "delayed.already_removed"
    BACKED_OFF = "delayed.backed_off"
    SCHEDULE_CHANGED = "schedule.changed"
    SCHEDULE_OLDER = "schedule.older"
    SCHEDULE_MISSED = "schedule.missed"
    SCHEDULE_FAILED = "schedule.failed"
    NOTIFY_FAILED = "delayed.notify_failed"
    BACKGROUND_TASK_FAILED = "delayed.background_task_failed"
    RETRY_UNACKNOWLEDGED = "delayed.retry_unacknowledged"
    QUEUE_DIFFERS = "delayed.queue_differs"
    DELIVERY_LIMITED = "receive.delivery_limited"
    BINDINGS_OVERLAP = "delayed.bindings_overlap"
    UNDELIVERABLE_CAUGHT = "delayed.undeliverable_caught"
    LISTENING_LOST = "delayed.listening_lost"
    LISTENING_RESUMED = "delayed.listening_resumed"
    LEASE_LOST = "delayed.lease_lost"
    OPERATOR_ACTION = "operator.action"
    DASHBOARD_FAILED = "dashboard.failed"
    DASHBOARD_REFUSED = "dashboard.refused"
    DASHBOARD_SIGNED_IN = "dashboard.signed_in"
    DASHBOARD_SIGN_IN_FAILED = "dashboard.sign_in_failed"
    OBSERVER_FAILED = "observer.failed"
    HTTP_EXPOSED = "http.exposed"
    HTTP_REQUEST = "http.request"
    HTTP_REQUEST_FAILED = "http.request_failed"
    ENDED_AT_ONCE = "endpoint.ended_at_once"
    WORKER_ENDED = "run.worker_ended"
    COMMAND = "command.said"
    UNCAUGHT = "command.uncaught"
    SOURCE_CHANGED = "run.source_changed"
    UNKNOWN_VARIABLE = "settings.unknown_variable"
    HEARTBEAT_FAILED = "probes.heartbeat_failed"
    FOREIGN_ROW = "delayed.foreign_row"
    INDEX_MISSING = "delayed.index_missing"
    WITHOUT_TIME = "delayed.without_time"
    GENERATION_FAILED = "dispatcher.generation_failed"
    SETTLED = "two_phase.settled"
    SETTLING_FAILED = "two_phase.settling_failed"
    PUBLISHING_BLOCKED = "publish.blocked"
    PUBLISHING_UNBLOCKED = "publish.unblocked"
    WORK_OVERDUE = "sql.work_overdue"
    DELTA_LOG_BEHIND = "cold_tier.delta_log_behind"
    SHARD_OUT_OF_REACH = "shard.out_of_reach"
    SHARD_REACHED = "shard.reached"
    SHARD_FAILED = "shard.failed"
    SHARDS_OUTDATED = "shards.outdated"
    SCHEMA_MOVED = "sql.schema_moved"
    OUTAGE_BEGAN = "outage.began"
    OUTAGE_LASTS = "outage.lasts"
    OUTAGE_ENDED = "outage.ended"
    BREAKER_ARMED = "breaker.armed"
    BREAKER_TRIGGERED = "breaker.triggered"
    BREAKER_DISARMED = "breaker.disarmed"
    BREAKER_ACTION_FAILED = "breaker.action_failed"


LOGGER_NAME: Final = "delayline"
#: Of how many kinds of failure the repetitions are counted; of more, the kind logged the longest ago is forgotten.
MOST_KINDS_OF_FAILURE: Final = 256
#: Seconds until the traceback of a failure that repeats is logged again; doubled each time, up to the longest.
FIRST_TRACEBACK_INTERVAL: Final = 600.0
LONGEST_TRACEBACK_INTERVAL: Final = 86_400.0


@dataclass(slots=True)
class _Shown:
    """A traceback that was logged."""

    at: float
    interval: float = FIRST_TRACEBACK_INTERVAL
    times: int = 1


class Tracebacks:
    """Decides which records have a traceback: of a failure that repeats the first, later a count, from any thread.

    Failures are the same that were raised as the same type, at the same place, and are logged as the same event.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: dict[tuple[str, type[BaseException], str, int], _Shown] = {}

    def earlier(self, event: str, exception: BaseException) -> int:
        """Return how many records had the same failure since its traceback was last logged; 0 to log it now."""
        trace = exception.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        file, line = ("", 0) if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        key, now = (event, type(exception), file, line), time.monotonic()
        with self._lock:
            shown = self._shown.pop(key, None)
            if shown is None:
                if len(self._shown) >= MOST_KINDS_OF_FAILURE:
                    del self._shown[next(iter(self._shown))]
                self._shown[key] = _Shown(now)
                return 0
            self._shown[key] = shown
            if now - shown.at < shown.interval:
                shown.times += 1
                return shown.times - 1
            shown.at, shown.times = now, 1
            shown.interval = min(shown.interval * 2, LONGEST_TRACEBACK_INTERVAL)
            return 0

    def forget(self) -> None:
        """Log the next traceback of each failure."""
        with self._lock:
            self._shown.clear()


tracebacks: Final = Tracebacks()


def is_outage(exception: BaseException | None) -> bool:
    """Return whether a back end is out of reach, which its text says: a traceback would add nothing."""
    return getattr(exception, "is_outage", False) is True


def emit(
    logger: logging.Logger,
    level: int,
    event: Event,
    text: str,
    *args: object,
    exception: BaseException | None = None,
    **facts: object,
) -> None:
    """Log `text % args` at `level` with `event` and `facts` as attributes of the record; nearly free when off.

    The traceback of `exception` is logged too, but that of an outage only at DEBUG, and of a failure that repeats with
    the first record; the others say how many there were.
    """
    if not logger.isEnabledFor(level):
        return
    if exception is not None and not logging.getLogger(LOGGER_NAME).isEnabledFor(logging.DEBUG):
        if is_outage(exception):
            exception = None
        elif earlier := tracebacks.earlier(event, exception):
            text, args, exception = f"{text} (%d more since the traceback)", (*args, earlier), None
    logger.log(level, text, *args, exc_info=exception, extra={"event": event, "facts": facts}, stacklevel=2)
