"""Write the parts of the pages that come from the code: `python docs/generate.py`; `--check` only compares.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end of generated -->`, in README.md,
CONTRIBUTING.md or any page.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import tomllib
from dataclasses import MISSING, fields
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from sqlalchemy.schema import CreateIndex, CreateTable

from delayline import (
    ConfigurationError,
    DelaylineError,
    Endpoint,
    Headers,
    MemoryDelayedMessageStore,
    MemoryTransport,
    Recoverability,
    SqlDelayedMessageStore,
    SqlInbox,
    SqlTransport,
    StoredDelivery,
    TransactionMode,
    TwoPhaseCommit,
    errors,
    guarantee,
    handler_rows,
)
from delayline.azure import AzureDelayedTable, AzureStorageQueueTransport
from delayline.cli import main as command_line
from delayline.errors import UnsupportedTransactionMode
from delayline.events import Event
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.settings import Settings, describe_setting, flag_of, setting_names, variable_of
from delayline.sql import schema
from delayline.sql.databases import database_at
from delayline.telemetry import catalog
from delayline.timeouts import SqlTimeoutPersister, TimeoutManagerDelivery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from sqlalchemy import Dialect, Table

    from delayline.spi import DelayedMessageStore, Transport
    from delayline.telemetry.catalog import Metric

ROOT: Final = Path(__file__).parents[1]
SOURCE: Final = ROOT / "src" / "delayline"
PART: Final = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end of generated -->)", re.DOTALL)
HELP_WIDTH: Final = 100


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def code(text: object) -> str:
    """Return the text as code, nothing for nothing."""
    return f"`{text}`" if f"{text}" else ""


def guarantees() -> str:
    """Return what every pair of parts promises in every mode."""
    one, two = "sqlite:///one.db", "sqlite:///two.db"
    here, there, both = "postgresql://server/one", "postgresql://server/two", TwoPhaseCommit()
    near, far, both_near = "mariadb://server/one", "mariadb://server/two", TwoPhaseCommit()
    cloud = "azure://account"
    broker = "amqp://broker"
    pairs: list[tuple[str, Transport, DelayedMessageStore | DelayLevelDelivery]] = [
        ("SQLite, queues and store in one file", SqlTransport(one), SqlDelayedMessageStore(one)),
        ("SQLite, queues and store in two files", SqlTransport(one), SqlDelayedMessageStore(two)),
        ("PostgreSQL, queues and store in one database", SqlTransport(here), SqlDelayedMessageStore(here)),
        ("PostgreSQL, queues and store in two databases", SqlTransport(here), SqlDelayedMessageStore(there)),
        (
            "the same with a `TwoPhaseCommit`",
            SqlTransport(here, two_phase=both),
            SqlDelayedMessageStore(there, two_phase=both),
        ),
        ("MariaDB, queues and store in one database", SqlTransport(near), SqlDelayedMessageStore(near)),
        ("MariaDB, queues and store in two databases", SqlTransport(near), SqlDelayedMessageStore(far)),
        (
            "the same with a `TwoPhaseCommit`",
            SqlTransport(near, two_phase=both_near),
            SqlDelayedMessageStore(far, two_phase=both_near),
        ),
        ("Azure Storage, queues and table", AzureStorageQueueTransport(cloud), AzureDelayedTable(cloud)),
        ("RabbitMQ, queues and delay levels", RabbitMQTransport(broker), DelayLevelDelivery()),
        ("queues on RabbitMQ, store in a database", RabbitMQTransport(broker), SqlDelayedMessageStore(here)),
        ("queues in memory, store on SQLite", MemoryTransport(), SqlDelayedMessageStore(one)),
        ("memory, queues and store", MemoryTransport(), MemoryDelayedMessageStore()),
    ]

    def cell(transport: Transport, waiting: DelayedMessageStore | DelayLevelDelivery, mode: TransactionMode) -> str:
        delivery = waiting if isinstance(waiting, DelayLevelDelivery) else StoredDelivery(waiting)
        try:
            return str(guarantee(transport, delivery, mode))
        except UnsupportedTransactionMode:
            return "refuses to start"

    def with_rows(transport: Transport, waiting: DelayedMessageStore | DelayLevelDelivery) -> str:
        delivery = waiting if isinstance(waiting, DelayLevelDelivery) else StoredDelivery(waiting)
        return str(handler_rows(transport, delivery, transport.highest_transaction_mode))

    rows = [
        [name, *(cell(transport, store, mode) for mode in TransactionMode), with_rows(transport, store)]
        for name, transport, store in pairs
    ]
    rows.append(with_an_inbox(RabbitMQTransport(broker), DelayLevelDelivery()))
    rows += timeout_guarantees(one, two)
    return table(["parts", *(code(mode.name) for mode in TransactionMode), "your rows"], rows)


def with_an_inbox(transport: Transport, delivery: DelayLevelDelivery) -> list[str]:
    """Return the row for endpoints with an inbox, whose guarantee is the same for every transport and delivery."""

    def cell(mode: TransactionMode) -> str:
        try:
            inbox = SqlInbox("postgresql://server/one")
            return str(Endpoint("any", transport=transport, inbox=inbox, transaction_mode=mode).guarantee)
        except ConfigurationError:
            return "refuses to start"

    rows = str(handler_rows(transport, delivery, TransactionMode.RECEIVE_ONLY, inbox=True))
    return ["any of these with an `inbox=`", *map(cell, TransactionMode), rows]


def timeout_guarantees(one: str, two: str) -> list[list[str]]:
    """Return the rows of the timeout manager: they are those of a store in the same place."""
    rows = []
    for name, place in (("one file", one), ("two files", two)):
        cells = []
        delivery = TimeoutManagerDelivery(SqlTimeoutPersister(place))
        kept = str(handler_rows(SqlTransport(one), delivery, TransactionMode.SENDS_ATOMIC_WITH_RECEIVE))
        for mode in TransactionMode:
            try:
                cells.append(str(guarantee(SqlTransport(one), delivery, mode)))
            except UnsupportedTransactionMode:
                cells.append("refuses to start")
        rows.append([f"SQLite, queues and timeout manager in {name}", *cells, kept])
    return rows


def documented(owner: type) -> dict[str, str]:
    """Return the description of each argument in the class docstring, from its section `Args:`."""
    _, _, section = (inspect.getdoc(owner) or "").partition("\nArgs:\n")
    section = section.split("\n\n")[0]
    found = re.findall(r"^    ([a-z_]+): (.+(?:\n {8,}.+)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found} | _documented_by_lines(owner)


def _documented_by_lines(owner: type) -> dict[str, str]:
    """Return the descriptions in a class docstring that has lines `name: text` instead of a section."""
    return dict(re.findall(r"^([a-z_]+): (.+)$", inspect.getdoc(owner) or "", re.MULTILINE))


def texts_below(owner: type) -> dict[str, str]:
    """Return the docstring below each field or member of a class."""
    tree = ast.parse(inspect.getsource(owner))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
    texts: dict[str, str] = {}
    for one, after in pairwise(body):
        target = (
            one.target if isinstance(one, ast.AnnAssign) else one.targets[0] if isinstance(one, ast.Assign) else None
        )
        if isinstance(target, ast.Name) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            texts[target.id] = str(after.value.value)
    return texts


def default(value: object) -> str:
    """Return a default value as the reader would write it."""
    if value is inspect.Parameter.empty:
        return "required"
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g} s"
    if inspect.isfunction(value):
        return code(value.__name__)
    return code(repr(value))


def settings_of(owner: type, besides: dict[str, str]) -> str:
    """Return the table of a class's arguments; `besides` explains those whose docstring leaves them to their type."""
    texts = documented(owner) | besides
    rows = []
    for name, parameter in inspect.signature(owner).parameters.items():
        text = texts[name]
        rows.append([code(name), code(parameter.annotation), default(parameter.default), text[0].upper() + text[1:]])
    return table(["setting", "type", "default", "meaning"], rows)


