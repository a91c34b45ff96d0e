"""What people ask for messages, one by one or as sets, and the record of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, runtime_checkable

from delayline.errors import ConfigurationError
from delayline.filters import MessageFilter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Reasons why messages were not changed that a job keeps.
PROBLEMS_KEPT: Final = 20
LONGEST_PROBLEM: Final = 300
"""Characters of one."""


class OperatorAction(StrEnum):
    """What a person asks for messages and schedules."""

    CANCEL = "cancel"
    RESCHEDULE = "reschedule"
    SEND_NOW = "send now"
    RETRY = "retry"
    EDIT = "edit"
    PURGE = "purge"
    PAUSE = "pause"
    RESUME = "resume"
    TRIGGER = "trigger"
    LIMIT = "limit"


#: What was done to the messages of a set, in a word.
DONE_TO: Final[Mapping[OperatorAction, str]] = {
    OperatorAction.CANCEL: "cancelled",
    OperatorAction.RESCHEDULE: "rescheduled",
    OperatorAction.SEND_NOW: "due now",
    OperatorAction.RETRY: "retried",
    OperatorAction.PURGE: "deleted",
}
#: Actions on pending messages, and on failed messages.
OF_PENDING: Final = frozenset({OperatorAction.CANCEL, OperatorAction.RESCHEDULE, OperatorAction.SEND_NOW})
OF_FAILED: Final = frozenset({OperatorAction.RETRY, OperatorAction.PURGE})


class JobState(StrEnum):
    """The state of a job that acts on many messages."""

    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """Its process has ended or lost the back end before it was done: another process can go on with it."""


@dataclass(frozen=True, slots=True)
class SetRequest:
    """An action on all messages that a filter means.

    Raises:
        ConfigurationError: The parts do not fit together.
    """

    action: OperatorAction
    filter: MessageFilter
    to: datetime | None = None
    """The new due time, to reschedule."""
    by: timedelta | None = None
    """How much later, or earlier where it is negative, to reschedule."""
    queue: str | None = None
    """The error queue, of failed messages."""
    destination: str | None = None
    """Where failed messages are sent; by default to the queue they failed in."""
    inbox_window: timedelta | None = None
    """How long the inbox keeps records: failed messages that are older stay. None for any age."""

    def __post_init__(self) -> None:
        if self.action is OperatorAction.RESCHEDULE and (self.to is None) == (self.by is None):
            raise ConfigurationError("give the new due time, to=, or how much later, by=")
        if self.action not in OF_PENDING | OF_FAILED:
            raise ConfigurationError(f"{self.action.value!r} is no action on a set of messages")
        if self.action in OF_PENDING and (self.filter.exception is not None or self.filter.group is not None):
            raise ConfigurationError(
                "pending messages have no exception and no group: leave them out, or act on failed messages"
            )
        if self.action in OF_FAILED:
            self.filter.check_of_failed()

    def encoded(self) -> str:
        """Return it as JSON, the same for the same request."""
        return json.dumps(asdict(self), default=_encoded, sort_keys=True)

    @classmethod
    def decoded(cls, text: str) -> Self:
        """Return the request of its JSON."""
        kept = json.loads(text)
        kept["action"] = OperatorAction(kept["action"])
        conditions: dict[str, Any] = kept["filter"]
        times = {name: _instant(conditions[name]) for name in ("due_from", "due_before")}
        kept["filter"] = MessageFilter(**conditions | times)
        spans = {name: timedelta(microseconds=kept[name]) for name in ("by", "inbox_window") if kept[name] is not None}
        return cls(**kept | spans | {"to": _instant(kept["to"])})

    @property
    def job_prefix(self) -> str:
        """How the names of its jobs begin."""
        return f"{self.action.value.replace(' ', '-')}-"

    @property
    def what(self) -> str:
        """Which messages, as a person reads it."""
        kind = "pending" if self.action in OF_PENDING else "failed"
        return f"{kind} messages" if self.filter.names_nothing else f"{kind} messages with {self.filter}"


def _encoded(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    assert isinstance(value, timedelta)  # noqa: S101 - nothing else is in a request
    return value // timedelta(microseconds=1)


def _instant(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


@dataclass(frozen=True, slots=True)
class SetPreview:
    """How many messages an action on a set would change."""

    number: int
    at: datetime
    """When they were counted."""
    bound: int
    """The last message that belongs to the set: later ones do not."""
    looked_at: int = 0
    """How many messages were looked through."""
    exact: bool = True
    """Whether all were counted; else there may be more."""
    examples: Sequence[str] = ()
    """The ids of the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRecord:
    """What a person did, or does, to messages."""

    name: str
    """The name of the job, or of the single action; nothing else in the database has it."""
    endpoint: str
    action: OperatorAction
    actor: str
    """Who; of a command `user@host`."""
    what: str
    """Which messages, or which schedule, as a person reads it."""
    state: JobState
    result: str = ""
    """The outcome as a person reads it, of an action that is over."""
    request: SetRequest | None = None
    """The action on a set of messages; None for single messages."""
    rate: int | None = None
    """Messages a second at most; None for as many as go."""
    started: datetime
    seen: datetime
    """When it last went on."""
    finished: datetime | None = None
    expected: int | None = None
    """How many messages the preview has found."""
    done: int = 0
    failed: int = 0
    """How many messages were not changed: the poller or a receiver had them, or `problems` has the reason."""
    problems: Sequence[str] = ()
    """The first reasons."""
    position: int = 0
    """The last message that was looked at."""
    bound: int = 0
    """The last message that belongs to the set."""
    held: Sequence[str] = ()
    """Messages that the poller had, and that are tried again at the end."""

    @classmethod
    def begun(
        cls,
        name: str,
        endpoint: str,
        request: SetRequest,
        preview: SetPreview,
        *,
        actor: str,
        rate: int | None,
        at: datetime,
    ) -> Self:
        """Return the record of a job that begins."""
        return cls(
            name=name,
            endpoint=endpoint,
            action=request.action,
            actor=actor,
            what=request.what,
            state=JobState.RUNNING,
            request=request,
            rate=rate,
            started=at,
            seen=at,
            expected=preview.number if preview.exact else None,
            bound=preview.bound,
        )

    @property
    def over(self) -> bool:
        """Whether nothing more happens."""
        return self.state in {JobState.DONE, JobState.STOPPED, JobState.FAILED}

    @property
    def numbers(self) -> str:
        """How far it is, as a person reads it."""
        of = "" if self.expected is None or self.over else f" of {self.expected:,}"
        return f"{self.done:,}{of} {DONE_TO.get(self.action, 'done')}" + (
            f", {self.failed:,} not" if self.failed else ""
        )

    def ended(self) -> Self:
        """Return the record of the job when it is through."""
        done = replace(self, state=JobState.DONE)
        return replace(done, result=done.numbers)

    def with_problem(self, message_id: str, reason: str) -> ActionRecord:
        """Return the record with a message more that was not changed."""
        text = f"{message_id}: {reason}"
        text = text if len(text) <= LONGEST_PROBLEM else f"{text[:LONGEST_PROBLEM]}..."
        problems = (*self.problems, text) if len(self.problems) < PROBLEMS_KEPT else self.problems
        return replace(self, failed=self.failed + 1, problems=problems)


