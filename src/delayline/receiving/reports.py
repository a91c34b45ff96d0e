"""What is logged and told to observers about the messages of a queue."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delayline.errors import UnknownMessageType
from delayline.events import Event, emit
from delayline.failures import as_shown, brief
from delayline.message import MAXIMUM_DESTINATION_LENGTH, Headers
from delayline.observer import Action
from delayline.outgoing import Outgoing, report_sent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from delayline.message import Message
    from delayline.observer import Observer
    from delayline.outgoing import Effect
    from delayline.transport import ReceivedMessage

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reports:
    """Reports what happens to the messages of a queue."""

    queue: str
    observer: Observer | None

    def received(self, number: int, error: Exception | None = None) -> None:
        """Messages were received, or receiving failed."""
        if self.observer is not None:
            self.observer.received(self.queue, number, error)

    def handled(self, message: Message, effects: Sequence[Effect], began: float, ended: float) -> None:
        """The handlers have run from `began` to `ended`, and the message is completed with their effects."""
        if self.observer is not None:
            self.observer.handled(self.queue, message, ended - began, None)
            if sends := [effect for effect in effects if isinstance(effect, Outgoing)]:
                report_sent(self.observer, sends, time.perf_counter() - ended, None)
        if logger.isEnabledFor(logging.DEBUG):
            seen = message.logical
            self._log(logging.DEBUG, Event.HANDLED, "handled %s", seen.id, message=seen)

    def not_handled(self, message: Message, seconds: float, error: Exception) -> None:
        """An attempt has failed."""
        if self.observer is not None:
            self.observer.handled(self.queue, message, seconds, error)

    def poison(self, message: Message, error: Exception) -> None:
        """No handler can take the message."""
        log_text = "Message %r is classified as a poison message: %s"
        message = as_shown(message)
        self._log(logging.ERROR, Event.POISON_MESSAGE, log_text, message.id, brief(error), message=message)

    def lost(self, message: Message, error: Exception) -> None:
        """Another receiver has handled the message meanwhile."""
        self._log(logging.WARNING, Event.RECEIVE_LOST, "%s", error, message=as_shown(message))

    def duplicate(self, message: Message) -> None:
        """The inbox has a record of the message."""
        log_text = "Message %s has been handled before, as the inbox says: it is not handled again"
        self._log(logging.INFO, Event.HANDLED_BEFORE, log_text, message.id, message=message)

    def alone(self, received: ReceivedMessage) -> None:
        """The message is handled beside no others."""
        log_text = "Message %s is handled alone: %d deliveries of it have ended without an outcome"
        shown, number = as_shown(received.message), received.earlier_deliveries
        emit(logger, logging.WARNING, Event.HANDLED_ALONE, log_text, shown.id, number, queue=self.queue)

    def repeated(self, message: Message, error: Exception) -> None:
        """The handlers run again at once: their own transaction has ended in favour of another."""
        log_text = "Message %s is handled again, as its transaction gave way to another: %s"
        self._log(logging.DEBUG, Event.HANDLER_REPEATED, log_text, message.id, brief(error), message=message)

    def failed(self, message: Message, attempt: int, error: Exception) -> None:
        """The handlers have failed."""
        shown = error if logger.isEnabledFor(logging.DEBUG) else None  # the last error's is with the move
        log_text = "Attempt %d to handle message %s failed: %s"
        self._log(
            logging.WARNING,
            Event.HANDLER_FAILED,
            log_text,
            attempt,
            message.id,
            brief(error),
            exception=shown,
            message=message,
        )

    def retried(self, message: Message, error: Exception) -> None:
        """The message is handled again at once."""
        self._recovered(Action.RETRIED, message, error)

    def delayed(self, message: Message, delay: timedelta, error: Exception) -> None:
        """The message is handled again later."""
        log_text, reason = "Message %s is handled again in %s%s", ""
        if isinstance(error, UnknownMessageType):  # of which no failure was logged
            reason = f": {brief(error)}"
        self._log(logging.WARNING, Event.RETRIED_LATER, log_text, message.id, delay, reason, message=message)
        self._recovered(Action.DELAYED, message, error)

    def returned(self, message: Message, error: Exception) -> None:
        """The message goes back to its queue, because of a back end."""
        log_text = "Message %s stays in %s for now: %s"
        self._log(logging.WARNING, Event.RECEIVE_FAILED, log_text, message.id, self.queue, error, message=message)
        self._recovered(Action.RETURNED, message, error)

    def discarded(self, message: Message, error: Exception) -> None:
        """A retry policy has had the message dropped."""
        self._log(
            logging.WARNING, Event.DISCARDED, "Discarded message %s: %s", message.id, brief(error), message=message
        )
        self._recovered(Action.DISCARDED, message, error)

    def moved(self, message: Message, error_queue: str, error: Exception) -> None:
        """The message is in the error queue."""
        log_text = "Moved message %s to error queue %r: %s"
        message = as_shown(message)
        self._log(
            logging.ERROR,
            Event.MOVED_TO_ERROR,
            log_text,
            message.id,
            error_queue,
            brief(error),
            exception=error,
            message=message,
        )
        self._recovered(Action.MOVED, message, error)

    def not_moved(self, message: Message, error: Exception) -> None:
        """A back end keeps the message from being completed, and from the error queue."""
        log_text = "Failed to execute recoverability policy for message with native ID: `%s`: %s"
        self._log(logging.ERROR, Event.ERROR_MOVE_FAILED, log_text, message.id, error, message=message)

    def not_movable(self, message: Message, times: int, pause: timedelta, error: Exception) -> None:
        """The message could be neither completed nor moved to the error queue, so many times, and waits."""
        log_text = (
            "Failed to execute recoverability policy for message with native ID: `%s`, %d times: %s. It stays in %s "
            "and is tried again in %s"
        )
        emit(
            logger,
            logging.ERROR,
            Event.ERROR_MOVE_FAILED,
            log_text,
            message.id,
            times,
            brief(error),
            self.queue,
            pause,
            exception=error if times == 1 else None,
            message=message,
            queue=self.queue,
            count=times,
        )

    def unacknowledged(self, message: Message, error: Exception) -> None:
        """ServicePulse is not told that its retry was handled."""
        log_text = "The retry of message %s is not acknowledged to queue %r: %s"
        acknowledged_to = message.headers[Headers.RETRY_ACKNOWLEDGEMENT_QUEUE][:MAXIMUM_DESTINATION_LENGTH]
        self._log(
            logging.WARNING,
            Event.RETRY_UNACKNOWLEDGED,
            log_text,
            message.id,
            acknowledged_to,
            brief(error),
            message=message,
        )

    def _log(
        self, level: int, event: Event, text: str, *args: object, message: Message, exception: Exception | None = None
    ) -> None:
        emit(logger, level, event, text, *args, exception=exception, message=message, queue=self.queue)

    def _recovered(self, action: Action, message: Message, error: Exception) -> None:
        if self.observer is not None:
            self.observer.recovered(action, self.queue, message, error)