def endpoint_settings() -> str:
    """Return the arguments of Endpoint."""
    return settings_of(
        Endpoint,
        {
            "name": "its input queue carries it too: 1 to 200 printable characters.",
            "transport": "where the queues are.",
            "delayed_delivery": "how a message waits; without one, delays are refused.",
            "clock": "where the time comes from: the machine, or a `ManualClock` in tests.",
        },
    )


def rabbitmq_settings() -> str:
    """Return the arguments of RabbitMQTransport."""
    return settings_of(RabbitMQTransport, {})


def delay_level_settings() -> str:
    """Return the arguments of DelayLevelDelivery."""
    return settings_of(DelayLevelDelivery, {})


def stored_delivery_settings() -> str:
    """Return the arguments of StoredDelivery."""
    lasts = "may fail, with no success between, before a critical error; longer than zero."
    return settings_of(
        StoredDelivery,
        {
            "store": "where messages wait until they are due.",
            "time_to_trigger_store_circuit_breaker": f"how long storing {lasts}",
            "time_to_trigger_fetch_circuit_breaker": f"how long fetching {lasts}",
            "time_to_trigger_dispatch_circuit_breaker": f"how long dispatching {lasts}",
            "batch_size": "how many due messages the poller takes at once; 1 or more.",
            "batch_bytes": "how many bytes of headers and bodies it takes at once, but at least one message.",
        },
    )


