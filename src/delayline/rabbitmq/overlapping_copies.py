"""Copies of delayed messages for another endpoint, whose name ends in that of the queue they come to.

The binding `#.Sales` matches the routing keys of `Contoso.Sales` as well. A copy is dropped only if the broker shows,
after the copy has come, that the other endpoint gets the message too; else it is kept.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from delayline.errors import DelaylineError
from delayline.rabbitmq.levels import delivery_name, destination_key, parse

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from delayline.rabbitmq.address import BrokerAddress
    from delayline.rabbitmq.admin.management_api import ManagementApi
    from delayline.rabbitmq.amqp.properties import Delivery

#: Where delayed messages come from: the levels of any name.
FROM_LEVELS: Final = re.compile(r"(?P<prefix>.+)\.delay-(?:level-[0-9]{2}|delivery)", re.DOTALL)
LOOK_PATIENCE: Final = 5.0
"""Seconds that a look at the broker's bindings may take."""
BETWEEN_LOOKS: Final = 0.5
"""Seconds between the looks for one queue: copies that come meanwhile share the next one."""


def meant_for_another(delivered: Delivery, queue: str) -> str | None:
    """Return the endpoint that a delayed message is for, where that is another whose name ends in this queue's.

    The binding `#.Sales` matches the routing keys of `Contoso.Sales` as well; nothing else does.
    """
    if FROM_LEVELS.fullmatch(delivered.exchange) is None:
        return None
    parsed = parse(delivered.routing_key)
    return parsed[1] if parsed is not None and parsed[1].endswith(f".{queue}") else None


class DeliveryBindings:
    """Asks the management API of a broker whether due messages get to a destination; keeps no answer."""

    def __init__(self, address: BrokerAddress) -> None:
        self._address = address
        self._api: ManagementApi | None = None

    async def why_not(self, delivery_exchange: str, destination: str, *, beside: str) -> str | None:
        """Return None if the broker shows that due messages get to the destination, else the reason.

        Args:
            delivery_exchange: The exchange that hands due messages to their destinations.
            destination: The name that they are for.
            beside: A queue that is none of the destination's.
        """
        try:
            async with asyncio.timeout(LOOK_PATIENCE):
                return await self._look(delivery_exchange, destination, beside)
        except TimeoutError:
            reason = f"the management API did not answer in {LOOK_PATIENCE:g} s"
        except DelaylineError as error:
            reason = str(error)
        except (AttributeError, LookupError, TypeError) as error:  # JSON of something else that answers there
            reason = f"the management API gave an answer that is none of RabbitMQ's ({error!r})"
        return f"it is unknown whether {destination!r} gets it too: {reason}"

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        api, self._api = self._api, None
        if api is not None:
            await api.close()

    async def _look(self, delivery_exchange: str, destination: str, beside: str) -> str | None:
        from delayline.rabbitmq.admin.management_api import ManagementApi

        if self._api is None:
            self._api = ManagementApi(self._address)
        key = destination_key(destination)
        bound = [binding for binding in await self._api.bindings_from(delivery_exchange) if binding.routing_key == key]
        if any(binding.to_queue and binding.destination != beside for binding in bound):
            return None
        exchanges = [binding.destination for binding in bound if not binding.to_queue]
        for name in exchanges:
            exchange = await self._api.exchange(name)
            if exchange is None or exchange.type != "fanout":
                continue
            if any(
                binding.to_queue and binding.destination != beside for binding in await self._api.bindings_from(name)
            ):
                return None
        if exchanges:
            return f"the exchange {exchanges[0]!r} leads to no queue"
        return f"{destination!r} is not bound to {delivery_exchange!r}"


class OverlappingCopies:
    """Decides about the copies that come to a queue, beside its other messages.

    Args:
        bindings: Asked once the copies have come.
        queue: The queue that they came to.
        drop: Called with a copy that the other endpoint has too, and that endpoint's name.
        keep: Called with any other copy, the other endpoint's name, and the reason; it raises nothing.
    """

    def __init__(
        self,
        bindings: DeliveryBindings,
        queue: str,
        *,
        drop: Callable[[Delivery, str], None],
        keep: Callable[[Delivery, str, str], Awaitable[None]],
    ) -> None:
        self._bindings = bindings
        self._queue = queue
        self._drop = drop
        self._keep = keep
        self._undecided: defaultdict[tuple[str, str], list[Delivery]] = defaultdict(list)
        self._deciding: asyncio.Task[None] | None = None

    def add(self, copy: Delivery, other: str) -> None:
        """Decide about a copy for another endpoint, soon."""
        levels = FROM_LEVELS.fullmatch(copy.exchange)
        delivery_exchange = delivery_name(levels["prefix"]) if levels else copy.exchange
        self._undecided[delivery_exchange, other].append(copy)
        if self._deciding is None or self._deciding.done():
            self._deciding = asyncio.create_task(self._decide())

    def forget(self) -> None:
        """Decide about no copy that came so far: each returns to the queue."""
        self._undecided.clear()
        if self._deciding is not None:
            self._deciding.cancel()
            self._deciding = None

    async def _decide(self) -> None:
        while self._undecided:
            pair = next(iter(self._undecided))
            copies = self._undecided.pop(pair)  # copies that come during the look are for the next
            delivery_exchange, other = pair
            reason = await self._bindings.why_not(delivery_exchange, other, beside=self._queue)
            for copy in copies:
                if reason is None:
                    self._drop(copy, other)
                else:
                    await self._keep(copy, other, reason)
            await asyncio.sleep(BETWEEN_LOOKS)
