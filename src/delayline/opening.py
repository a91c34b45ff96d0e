"""Opens the transport and the store of settings for a while, and closes them again."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from delayline.composition import in_memory, must_exist, on_rabbitmq, persister_of, store_of, transport_of
from delayline.delayed.store import SupportsClose, managed
from delayline.errors import ConfigurationError
from delayline.timeouts.draining import persister_at
from delayline.transaction import TransactionMode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delayline.delayed.store import DelayedMessageStore, SupportsManagement
    from delayline.settings import Settings
    from delayline.transport import Transport


@contextlib.asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[DelayedMessageStore]:
    """Open the endpoint's delayed message store."""
    refuse_memory(settings)
    name = settings.named_endpoint
    store = store_of(settings)
    must_exist(settings.resolved_store_url)
    await store.initialize(name, TransactionMode.RECEIVE_ONLY)
    try:
        yield store
    finally:
        if isinstance(store, SupportsClose):
            await store.close()


@contextlib.asynccontextmanager
async def open_waiting(settings: Settings, *, timeouts: bool) -> AsyncIterator[SupportsManagement]:
    """Open the endpoint's pending messages: its store, or a timeout manager's table."""
    if not timeouts and not settings.timeout_manager:
        async with open_store(settings) as store:
            yield managed(as_sent(settings, store))
        return
    if settings.timeout_manager:
        refuse_memory(settings)
        url, persister = settings.resolved_store_url, persister_of(settings)
    elif settings.timeouts_url is None:
        raise ConfigurationError("no timeouts_url is set: set it to the database of the old timeout manager's timeouts")
    else:
        url, persister = settings.timeouts_url, persister_at(settings.timeouts_url, schema=settings.schema)
    must_exist(url)
    await persister.open(settings.named_endpoint)
    try:
        yield persister
    finally:
        await persister.close()


@contextlib.asynccontextmanager
async def open_transport(settings: Settings) -> AsyncIterator[Transport]:
    """Open the transport."""
    refuse_memory(settings)
    transport = transport_of(settings)
    must_exist(settings.resolved_transport_url)
    await transport.start()
    try:
        yield transport
    finally:
        await transport.stop()


def as_sent(settings: Settings, store: object) -> object:
    """Return the management of the store; one in front of delay levels shows and changes messages as they were sent."""
    if not on_rabbitmq(settings.resolved_transport_url):
        return store
    from delayline.rabbitmq.front import managed_as_sent

    return managed_as_sent(store)


def refuse_memory(settings: Settings) -> None:
    """Raise ConfigurationError for messages that would be gone with this command's process."""
    for url in (settings.resolved_store_url, settings.resolved_transport_url):
        if in_memory(url):
            raise ConfigurationError(
                f"{url!r} is this command's own memory: whatever it holds is gone when the command ends. "
                "Use --url sqlite:///delayline.db, or memory inside one program"
            )