def timeout_manager_settings() -> str:
    """Return the arguments of TimeoutManagerDelivery."""
    return settings_of(TimeoutManagerDelivery, {})


def recoverability_settings() -> str:
    """Return the fields of Recoverability."""
    texts = texts_below(Recoverability)
    rows = []
    for one in fields(Recoverability):
        value = () if one.default is MISSING else one.default  # the one field with a factory makes an empty tuple
        rows.append([code(one.name), code(one.type), default(value), texts[one.name]])
    return table(["setting", "type", "default", "meaning"], rows)


def configuration() -> str:
    """Return the settings of delayline.toml, the environment and the flags."""
    defaults: dict[str, object] = {one.name: one.default for one in fields(Settings)}
    rows = []
    for name in setting_names():
        shown = "" if defaults[name] is None else default(defaults[name])
        rows.append([code(name), code(variable_of(name)), code(flag_of(name)), shown, describe_setting(name)])
    return table(["delayline.toml", "variable", "flag", "default", "meaning"], rows)


def commands(command: click.Command, path: str, parent: click.Context | None = None) -> Iterator[tuple[str, str]]:
    """Yield every command with its help text."""
    context = click.Context(
        command, info_name=path.rpartition(" ")[2], parent=parent, terminal_width=HELP_WIDTH, **command.context_settings
    )
    yield path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None:
                yield from commands(below, f"{path} {name}", context)


def command_reference() -> str:
    """Return the help text of every command."""
    return "\n".join(f"## {path}\n\n```text\n{text}\n```\n" for path, text in commands(command_line, "delayline"))