class ActionLog(Protocol):
    """The record of what people did to the messages of an endpoint, with the jobs that go on."""

    is_kept: bool
    """Whether it is in a database: else it is gone with this process."""

    async def record(self, done: ActionRecord) -> None:
        """Keep an action that is over."""
        ...

    async def actions(self, limit: int) -> Sequence[ActionRecord]:
        """Return the latest actions, the latest first; a job whose process has ended is `INTERRUPTED`."""
        ...

    async def action(self, name: str) -> ActionRecord | None:
        """Return the action with that name."""
        ...

    async def begin(
        self, request: SetRequest, preview: SetPreview, *, actor: str, rate: int | None = None
    ) -> ActionRecord:
        """Begin a job, or return the job that does the same already."""
        ...

    async def take(self, name: str, owner: str) -> ActionRecord | None:
        """Make `owner` the one that goes on with a job; None while another process does, or once it is over."""
        ...

    async def advance(self, record: ActionRecord, owner: str) -> bool:
        """Keep how far a job is; False if it was stopped or taken by another process."""
        ...

    async def leave(self, name: str, owner: str) -> None:
        """Let another process go on with the job at once."""
        ...

    async def stop(self, name: str) -> bool:
        """Stop the job with that name; False if it does not run. What is changed stays changed."""
        ...


class MessageSet(Protocol):
    """All messages of a store or an error queue, as sets that actions change.

    A set has the messages that were there when it was counted and that match when the job comes to them.
    """

    async def preview(self, request: SetRequest, counted: Callable[[int], None] | None = None) -> SetPreview:
        """Count the messages.

        Args:
            request: The action, of which the filter counts.
            counted: Called now and then with how many messages were looked through.
        """
        ...

    async def last(self, request: SetRequest) -> int:
        """Return the `bound` of a set of the messages that are there now, without counting them."""
        ...

    async def step(self, record: ActionRecord, owner: str, most: int, *, final: bool = False) -> ActionRecord | None:
        """Change the next messages, and keep the record of it: in one transaction where there are such.

        Args:
            record: The job, as it was taken or as the step before has returned it.
            owner: Whose it is.
            most: How many messages at most.
            final: Whether to end a job that is through, and count what the poller still has as too late.

        Returns:
            The record; None if the job was stopped or taken by another process.
        """
        ...

    async def close(self) -> None:
        """Give back what it holds: another process may go on."""
        ...


@runtime_checkable
class SupportsActionLog(Protocol):
    """Capability of stores and transports: what people did is kept in the database."""

    def action_log(self, endpoint_name: str) -> ActionLog | None:
        """Return the record of the actions on an endpoint's messages; None where none is kept."""
        ...


@runtime_checkable
class SupportsMessageSet(Protocol):
    """Capability of stores and transports: change sets of messages by a filter, many in a transaction."""

    def message_set(self, endpoint_name: str) -> MessageSet | None:
        """Return the messages of an endpoint; None where the table has no order that a job could go by."""
        ...
