"""Opens what a command needs of a transport and a store, and closes it again."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from delayline.config import endpoint_from, scheme_of, store_from, transport_from
from delayline.delayed.store import ManagedStore
from delayline.errors import BackendUnusable, ConfigurationError
from delayline.transaction import TransactionMode
from delayline.transport import ManagedQueues

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayline.config import Settings
    from delayline.delayed.store import DelayedMessageStore
    from delayline.endpoint import Endpoint
    from delayline.transport import Transport


def sending_endpoint(settings: Settings) -> Endpoint:
    """Return the endpoint as one that stores and sends only; what it needs was created by `delayline setup`."""
    refuse_memory(settings)
    endpoint = endpoint_from(settings, polling=False, send_only=True, setup_infrastructure=False)
    must_exist(settings)
    return endpoint


@contextlib.asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[DelayedMessageStore]:
    """Open the endpoint's delayed message store."""
    refuse_memory(settings)
    name = settings.named_endpoint
    must_exist(settings)
    store = store_from(settings.where_messages_wait, table_name=settings.table_name)
    await store.initialize(name, TransactionMode.RECEIVE_ONLY)
    try:
        yield store
    finally:
        close = getattr(store, "close", None)
        if close is not None:
            await close()


@contextlib.asynccontextmanager
async def open_transport(settings: Settings) -> AsyncIterator[Transport]:
    """Open the transport."""
    refuse_memory(settings)
    must_exist(settings)
    transport = transport_from(settings.where_queues_are)
    await transport.start()
    try:
        yield transport
    finally:
        await transport.stop()


def managed(store: DelayedMessageStore) -> ManagedStore:
    """Return the store as one that people can look into; raises ConfigurationError."""
    if not isinstance(store, ManagedStore):
        raise ConfigurationError(f"{type(store).__name__} cannot list, cancel or reschedule what waits")
    return store


def managed_queues(transport: Transport) -> ManagedQueues:
    """Return the transport as one whose queues people can look into; raises ConfigurationError."""
    if not isinstance(transport, ManagedQueues):
        raise ConfigurationError(f"{type(transport).__name__} cannot list or move single messages of a queue")
    return transport


def refuse_memory(settings: Settings) -> None:
    """Raise ConfigurationError for messages that would be gone with this command's process."""
    for url in (settings.where_messages_wait, settings.where_queues_are):
        if scheme_of(url) == "memory":
            raise ConfigurationError(
                f"{url!r} is this command's own memory: whatever it holds is gone when the command ends. "
                "Use --url sqlite:///delayline.db, or memory inside one program"
            )


def must_exist(settings: Settings) -> None:
    """Raise BackendUnusable where there is no database file yet: opening one would make an empty one."""
    for url in {settings.where_messages_wait, settings.where_queues_are}:
        if scheme_of(url) == "sqlite":
            path = Path(url.partition("://")[2].removeprefix("/").partition("?")[0])
            if path.name and not path.exists():
                raise BackendUnusable(
                    f"there is no file {path} (in {Path.cwd()}). Check --url, or create it with: delayline setup"
                )