EVENT_MEANING: Final = {
    Event.SCHEDULE_CHANGED: "A schedule was added, changed, paused, resumed or removed.",
    Event.SCHEDULE_OLDER: "A process declares a schedule as it was before a newer declaration: it changes nothing.",
    Event.SCHEDULE_MISSED: "An occurrence of a schedule was due too long ago: with `missed='none'` it does not leave.",
    Event.SCHEDULE_FAILED: "What follows an occurrence of a schedule cannot be stored; it is tried again every minute.",
    Event.ENDPOINT_STARTED: "The endpoint is connected, delivers and receives.",
    Event.SETTLED: "A transaction that a crash had left prepared is committed or rolled back.",
    Event.SETTLING_FAILED: "Prepared transactions cannot be finished now; it is tried again every second.",
    Event.ENDPOINT_STOPPED: "The endpoint has finished its messages in flight and disconnected.",
    Event.ENDPOINT_NOT_STOPPED: "The event loop or the interpreter ended before the endpoint was stopped: use `with`.",
    Event.REPLY_DROPPED: "A reply came after its request had given up, or after another reply.",
    Event.LOOP_BLOCKED: "A `SyncEndpoint` was called on an event loop, which stands still meanwhile; logged once.",
    Event.LOOP_STUCK: "The event loop has not turned for 2 seconds: with its stack, and the handler that blocks it.",
    Event.LOOP_TURNS: "The event loop turns again after it was stuck.",
    Event.NO_HANDLERS: "The endpoint started without handlers and is not send-only: messages stay in its queue.",
    Event.CRITICAL_ERROR: "A fault lasted too long; the critical error action runs now.",
    Event.CRITICAL_ERROR_ACTION_FAILED: "The critical error action raised an error itself.",
    Event.UNHEARD: "An event was published to which no endpoint subscribes.",
    Event.SUBSCRIBER_GONE: "A queue subscribes to an event that was published, and does not exist.",
    Event.SEND_ABANDONED: "A send went on after its caller was cancelled, and has failed.",
    Event.HANDLED: "The handlers succeeded and the message is off its queue.",
    Event.HANDLED_UNRECORDED: "Messages were handled and removed; that the journal records it failed.",
    Event.HANDLED_BEFORE: "The inbox has a record of the message: it is acknowledged, and not handled again.",
    Event.HANDLER_FAILED: "One attempt to handle a message failed.",
    Event.HANDLER_REPEATED: "A handler runs again at once, as its own transaction gave way to another (a deadlock).",
    Event.DISCARDED: "A retry policy has dropped a message whose handler failed.",
    Event.HANDLERS_CANCELLED: "Handlers have not ended within the grace period of a stop.",
    Event.HANDLER_BLOCKED: "A coroutine handler has blocked the event loop for more than a second.",
    Event.RETRIED_LATER: "The message was deferred for more attempts, or for a process that knows its type.",
    Event.RECEIVE_FAILED: "Messages could not be taken from the queue; it is tried again.",
    Event.CRASHES_UNCOUNTED: "Deliveries that end with their process are not counted: the tables cannot be used.",
    Event.HANDLED_ALONE: "A message is handled alone, as deliveries of it have ended without an outcome before.",
    Event.EXPIRED: "A message had waited longer than its `NServiceBus.TimeToBeReceived` and was deleted unseen.",
    Event.LIMITS_UNUSABLE: "The limits of types in the registry of queues are not JSON that delayline has written.",
    Event.RECEIVE_LOST: "The message left its queue while it was handled here: a possible duplicate.",
    Event.RECEIVE_TASK_FAILED: "A message could not even be given back; it is when the process ends, if not before.",
    Event.POISON_MESSAGE: "The message's headers cannot be read; it goes to the error queue as it is.",
    Event.MOVED_TO_ERROR: "The message is in the error queue.",
    Event.ERROR_MOVE_FAILED: "The message could not be moved to the error queue; it stays where it is.",
    Event.STORED: "A delayed message is durable.",
    Event.STORE_FAILED: "A delayed message could not be stored; the sender gets the error.",
    Event.WOKE: "The poller woke.",
    Event.SLEEPS: "The poller sleeps until something is due, or until it is woken.",
    Event.FETCHED: "The poller took due messages from the store.",
    Event.FETCH_FAILED: "The store could not be asked for due messages; it is tried again.",
    Event.DISPATCHED: "Due messages were sent to their destinations.",
    Event.DISPATCH_FAILED: "A due message, or a whole batch, could not be sent.",
    Event.REMOVED: "Messages that were sent are out of the store.",
    Event.REMOVE_FAILED: "Messages that were sent could not be removed; if no others can be, nothing else is sent.",
    Event.ALREADY_REMOVED: "A message was gone from the store when it was to be removed: a possible duplicate.",
    Event.BACKED_OFF: "A message that could not be sent waits for its next attempt.",
    Event.NOTIFY_FAILED: "A notification to other processes failed; it is sent when the server is back.",
    Event.BACKGROUND_TASK_FAILED: "A background task failed, such as reading the server's time.",
    Event.RETRY_UNACKNOWLEDGED: "A message that ServicePulse had retried was handled; the notice cannot be sent.",
    Event.QUEUE_DIFFERS: "On RabbitMQ a queue exists with other arguments than this endpoint gives it, and is used.",
    Event.DELIVERY_LIMITED: "A queue on RabbitMQ drops messages that were returned to it often; with the cure.",
    Event.BINDINGS_OVERLAP: "On RabbitMQ an endpoint gets another's delayed messages: one name ends in the other.",
    Event.UNDELIVERABLE_CAUGHT: "Whether a set-up of RabbitMQ's levels has due messages without a destination caught.",
    Event.LEASE_LOST: "Another process may have the lease on the delayed messages: those in flight may be duplicated.",
    Event.INDEX_MISSING: "A table of timeouts that .NET made lacks an index; the text has the SQL that creates it.",
    Event.WITHOUT_TIME: "A table of timeouts has rows without a time, which are never due; the text has what to do.",
    Event.OPERATOR_ACTION: "A person changed messages, or a job does: the text says who, what, which and how many.",
    Event.DASHBOARD_FAILED: "A page of the dashboard, or a part of one, failed; pages show the reference in the text.",
    Event.OBSERVER_FAILED: "A method of an observer has raised; delivery goes on. After the first time: DEBUG.",
    Event.HTTP_EXPOSED: "Probes or metrics are served on every interface of the machine, without a password.",
    Event.HTTP_REQUEST: "The server of probes and metrics has answered a request.",
    Event.HTTP_REQUEST_FAILED: "A request for probes or metrics failed: at DEBUG because the client went away.",
    Event.ENDED_AT_ONCE: "A second signal ended the process: what its handlers had in hand is handled again.",
    Event.WORKER_ENDED: "A process of `delayline run --processes` has died; it is started again.",
    Event.COMMAND: "What a command prints for people, in a JSON log: its start, its end, a warning or its error.",
    Event.UNCAUGHT: "The process, or a thread, has ended by an exception that nothing has caught, in a JSON log.",
    Event.SOURCE_CHANGED: "A source file has changed: the processes of `delayline run --reload` are started again.",
    Event.UNKNOWN_VARIABLE: "A DELAYLINE_* variable is no setting: a typing error, or another program's.",
    Event.HEARTBEAT_FAILED: "The heartbeat file could not be touched, or systemd not be notified; delivery goes on.",
    Event.FOREIGN_ROW: "A row of the delayed messages table is no message; it stays where it is and delays no other.",
    Event.GENERATION_FAILED: "A job of a Spark dispatcher failed; it is begun again after a pause.",
    Event.LISTENING_LOST: "The server's notifications do not come; until they do, the poller looks every second.",
    Event.LISTENING_RESUMED: "The server's notifications come again.",
    Event.PUBLISHING_BLOCKED: "The broker is short of memory or disk and takes no messages; sends wait.",
    Event.PUBLISHING_UNBLOCKED: "The broker takes messages again.",
    Event.WORK_OVERDUE: "A task waits for a database for longer than an answer may take; logged once for each wait.",
    Event.DELTA_LOG_BEHIND: "The cold tier's Delta log could not be brought up to date; the next job tries it again.",
    Event.SHARD_OUT_OF_REACH: "A shard did not answer when it was opened: its messages wait, and it is tried again.",
    Event.SHARD_REACHED: "A shard that was out of reach is open: its messages go on.",
    Event.SHARD_FAILED: "Something in a shard has failed for too long. The others go on; it is tried again.",
    Event.SCHEMA_MOVED: "Citus has moved a schema to another server; claims go on there after 3 seconds.",
    Event.SHARDS_OUTDATED: "A newer version of the map of shards is in use: this process sends nothing any more.",
    Event.OUTAGE_BEGAN: "A back end is out of reach; logged once for all that use it in the process.",
    Event.OUTAGE_LASTS: "It still is, with the number of failures and what fails; after 1, 2, 4 ... 60 seconds.",
    Event.OUTAGE_ENDED: "It is in reach again.",
    Event.BREAKER_ARMED: "A fault began; it becomes a critical error if it lasts.",
    Event.BREAKER_TRIGGERED: "The fault lasted too long: a critical error follows.",
    Event.BREAKER_DISARMED: "The fault is over.",
    Event.BREAKER_ACTION_FAILED: "What a breaker does when it arms, triggers or disarms raised an error.",
    Event.DASHBOARD_REFUSED: "The dashboard refused a request: another host name, no permission, no CSRF token.",
    Event.DASHBOARD_SIGNED_IN: "A user has signed in to the dashboard, with the token or with a name and a password.",
    Event.DASHBOARD_SIGN_IN_FAILED: "A wrong token, user name or password was given to the dashboard.",
}


