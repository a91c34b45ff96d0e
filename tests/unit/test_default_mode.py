"""The default transaction mode, where the store supports only the weaker ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.unit.conftest import MemoryStore

from delayline import Endpoint, Guarantee, MemoryTransport, Message, StoredDelivery, TransactionMode
from delayline.errors import UnsupportedTransactionMode
from delayline.testing import FaultyStore

if TYPE_CHECKING:
    from delayline.spi import DelayedMessageStore

MODES = list(TransactionMode)
AT_LEAST_ONCE = MODES[1:3]


class Refusing(MemoryStore):
    """A store that refuses stronger modes when it is opened, and says nothing before."""

    def __init__(self, highest: TransactionMode) -> None:
        super().__init__()
        self.highest = highest
        self.asked: list[TransactionMode] = []

    async def initialize(self, endpoint_name: str, mode: TransactionMode) -> None:
        self.asked.append(mode)
        if mode > self.highest:
            raise UnsupportedTransactionMode(f"up to {self.highest.name}")
        await super().initialize(endpoint_name, mode)


class Saying(Refusing):
    """A store that says which modes it supports."""

    @property
    def highest_transaction_mode(self) -> TransactionMode:
        return self.highest


def endpoint_over(store: DelayedMessageStore, mode: TransactionMode | None = None) -> Endpoint:
    return Endpoint("sales", transport=MemoryTransport(), delayed_delivery=StoredDelivery(store), transaction_mode=mode)


@pytest.mark.parametrize("verbs_only", [False, True])
@pytest.mark.parametrize("highest", MODES)
async def test_the_default_is_what_the_store_says(highest: TransactionMode, verbs_only: bool) -> None:
    store = Saying(highest)
    endpoint = endpoint_over(store if not verbs_only else FaultyStore(store))
    assert endpoint.transaction_mode is highest
    async with endpoint:
        assert store.asked == [highest]


@pytest.mark.parametrize("highest", MODES[:-1])
def test_a_stronger_mode_than_the_store_says_is_refused_with_the_remedy(highest: TransactionMode) -> None:
    with pytest.raises(UnsupportedTransactionMode, match=rf"transaction_mode=TransactionMode\.{highest.name}\b"):
        endpoint_over(Saying(highest), TransactionMode.TRANSACTION_SCOPE)


@pytest.mark.parametrize("highest", AT_LEAST_ONCE)
async def test_the_default_is_what_the_store_accepts(highest: TransactionMode) -> None:
    # Given a store that refuses modes when it is opened
    store = Refusing(highest)
    endpoint = endpoint_over(store)
    # When the endpoint starts without a mode of its own, then it starts in the strongest that the store accepts
    async with endpoint:
        assert (endpoint.transaction_mode, endpoint.guarantee) == (highest, Guarantee.AT_LEAST_ONCE)
        assert store.asked[-1] is highest
    # And again, at once
    async with endpoint:
        assert store.asked[-2:] == [highest, highest]


async def test_a_message_comes_in_the_weaker_mode() -> None:
    endpoint = endpoint_over(Refusing(TransactionMode.RECEIVE_ONLY))
    handled: list[str] = []

    @endpoint.handler
    async def handle(message: Message, context: object) -> None:
        handled.append(message.id)
        await endpoint.stop()

    async with endpoint:
        await endpoint.send("sales", b"", message_id="m")
        await endpoint.wait_stopped()
    assert handled == ["m"]


async def test_no_store_is_given_the_mode_that_may_lose_messages_unasked() -> None:
    with pytest.raises(UnsupportedTransactionMode, match="up to NONE"):
        await endpoint_over(Refusing(TransactionMode.NONE)).start()


async def test_a_mode_that_was_chosen_is_not_weakened() -> None:
    endpoint = endpoint_over(Refusing(TransactionMode.RECEIVE_ONLY), TransactionMode.SENDS_ATOMIC_WITH_RECEIVE)
    with pytest.raises(UnsupportedTransactionMode):
        await endpoint.start()
    assert endpoint.transaction_mode is TransactionMode.SENDS_ATOMIC_WITH_RECEIVE
