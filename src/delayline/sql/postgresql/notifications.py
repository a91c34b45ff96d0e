"""Notifications between processes that share a PostgreSQL database: LISTEN and NOTIFY, or polling if they fail."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import selectors
import threading
import time
import uuid
from datetime import timedelta
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from delayline.circuit_breaker import FailureLog
from delayline.clock import SystemClock, from_microseconds
from delayline.delayed.poller import MAXIMUM_SLEEP
from delayline.errors import BackendUnavailable, BackendUnusable, DelaylineError
from delayline.events import Event, emit
from delayline.sql.deadlines import STOPPING
from delayline.sql.notifications import Listeners
from delayline.sql.postgresql.citus import OWNER_LOOKED_UP_EVERY
from delayline.sql.schema import queue_tables
from delayline.sql.server import run, watch_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from sqlalchemy import Connection

    from delayline.sql.postgresql.citus import OwnedSchema
    from delayline.sql.postgresql.dialect import Postgresql
    from delayline.sql.server import ServerSessions

logger: logging.Logger = logging.getLogger(__name__)

PROBE_EVERY: Final = 30.0  # seconds between proofs that a notification still comes through
PROBE_WITHIN: Final = 5.0
POLL_EVERY: Final = 1.0  # seconds between looks while notifications do not come through
SEND_EVERY: Final = 0.002  # seconds between notifications of other processes: each costs as much as an insert
LOST_AFTER: Final = 1.0  # seconds after which a scheduled notification is lost: its event loop has ended


#: The same for notifications that are not urgent: a queue has messages, and this process receives from it too; or
#: messages were stored that are due after `AWAKE_WITHIN`.
SEND_LATER_EVERY: Final = 0.02
AWAKE_WITHIN: Final = timedelta(milliseconds=200)
#: A poller that sleeps shorter than this needs no notification.
SHORTEST_SLEEP: Final = timedelta(milliseconds=5)
#: A poller's longest sleep, and the time for its query of the next due time.
LONGEST_SLEEP: Final = MAXIMUM_SLEEP + timedelta(seconds=5)

NOTIFY: Final = "SELECT pg_notify(%s, %s)"
#: A poller that is awake needs no notification, unless the message is due: it may have looked beyond it already. Not in
#: the statement that notifies: an engine that distributes tables runs a read of such a table on another server.
MUST_NOTIFY: Final = """
SELECT %s <= clock_timestamp() + interval '5 ms'
OR EXISTS (SELECT FROM {sleeping} WHERE channel = %s AND listener <> %s AND until > %s)
"""
SLEEP: Final = """
INSERT INTO {sleeping} (channel, listener, until) VALUES (%s, %s, %s)
ON CONFLICT (channel, listener) DO UPDATE SET until = EXCLUDED.until
"""
AWAKE: Final = "DELETE FROM {sleeping} WHERE listener = %s"
SWEEP: Final = "DELETE FROM {sleeping} WHERE until < statement_timestamp() - interval '1 day'"


class PostgresqlNotifications:
    """Notifies listeners in this process at once, in other processes by NOTIFY. Thread-safe.

    NOTIFY serializes commits. Therefore it is sent on a separate connection after the commit, once for all
    messages since the last, and only if a poller has registered that it sleeps beyond the new due time.
    """

    reach_others = True

    def __init__(self, database: ServerSessions, dialect: Postgresql) -> None:
        self._database = database
        self._dialect = dialect
        self.listeners: Listeners = Listeners()
        self.me: str = uuid.uuid4().hex[:12]
        self._lock = threading.Lock()
        self._unsent: dict[str, int] = {}
        self._sends_at: float | None = None
        """When other processes are notified next; None if that is not scheduled."""
        self._sent_at = -math.inf
        self._sleeping: dict[str, str] = {}
        self._registered: dict[str, datetime] = {}
        self._thread: threading.Thread | None = None
        self._failures = FailureLog(SystemClock(), "notifications", dialect.connections.identity)
        self.wake: int
        self.wake, self._woken = os.pipe()
        self.closing: bool = False
        self.renewals: int = 0
        """How often listeners' connections were to be replaced."""

    def takes_writes(self, connection: Connection) -> bool:
        """Return whether the server behind the connection still takes writes; raises a driver's error."""
        return self._dialect.connections.ping(connection)

    @property
    def notifies(self) -> bool:
        """Whether the engine has notifications, as far as is known."""
        return self._dialect.connections.notifies

    @property
    def owned(self) -> OwnedSchema | None:
        """The schema of Citus that everything is in, if it is."""
        return self._dialect.connections.owned

    def check_owner(self, schema: OwnedSchema) -> None:
        """Have every connection replaced, and what is handled locked again, if Citus has moved the schema."""
        with contextlib.suppress(DelaylineError):
            self._database.use_session(schema.check)

    @property
    def server_timeout(self) -> float:
        """Seconds to wait for an answer."""
        return self._dialect.connections.server_timeout

    def subscribe(self, channel: str, callback: Callable[[int], None]) -> Callable[[], None]:
        """Call `callback(at)` on the running loop after each commit that notifies `channel`; return how to stop."""
        unsubscribe = self.listeners.add(channel, callback)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._listen, name="delayline notifications", daemon=True)
                self._thread.start()
        os.write(self._woken, b"s")
        return unsubscribe

    def register_store(self, channel: str, schema: str | None) -> None:
        """Register the schema of the tables that a store's channel belongs to."""
        table = queue_tables(schema).sleeping
        self._sleeping[channel] = self._dialect.sql.identifier_preparer.format_table(table)

    def must_register_sleep(self, channel: str, until: datetime | None) -> bool:
        """Return whether the sleep of the poller that listens here still has to be registered for other processes."""
        if channel not in self.listeners.channels:
            return False
        now, until = self._database.clock.now(), self._at_most(until)
        registered = self._registered.get(channel)
        return until - now >= SHORTEST_SLEEP and (
            registered is None or not timedelta(0) <= registered - until < SHORTEST_SLEEP
        )

    def register_sleep(self, connection: Connection, channel: str, until: datetime | None) -> bool:
        """Register the sleep of the poller that listens here; return True if it was not registered before."""
        if not self.must_register_sleep(channel, until):
            return False
        name, until = channel_name(channel), self._at_most(until)
        sleeping, is_first = self._sleeping[channel], channel not in self._registered

        def register(connection: Connection) -> None:
            if is_first:
                run(connection, SWEEP.format(sleeping=sleeping))
            run(connection, SLEEP.format(sleeping=sleeping), name, self.me, until)

        self._dialect.transactions.run_briefly(register, connection)
        self._registered[channel] = until
        return True

    def _at_most(self, until: datetime | None) -> datetime:
        latest = self._database.clock.now() + LONGEST_SLEEP
        return latest if until is None else min(until, latest)

    def forget(self) -> None:
        """Register the pollers' sleeps again: the server may have lost them."""
        self._registered.clear()

    def notify(self, channel: str, at: int = 0) -> None:
        """Notify the listeners of `channel`; in other processes a moment later, once for several notifications."""
        self.listeners.notify(channel, at)
        if channel in self._sleeping:
            wait = from_microseconds(at) - self._database.clock.at_latest()
            if wait > LONGEST_SLEEP:
                return  # no poller sleeps that long
            is_urgent = wait < AWAKE_WITHIN
        else:
            is_urgent = not self.listeners.listens(channel)
        with self._lock:
            self._unsent[channel] = min(at, self._unsent.get(channel, at))
        self.spawn_sending(is_urgent=is_urgent)

    def spawn_sending(self, *, is_urgent: bool) -> None:
        """Send pending notifications to other processes unless that is scheduled: now, or a moment after the last."""
        now = time.monotonic()
        with self._lock:
            if not self._unsent:
                return
            interval = SEND_EVERY if is_urgent else SEND_LATER_EVERY
            sends_at = max(now, self._sent_at + interval)
            if self._sends_at is not None and self._sends_at <= sends_at and now < self._sends_at + LOST_AFTER:
                return
            self._sends_at = sends_at
            pause = sends_at - now
        try:
            loop = asyncio.get_running_loop() if pause else None
        except RuntimeError:  # a thread of the database
            loop = None
        if loop is None:
            self._database.spawn(self._send_unsent)
        else:
            loop.call_later(pause, self._database.spawn, self._send_unsent)

    def notify_in(self, connection: Connection, channel: str, at: int) -> None:
        """Notify every listener, in this process too, when the transaction on the connection commits."""
        if self.notifies:
            run(connection, NOTIFY, channel_name(channel), f"caller {at}")

    def renew(self) -> None:
        """Listen on another connection: the server behind the present connection is not the primary any more."""
        with self._lock:
            self.renewals += 1
            if self._thread is not None and not self.closing:
                os.write(self._woken, b"r")

    def close(self) -> None:
        """Stop listening."""
        with self._lock:  # the thread, which may be awake already, closes the pipe after that
            self.closing = True
            os.write(self._woken, b"c")
        self._database.spawn(self._send_unsent)  # its time may come too late
        if self._thread is None:
            self._close_pipe()
        else:
            self._thread.join(self._dialect.connections.stops.left(STOPPING))
        with contextlib.suppress(BackendUnavailable, BackendUnusable):
            self._wake_for_good()

    def _close_pipe(self) -> None:
        with self._lock:
            os.close(self.wake)
            os.close(self._woken)

    def _wake_for_good(self) -> None:
        session = self._database.session()
        session.run(partial(self._dialect.transactions.run_briefly, self._wake))
        session.close()

    def _wake(self, connection: Connection) -> None:
        for sleeping in {self._sleeping[channel] for channel in self.listeners.channels & self._sleeping.keys()}:
            run(connection, AWAKE.format(sleeping=sleeping), self.me)

    def spawn_probe(self) -> None:
        """Notify ourselves, to see whether it comes."""
        self._database.spawn(lambda: self.send({self.me: 0}))

    def _send_unsent(self) -> None:
        with self._lock:
            unsent, self._unsent = self._unsent, {}
            self._sends_at = None
            if not unsent:
                return
            self._sent_at = time.monotonic()
        try:
            try:
                self.send(unsent)
            except BackendUnavailable:  # an idle connection may have been lost: try another
                self.send(unsent)
        except DelaylineError as error:
            with self._lock:  # with the next, or when the server is back
                for channel, at in unsent.items():
                    self._unsent[channel] = min(at, self._unsent.get(channel, at))
            emit(logger, logging.WARNING, Event.NOTIFY_FAILED, "Other processes could not be notified: %s", error)

    def send(self, unsent: dict[str, int]) -> None:
        """Notify every process, this process included; on a worker thread."""
        self._database.use_session(lambda connection: self._send(connection, unsent))

    def _send(self, connection: Connection, unsent: dict[str, int]) -> None:
        for channel, at in unsent.items():
            if not self.notifies:
                return
            name, payload, sleeping = channel_name(channel), f"{self.me} {at}", self._sleeping.get(channel)
            due = from_microseconds(at)
            if (
                sleeping is None
                or run(connection, MUST_NOTIFY.format(sleeping=sleeping), due, name, self.me, due)[0][0]
            ):
                with self.noting_refusals():
                    run(connection, NOTIFY, name, payload)

    @contextlib.contextmanager
    def noting_refusals(self) -> Iterator[None]:
        """Note that the engine lacks notifications if it refuses the statement: there is a look every second then."""
        try:
            yield
        except self._dialect.errors.kinds as error:
            if not self._dialect.errors.is_not_supported(error):
                raise
            if self.notifies:
                self._dialect.connections.notifies = False
                log_text = "%s has no notifications, looking every %g s instead: %s"
                emit(logger, logging.WARNING, Event.LISTENING_LOST, log_text, self._dialect, POLL_EVERY, error)

    def _listen(self) -> None:
        try:
            self._listen_again_and_again()
        finally:
            self._failures.leave()
            self._close_pipe()  # not before: a thread that still waits for the server uses it

    def _listen_again_and_again(self) -> None:
        while not self.closing:
            try:
                renewals = self.renewals
                if self.notifies:
                    with self._dialect.connections.connect() as connection:
                        self.spawn_sending(is_urgent=True)
                        NotificationListener(self, connection, renewals).run()
            except Exception as error:  # without this thread no listener of this process would be notified
                template = "Notifications do not come any more, looking every %g s instead: %s"
                failure = (
                    self._dialect.errors.translated(error) if isinstance(error, self._dialect.errors.kinds) else error
                )
                self._failures.log_failure(
                    logger, logging.WARNING, Event.LISTENING_LOST, template, POLL_EVERY, failure, exception=failure
                )
            if not self.closing:
                self.listeners.notify_all()
                self._pause(POLL_EVERY)

    def listens(self) -> None:
        """Log that notifications come again, if they did not."""
        is_outage_over = self._failures.outage is not None  # which is logged once for all parts
        if self._failures.over() or is_outage_over:
            level = logging.DEBUG if is_outage_over else logging.INFO
            emit(logger, level, Event.LISTENING_RESUMED, "Notifications come again")

    def _pause(self, seconds: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.wake, selectors.EVENT_READ)
            if selector.select(seconds):
                os.read(self.wake, 1024)