#: The functions that log events, and the position of the event among their arguments; `_log` is that of `Reports`.
LOGGING: Final = {"emit": 2, "log_failure": 2, "_log": 1}


def emitted() -> dict[str, tuple[set[str], set[str]]]:
    """Return the levels and facts of each event, read from every call that logs one."""
    found: dict[str, tuple[set[str], set[str]]] = {event.name: (set(), set()) for event in Event}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = getattr(node, "func", None)
            name = getattr(called, "id", None) or getattr(called, "attr", None)
            if isinstance(node, ast.Call) and name in LOGGING and len(node.args) > LOGGING[name]:
                level, event = node.args[LOGGING[name] - 1 : LOGGING[name] + 1]
                if isinstance(level, ast.Attribute) and isinstance(event, ast.Attribute):
                    levels, facts = found[event.attr]
                    levels.add(level.attr)
                    facts |= {word.arg for word in node.keywords if word.arg not in {None, "exception"}} - {None}
                    facts |= {"queue"} if name == "_log" else set()
    return found


def log_events() -> str:
    """Return every event, with its levels and the facts its records carry."""
    found = emitted()
    rows = [
        [
            code(event.value),
            code(f"Event.{event.name}"),
            ", ".join(sorted(levels)),
            ", ".join(map(code, sorted(facts))),
            EVENT_MEANING[event],
        ]
        for event in Event
        for levels, facts in [found[event.name]]
    ]
    return table(["event", "name", "level", "facts", "meaning"], rows)


