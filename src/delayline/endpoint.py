"""The endpoint: a named party that sends messages, now or delayed, and handles messages that arrive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, TypedDict, TypeVar, Unpack, cast, overload

from delayline.checks import LoopGuard, check_part, full_scheme, whole_number
from delayline.clock import SystemClock
from delayline.delayed.delivery import (
    VERBS,
    DelayedDelivery,
    StoredDelivery,
    SupportsDeferredSetup,
    management_of,
    storage_of,
)
from delayline.delayed.host import DeliveryHost, SupportsSatellites
from delayline.delayed.outbox import OutboxDelivery
from delayline.delayed.sharded import ShardedDelivery
from delayline.delayed.store import SupportsRightsCheck
from delayline.errors import (
    BackendUnavailable,
    BackendUnusable,
    ConfigurationError,
    DelaylineError,
    NotStarted,
    UnsupportedTransactionMode,
)
from delayline.events import Event, emit
from delayline.external import UNSET, ExternalTransaction
from delayline.failed import FailedMessages
from delayline.masking import masked
from delayline.observer import Observers, QueueRole, SupportsMeasures, SupportsServerAddress
from delayline.outgoing import DELAYED_DELIVERIES, Composer, HeaderMap, Send, check_endpoint_name
from delayline.pending import PendingMessages
from delayline.receiving.execution import name_of
from delayline.receiving.handlers import Handlers, Surrounding
from delayline.receiving.intake import open_intake
from delayline.receiving.loop_watch import watch_running_loop
from delayline.receiving.once import Once
from delayline.receiving.pipeline import Pipeline, handler_pipeline
from delayline.receiving.recoverability import Recoverability
from delayline.receiving.registration import RegistersHandlers
from delayline.receiving.satellites import open_satellite
from delayline.receiving.sharded import ShardedPipeline
from delayline.receiving.transactions import HandlerRows, HandlerTransactions, handler_rows
from delayline.recurring import RecurringMessages
from delayline.requests import Requests
from delayline.routes import Routes
from delayline.sending import Sender
from delayline.set_jobs import MemoryActionLog
from delayline.shards import SupportsShards
from delayline.subscriptions import Subscriptions
from delayline.transaction import (
    Guarantee,
    Transaction,
    TransactionMode,
    guarantee,
    strongest_mode,
    weaker_mode,
)
from delayline.transport import (
    VERBS_OF_TRANSPORTS,
    SupportsPublishing,
    SupportsQueueLimits,
    SupportsQueueManagement,
    SupportsStopDeadline,
    address_in,
    limited,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime
    from pathlib import Path
    from types import TracebackType

    from delayline.clock import Clock
    from delayline.delayed.outbox import Outbox
    from delayline.delayed.recurrence import Recurrence
    from delayline.delayed.schedules import Missed, Schedules
    from delayline.delayed.store import DelayedMessageStore, SendConflict
    from delayline.external import ExternalConnection, Unset
    from delayline.inbox import Inbox
    from delayline.message import Body, Message
    from delayline.observer import Observer
    from delayline.outgoing import PublishOptions, RequestOptions, SendOptions
    from delayline.sending import Sent
    from delayline.serialization import Serializer
    from delayline.transport import Transport

logger: logging.Logger = logging.getLogger(__name__)

#: How long handlers may take at a stop; container platforms kill a process after 30 s.
GRACE: Final = timedelta(seconds=25)
Reply = TypeVar("Reply")
CriticalErrorAction = Callable[["Endpoint", str, Exception], Awaitable[None]]

#: Measured with `pg_handled`: twice as many handlers handle 20 % more messages a second, half as many a quarter less.
DEFAULT_CONCURRENCY: Final = 32


async def log_and_stop(endpoint: Endpoint, text: str, error: Exception) -> None:
    """Stop the endpoint: the default for critical errors, which are logged before this runs."""
    del text, error
    await endpoint.stop()


class CodeArguments(TypedDict, total=False):
    """The arguments of Endpoint that are no settings: what only a program can say."""

    recoverability: Recoverability | None
    transaction_connections: int | None
    send_only: bool
    on_critical_error: CriticalErrorAction
    setup_infrastructure: bool
    clock: Clock | None
    serializer: Serializer | None
    observers: Sequence[Observer]
    routes: Mapping[type, str] | None


class Endpoint(RegistersHandlers):
    """A named sender and receiver with an input queue of the same name and an optional delayed delivery.

    Use it as `async with endpoint:`. It belongs to the event loop on which it was started.

    Args:
        name: Name of the endpoint and of its input queue, 1 to 200 characters.
        url: Where queues and delayed messages are, such as `postgresql://shop@db/shop` or `sqlite:///shop.db`.
        transport: Moves messages between queues; excludes `url`.
        delayed_delivery: How messages wait; a delayed message store alone stands for a StoredDelivery over it. By
            default they wait at `url`; with `transport` there is none.
        transaction_mode: By default the strongest that transport and delayed delivery support together.
        error_queue: Queue for messages that cannot be handled or dispatched.
        recoverability: Retries of failing handlers; by default as many as the transaction mode allows.
        concurrency: Messages handled at once; 1 or more. Handlers that wait for other systems, such as HTTP services,
            gain from more.
        transaction_connections: The most connections to open for `context.transaction()` without a source; 1 or more,
            by default `concurrency`. Receiving and dispatching have others.
        send_only: No input queue and no handlers; the delayed delivery still runs.
        on_critical_error: Called, after logging, when a fault has lasted too long. The default stops the endpoint.
        setup_infrastructure: Create queues and tables at start; False leaves that to `delayline setup`.
        clock: Clock for delays and retries; by default the delayed delivery's, or the machine's.
        draining: The delayed delivery used before: its messages are still delivered, new messages go elsewhere.
        serializer: Writes and reads the bodies of messages that are neither bytes nor text; JSON by default.
        observers: Objects that are called with what the endpoint has done, such as `delayline.telemetry.Measurements`.
        disable_timeout_manager: Do not start the `draining` delivery; `delayline doctor` shows when it is empty.
        inbox: Keeps a record of each message that was handled, in the database of the handlers' rows, as
            `SqlInbox(url)`: what they do there happens once, and what they send.
        outbox: Keeps what is sent with `transaction=` on a database that neither the queues nor the delayed messages
            are in, as `SqlOutbox(url)`, and forwards it after the commit. By default in the database of the inbox.
        routes: The queue that messages of a type go to where `send` names none, as `{Bill: "billing"}`.

    Raises:
        ConfigurationError: An argument is invalid.
        UnsupportedTransactionMode: The parts do not support the transaction mode together.

    Example:
        ```python
        endpoint = Endpoint("sales", url="sqlite:///sales.db")
        async with endpoint:
            await endpoint.send("sales", {"order": 17}, delay=timedelta(days=3))
        ```
    """

    def __init__(  # noqa: PLR0913 - the settings of an endpoint, all keyword-only
        self,
        name: str,
        *,
        url: str | None = None,
        transport: Transport | None = None,
        delayed_delivery: DelayedDelivery | DelayedMessageStore | None = None,
        transaction_mode: TransactionMode | None = None,
        error_queue: str = "error",
        recoverability: Recoverability | None = None,
        concurrency: int = DEFAULT_CONCURRENCY,
        transaction_connections: int | None = None,
        send_only: bool = False,
        on_critical_error: CriticalErrorAction = log_and_stop,
        setup_infrastructure: bool = True,
        clock: Clock | None = None,
        draining: DelayedDelivery | DelayedMessageStore | None = None,
        disable_timeout_manager: bool = False,
        serializer: Serializer | None = None,
        observers: Sequence[Observer] = (),
        inbox: Inbox | None = None,
        outbox: Outbox | None = None,
        routes: Mapping[type, str] | None = None,
    ) -> None:
        self.name: str = check_endpoint_name(name)
        self.made_from: object | None = None
        """The settings that it was made from; None where it was made of arguments."""
        error_queue = _error_queue(error_queue, name)
        transport, delayed_delivery = _parts(
            name, error_queue, url, transport, _delivery("delayed_delivery", delayed_delivery)
        )
        self.transport = transport
        draining = _delivery("draining", draining)
        self.delayed_delivery = delayed_delivery
        self.inbox = inbox
        self.error_queue = error_queue
        self.send_only = send_only
        self._queues = [self.error_queue] if send_only else [name, self.error_queue]
        self._chooses_mode = transaction_mode is None
        self._use_mode(_mode(transaction_mode, transport, delayed_delivery, inbox))
        self.recoverability: Recoverability = _recoverability(recoverability, self.transaction_mode, delayed_delivery)
        self.concurrency: int = whole_number("concurrency", concurrency, at_least=1)
        self.transaction_connections: int = (
            self.concurrency
            if transaction_connections is None
            else whole_number("transaction_connections", transaction_connections, at_least=1)
        )
        self._handlers = Handlers(serializer, threads=self.concurrency)
        self._critical_error = CriticalErrors(self, on_critical_error).raised
        self._setup = setup_infrastructure
        self._clock = clock or (None if delayed_delivery is None else delayed_delivery.clock) or SystemClock()
        self._queue = address_in(transport, name)
        self._composer = Composer(
            name,
            self._clock,
            reply_to=None if send_only else self._queue,
            serializer=self._handlers.serializer,
            routes=Routes(routes),
            publishes=isinstance(transport, SupportsPublishing),
        )
        self._requests = Requests(name, transport, self._handlers.serializer)
        self._recurring = RecurringMessages(name, self._composer, delayed_delivery, self._clock)
        self._subscriptions = Subscriptions(transport, name)
        self._observers = Observers(observers)
        self._host = DeliveryHost(
            name,
            transport,
            self.transaction_mode,
            self.error_queue,
            self._clock,
            self._critical_error,
            open_satellite,
            self._observers,
        )
        self.draining = draining
        self._outbox = _outbox(outbox, inbox, delayed_delivery)
        self._once = None if inbox is None or self._outbox is None else Once(inbox, self._outbox, delayed_delivery)
        self._deliveries = self._bind(None if disable_timeout_manager else draining)
        self.queue_roles: Mapping[str, QueueRole] = _queue_roles(
            None if send_only else self._queue, error_queue, self._deliveries, self._composer.routes
        )
        """The queues that it knows from its settings, each with its role."""
        self._unrecorded = MemoryActionLog(name, self._clock)
        self.errors: FailedMessages = FailedMessages(
            transport,
            error_queue,
            self._clock,
            beside=None if delayed_delivery is None else management_of(delayed_delivery),
            inbox_window=None if inbox is None else inbox.window,
        )
        """The failed messages: count, retry and purge all that a filter means."""
        self._reset()

    @classmethod
    def from_settings(
        cls, name: str | None = None, *, config: Path | str | None = None, **code: Unpack[CodeArguments]
    ) -> Endpoint:
        """Return the endpoint that delayline.toml and the DELAYLINE_* variables describe, not started yet.

        Run by `delayline run MODULE:ENDPOINT` it has the command's flags, too. The last wins.

        Args:
            name: Its name; by default that of the settings. A name that is given here wins over theirs.
            config: The settings file; by default ./delayline.toml if it exists.
            code: What is no setting: `recoverability`, `transaction_connections`, `send_only`, `on_critical_error`,
                `setup_infrastructure`, `clock`, `serializer`, `observers` and `routes`, as in `Endpoint`.

        Raises:
            ConfigurationError: A setting is unknown or cannot work; the text has its place and the remedy.

        Example:
            ```python
            billing = Endpoint.from_settings("billing", recoverability=Recoverability(delayed_retries=5))
            ```
        """
        compose = import_module("delayline.composition")  # by its name: it is built on this module
        endpoint: Endpoint = compose.endpoint_of_process(name, config, **code)
        return endpoint

    def _use_mode(self, mode: TransactionMode) -> None:
        self.transaction_mode = mode
        has_inbox = self.inbox is not None
        self.guarantee: Guarantee = guarantee(self.transport, self.delayed_delivery, mode, inbox=has_inbox)
        self.handler_rows: HandlerRows = handler_rows(self.transport, self.delayed_delivery, mode, inbox=has_inbox)

    def _reset(self) -> None:
        self._sender: Sender | None = None
        self._pipeline: Pipeline | ShardedPipeline | None = None
        self._running = contextlib.AsyncExitStack()
        self._starting: asyncio.Task[None] | None = None
        self._started = False
        self._stopped: asyncio.Event | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._process = LoopGuard()

    @property
    def running_handlers(self) -> int:
        """How many messages are being handled."""
        pipeline = self._pipeline
        return 0 if pipeline is None else pipeline.running

    @property
    def started(self) -> bool:
        """Whether the endpoint is started in this process, on an event loop that has not ended."""
        return self._started and not self._process.forked and not self._process.ended

    @property
    def handlers(self) -> tuple[Callable[..., Any], ...]:
        """The registered handlers, in the order they run."""
        return self._handlers.functions

    @property
    def delayed(self) -> PendingMessages:
        """The pending messages: list, count, cancel, reschedule, send now.

        Raises ConfigurationError if the delayed delivery does not support it.
        """
        if self.delayed_delivery is None:
            raise ConfigurationError(f"endpoint {self.name!r} has no delayed delivery, and so no pending messages")
        management = management_of(self.delayed_delivery)
        return PendingMessages(management, self._clock, self.name, beside=self.transport, unkept=self._unrecorded)

    @property
    def schedules(self) -> Schedules:
        """The recurring messages: list, pause, resume, trigger, change, remove.

        Raises ConfigurationError if the endpoint's store keeps none.
        """
        return self._recurring.schedules

    @property
    def queues(self) -> SupportsQueueLimits:
        """The limits of queues: pause, resume, concurrency and rate, for all processes; changeable while they run.

        Raises ConfigurationError if the transport does not support it.
        """
        return limited(self.transport)

    @property
    def clock(self) -> Clock:
        """The clock that it measures delays with."""
        return self._clock

    @property
    def store(self) -> object | None:
        """The store of the delayed delivery, or the delivery itself where it has none; None for neither."""
        return None if self.delayed_delivery is None else storage_of(self.delayed_delivery)

    @property
    def observers(self) -> Sequence[Observer]:
        """The observers, in the order in which they are called."""
        return self._observers.each

    @property
    def messaging_system(self) -> str:
        """The system that the queues are in, as the semantic conventions of OpenTelemetry name it."""
        transport = self.transport
        return transport.messaging_system if isinstance(transport, SupportsServerAddress) else "delayline"

    @property
    def server_address(self) -> tuple[str, int | None] | None:
        """Host and port of the server that the queues are on; None for none, or several."""
        transport = self.transport
        return transport.server_address if isinstance(transport, SupportsServerAddress) else None

    def measures(self) -> dict[str, float]:
        """Return the present values of transport, stores and handlers, such as `lease.held`, for metrics."""
        parts = [self.transport, *map(storage_of, self._deliveries), self._pipeline]
        limits: dict[str, float] = {}
        for part in parts:
            if isinstance(part, SupportsMeasures):
                for name, value in part.measures().items():
                    limits[name] = limits.get(name, 0) + value
        return limits

    def observe(self, observer: Observer) -> None:
        """Add an observer, which is called with each event of the endpoint.

        Args:
            observer: An object with the methods of `delayline.telemetry.Observer`.

        Raises:
            ConfigurationError: The endpoint is started.
        """
        if self._stopped is not None:
            raise ConfigurationError(f"endpoint {self.name!r} is started already: add observers before start()")
        self._observers.add(observer)

    def _register(
        self,
        handle: Callable[..., Any],
        kind: Any,  # noqa: ANN401 - a type, or its name
        *,
        recoverability: Recoverability | None,
        timeout: timedelta | None,
        concurrency: int | None,
    ) -> None:
        self._check_handler(handle)
        fitted = (
            None
            if recoverability is None
            else _recoverability(recoverability, self.transaction_mode, self.delayed_delivery)
        )
        if kind is None:
            self._handlers.add(handle, recoverability=fitted, timeout=timeout)
            return
        if concurrency is not None and not isinstance(self.transport, SupportsQueueLimits):
            raise ConfigurationError(
                f"concurrency={concurrency!r} of a handler holds over all processes, which needs queues in a SQL "
                f"database: not {type(self.transport).__name__}. Leave it out, or limit it in the handler"
            )
        self._handlers.add_typed(kind, handle, recoverability=fitted, timeout=timeout, concurrency=concurrency)

    def around_handlers(self, surround: Surrounding) -> Surrounding:
        """Have each handler run inside of a context manager, as a framework needs it; usable as a decorator.

        It is entered for each attempt, on the handler's thread or in its task, and left when the handler has ended. Of
        several, the first is the outermost.

        Args:
            surround: A function of the handler's `MessageContext`, which returns a context manager.

        Raises:
            ConfigurationError: The endpoint is started.

        Example:
            ```python
            endpoint.around_handlers(lambda context: flask_app.app_context())
            ```
        """
        if self._stopped is not None:
            raise ConfigurationError(f"endpoint {self.name!r} is started already: call around_handlers before start()")
        self._handlers.surroundings.append(surround)
        return surround

    def _subscribe_to(self, kind: object) -> None:
        self._subscriptions.add(kind)

    async def unsubscribe(self, kind: object) -> None:
        """End the subscription of this endpoint to events of a type. Events that are in its queue stay there.

        Of delayed events that wait this endpoint gets no copies. A later start of a program that still has the handler
        in `subscribes` subscribes again.

        Args:
            kind: The type of the events, or its name.

        Raises:
            ConfigurationError: The transport has no subscriptions.
            NotStarted: The endpoint is not started.
            BackendUnavailable: The back end did not answer.
        """
        self._started_sender()
        await self._subscriptions.end(kind)

    def _check_handler(self, handle: object) -> None:
        if self.send_only:
            raise ConfigurationError(f"endpoint {self.name!r} is send_only: it has no queue to handle messages from")
        if self._stopped is not None:
            raise ConfigurationError(
                f"endpoint {self.name!r} is started already: handler {name_of(handle)} would get no messages. "
                "Register handlers before start()"
            )

    def every(
        self,
        name: str,
        recurrence: Recurrence,
        destination: str,
        body: Body,
        *,
        headers: HeaderMap | None = None,
        missed: Missed = "one",
        check_destination: bool = True,
    ) -> None:
        """Declare a recurring message: it is added when the endpoint starts, or changed if it was declared otherwise.

        A declaration that was never made before is the newer one. A process of an older version that starts, or
        restarts, changes nothing. What is declared no more stays until `schedules.remove`.

        Args:
            name: Name of the schedule, 1 to 200 characters, its own in the endpoint.
            recurrence: When it is due: `cron("0 9 * * MON-FRI", tz="Europe/Berlin")`, or `interval(hours=6)`.
            destination: Name of the queue.
            body: The body of each occurrence, as of `send`; the same in each start of the program.
            headers: Further headers, str to str.
            missed: What happens to occurrences that no process was there to dispatch: `"none"` of them leaves, `"one"`
                does, or `"all"` of them do.
            check_destination: Whether the start is refused where the destination does not exist.

        Raises:
            ConfigurationError: The endpoint is started, its store keeps no schedules, or an argument is invalid.
            InvalidMessage: The name or the message is invalid.

        Example:
            ```python
            endpoint.every("nightly-report", cron("0 9 * * MON-FRI", tz="Europe/Berlin"), "reports", {"kind": "sales"})
            ```
        """
        if self._stopped is not None:
            raise ConfigurationError(f"endpoint {self.name!r} is started already: declare {name!r} before start()")
        self._recurring.declare(
            name, recurrence, destination, body, headers=headers, missed=missed, check_destination=check_destination
        )

    async def start(self) -> None:
        """Connect, set up, and start delivering and receiving; receives only if handlers are registered.

        Raises BackendUnavailable, BackendUnusable or ConfigurationError, with nothing left open; NotStarted if it was
        stopped meanwhile, by a call or by a critical error.
        """
        if self._stopped is not None:
            self._process.check(f"endpoint {self.name!r}")
            raise ConfigurationError(
                f"endpoint {self.name!r} is started already: start it once, `async with endpoint:` starts it too"
            )
        self._process = LoopGuard()
        self._stopped, self._stopping = asyncio.Event(), None
        self._starting = asyncio.create_task(self._start_parts(), name=f"delayline start {self.name}")
        try:
            await self._starting
        except BaseException as error:
            await self.stop()
            caller = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and caller is not None and not caller.cancelling():
                raise NotStarted(f"endpoint {self.name!r} was stopped while it started: see its log for why") from error
            raise

    async def setup(self) -> None:
        """Create the input queue, the error queue and the tables of delayed delivery. Idempotent; needs no `start`."""
        await self.transport.start()
        try:
            await self.transport.setup_infrastructure(self._queues)
            for delivery in self._deliveries:
                await delivery.setup_infrastructure()
            if self.inbox is not None:
                await self.inbox.setup_infrastructure()
        finally:
            await self.transport.stop()

    async def stop(self, grace: timedelta = GRACE) -> None:
        """Finish messages in flight, or cancel a start in progress, then disconnect.

        Idempotent; all callers wait for it.

        Called by a handler it returns at once: the stop waits for that handler.

        Args:
            grace: How long handlers may take to finish. After that they are cancelled, and their messages go back to
                the queue for other processes. A function in a thread cannot be cancelled and runs on.
        """
        if self._stopped is None or self._process.forked:
            return
        self._process.check(f"endpoint {self.name!r}")
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop_parts(grace), name=f"delayline stop {self.name}")
        if self._pipeline is None or not self._pipeline.runs(asyncio.current_task()):
            await asyncio.shield(self._stopping)

    async def wait_stopped(self) -> None:
        """Return once the endpoint has stopped."""
        if self._stopped is not None and not self._process.forked:
            self._process.check(f"endpoint {self.name!r}")
            await self._stopped.wait()

    def route(self, kind: type, queue: str) -> None:
        """Let messages of a type go to a queue where `send` names none; see `routes` of the endpoint.

        Args:
            kind: The class of the messages. Its subclasses go there too, unless they have routes of their own.
            queue: Name of the queue.

        Raises:
            ConfigurationError: The class has another route, or its values have no type of their own, as dicts.

        Example:
            ```python
            endpoint.route(Bill, "billing")
            await endpoint.send(Bill(17), delay=timedelta(days=14))
            ```
        """
        self._composer.routes.add(kind, queue)

    @overload
    async def send(self, destination: str, body: Body, **options: Unpack[SendOptions]) -> Sent: ...
    @overload
    async def send(self, body: Body, /, **options: Unpack[SendOptions]) -> Sent: ...

    async def send(  # noqa: PLR0913 - a message has these parts, all keyword-only but two
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
        transaction: ExternalConnection | ExternalTransaction | Transaction | Unset = UNSET,
        check_destination: bool = True,
        on_conflict: SendConflict | None = None,
        at_most: timedelta | None = None,
    ) -> Sent:
        """Send a message, due now, after `delay` or at `deliver_at`, and return its id once it is durable.

        If cancelled, it returns at once, and the message is usually sent all the same.

        Args:
            destination: Name of the queue, 1 to 200 characters. Leave it out for a body whose type has a route.
            body: Bytes as they are, str as UTF-8, anything else as JSON; the content type header is set accordingly.
            headers: Further headers, str to str.
            message_id: Id of 1 to 250 characters; by default a new UUID. Repeating a delayed send with the id of a
                pending message changes nothing.
            delay: Time to wait, zero or more; excludes `deliver_at`.
            deliver_at: Due time, an aware `datetime`.
            expires: How long the message may wait in its queue, above zero; then it is deleted.
            correlation_id: Id of the exchange that the message belongs to, 1 to 250 characters; by default its own id.
            transaction: An external transaction on the database of the queues or of the store: a connection or
                session of SQLAlchemy, a connection of psycopg, psycopg2, sqlite3 or PyMySQL, or Django's `connection`
                or an alias of its DATABASES. The message exists if and only if you commit. None is an error: leave it
                out instead.
            check_destination: Whether a delayed message for a queue that does not exist is refused, where the
                transport can look queues up; each queue is looked up once.
            on_conflict: For a delayed message with a `message_id`: whether a pending message with that id is kept
                (`"keep"`), replaced (`"replace"`, `"postpone"`), or DuplicateMessage is raised (`"raise"`). Left out,
                it is kept. With `"postpone"` a message that is being dispatched is waited for, so that the new one is
                stored in any case.
            at_most: With `on_conflict="postpone"`: the message is due no later than this after the first send of the
                pending message.

        Returns:
            The message's id, a str; with `on_conflict` its `result` is whether the message was stored, kept or
            replaced.

        Raises:
            InvalidMessage: The message cannot be sent on this transport.
            DuplicateMessage: A message with the id is pending, and `on_conflict` is `"raise"`; or it is to be replaced
                and is being dispatched.
            InvalidDueTime: The delay or due time is out of range.
            NotStarted: The endpoint is not started.
            QueueNotFound: The destination does not exist.
            BackendUnavailable: The back end did not answer; the text names an unknown outcome.
            ConfigurationError: The message cannot be part of the transaction.
            TransactionAborted: The transaction has failed before and has to be rolled back.
        """
        if destination is UNSET or body is UNSET:
            destination, body = self._composer.routed(destination, body)
        send = Send(
            destination, body, headers, message_id, delay, deliver_at, expires, correlation_id, on_conflict, at_most
        )
        return await self._started_sender().send(send, transaction, check_destination=check_destination)

    async def send_local(self, body: Body, **options: Unpack[SendOptions]) -> Sent:
        """Send a message to this endpoint's own queue.

        Args:
            body: Bytes as they are, str as UTF-8, anything else as JSON.
            options: The other arguments of `send`.

        Returns:
            The message's id, as of `send`.

        Raises:
            ConfigurationError: The endpoint is send-only, and has no queue.
            DelaylineError: The errors of `send`.
        """
        if self.send_only:
            raise ConfigurationError(f"endpoint {self.name!r} is send_only: it has no queue for send_local")
        return await self.send(self.name, body, **options)

    async def publish(
        self,
        event: Body,
        *,
        transaction: ExternalConnection | ExternalTransaction | Transaction | Unset = UNSET,
        **options: Unpack[PublishOptions],
    ) -> Sent:
        """Publish an event: each endpoint that subscribes to its type, or to a base of it, gets a copy.

        Subscribers are looked up when the event is dispatched: of a delayed event when it is due.

        Args:
            event: A value of a class with a name, such as a dataclass; see `message_type` for names.
            transaction: An external transaction; see `send`.
            options: `headers`, `message_id`, `delay`, `deliver_at`, `expires`, `correlation_id`, `on_conflict` and
                `at_most`, as of `send`.

        Returns:
            The event's id, which all copies have, as `send` returns it.

        Raises:
            InvalidMessage: The event has no type with a name, or cannot be sent on this transport.
            ConfigurationError: The transport has no subscriptions, or the event cannot be part of the transaction.
            DelaylineError: Other errors, as of `send`.

        Example:
            ```python
            await endpoint.publish(OrderPlaced("17"))
            await endpoint.publish(OrderOverdue("17"), delay=timedelta(days=14))
            ```
        """
        sender = self._started_sender()
        return await sender.send(self._composer.publication(event, **options), transaction, check_destination=False)

    @overload
    async def request(
        self,
        destination: str,
        body: Body,
        *,
        timeout: timedelta,
        reply_type: type[Reply],
        **options: Unpack[RequestOptions],
    ) -> Reply: ...

    @overload
    async def request(
        self, destination: str, body: Body, *, timeout: timedelta, **options: Unpack[RequestOptions]
    ) -> Message: ...

    async def request(
        self,
        destination: str,
        body: Body,
        *,
        timeout: timedelta,
        reply_type: type[Reply] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Reply | Message:
        """Send a message and return the reply that its handler gives with `context.reply`.

        The reply comes to a queue of this process, which the first request creates and `stop` removes. Of several
        replies the first is returned; later ones, and those that come too late, are logged and dropped. In a handler,
        prefer `context.send` and a handler for the reply: it survives a crash, which a request does not.

        Args:
            destination: Name of the queue, 1 to 200 characters.
            body: Bytes as they are, str as UTF-8, anything else as JSON.
            timeout: How long to wait for the reply, above zero.
            reply_type: The type to read the reply's body as; by default the reply is returned as a `Message`.
            options: `headers`, further headers, and `message_id`, an id of 1 to 250 characters; by default a new UUID.

        Returns:
            The reply.

        Raises:
            NoReply: None has come in time.
            InvalidPayload: The reply's body does not fit the type.
            DelaylineError: The errors of `send`.

        Example:
            ```python
            price = await endpoint.request("pricing", Quote("A1"), timeout=timedelta(seconds=5), reply_type=Price)
            ```
        """
        sender, send = self._started_sender(), Send(destination, body, **options)
        reply: Reply | Message = await self._requests.request(self._host, sender, send, timeout, reply_type)
        return reply

    async def send_many(
        self,
        messages: Iterable[Send],
        *,
        transaction: ExternalConnection | ExternalTransaction | Transaction | Unset = UNSET,
        check_destination: bool = True,
    ) -> list[str]:
        """Send several messages and return their ids, in order, once all are durable.

        Where queues and delayed messages are in one database, all are sent or none. Otherwise some may have
        been sent when it raises.

        Args:
            messages: What to send; see `Send`.
            transaction: An external transaction; see `send`.
            check_destination: See `send`.

        Returns:
            The messages' ids.

        Raises:
            InvalidMessage: A message cannot be sent; the text has its position. Nothing was sent.
            QueueNotFound: A destination does not exist.
            DelaylineError: Other errors, as of `send`.

        Example:
            ```python
            await endpoint.send_many(Send("billing", Bill(number), delay=timedelta(days=14)) for number in numbers)
            ```
        """
        return await self._started_sender().send_many(messages, transaction, check_destination=check_destination)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    if not TYPE_CHECKING:  # to type checkers it is not there

        def __enter__(self) -> NoReturn:
            raise ConfigurationError(
                f"endpoint {self.name!r} is used with `async with`; in synchronous code write "
                "`with SyncEndpoint(endpoint) as sync:`"
            )

        def __exit__(self, *_: object) -> None: ...

    def _bind(self, draining: DelayedDelivery | None) -> list[DelayedDelivery]:
        """Bind the delayed deliveries of this endpoint, and return them."""
        if self.draining is not None and self.draining is self.delayed_delivery:
            raise ConfigurationError("draining= is the delayed_delivery itself: leave it out, or name the new delivery")
        all_deliveries = (self.delayed_delivery, draining, self._outbox)
        deliveries = [delivery for delivery in all_deliveries if delivery is not None]
        for delivery in deliveries:
            delivery.bind(self._host)
        return deliveries

    def _started_sender(self) -> Sender:
        if self._stopped is None or self._sender is None:
            raise NotStarted(f"endpoint {self.name!r} is not started: use `async with endpoint:`")
        self._process.check(f"endpoint {self.name!r}")
        return self._sender

    async def _start_parts(self) -> None:
        self._observers.attach(self)
        self._composer.traces = self._observers.traces
        self._sender = Sender(
            self.transport, self.delayed_delivery, self._composer, self._clock, self._observers.all, self._outbox
        )
        if self._handlers or self._deliveries:
            self._running.callback(watch_running_loop())
        await self.transport.start()
        self._running.push_async_callback(self.transport.stop)
        self._running.push_async_callback(self._requests.stop)
        self._observers.start()
        self._running.push_async_callback(self._observers.stop)
        if self._setup:
            await self.transport.setup_infrastructure(self._queues)
        if self._setup:
            for delivery in self._deliveries:
                await _set_up(delivery)
            if self.inbox is not None:
                await self.inbox.setup_infrastructure()
        takes, subscriptions = bool(self._handlers), self._subscriptions
        await _check_rights(self.name, self.transport, self._deliveries, self.inbox, subscriptions, takes=takes)
        for delivery in self._deliveries:
            self._running.push_async_callback(delivery.stop)
            await self._start_delivery(delivery)
        await self._recurring.start(self._sender.destinations)
        self._running.push_async_callback(self._recurring.stop)
        if self.inbox is not None:
            await self.inbox.start(self.name)
            self._running.push_async_callback(self.inbox.stop)
        if self._handlers:
            await self._subscriptions.begin()
            self._running.callback(self._handlers.close)
            self._pipeline = await _begin_to_receive(self, self._sender)
            self._running.push_async_callback(self._pipeline.stop)
        elif not self.send_only:
            await _warn_of_no_handlers(self.name, self.transport)
        emit(
            logger,
            logging.INFO,
            Event.ENDPOINT_STARTED,
            "endpoint %s started: %s, %s",
            self.name,
            self.transaction_mode.name,
            self.guarantee,
        )
        self._started = True
        self._watching = asyncio.create_task(_watch_loop(self), name=f"delayline watch {self.name}")

    async def _start_delivery(self, delivery: DelayedDelivery) -> None:
        """Start it; in a weaker mode if its store refuses the default mode, which the store alone knows."""
        while True:
            try:
                return await delivery.start()
            except UnsupportedTransactionMode:
                weaker = weaker_mode(self.transaction_mode)
                if weaker is None or not self._chooses_mode:
                    raise
                self._use_mode(weaker)
                self._host = replace(self._host, mode=weaker)
                delivery.bind(self._host)

    async def _stop_parts(self, grace: timedelta) -> None:
        stopped, starting = self._stopped, self._starting
        try:
            for part in (self.transport, *map(storage_of, self._deliveries)):
                if isinstance(part, SupportsStopDeadline):
                    part.stop_soon()
            if starting is not None and starting.cancel():
                await asyncio.wait([starting])
            if self._pipeline is not None:
                await self._pipeline.stop(grace)
            await self._running.aclose()
        finally:
            if self._started:
                emit(logger, logging.INFO, Event.ENDPOINT_STOPPED, "endpoint %s stopped", self.name)
            self._pipeline = self._sender = self._stopped = self._starting = None
            self._started = False
            if stopped is not None:
                stopped.set()


async def _begin_to_receive(endpoint: Endpoint, sender: Sender) -> Pipeline | ShardedPipeline:
    """Return the endpoint's pipeline, which receives; over several shards that of each."""
    transport, delivery = endpoint.transport, endpoint.delayed_delivery

    async def opened(name: str | None, host: DeliveryHost, concurrency: int) -> Pipeline:
        intake = await open_intake(host, endpoint._queue, concurrency)
        connections = max(1, endpoint.transaction_connections * concurrency // endpoint.concurrency)
        transactions = _transactions(host.transport, endpoint.transaction_mode, endpoint.inbox, connections)
        endpoint._running.push_async_callback(transactions.close)
        transactions.check_drivers(endpoint._handlers.functions)
        in_shard = delivery.parts[name] if name is not None and isinstance(delivery, ShardedDelivery) else delivery
        return handler_pipeline(
            intake,
            endpoint._handlers,
            transactions=transactions,
            composer=endpoint._composer,
            recoverability=endpoint.recoverability,
            delivery=in_shard,
            destinations=sender.destinations,
            once=endpoint._once,
        )

    if isinstance(transport, SupportsShards):
        sharded = ShardedPipeline(endpoint._host, list(transport.parts), endpoint.concurrency, opened)
        await sharded.begin()
        return sharded
    pipeline = await opened(None, endpoint._host, endpoint.concurrency)
    pipeline.start()
    return pipeline


async def _watch_loop(endpoint: Endpoint) -> None:
    """Say that the event loop ends before the endpoint has been stopped, as when an `asyncio.run` returns."""
    stopped = endpoint._stopped
    try:
        await endpoint.wait_stopped()
    except asyncio.CancelledError:
        if endpoint._stopping is None and endpoint._stopped is stopped:
            log_text = (
                "endpoint %s was not stopped before its event loop ended: what it was doing is cancelled, and its "
                "messages come again. Use `async with endpoint:`, or await endpoint.stop()"
            )
            emit(logger, logging.WARNING, Event.ENDPOINT_NOT_STOPPED, log_text, endpoint.name)
        raise


class CriticalErrors:
    """Logs the critical errors of an endpoint, and runs its action for them."""

    def __init__(self, endpoint: Endpoint, action: CriticalErrorAction) -> None:
        self._endpoint = endpoint
        self._action = action
        self._running: set[asyncio.Task[None]] = set()

    def raised(self, text: str, error: Exception) -> None:
        """Log the error and start the action."""
        name = self._endpoint.name
        emit(logger, logging.CRITICAL, Event.CRITICAL_ERROR, "%s: %s: %s", name, text, error, exception=error)
        action = asyncio.ensure_future(self._action(self._endpoint, text, error))
        self._running.add(action)
        action.add_done_callback(self._ended)

    def _ended(self, action: asyncio.Task[None]) -> None:
        self._running.discard(action)
        if not action.cancelled() and (error := action.exception()) is not None:
            emit(
                logger,
                logging.CRITICAL,
                Event.CRITICAL_ERROR_ACTION_FAILED,
                "the critical error action of endpoint %s failed",
                self._endpoint.name,
                exception=error,
            )


async def _warn_of_no_handlers(name: str, transport: Transport) -> None:
    """Log a warning, with the number of messages in the queue where it can be told: no handler takes them."""
    number: int | None = None
    if isinstance(transport, SupportsQueueManagement):
        with contextlib.suppress(DelaylineError):  # whatever is wrong shows where it matters
            number = await transport.count(name)
    log_text = (
        "endpoint %s has no handlers, and receives nothing%s. Register handlers with @endpoint.handles or "
        "@endpoint.handler before start(), or pass send_only=True"
    )
    there = f": {number} messages stay in its queue" if number else ""
    emit(logger, logging.WARNING, Event.NO_HANDLERS, log_text, name, there, count=number)


async def _check_rights(
    name: str,
    transport: Transport,
    deliveries: Sequence[DelayedDelivery],
    inbox: Inbox | None,
    subscriptions: Subscriptions,
    *,
    takes: bool,
) -> None:
    """Raise BackendUnusable with every right that an endpoint lacks, before its first use."""
    missing: dict[str, None] = {}
    if isinstance(transport, SupportsRightsCheck):
        missing |= dict.fromkeys(await transport.missing_rights(name, takes=takes))
    missing |= dict.fromkeys(await subscriptions.missing_rights())
    for delivery in deliveries:
        if isinstance(delivery, SupportsRightsCheck):
            with contextlib.suppress(BackendUnavailable):  # some deliveries start without their database
                missing |= dict.fromkeys(await delivery.missing_rights(name, takes=True))
    if inbox is not None:
        missing |= dict.fromkeys(await inbox.missing_rights(name, takes=True))
    if missing:
        grants = "\n".join(missing)
        raise BackendUnusable(
            f"endpoint {name!r} lacks rights in its database. Run this as the owner of the tables:\n{grants}"
        )


async def _set_up(delivery: DelayedDelivery) -> None:
    try:
        await delivery.setup_infrastructure()
    except BackendUnavailable:
        if not isinstance(delivery, SupportsDeferredSetup):
            raise
        delivery.set_up_later()


def _delivery(setting: str, given: DelayedDelivery | DelayedMessageStore | None) -> DelayedDelivery | None:
    """Return a delayed delivery: the given one, or a StoredDelivery over a given store."""
    if given is None:
        return None
    check_part(setting, given, (), f"{setting}=SqlDelayedMessageStore(url)")
    if hasattr(given, "bind"):
        return cast("DelayedDelivery | None", given)
    if all(hasattr(given, verb) for verb in VERBS):
        return StoredDelivery(given)
    raise ConfigurationError(
        f"{setting}= is a {type(given).__name__}, neither a delayed delivery nor a delayed message store: "
        "pass StoredDelivery(store), or another delivery of delayline's"
    )


def _parts(
    name: str, error_queue: str, url: str | None, transport: Transport | None, delivery: DelayedDelivery | None
) -> tuple[Transport, DelayedDelivery | None]:
    """Return the transport and the delayed delivery: the given ones, or what is at the URL."""
    if url is None:
        if transport is None:
            raise ConfigurationError(
                f"endpoint {name!r} has no queues: pass url=, such as sqlite:///delayline.db, or a transport="
            )
        check_part("transport", transport, VERBS_OF_TRANSPORTS, "transport=SqlTransport(url), or url= in its place")
        return transport, delivery
    if transport is not None:
        raise ConfigurationError(
            f"url= and transport= exclude each other: the queues are at {masked(str(url))!r} or in the transport. "
            "Leave out one of them"
        )
    if not isinstance(url, str):
        raise ConfigurationError(f"url= is a {type(url).__name__}: pass a text, such as sqlite:///delayline.db")
    from delayline.backends import BackendOptions, backend_of, delivery_at

    url, options = full_scheme(url), BackendOptions(name=name, error_queue=error_queue)
    transport = backend_of(url, kind="transport").transport(url, options)
    return transport, delivery_at(url, options) if delivery is None else delivery


def _queue_roles(
    queue: str | None, error_queue: str, deliveries: Sequence[DelayedDelivery], routes: Routes
) -> dict[str, QueueRole]:
    roles = {} if queue is None else {queue: QueueRole.INPUT}
    roles[error_queue] = QueueRole.ERROR
    for delivery in deliveries:
        if isinstance(delivery, SupportsSatellites):
            roles |= dict.fromkeys(delivery.satellite_queues, QueueRole.SATELLITE)
    return dict.fromkeys(routes.queues, QueueRole.DESTINATION) | roles


def _error_queue(error_queue: str, name: str) -> str:
    if error_queue == name:
        raise ConfigurationError(f"error_queue={error_queue!r} is the endpoint's own queue: name another")
    return check_endpoint_name(error_queue)


def _mode(
    mode: TransactionMode | None, transport: Transport, delivery: DelayedDelivery | None, inbox: Inbox | None
) -> TransactionMode:
    if mode is not None and not isinstance(mode, TransactionMode):
        raise ConfigurationError(
            f"transaction_mode must be one of TransactionMode.{', '.join(TransactionMode.__members__)}; not {mode!r}"
        )
    if inbox is None:
        return strongest_mode(transport, delivery) if mode is None else mode
    if mode not in (None, TransactionMode.RECEIVE_ONLY):
        raise ConfigurationError(
            f"with inbox= a message leaves its queue after the commit in the inbox's database, which is RECEIVE_ONLY, "
            f"not {mode.name}: leave transaction_mode out"
        )
    return TransactionMode.RECEIVE_ONLY


def _transactions(
    transport: Transport, mode: TransactionMode, inbox: Inbox | None, connections: int
) -> HandlerTransactions:
    if inbox is None:
        return HandlerTransactions(transport, mode, connections)
    # The rows commit with the record, whatever the mode is in which their messages leave the queue.
    return HandlerTransactions(inbox, TransactionMode.TRANSACTION_SCOPE, connections)


def _outbox(outbox: Outbox | None, inbox: Inbox | None, delivery: DelayedDelivery | None) -> OutboxDelivery | None:
    if inbox is not None:
        outbox = outbox or inbox.new_outbox()
        if outbox.transaction_domain != inbox.external_domain:
            raise ConfigurationError(
                f"the inbox is in {inbox.external_domain} and the outbox in {outbox.transaction_domain}: leave outbox= "
                "out, and what handlers send is kept beside the inbox"
            )
    return None if outbox is None else OutboxDelivery(outbox, delivery)


def _recoverability(
    given: Recoverability | None, mode: TransactionMode, delivery: DelayedDelivery | None
) -> Recoverability:
    """Fit the defaults to the mode; refuse explicit settings that cannot work."""
    settings = given or Recoverability()
    if settings.policy is not None and mode is TransactionMode.NONE:
        raise ConfigurationError("a retry policy is not supported with TransactionMode.NONE, which tries once")
    if settings.policy is None and settings.delays_retries:
        if mode is TransactionMode.NONE:
            raise ConfigurationError(
                "Delayed retries are not supported when running with TransactionMode.NONE. "
                "Use Recoverability(delayed_retries=0) or a stronger mode"
            )
        if delivery is None:
            raise ConfigurationError(
                "Delayed retries are not supported without delayed delivery. "
                f"Use Recoverability(delayed_retries=0), or {DELAYED_DELIVERIES}"
            )
    if mode is TransactionMode.NONE:
        return replace(settings, immediate_retries=0, delayed_retries=0, delays=None, unknown_type_wait=timedelta(0))
    return replace(settings, delayed_retries=0, delays=None) if delivery is None else settings
