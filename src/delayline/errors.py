"""Every error delayline raises, as a tree.

DelaylineError
├── ConfigurationError (ValueError)      a setting, name or URL that cannot work; the text names the change
│   ├── UnsupportedTransactionMode       the parts cannot honour that transaction mode
│   ├── DifferentInput                   a job's name was used for other rows before
│   └── MissingExtra (ImportError)       an optional dependency is not installed
├── InvalidMessage (ValueError)          a message refused at the door: body, header, destination, id
│   ├── InvalidDueTime                   a delay or instant that cannot be honoured
│   └── DuplicateMessage                 a bulk job brings an id that waits already, or brings it twice
├── CorruptHeaders (ValueError)          stored or received headers cannot be read
├── CorruptBody (ValueError)             a received body is not the text or JSON that was asked for
│   └── InvalidPayload                   a received body does not fit the type of its handler
├── UnknownMessageType (LookupError)     no handler takes the type of a received message
├── HandlerCancelled                     a handler's task was cancelled, and not by its endpoint
├── TooManyCrashes                       deliveries of a message ended without an outcome, as by a killed process
├── NoReply (TimeoutError)                no reply to a request has come in time
├── NotStarted (RuntimeError)            the endpoint is not started, or stopped already
├── TransactionAborted (RuntimeError)    a statement of the transaction has failed before: roll it back
├── BackendUnavailable (ConnectionError) the database or broker does not answer now; trying again may help
│   ├── StorageFull                      no space left where messages are kept
│   └── TransactionConflict              a transaction was undone in favour of another: repeat it
├── BackendUnusable (RuntimeError)       the database or broker will never work as it is; trying again will not help
│   └── NewerSchema                      written by a newer delayline
├── QueueNotFound (LookupError)          the destination queue does not exist
├── MessageRejected                      the broker did not take the message, as when its queue is full
└── DispatchFailed                       some operations of a batch were not sent; the others were
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class DelaylineError(Exception):
    """The root: catch this to catch everything delayline raises on purpose."""


class ConfigurationError(DelaylineError, ValueError):
    """A setting, name or URL cannot work; the text names the value and the remedy."""


class UnsupportedTransactionMode(ConfigurationError):
    """The transport and the delayed delivery cannot honour the transaction mode together."""


class DifferentInput(ConfigurationError):
    """A bulk job has the name of an earlier one with other rows; nothing was stored."""


class MissingExtra(ConfigurationError, ImportError):
    """An optional dependency is not installed; the text has the install command."""

    def __init__(self, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs an extra that is not installed. Run: pip install 'delayline[{extra}]'")
        self.extra = extra


class InvalidMessage(DelaylineError, ValueError):
    """A message was refused before anything was stored or sent."""


class InvalidDueTime(InvalidMessage):
    """A delay or an instant cannot be honoured: naive, negative, doubled or beyond the range."""


class DuplicateMessage(InvalidMessage):
    """The id of a message is that of a pending message, or comes twice in a bulk job; nothing was stored."""

    def __init__(self, message_id: str, text: str | None = None) -> None:
        super().__init__(
            text
            or f"message {message_id!r} waits already, or comes twice: nothing was stored. Use on_conflict='keep' to "
            "keep the pending message, or 'replace'"
        )
        self.message_id = message_id


class CorruptHeaders(DelaylineError, ValueError):
    """Headers that were stored or received cannot be read as str to str."""


class CorruptBody(DelaylineError, ValueError):
    """The body of a received message is not the text or JSON that its handler asked for."""


class InvalidPayload(CorruptBody):
    """The body of a received message does not fit the type that its handler is registered for."""


class UnknownMessageType(DelaylineError, LookupError):
    """The endpoint has no handler for the type of a received message."""


class NoReply(DelaylineError, TimeoutError):
    """No reply to a request has come in time; the request may still be handled."""


class HandlerCancelled(DelaylineError):
    """The task of a handler was cancelled, and not by its endpoint: a failure of the handler, like any other."""


class TooManyCrashes(DelaylineError):
    """Deliveries of a message have ended without an outcome too often, as when the process was killed each time.

    Args:
        message_id: Id of the message.
        crashes: How many deliveries ended so.
    """

    def __init__(self, message_id: str, crashes: int) -> None:
        super().__init__(
            f"{crashes} deliveries of message {message_id!r} have ended without an outcome: their processes were "
            "killed, ran out of memory or crashed. Find out why before it is retried, or raise maximum_crashes"
        )
        self.crashes = crashes


class NotStarted(DelaylineError, RuntimeError):
    """The endpoint has to be started first: `async with endpoint:` or `await endpoint.start()`."""


class TransactionAborted(DelaylineError, RuntimeError):
    """A statement of the transaction has failed before, so that it takes no more: roll it back and begin again."""


class BackendUnavailable(DelaylineError, ConnectionError):
    """The database or broker does not answer now; nothing was lost and trying again may help."""

    is_outage: Final = True
    """Logs have no traceback of it, except at DEBUG."""


class TransactionConflict(BackendUnavailable):
    """The database has undone a transaction in favour of another, by a deadlock or a conflict: repeat it."""


class StorageFull(BackendUnavailable):
    """The disk or quota that holds the messages is full; free space and try again."""


class BackendUnusable(DelaylineError, RuntimeError):
    """The database or broker cannot be used as it is; trying again will not help."""


class NewerSchema(BackendUnusable):
    """The database was set up by a newer delayline; upgrade this installation."""


class QueueNotFound(DelaylineError, LookupError):
    """A destination queue does not exist.

    Args:
        queue: Its name.
        similar: Queues that exist and have a similar name, the most similar first.
        unless: An alternative for the caller, as the end of a sentence.
    """

    def __init__(self, queue: str, *, similar: Sequence[str] = (), unless: str = "") -> None:
        meant = f" Did you mean {' or '.join(map(repr, similar))}?" if similar else ""
        super().__init__(
            f"queue {queue!r} does not exist.{meant} Start its endpoint once, or run: delayline setup --queue NAME"
            f"{unless}"
        )
        self.queue = queue
        self.similar: tuple[str, ...] = tuple(similar)


class MessageRejected(DelaylineError):
    """The broker did not take a message, as when its queue is full; the same message may be taken later."""


class DispatchFailed(DelaylineError):
    """Some operations of a dispatch were not sent; every other operation of it was.

    `failures` maps the position of each failed operation in the dispatched sequence to its error.
    """

    def __init__(self, failures: Mapping[int, Exception]) -> None:
        first = next(iter(failures.values()))
        super().__init__(f"{len(failures)} operation(s) were not sent, the first because: {first}")
        self.failures: dict[int, Exception] = dict(failures)