def metrics_of(some: Sequence[Metric]) -> str:
    """Return metrics with their names for OpenTelemetry and Prometheus."""
    rows = [
        [
            code(one.name),
            code(one.prometheus_name),
            one.kind.value,
            code(one.unit),
            ", ".join(map(code, one.attributes)),
            one.meaning,
        ]
        for one in some
    ]
    return table(["metric", "for Prometheus", "type", "unit", "attributes", "meaning"], rows)


def own_metrics() -> str:
    """Return delayline's own metrics."""
    return metrics_of(catalog.OWN)


def messaging_metrics() -> str:
    """Return the metrics of the semantic conventions."""
    return metrics_of(catalog.MESSAGING)


def nservicebus_metrics() -> str:
    """Return the metrics that are named as NServiceBus names them."""
    return metrics_of(catalog.NSERVICEBUS)


def error_tree() -> str:
    """Return the errors, children below their parents, with what they mean and what else catches them."""
    rows: list[list[str]] = []
    order = list(vars(errors).values())

    def add(kind: type[Exception], depth: int) -> None:
        built_in = [
            base.__name__ for base in kind.__bases__ if not issubclass(base, DelaylineError) and base is not Exception
        ]
        meaning = (kind.__doc__ or "").splitlines()[0]
        rows.append(["&nbsp;" * 4 * depth + code(kind.__name__), ", ".join(map(code, built_in)), meaning])
        public = [below for below in kind.__subclasses__() if below in order]
        for below in sorted(public, key=order.index):
            add(below, depth + 1)

    add(DelaylineError, 0)
    return table(["error", "is also a", "meaning"], rows)