class NotificationListener:
    """A connection that listens, for as long as it lasts."""

    def __init__(self, owner: PostgresqlNotifications, connection: Connection, renewals: int) -> None:
        self._owner = owner
        self._connection = connection
        self._driver: Any = connection.connection.driver_connection
        self._channels: set[str] = set()
        self._probed = -math.inf
        self._proven = True
        self._looked_up = -math.inf
        self._watch = watch_of(connection)
        self._limit = owner.server_timeout
        self._renewals = renewals

    def run(self) -> None:
        """Listen until the owner closes or wants another connection; raises a driver's error when it is lost."""
        owner, selector = self._owner, selectors.DefaultSelector()
        with contextlib.closing(selector):
            selector.register(owner.wake, selectors.EVENT_READ)
            selector.register(self._driver.fileno(), selectors.EVENT_READ)
            with owner.noting_refusals():
                self._ask(f'LISTEN "{channel_name(owner.me)}"')
            if not owner.notifies:
                return
            self._join()
            owner.listens()
            while not owner.closing and owner.renewals == self._renewals:
                if owner.owned is not None:
                    self._must_own(owner.owned)
                ready = {key.fd for key, _ in selector.select(self._patience())}
                if owner.wake in ready:
                    os.read(owner.wake, 1024)
                    self._join()
                    self._receive()  # received together with the answers to LISTEN
                if self._driver.fileno() in ready:
                    self._receive()
                if not ready:
                    self._probe()

    def _join(self) -> None:
        self._owner.forget()
        for channel in self._owner.listeners.channels - self._channels:
            self._ask(f'LISTEN "{channel_name(channel)}"')
            self._channels.add(channel)
            self._owner.listeners.notify(channel, 0)  # committed before LISTEN took effect

    def _ask(self, statement: str) -> None:
        self._watch.begin(self._limit)
        run(self._connection, statement)
        self._watch.end()

    def _must_be_primary(self) -> None:
        """Raise if the connection is dead, or its server a replica, on which nobody notifies."""
        self._watch.begin(self._limit)
        writes = self._owner.takes_writes(self._connection)
        self._watch.end()
        if not writes:
            raise BackendUnavailable("the server has become read-only, a replica perhaps")

    def _must_own(self, schema: OwnedSchema) -> None:
        """Raise, and have every connection replaced, if Citus has moved the schema to another server."""
        now = time.monotonic()
        if now - self._looked_up < OWNER_LOOKED_UP_EVERY:
            return
        self._looked_up = now
        self._watch.begin(self._limit)
        is_owner = schema.is_owner(self._connection)
        self._watch.end()
        if not is_owner:
            self._owner.check_owner(schema)
            raise BackendUnavailable(f"Citus has moved schema {schema.name!r} to another server")

    def _receive(self) -> None:
        names = {channel_name(channel): channel for channel in self._channels}
        for notification in self._driver.notifies(timeout=0):
            sender, _, at = notification.payload.partition(" ")
            channel = names.get(notification.channel)
            if channel is not None and sender != self._owner.me:
                self._owner.listeners.notify(channel, int(at) if at.lstrip("-").isdecimal() else 0)
            self._proven = True

    def _patience(self) -> float:
        usual = PROBE_EVERY if self._proven else POLL_EVERY
        return usual if self._owner.owned is None else min(usual, OWNER_LOOKED_UP_EVERY)

    def _probe(self) -> None:
        """Send ourselves a notification on another connection; until it comes, poll."""
        if not self._proven:
            self._owner.listeners.notify_all()
            self._must_be_primary()  # a pooler may take LISTEN without effect; a connection that is dead is replaced
        if time.monotonic() - self._probed < PROBE_WITHIN:
            return
        self._proven, self._probed = False, time.monotonic()
        self._owner.spawn_probe()


@lru_cache(maxsize=1024)
def channel_name(channel: str) -> str:
    """Return PostgreSQL's name for a channel: short, and free of anything that needs quoting."""
    return f"delayline_{hashlib.blake2b(channel.encode('utf-8', 'surrogatepass'), digest_size=16).hexdigest()}"
