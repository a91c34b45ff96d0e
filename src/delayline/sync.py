"""A synchronous endpoint for Django, Flask and scripts, run on an event loop in a background thread."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, TypeVar, Unpack, overload

from delayline.checks import ForkGuard
from delayline.endpoint import Endpoint
from delayline.errors import ConfigurationError, NotStarted
from delayline.events import Event, emit
from delayline.external import UNSET, ExternalTransaction, WaitingThread, checked_transaction
from delayline.outgoing import MessageOptions, PublishOptions, RequestOptions
from delayline.receiving.registration import RegistersHandlers
from delayline.transaction import THREAD_WAITS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence
    from concurrent.futures import Future
    from datetime import datetime
    from pathlib import Path
    from types import TracebackType

    from delayline.actions import ActionRecord, SetPreview
    from delayline.delayed.pauses import DispatchPause
    from delayline.delayed.recurrence import Recurrence
    from delayline.delayed.schedules import Missed, Schedule
    from delayline.delayed.store import DueCount, Outcome, SendConflict
    from delayline.endpoint import CodeArguments
    from delayline.external import ExternalConnection, Unset
    from delayline.filters import MessageFilter
    from delayline.message import Body, DelayedMessage, Message
    from delayline.outgoing import HeaderMap, Send
    from delayline.receiving.recoverability import Recoverability
    from delayline.sending import Sent
    from delayline.set_jobs import MessageJobs, SetOptions

logger: logging.Logger = logging.getLogger(__name__)

Result = TypeVar("Result")

#: How long the end of the interpreter waits for handlers of an endpoint that was not stopped ...
EXIT_GRACE: Final = timedelta(seconds=2)
#: ... and for all of its stop, in seconds: a server that does not answer must not keep a process.
EXIT_WAITS: Final = 5.0


class SyncSendOptions(MessageOptions, total=False):
    """What can be said of a message that `SyncEndpoint.send` sends; see there."""

    transaction: ExternalConnection | Unset


class SyncEndpoint(RegistersHandlers):
    """Runs an Endpoint on a background event loop; its methods block and may be called from any thread.

    Handlers stay coroutine functions and run on that loop. Start it after a server has forked its workers: in a process
    that was forked later every call raises NotStarted, but `stop`, which does nothing there.

    When the interpreter ends before `stop` was called, that is done then, for at most 5 seconds.

    Args:
        endpoint: The endpoint, not started.

    Example:
        ```python
        with SyncEndpoint(Endpoint("shop", transport=SqlTransport(url))) as shop:
            shop.send("orders", {"number": 7})
        ```
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process = ForkGuard()
        self._has_warned = False

    @classmethod
    def from_settings(
        cls, name: str | None = None, *, config: Path | str | None = None, **code: Unpack[CodeArguments]
    ) -> Self:
        """Return a synchronous endpoint of the settings; see `Endpoint.from_settings`.

        Args:
            name: Its name; by default that of the settings.
            config: The settings file; by default ./delayline.toml if it exists.
            code: The arguments of `Endpoint` that are no settings.

        Returns:
            The endpoint, not started.
        """
        return cls(Endpoint.from_settings(name, config=config, **code))

    def _register(
        self,
        handle: Callable[..., Any],
        kind: Any,  # noqa: ANN401 - a type, or its name
        *,
        recoverability: Recoverability | None,
        timeout: timedelta | None,
        concurrency: int | None,
    ) -> None:
        if kind is None:
            self.endpoint.handler(handle, recoverability=recoverability, timeout=timeout)
        else:
            options = partial(self.endpoint.handles, recoverability=recoverability, timeout=timeout)
            options(kind, concurrency=concurrency)(handle)

    def _subscribe_to(self, kind: object) -> None:
        self.endpoint._subscribe_to(kind)

    def unsubscribe(self, kind: object) -> None:
        """End the subscription to events of a type; see `Endpoint.unsubscribe`.

        Args:
            kind: The type of the events, or its name.

        Raises:
            DelaylineError: The errors of `Endpoint.unsubscribe`.
        """
        self.run(self.endpoint.unsubscribe(kind))

    def start(self) -> None:
        """Start the loop's thread and the endpoint; raises the errors of `Endpoint.start`."""
        if self._loop is not None:
            self._process.check(f"endpoint {self.endpoint.name!r}")
            raise ConfigurationError(
                f"endpoint {self.endpoint.name!r} is started already: `with SyncEndpoint(endpoint):` starts it too"
            )
        self._process = ForkGuard()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"delayline {self.endpoint.name}", daemon=True
        )
        self._thread.start()
        waits = THREAD_WAITS.set(True)  # the task has a copy of this context
        try:
            self._start(self.endpoint.start()).result()
        except BaseException:
            self._end()
            raise
        finally:
            THREAD_WAITS.reset(waits)
        atexit.register(self._stop_at_exit)

    def stop(self) -> None:
        """Finish messages in flight and end the thread. Idempotent."""
        if self._loop is not None and not self._process.forked:
            try:
                self._start(self.endpoint.stop()).result()
            finally:
                self._end()

    @overload
    def send(self, destination: str, body: Body, **options: Unpack[SyncSendOptions]) -> Sent: ...
    @overload
    def send(self, body: Body, /, **options: Unpack[SyncSendOptions]) -> Sent: ...

    def send(  # noqa: PLR0913 - as in Endpoint.send
        self,
        destination: Any = UNSET,
        body: Body = UNSET,
        *,
        headers: HeaderMap | None = None,
        message_id: str | None = None,
        delay: timedelta | None = None,
        deliver_at: datetime | None = None,
        expires: timedelta | None = None,
        correlation_id: str | None = None,
        transaction: ExternalConnection | Unset = UNSET,
        check_destination: bool = True,
        on_conflict: SendConflict | None = None,
        at_most: timedelta | None = None,
    ) -> Sent:
        """Send a message, due now, after `delay` or at `deliver_at`, and return its id once it is durable.

        Args:
            destination: Name of the queue, 1 to 200 characters. Leave it out for a body whose type has a route.
            body: Bytes as they are, str as UTF-8, anything else as JSON.
            headers: Further headers, str to str.
            message_id: Id of 1 to 250 characters; by default a new UUID.
            delay: Time to wait, zero or more; excludes `deliver_at`.
            deliver_at: Due time, an aware `datetime`.
            expires: How long the message may wait in its queue, above zero; then it is deleted.
            correlation_id: Id of the exchange that the message belongs to, 1 to 250 characters; by default its own id.
            transaction: An external transaction, whose connection is used on the calling thread; see `Endpoint.send`.
            check_destination: Whether a delayed message for a queue that does not exist is refused.
            on_conflict: `"keep"`, `"replace"`, `"postpone"` or `"raise"` for an id that is pending already; see
                `Endpoint.send`.
            at_most: With `"postpone"`, the longest time from the first send of the pending message to the due time.

        Returns:
            The message's id, as `Endpoint.send` returns it.

        Raises:
            DelaylineError: The errors of `Endpoint.send`.
        """
        work = partial(
            self.endpoint.send,
            destination,
            body,
            headers=headers,
            message_id=message_id,
            delay=delay,
            deliver_at=deliver_at,
            expires=expires,
            correlation_id=correlation_id,
            check_destination=check_destination,
            on_conflict=on_conflict,
            at_most=at_most,
        )
        return self.run_in(transaction, work)

    def send_local(self, body: Body, **options: Unpack[SyncSendOptions]) -> Sent:
        """Send a message to the endpoint's own queue; see `Endpoint.send_local`.

        Args:
            body: Bytes as they are, str as UTF-8, anything else as JSON.
            options: The other arguments of `send`.

        Returns:
            The message's id, as of `send`.

        Raises:
            DelaylineError: The errors of `Endpoint.send_local`.
        """
        transaction = options.pop("transaction", UNSET)
        return self.run_in(transaction, partial(self.endpoint.send_local, body, **options))

    def publish(
        self, event: Body, *, transaction: ExternalConnection | Unset = UNSET, **options: Unpack[PublishOptions]
    ) -> Sent:
        """Publish an event, and return its id once it is durable; see `Endpoint.publish`.

        Args:
            event: A value of a class with a name, such as a dataclass.
            transaction: An external transaction, whose connection is used on the calling thread; see `send`.
            options: The other arguments of `Endpoint.publish`.

        Returns:
            The event's id, as of `send`.

        Raises:
            DelaylineError: The errors of `Endpoint.publish`.
        """
        return self.run_in(transaction, partial(self.endpoint.publish, event, **options))

    @overload
    def request(
        self,
        destination: str,
        body: Body,
        *,
        timeout: timedelta,
        reply_type: type[Result],
        **options: Unpack[RequestOptions],
    ) -> Result: ...

    @overload
    def request(
        self, destination: str, body: Body, *, timeout: timedelta, **options: Unpack[RequestOptions]
    ) -> Message: ...

    def request(
        self,
        destination: str,
        body: Body,
        *,
        timeout: timedelta,
        reply_type: type[Result] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Result | Message:
        """Send a message and return the reply; see `Endpoint.request`.

        Args:
            destination: Name of the queue, 1 to 200 characters.
            body: Bytes as they are, str as UTF-8, anything else as JSON.
            timeout: How long to wait for the reply, above zero.
            reply_type: The type to read the reply's body as; by default the reply is returned as a `Message`.
            options: `headers` and `message_id`, as of `Endpoint.request`.

        Returns:
            The reply.

        Raises:
            DelaylineError: The errors of `Endpoint.request`.
        """
        if reply_type is None:
            return self.run(self.endpoint.request(destination, body, timeout=timeout, **options))
        asked = self.endpoint.request(destination, body, timeout=timeout, reply_type=reply_type, **options)
        return self.run(asked)

    def send_many(
        self,
        messages: Iterable[Send],
        *,
        transaction: ExternalConnection | Unset = UNSET,
        check_destination: bool = True,
    ) -> list[str]:
        """Send messages together, and return their ids once they are durable.

        Args:
            messages: What to send; see `Send`.
            transaction: An external transaction; see `send`.
            check_destination: See `send`.

        Returns:
            The messages' ids.

        Raises:
            DelaylineError: The errors of `Endpoint.send_many`.
        """
        work = partial(self.endpoint.send_many, messages, check_destination=check_destination)
        return self.run_in(transaction, work)

    @property
    def delayed(self) -> SyncPendingMessages:
        """The pending messages; raises ConfigurationError where `Endpoint.delayed` does."""
        return SyncPendingMessages(self)

    @property
    def errors(self) -> SyncFailedMessages:
        """The failed messages: count, retry and purge all that a filter means."""
        return SyncFailedMessages(self)

    @property
    def schedules(self) -> SyncSchedules:
        """The recurring messages; raises ConfigurationError where `Endpoint.schedules` does."""
        return SyncSchedules(self)

    def run_in(
        self, transaction: ExternalConnection | Unset, work: Callable[..., Coroutine[Any, Any, Result]]
    ) -> Result:
        """Run a coroutine function of the endpoint that takes `transaction=`, with one of the calling thread's.

        Args:
            transaction: The external transaction, whose connection is used on the calling thread; UNSET for none.
            work: The coroutine function.

        Returns:
            The coroutine's result.
        """
        self._warn_on_loop()
        external, thread = checked_transaction(transaction), WaitingThread()
        given = UNSET if external is None else ExternalTransaction(external, thread)
        return thread.wait_for(self._start(work(transaction=given)))

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run any of the endpoint's coroutines, as in `sync.run(endpoint.setup())`.

        Args:
            work: The coroutine.

        Returns:
            The coroutine's result.
        """
        self._warn_on_loop()
        return self._start(work).result()

    def _warn_on_loop(self) -> None:
        """Log, once, that the caller's event loop stands still meanwhile; in a notebook nothing else runs on it."""
        if self._has_warned or asyncio._get_running_loop() is None or threading.current_thread() is self._thread:
            return
        self._has_warned = True
        emit(
            logger,
            logging.WARNING,
            Event.LOOP_BLOCKED,
            "a call of SyncEndpoint blocks the event loop that it is made on: await the calls of endpoint %r itself, "
            "started there with `async with endpoint:`, or call this in a thread, as with asyncio.to_thread",
            self.endpoint.name,
        )

    def _start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        loop = self._loop
        if loop is None:
            work.close()
            raise NotStarted(f"endpoint {self.endpoint.name!r} is not started: use `with SyncEndpoint(endpoint):`")
        if self._process.forked:
            work.close()
            self._process.check(f"endpoint {self.endpoint.name!r}")
        if threading.current_thread() is self._thread:
            work.close()
            raise ConfigurationError("a SyncEndpoint would wait for itself here: in a handler, await context.send(...)")
        return asyncio.run_coroutine_threadsafe(work, loop)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    if not TYPE_CHECKING:  # to type checkers it is not there

        async def __aenter__(self) -> NoReturn:
            raise ConfigurationError("a SyncEndpoint is used with `with`; in coroutines write `async with endpoint:`")

        async def __aexit__(self, *_: object) -> None: ...

    def _stop_at_exit(self) -> None:
        """Finish what is under way, which would be done again elsewhere: an outbox's batch is sent, but not deleted."""
        if self._loop is None or self._process.forked:
            return
        stopping = asyncio.run_coroutine_threadsafe(self.endpoint.stop(EXIT_GRACE), self._loop)
        try:
            stopping.result(EXIT_WAITS)
        except Exception as error:
            log_text = "endpoint %s was not stopped when the interpreter ended: what is in hand is done again: %r"
            emit(logger, logging.WARNING, Event.ENDPOINT_NOT_STOPPED, log_text, self.endpoint.name, error)

    def _end(self) -> None:
        atexit.unregister(self._stop_at_exit)
        loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()


async def _cancel_others() -> None:
    """Cancel the calls of other threads: the loop no longer runs to answer them."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class SyncPendingMessages:
    """The pending messages of a SyncEndpoint; its methods block and may be called from any thread.

    Args:
        sync: The endpoint.
    """

    def __init__(self, sync: SyncEndpoint) -> None:
        self._sync = sync
        self._pending = sync.endpoint.delayed

    def cancel(self, message_id: str, *, transaction: ExternalConnection | Unset = UNSET) -> Outcome:
        """Delete a pending message; see `PendingMessages.cancel`.

        Args:
            message_id: Id of the message.
            transaction: An external transaction, whose connection is used on the calling thread.

        Returns:
            What has become of the message.
        """
        return self._sync.run_in(transaction, partial(self._pending.cancel, message_id))

    def reschedule(self, message_id: str, due: datetime, *, transaction: ExternalConnection | Unset = UNSET) -> Outcome:
        """Give a pending message a new due time; see `PendingMessages.reschedule`.

        Args:
            message_id: Id of the message.
            due: The new due time, with a time zone; a past time means now.
            transaction: An external transaction, whose connection is used on the calling thread.

        Returns:
            What has become of the message.
        """
        return self._sync.run_in(transaction, partial(self._pending.reschedule, message_id, due))

    def send_now(self, message_id: str, *, transaction: ExternalConnection | Unset = UNSET) -> Outcome:
        """Dispatch a pending message now; see `PendingMessages.send_now`.

        Args:
            message_id: Id of the message.
            transaction: An external transaction, whose connection is used on the calling thread.

        Returns:
            What has become of the message.
        """
        return self._sync.run_in(transaction, partial(self._pending.send_now, message_id))

    def pending(self, *, destination: str | None = None, limit: int = 100, offset: int = 0) -> Sequence[DelayedMessage]:
        """Return pending messages, earliest due first.

        Args:
            destination: The destination of the messages; by default all.
            limit: The most messages to return.
            offset: How many messages to leave out first.

        Returns:
            The messages.
        """
        return self._sync.run(self._pending.pending(destination=destination, limit=limit, offset=offset))

    def count_by_due(self, bucket: timedelta) -> Sequence[DueCount]:
        """Return counts by destination and due bucket, earliest first.

        Args:
            bucket: The length of a bucket; buckets are aligned to 1970 UTC.

        Returns:
            The counts that are not zero.
        """
        return self._sync.run(self._pending.count_by_due(bucket))

    def pause(self, destination: str | None = None) -> bool:
        """Dispatch no more messages for a destination, or of the endpoint; see `PendingMessages.pause`.

        Args:
            destination: The destination; by default all messages of the endpoint are paused.

        Returns:
            Whether that was not paused already.
        """
        return self._sync.run(self._pending.pause(destination))

    def resume(self, destination: str | None = None, *, rate: float | None = None) -> bool:
        """Dispatch messages again; see `PendingMessages.resume`.

        Args:
            destination: The destination; by default the pause of the whole endpoint ends.
            rate: The most overdue messages that leave in a second.

        Returns:
            Whether that was paused.
        """
        return self._sync.run(self._pending.resume(destination, rate=rate))

    def pauses(self) -> Sequence[DispatchPause]:
        """Return what is paused; see `PendingMessages.pauses`.

        Returns:
            The pauses.
        """
        return self._sync.run(self._pending.pauses())

    def count(self, where: MessageFilter) -> SetPreview:
        """Count the messages that an action on all of them would change; see `PendingMessages.count`.

        Args:
            where: Which messages; `MessageFilter()` is every one.

        Returns:
            The number, with the ids of the first ones.
        """
        return self._sync.run(self._pending.count(where))

    def cancel_all(self, where: MessageFilter, **how: Unpack[SetOptions]) -> ActionRecord:
        """Cancel all messages that match, as a job; see `PendingMessages.cancel_all`.

        Args:
            where: Which messages; `MessageFilter()` is every one.
            how: `rate`, `progress`, which is called on the endpoint's thread, and `actor`.

        Returns:
            The record of the job, which is over.
        """
        return self._sync.run(self._pending.cancel_all(where, **how))

    def reschedule_all(
        self,
        where: MessageFilter,
        *,
        to: datetime | None = None,
        by: timedelta | None = None,
        **how: Unpack[SetOptions],
    ) -> ActionRecord:
        """Give all messages that match another due time, as a job; see `PendingMessages.reschedule_all`.

        Args:
            where: Which messages; `MessageFilter()` is every one.
            to: The new due time.
            by: How much later each is due, or earlier where it is negative; excludes `to`.
            how: `rate`, `progress`, which is called on the endpoint's thread, and `actor`.

        Returns:
            The record of the job, which is over.
        """
        return self._sync.run(self._pending.reschedule_all(where, to=to, by=by, **how))

    def send_now_all(self, where: MessageFilter, **how: Unpack[SetOptions]) -> ActionRecord:
        """Make all messages that match due at once, as a job; see `PendingMessages.send_now_all`.

        Args:
            where: Which messages; `MessageFilter()` is every one.
            how: `rate`, `progress`, which is called on the endpoint's thread, and `actor`.

        Returns:
            The record of the job, which is over.
        """
        return self._sync.run(self._pending.send_now_all(where, **how))

    @property
    def jobs(self) -> SyncMessageJobs:
        """The jobs that change sets of these messages: listed, resumed and stopped by name."""
        return SyncMessageJobs(self._sync, self._pending.jobs)


class SyncFailedMessages:
    """The failed messages of a SyncEndpoint; its methods block and may be called from any thread.

    Args:
        sync: The endpoint.
    """

    def __init__(self, sync: SyncEndpoint) -> None:
        self._sync = sync
        self._failed = sync.endpoint.errors

    def count(self, where: MessageFilter) -> SetPreview:
        """Count the failed messages that match; see `FailedMessages.count`.

        Args:
            where: Which messages; `MessageFilter()` is every one.

        Returns:
            The number, with the ids of the first ones.
        """
        return self._sync.run(self._failed.count(where))

    def retry_all(
        self,
        where: MessageFilter,
        *,
        to: str | None = None,
        past_window: bool = False,
        **how: Unpack[SetOptions],
    ) -> ActionRecord:
        """Send all failed messages that match to the queues they failed in; see `FailedMessages.retry_all`.

        Args:
            where: Which messages; `MessageFilter()` is every one.
            to: The queue to send them to instead.
            past_window: Whether to retry messages that failed before the inbox's oldest record, too.
            how: `rate`, `progress`, which is called on the endpoint's thread, and `actor`.

        Returns:
            The record of the job, which is over.
        """
        return self._sync.run(self._failed.retry_all(where, to=to, past_window=past_window, **how))

    def purge_all(self, where: MessageFilter, **how: Unpack[SetOptions]) -> ActionRecord:
        """Delete all failed messages that match, for good; see `FailedMessages.purge_all`.

        Args:
            where: Which messages; `MessageFilter()` is every one.
            how: `rate`, `progress`, which is called on the endpoint's thread, and `actor`.

        Returns:
            The record of the job, which is over.
        """
        return self._sync.run(self._failed.purge_all(where, **how))

    @property
    def jobs(self) -> SyncMessageJobs:
        """The jobs that change sets of these messages: listed, resumed and stopped by name."""
        return SyncMessageJobs(self._sync, self._failed.jobs)


class SyncMessageJobs:
    """The jobs on sets of a SyncEndpoint's messages; its methods block and may be called from any thread.

    Args:
        sync: The endpoint.
        jobs: The jobs.
    """

    def __init__(self, sync: SyncEndpoint, jobs: MessageJobs) -> None:
        self._sync = sync
        self._jobs = jobs

    @property
    def is_recorded(self) -> bool:
        """Whether jobs outlive this process; see `MessageJobs`."""
        return self._jobs.is_recorded

    def list(self, limit: int = 50) -> Sequence[ActionRecord]:
        """Return the latest actions on these messages, the latest first; see `MessageJobs.list`.

        Args:
            limit: How many at most.

        Returns:
            The actions.
        """
        return self._sync.run(self._jobs.list(limit))

    def resume(self, name: str, *, progress: Callable[[ActionRecord], None] | None = None) -> ActionRecord:
        """Go on with a job whose process has ended, or follow one that runs; see `MessageJobs.resume`.

        Args:
            name: Its name.
            progress: Called on the endpoint's thread with the record after each step.

        Returns:
            The record of the job, which is over.
        """
        return self._sync.run(self._jobs.resume(name, progress=progress))

    def stop(self, name: str) -> bool:
        """Stop a job, wherever it runs; see `MessageJobs.stop`.

        Args:
            name: Its name.

        Returns:
            False if no job of that name runs.
        """
        return self._sync.run(self._jobs.stop(name))


class SyncSchedules:
    """The recurring messages of a SyncEndpoint; its methods block and may be called from any thread.

    Args:
        sync: The endpoint.
    """

    def __init__(self, sync: SyncEndpoint) -> None:
        self._sync = sync
        self._schedules = sync.endpoint.schedules

    def list(self) -> Sequence[Schedule]:
        """Return the schedules by name; see `Schedules.list`.

        Returns:
            The schedules.
        """
        return self._sync.run(self._schedules.list())

    def pause(self, name: str) -> Schedule:
        """Pause a schedule; see `Schedules.pause`.

        Args:
            name: Its name.

        Returns:
            The schedule as it is now.
        """
        return self._sync.run(self._schedules.pause(name))

    def resume(self, name: str) -> Schedule:
        """Resume a schedule; see `Schedules.resume`.

        Args:
            name: Its name.

        Returns:
            The schedule as it is now.
        """
        return self._sync.run(self._schedules.resume(name))

    def trigger(self, name: str) -> str:
        """Send an occurrence now; see `Schedules.trigger`.

        Args:
            name: The schedule's name.

        Returns:
            The message's id.
        """
        return self._sync.run(self._schedules.trigger(name))

    def change(
        self,
        name: str,
        *,
        recurrence: Recurrence | None = None,
        destination: str | None = None,
        body: Body | None = None,
        missed: Missed | None = None,
    ) -> Schedule:
        """Change a schedule; see `Schedules.change`.

        Args:
            name: Its name.
            recurrence: When it is due, `cron(...)` or `interval(...)`.
            destination: The queue that it goes to.
            body: The body of each occurrence.
            missed: What happens to occurrences that no process was there to dispatch.

        Returns:
            The schedule as it is now.
        """
        change = self._schedules.change(name, recurrence=recurrence, destination=destination, body=body, missed=missed)
        return self._sync.run(change)

    def remove(self, name: str) -> None:
        """Remove a schedule; see `Schedules.remove`.

        Args:
            name: Its name.
        """
        self._sync.run(self._schedules.remove(name))