PREFIXES: Final = ("EXCEPTION_PREFIX", "DISPATCH_PROPERTIES")
HEADER_MEANING: Final = {
    "MESSAGE_ID": "The id the message was sent with, which handlers see; a copy to be handled again keeps it.",
    "CORRELATION_ID": "The id of the message that began an exchange; a reply carries its request's.",
    "CONVERSATION_ID": "The id of the first message of a chain; what a handler sends carries it on.",
    "RELATED_TO": "The id of the message whose handler sent this one.",
    "REPLY_TO": "The queue for replies; absent when the sender is `send_only`.",
    "TIME_TO_BE_RECEIVED": "How long it may wait in a queue to be received, as in `00:05:00`; then it is deleted.",
    "CONTENT_TYPE": "`application/json`, `text/plain; charset=utf-8` or `application/octet-stream`.",
    "ATTEMPTS": "How often handling was attempted before this round, counted where there is a retry policy.",
    "SCHEDULE": "The name of the schedule that a recurring message is an occurrence of.",
    "FIRST_SENT": "when the first message with the id was sent, of a message that was postponed",
    "UNKNOWN_SINCE": "Since when the message waits for a process with a handler of its type.",
    "CRASHES": "how many deliveries have ended without an outcome, as when their process was killed",
    "ENCLOSED_MESSAGE_TYPES": "The name of the message's type, then those of its base classes, separated by `;`.",
    "INTENT": "`Send` or `Reply`.",
    "ORIGINATING_ENDPOINT": "The endpoint that sent it.",
    "ORIGINATING_SAGA_ID": "The saga of NServiceBus that sent it.",
    "ORIGINATING_SAGA_TYPE": "The type of that saga.",
    "SAGA_ID": "The saga that it is for: a reply copies that of the request; a timeout names its own.",
    "SAGA_TYPE": "The type of that saga.",
    "START_NEW_TRACE": "`True` beside a `traceparent`: the handler starts a trace that links to the sender's.",
    "ORIGINATING_MACHINE": "The host name of its machine.",
    "TIME_SENT": "When it was sent.",
    "DELIVER_AT": "When it was due as it was sent; only on delayed messages. Rescheduling and retries leave it.",
    "RETRIES": "How many rounds of delayed retries were begun.",
    "RETRIES_TIMESTAMP": "When the last of them was begun.",
    "FAILED_QUEUE": "The queue a retry goes to: the handler's queue, or a delayed message's destination.",
    "TIME_OF_FAILURE": "When it failed for good.",
    "PROCESSING_MACHINE": "The host name of the machine where it failed.",
    "PROCESSING_ENDPOINT": "The endpoint where it failed.",
    "RETRY_ID": "ServicePulse's id of a retry; the notice that it was handled has it too.",
    "RETRY_ACKNOWLEDGEMENT_QUEUE": "The queue for that notice.",
    "RETRY_SUCCESSFUL": "When the retried message was handled, in the notice.",
    "HOST_ID": "An id of that machine and endpoint, the same at each start.",
    "HOST_DISPLAY_NAME": "That machine and its Python implementation.",
    "EXCEPTION_TYPE": "The exception's class.",
    "INNER_EXCEPTION_TYPE": "The class of its cause, where it has one.",
    "EXCEPTION_HELP_LINK": "Always without a value.",
    "EXCEPTION_MESSAGE": "Its text, 16,384 characters at most.",
    "EXCEPTION_SOURCE": "The module of its class.",
    "EXCEPTION_STACK_TRACE": "Its traceback.",
}


def headers() -> str:
    """Return the names of all headers."""
    names = {name: value for name, value in vars(Headers).items() if name.isupper() and name not in PREFIXES}
    rows = [[code(value), code(f"Headers.{name}"), HEADER_MEANING[name]] for name, value in names.items()]
    return table(["header", "name", "meaning"], rows)


def sqlite_schema() -> str:
    """Return the statements that create the tables in SQLite."""
    return schema_of("sqlite:///delayline.db")


def postgresql_schema() -> str:
    """Return the statements that create the tables in PostgreSQL."""
    return schema_of("postgresql://server/shop")


def sqlserver_schema() -> str:
    """Return the statements that create the tables in SQL Server."""
    return schema_of("mssql://server/shop")


def mariadb_schema() -> str:
    """Return the statements that create the tables in MariaDB."""
    return schema_of("mariadb://server/shop")


def schema_of(url: str) -> str:
    """Return the statements that create the tables of queues and of a store."""
    product = database_at(url).dialect
    name = product.catalog.schema_of(None)
    tables = [schema.versions_table(name), *schema.QUEUES.tables(product.catalog, name)]
    return schema_in(product.sql, [*tables, product.catalog.timeouts_table("sales.timeouts", name)])


def schema_in(dialect: Dialect, tables: Sequence[Table]) -> str:
    """Return the statements that create those tables."""
    statements = []
    for one in tables:
        statements.append(str(CreateTable(one).compile(dialect=dialect)))
        statements += [str(CreateIndex(index).compile(dialect=dialect)) for index in one.indexes]
    text = ";\n\n".join(re.sub(r"[ \t]+\n", "\n", statement).strip() for statement in statements)
    return f"```sql\n{text.replace(chr(9), '    ')};\n```\n"


