"""APScheduler's SQL job store: jobs that run once become messages; repeating jobs are named, and stay."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sqlalchemy import Column, Float, String, select

from delayline.clock import EPOCH
from delayline.message import Headers
from delayline.migration.rows import record_batch
from delayline.migration.source import SourcePartition, TableSource
from delayline.sql.schema import CONTENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from sqlalchemy import ColumnElement, Connection, Table

#: APScheduler's default; a job store may have been given another.
APSCHEDULER_JOBS: Final = "apscheduler_jobs"
LONGEST_ID: Final = 191
ONCE: Final = "apscheduler.triggers.date.DateTrigger"
#: Headers that describe the original job; the body has its arguments.
FUNCTION: Final = "APScheduler.Function"
NAME_HEADER: Final = "APScheduler.Name"
#: The largest state of a job, in bytes; an unpickled object may need some hundred times as much memory.
LARGEST_STATE: Final = 1024 * 1024
#: Of the arguments as JSON, where a list that a pickle holds once and names often counts each time.
LARGEST_BODY: Final = 16 * 1024 * 1024
EACH: Final = 16
MOST_CLASSES: Final = 1000
LONGEST_TASK_NAME: Final = 1000
LONGEST_REASON: Final = 500
PUTS: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
CLASSES: Final = frozenset({"GLOBAL", "STACK_GLOBAL", "INST"})
UNREADABLE_STATE: Final = "its state cannot be read: {}"
REPEATS: Final = "it repeats ({}), and a message comes once: schedule it anew, or let APScheduler run it"
NO_JSON: Final = "its arguments are not JSON: {}. Let APScheduler run it"


class APScheduler(TableSource):
    """Jobs of APScheduler 3 that run once: the executor becomes the destination, the arguments the body.

    A job's state is a pickle: it is read without running or importing anything that it names. Paused jobs stay.
    """

    kind: ClassVar[str] = "apscheduler"
    key: ClassVar[str] = "id"
    due: ClassVar[str] = "next_run_time"
    body: ClassVar[str] = "job_state"
    outside: ClassVar[str] = "it is paused, or is due beyond the years 1753 to 9999"

    def columns(self) -> list[Column[Any]]:
        """Return the columns that APScheduler 3 makes."""
        return [
            Column("id", String(LONGEST_ID), primary_key=True),
            Column("next_run_time", Float(25)),
            Column("job_state", CONTENT),
        ]

    def partitions(self, connection: Connection) -> list[SourcePartition]:
        """Return the partition: a job store belongs to a single scheduler."""
        if APSCHEDULER_JOBS not in self.table_names(connection):
            return []
        self.check_columns(connection, APSCHEDULER_JOBS)
        jobs = self.table(APSCHEDULER_JOBS)
        job = connection.execute(select(jobs.c.id).limit(1)).first()
        return [] if job is None else [SourcePartition(self.kind, APSCHEDULER_JOBS)]

    def names(self, partition: SourcePartition, endpoint: str) -> bool:
        """Return True: all jobs are moved to the endpoint, as they name none."""
        del partition, endpoint
        return True

    def kept_due(self, due: datetime) -> float:
        """Return the seconds since 1970."""
        return (due - EPOCH) / timedelta(seconds=1)

    def read_due(self, kept: float) -> datetime:
        """Return the instant, to the microsecond."""
        return (EPOCH + timedelta(microseconds=round(kept * 1_000_000))).astimezone(UTC)

    def selected(self, table: Table, *, bodies: bool = True) -> Sequence[ColumnElement[Any]]:
        """Return the columns that make a job a message."""
        del bodies
        return [table.c.id, table.c.next_run_time, table.c.job_state]

    def messages(self, rows: Sequence[Sequence[Any]]) -> pa.RecordBatch:
        """Return the jobs as messages, rejected jobs with the reason."""
        return record_batch(self._message(*row) for row in rows)

    def _message(self, key: str, due: float, state: bytes) -> tuple[Any, ...]:
        message_id, at = f"apscheduler-{key}", self.read_due(due)
        try:
            job = state_of(bytes(state))
            trigger = f"{type(job['trigger']).__module__}.{type(job['trigger']).__qualname__}"
            function, name, executor = (_name(job, key) for key in ("func", "name", "executor"))
            arguments = {"args": list(job["args"]), "kwargs": dict(job["kwargs"])}
        except Exception as error:
            return message_id, None, at, None, None, UNREADABLE_STATE.format(_cut(error))
        reason = None if trigger == ONCE else REPEATS.format(_cut(trigger.rsplit(".", 1)[1]))
        body = b""
        if reason is None:
            try:
                body = _encoded(arguments)
            except (TypeError, ValueError, RecursionError) as error:
                reason = NO_JSON.format(_cut(error))
        headers = {
            Headers.MESSAGE_ID: message_id, Headers.CONTENT_TYPE: "application/json", FUNCTION: function,
            NAME_HEADER: name,
        }  # fmt: skip
        return message_id, executor, at, json.dumps(headers), body, reason


class _Inert:
    """Inert stand-in for an object of any class in a pickle."""

    def __init__(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - whatever was pickled
        pass

    def __call__(self, *_: Any, **__: Any) -> _Inert:  # noqa: ANN401 - as above
        return _Inert()

    def __setstate__(self, _: Any) -> None:  # noqa: ANN401 - as above
        pass

    def __setitem__(self, _: Any, __: Any) -> None:  # noqa: ANN401 - as above
        pass

    append = extend = add = update = __setstate__


class _Reader(pickle.Unpickler):
    """Reads a pickle without importing anything: every class and function it names becomes an inert class."""

    def find_class(self, module: str, name: str) -> type[_Inert]:
        """Return a class of that name."""
        return type(name, (_Inert,), {"__module__": module})


def state_of(pickled: bytes) -> dict[str, Any]:
    """Return the state of a job from a job store; its objects are inert. Raises pickle's errors, or TypeError."""
    _check_size(pickled)
    state = _Reader(io.BytesIO(pickled)).load()
    if not isinstance(state, dict):
        raise TypeError(f"it holds a {type(state).__name__}, no job")
    return state


