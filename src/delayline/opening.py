"""Opens the transport and the pending messages of settings for a while, and closes them again."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Final

from delayline.actions import SupportsActionLog
from delayline.backends import backend_of
from delayline.composition import options_of, persister_of, store_of, transport_of
from delayline.delayed.store import SupportsClose, managed
from delayline.errors import ConfigurationError, DelaylineError
from delayline.events import Event, emit
from delayline.setting_values import did_you_mean
from delayline.timeouts.draining import persister_at
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayline.delayed.store import DelayedMessageStore, SupportsManagement
    from delayline.settings import Settings
    from delayline.timeouts import SqlTimeoutPersister
    from delayline.transport import Transport

logger: logging.Logger = logging.getLogger(__name__)

#: Endpoints that an error names.
MOST_NAMED: Final = 10


@contextlib.asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[DelayedMessageStore]:
    """Open the endpoint's delayed message store."""
    name, url = settings.named_endpoint, settings.resolved_store_url
    _refuse_memory(url)
    store = store_of(settings)
    backend_of(url).must_exist(url)
    await store.initialize(name, TransactionMode.RECEIVE_ONLY)
    try:
        yield store
    finally:
        if isinstance(store, SupportsClose):
            await store.close()


@contextlib.asynccontextmanager
async def open_waiting(settings: Settings, *, timeouts: bool) -> AsyncIterator[SupportsManagement]:
    """Open the endpoint's pending messages to be listed and changed; with timeouts an old timeout manager's."""
    if not timeouts:
        async with open_pending(settings) as pending:
            yield managed(pending)
        return
    if settings.timeouts_url is None:
        raise ConfigurationError("no timeouts_url is set: set it to the database of the old timeout manager's timeouts")
    persister = persister_at(settings.timeouts_url, schema=settings.schema)
    async with _open_persister(persister, settings.timeouts_url, settings.named_endpoint):
        yield persister


@contextlib.asynccontextmanager
async def open_pending(settings: Settings) -> AsyncIterator[object]:
    """Open what has the endpoint's pending messages: a store, a timeout manager's table, or the back end itself."""
    name, url = settings.named_endpoint, settings.resolved_store_url
    _refuse_memory(url)
    backend = backend_of(url)
    if settings.timeout_manager:
        async with _open_persister(persister_of(settings), url, name) as persister:
            yield persister
    elif backend.native_delays is not None:
        backend.must_exist(url)
        async with backend.pending(url, options_of(settings)) as pending:
            yield pending
    else:
        async with open_store(settings) as store:
            yield backend_of(settings.resolved_transport_url).as_sent(store)


@contextlib.asynccontextmanager
async def open_transport(settings: Settings) -> AsyncIterator[Transport]:
    """Open the transport."""
    url = settings.resolved_transport_url
    _refuse_memory(url, "transport")
    transport = transport_of(settings)
    backend_of(url).must_exist(url)
    await transport.start()
    try:
        yield transport
    finally:
        await transport.stop()


@contextlib.asynccontextmanager
async def beside_queues(settings: Settings, transport: Transport) -> AsyncIterator[object]:
    """Open what keeps actions on queues whose transport keeps none: the store in front of a broker.

    What is asked for is done without it, too: that it cannot be opened is a warning.
    """
    async with contextlib.AsyncExitStack() as stack:
        store: object = None
        has_store = settings.timeout_manager or backend_of(settings.resolved_store_url).native_delays is None
        if not isinstance(transport, SupportsActionLog) and settings.endpoint is not None and has_store:
            try:
                store = await stack.enter_async_context(open_pending(settings))
            except DelaylineError as error:
                template = "Actions are not recorded, as their database cannot be opened: %s"
                emit(logger, logging.WARNING, Event.OPERATOR_ACTION, template, error)
        yield store


async def other_endpoints(settings: Settings) -> str:
    """Return a sentence with the endpoints that are set up there, where the settings name another; else nothing."""
    url, name = settings.resolved_store_url, settings.endpoint
    if name is None or settings.table_name is not None:
        return ""
    try:
        backend = backend_of(url)
        backend.must_exist(url)
        names = await backend.endpoints(url, options_of(settings))
    except DelaylineError:  # what is wrong with it is being said already
        return ""
    if not names or name in names:
        return ""
    shown = ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
    return f"no endpoint {name!r} is set up there{did_you_mean(name, names) or '.'} Endpoints there: {shown}"


def refuse_memory(settings: Settings) -> None:
    """Raise ConfigurationError for messages that would be gone with this command's process."""
    _refuse_memory(settings.resolved_transport_url, "transport")
    _refuse_memory(settings.resolved_store_url)


def _refuse_memory(url: str, kind: str = "delayed message store") -> None:
    if backend_of(url, kind=kind).in_process:
        raise ConfigurationError(
            f"{url!r} is this command's own memory: whatever it holds is gone when the command ends. "
            "Use --url sqlite:///delayline.db, or memory inside one program"
        )


@contextlib.asynccontextmanager
async def _open_persister(persister: SqlTimeoutPersister, url: str, name: str) -> AsyncIterator[SqlTimeoutPersister]:
    backend_of(url).must_exist(url)
    await persister.open(name)
    try:
        yield persister
    finally:
        await persister.close()