def modes() -> str:
    """Return the transaction modes."""
    texts = texts_below(TransactionMode)
    return table(["mode", "meaning"], [[code(mode.name), texts[mode.name]] for mode in TransactionMode])


#: What each extra is for; its packages are in pyproject.toml.
EXTRAS: Final = {
    "sqlite": "`context.transaction()` of coroutine handlers on SQLite, which itself needs no extra",
    "postgresql": "store and queues on PostgreSQL, `postgresql://`",
    "mariadb": "store and queues on MariaDB, `mariadb://`",
    "mysql": "store and queues on MySQL 8, `mysql://`",
    "sqlserver": "store and queues on SQL Server, `mssql://`, through Microsoft's driver",
    "pymssql": "the same through pymssql, where Microsoft's driver does not run",
    "rabbitmq": "queues and delay levels on RabbitMQ, `amqp://`",
    "azure": "queues and delayed messages in Azure Storage, `azure://`",
    "delta": "the cold tier as a Delta table, which others read",
    "spark": "scheduling in bulk, the cold tier, migration and audit on Spark, with a Java for machines without one",
    "telemetry": "metrics and traces for OpenTelemetry and Prometheus",
    "dashboard": "`delayline dashboard`, and `delayline.dashboard.app` to mount",
    "cron": "cron expressions of recurring messages, with time zones for machines without them",
    "testing": "the conformance suites for a store or transport of your own",
}


def extras() -> str:
    """Return the extras, with what each is for and installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = project["optional-dependencies"]
    if packages.keys() != EXTRAS.keys():
        raise SystemExit("describe every extra of pyproject.toml in EXTRAS")
    rows = [[code(name), text, ", ".join(map(code, packages[name]))] for name, text in EXTRAS.items()]
    return table(["extra", "for", "installs"], rows)


def layout() -> str:
    """Return the package's modules from the top layer to the bottom, with the first sentence of each."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    [layers] = [contract["layers"] for contract in settings["contracts"] if contract.get("containers") == ["delayline"]]
    rows = []
    for layer in layers:
        for name in layer.split(" | "):
            place = f"{name}/" if (SOURCE / name).is_dir() else f"{name}.py"
            file = SOURCE / name / "__init__.py" if place.endswith("/") else SOURCE / place
            documentation = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            first = re.split(r"(?<=\.)\s|\n\n", documentation, maxsplit=1)[0]
            rows.append([code(place), " ".join(first.split()).removesuffix(".")])
    return table(["layer, top to bottom", "contents"], rows)


PARTS: Final[dict[str, Callable[[], str]]] = {
    "guarantees": guarantees,
    "modes": modes,
    "extras": extras,
    "layout": layout,
    "endpoint-settings": endpoint_settings,
    "stored-delivery-settings": stored_delivery_settings,
    "rabbitmq-settings": rabbitmq_settings,
    "delay-level-settings": delay_level_settings,
    "timeout-manager-settings": timeout_manager_settings,
    "recoverability-settings": recoverability_settings,
    "configuration": configuration,
    "commands": command_reference,
    "log-events": log_events,
    "own-metrics": own_metrics,
    "messaging-metrics": messaging_metrics,
    "nservicebus-metrics": nservicebus_metrics,
    "errors": error_tree,
    "headers": headers,
    "sqlite-schema": sqlite_schema,
    "postgresql-schema": postgresql_schema,
    "mariadb-schema": mariadb_schema,
    "sqlserver-schema": sqlserver_schema,
}


def pages() -> list[Path]:
    """Return every page that may have generated parts."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def fresh(text: str) -> str:
    """Return a page with its generated parts as the code has them now."""
    return PART.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n{found[3]}", text)


def stale() -> dict[Path, str]:
    """Return the pages that differ from the code, with what they should be."""
    texts = {page: page.read_text(encoding="utf-8") for page in pages()}
    return {page: fresh(text) for page, text in texts.items() if fresh(text) != text}


def run(arguments: Sequence[str]) -> int:
    """Write the pages, or, with `--check`, only say which are stale."""
    found = stale()
    for page, text in found.items():
        sys.stdout.write(f"{page.relative_to(ROOT)}\n")
        if "--check" not in arguments:
            page.write_text(text, encoding="utf-8")
    return 1 if found and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