def _check_size(pickled: bytes) -> None:
    """Raise ValueError for a pickle that needs much more memory than it has bytes."""
    if len(pickled) > LARGEST_STATE:
        raise ValueError(f"it has {len(pickled):,} bytes, {LARGEST_STATE:,} at most. Let APScheduler run it")
    classes = 0
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name in PUTS and argument is not None and argument > len(pickled):
            raise ValueError(
                f"it numbers an object {argument}, more than it has bytes"
            )  # the reader makes room for all
        classes += operation.name in CLASSES
        if classes > MOST_CLASSES:
            raise ValueError(f"it names more than {MOST_CLASSES} classes")


def _name(job: dict[str, Any], what: str) -> str:
    name = job[what]
    if not isinstance(name, str) or len(name) > LONGEST_TASK_NAME:
        raise TypeError(f"its {what} is not text of at most {LONGEST_TASK_NAME} characters")
    return name


def _encoded(arguments: dict[str, Any]) -> bytes:
    """Return the arguments as JSON. Raises TypeError or ValueError if they cannot be encoded, or are too large."""
    size, left = 0, list[Any]([arguments])
    while left:
        value = left.pop()
        size += EACH + (len(value) if isinstance(value, str) else 0)
        if size > LARGEST_BODY:
            raise ValueError(f"they have more than {LARGEST_BODY // 1024 // 1024} MiB")
        if isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            left += value
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()


def _cut(reason: object) -> str:
    cause = str(reason).encode(errors="backslashreplace").decode()
    return cause if len(cause) <= LONGEST_REASON else f"{cause[:LONGEST_REASON]}..."
