"""How often a quorum queue takes a message back before it drops it: what is known of the queues of this process.

From version 4 on RabbitMQ drops a message that was returned more than 20 times, unless an argument of the queue, a
policy or an operator policy says otherwise. Returns are everyday events: a crash returns every message that its process
held.

See https://www.rabbitmq.com/docs/quorum-queues#poison-message-handling.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from delayline.errors import BackendUnavailable, BackendUnusable, ConfigurationError, QueueNotFound
from delayline.events import Event, emit
from delayline.rabbitmq.browsing import must_exist
from delayline.rabbitmq.infrastructure import difference_in
from delayline.rabbitmq.refusals import NotFound, PreconditionFailed
from delayline.rabbitmq.topology import can_be_compared, queue_declaration

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from delayline.rabbitmq.address import BrokerAddress
    from delayline.rabbitmq.connection import BrokerConnection

logger: logging.Logger = logging.getLogger(__name__)

UNLIMITED: Final = 100_000
"""A limit that no message reaches. It is NServiceBus's: before version 4 a limit of -1 is refused, or taken for 0."""
DEFAULT: Final = 20
LIMITED_FROM: Final = (4,)
"""The first version of RabbitMQ in which quorum queues have that default."""
ARGUMENT: Final = "x-delivery-limit"
QUORUM: Final = "quorum"
NACK_IS_NOT_COUNTED: Final = (4, 3)
"""The first version in which a queue does not count the return of a message by a nack."""
LIMIT_LOOK_PATIENCE: Final = 5.0
"""Seconds that the management API may take."""
KNOWN_FOR: Final = 60.0
"""Seconds after which the limit of a queue is read again."""
UNSEEN_FOR: Final = 600.0
"""Seconds after which a management API that showed nothing is asked again, which may take the patience above."""


@dataclass(frozen=True, slots=True)
class DeliveryLimit:
    """How often a queue takes a message back; it drops a message that is returned more often."""

    queue: str
    returns: int | None = None
    """None for any number of times."""
    cause: str = ""
    remedy: str = ""
    is_default: bool = False
    """Whether it is the version's, as nothing else is set, or nothing else could be seen."""
    seen: bool = True
    """Whether all that may set a limit could be seen."""

    @property
    def drops(self) -> bool:
        """Whether messages can get lost by it."""
        return self.returns is not None and self.returns < UNLIMITED

    def __str__(self) -> str:
        """Return the limit and its remedy as sentences."""
        return f"{self.fact}. {self.remedy}" if self.drops else self.fact

    @property
    def fact(self) -> str:
        """The limit as the begin of a sentence."""
        if not self.drops:
            return f"queue {self.queue!r} takes messages back any number of times"
        return f"queue {self.queue!r} drops a message that is returned more than {self.returns} times, {self.cause}"


def default_limit(queue: str, version: tuple[int, ...], remedy: str, *, unseen: str = "") -> DeliveryLimit:
    """Return the limit of a quorum queue for which nothing is set.

    Args:
        queue: The queue's name.
        version: The broker's version.
        remedy: What lifts the limit.
        unseen: Why it is not known whether a policy sets another.
    """
    if version < LIMITED_FROM:
        return DeliveryLimit(queue, seen=not unseen)
    cause = f"the default of RabbitMQ {'.'.join(map(str, version))}"
    if unseen:
        cause += f", unless a policy says otherwise, which could not be looked at: {unseen}"
    return DeliveryLimit(queue, DEFAULT, cause, remedy, is_default=True, seen=not unseen)


class DeliveryLimits:
    """The delivery limits of the queues of a process, which lifts them when it creates the queues.

    Args:
        address: The broker.
        connection: A connection to it.
    """

    def __init__(self, address: BrokerAddress, connection: BrokerConnection) -> None:
        self._address = address
        self._connection = connection
        self._known: dict[str, tuple[DeliveryLimit, float]] = {}
        self._with_argument: set[str] = set()
        self._looks: set[asyncio.Task[None]] = set()

    async def lift(self, queues: Collection[str]) -> None:
        """Have the broker drop nothing from the queues, which are created next: by a policy for each.

        Without the right to set policies, or without a management API, new queues get an argument instead.
        """
        version = await self._connection.version()
        if version < LIMITED_FROM or self._address.queue_type != QUORUM:
            return
        from delayline.rabbitmq.admin import limits
        from delayline.rabbitmq.admin.management_api import ManagementApi

        try:
            async with asyncio.timeout(LIMIT_LOOK_PATIENCE), ManagementApi(self._address) as api:
                lifted = await limits.lift(api, version, queues)
        except (BackendUnavailable, BackendUnusable, ConfigurationError, TimeoutError) as error:
            lifted = limits.unseen(self._address.vhost, version, queues, reason(self._address, error))
        for limit in lifted.values():
            self._note(limit)
            if limit.is_default:
                self._with_argument.add(limit.queue)

    def argument_of(self, queue: str) -> Mapping[str, int]:
        """Return the argument to create the queue with, where no policy could be set for it; else none."""
        return {ARGUMENT: UNLIMITED} if queue in self._with_argument else {}

    def created(self, queue: str) -> None:
        """Note that the queue has the argument."""
        limit = self._of(queue)
        if limit is not None and limit.is_default and queue in self._with_argument:
            self._note(DeliveryLimit(queue))

    def differs(self, queue: str, error: PreconditionFailed) -> bool:
        """Note the argument that an existing queue has instead; return False if the error is about something else."""
        theirs = _argument_in(error)
        if theirs is None:
            return False
        limit = self._of(queue)
        if limit is not None and limit.is_default:
            self._note(_by_argument(queue, theirs) or limit)
        return True

    def warn(self, queues: Collection[str]) -> None:
        """Log which of the queues may drop messages."""
        for limit in filter(None, map(self._of, queues)):
            if limit.drops:
                template = "RabbitMQ loses messages that are returned often: %s"
                emit(logger, logging.WARNING, Event.DELIVERY_LIMITED, template, limit)

    def look_later(self, *queues: str) -> None:
        """Look at queues that this process did not set up, beside other work, and log queues that may drop messages."""
        unknown = [queue for queue in queues if self._of(queue) is None]
        if unknown:
            look = asyncio.create_task(self._look(unknown))
            self._looks.add(look)
            look.add_done_callback(self._looks.discard)

    async def stop(self) -> None:
        """Look at no more queues."""
        for look in self._looks:
            look.cancel()
        if self._looks:
            await asyncio.wait(self._looks)

    async def is_reached(self, queue: str, returns: int) -> bool:
        """Return whether the queue would drop a message that was returned so often at its next return.

        False for a message never returned: a limit of 0 is no reason not to handle it.
        """
        if not returns:
            return False
        try:
            limit = await self.of(queue)
        except (BackendUnavailable, BackendUnusable, QueueNotFound):
            return False
        if limit.returns is None:
            return False
        return returns >= limit.returns if limit.seen else returns == limit.returns

    async def of(self, queue: str) -> DeliveryLimit:
        """Return the limit of a queue, read again after a minute. Raises BackendUnavailable; QueueNotFound.

        Policies change while processes run.
        """
        known = self._known.get(queue)
        if known is None or known[1] < asyncio.get_running_loop().time():
            limits = await read(self._address, self._connection, [queue])
            if queue not in limits:
                raise QueueNotFound(queue)
            self._note(limits[queue])
        return self._known[queue][0]

    async def _look(self, queues: Collection[str]) -> None:
        try:
            for limit in (await read(self._address, self._connection, queues)).values():
                self._note(limit)
        except (BackendUnavailable, BackendUnusable):
            return  # what receives finds that too
        self.warn(queues)

    def _of(self, queue: str) -> DeliveryLimit | None:
        known = self._known.get(queue)
        return None if known is None else known[0]

    def _note(self, limit: DeliveryLimit) -> None:
        known_for = KNOWN_FOR if limit.seen else UNSEEN_FOR
        self._known[limit.queue] = limit, asyncio.get_running_loop().time() + known_for


def reason(address: BrokerAddress, error: Exception) -> str:
    """Return why the management API shows nothing."""
    return str(error) or f"no answer from {address.management_url} in {LIMIT_LOOK_PATIENCE:g} s"


async def read(
    address: BrokerAddress, connection: BrokerConnection, queues: Collection[str]
) -> Mapping[str, DeliveryLimit]:
    """Return the limits of the existing queues, as far as they can be seen.

    Without a management API an argument is all that can be seen from version 4 on, by declaring the queue with it.

    Raises:
        BackendUnavailable: The broker does not answer.
    """
    from delayline.rabbitmq.admin import limits
    from delayline.rabbitmq.admin.management_api import ManagementApi

    version = await connection.version()
    try:
        async with asyncio.timeout(LIMIT_LOOK_PATIENCE), ManagementApi(address) as api:
            return await limits.read(api, version, queues)
    except (BackendUnavailable, BackendUnusable, ConfigurationError, TimeoutError) as error:
        unseen = limits.unseen(address.vhost, version, queues, reason(address, error))
    if version < LIMITED_FROM:
        return unseen
    known = {}
    for queue in queues:
        try:
            await connection.run(partial(must_exist, queue=queue))
            may_ask = can_be_compared(queue, address.vhost)
            known[queue] = (await _probed(connection, queue) if may_ask else None) or unseen[queue]
        except NotFound:
            continue
    return known


async def _probed(connection: BrokerConnection, queue: str) -> DeliveryLimit | None:
    """Return the limit that an existing queue's argument sets; None for none, or where it cannot be seen."""
    declaration = queue_declaration(queue, QUORUM, {ARGUMENT: UNLIMITED})
    try:
        await connection.run(lambda channel: channel.call(declaration))
    except PreconditionFailed as error:
        difference = difference_in(str(error))
        if difference is not None and difference.argument == "x-queue-type":
            return DeliveryLimit(queue)  # it is a classic queue, or a stream
        theirs = _argument_in(error)
        return None if theirs is None else _by_argument(queue, theirs)
    except BackendUnusable:  # the user may not declare
        return None
    return DeliveryLimit(queue)


def _argument_in(error: PreconditionFailed) -> str | None:
    """Return the limit that a queue has as its argument, or `none`; None for an error about something else."""
    difference = difference_in(" ".join(str(part) for part in error.args))
    return difference.theirs if difference is not None and difference.argument == ARGUMENT else None


def _by_argument(queue: str, theirs: str) -> DeliveryLimit | None:
    try:
        number = int(theirs)
    except ValueError:
        return None
    return by_argument(queue, number)


def by_argument(queue: str, number: int) -> DeliveryLimit:
    """Return the limit that an argument sets from version 4 on."""
    remedy = (
        "An argument cannot be changed, and no policy lifts it: empty the queue, delete it, and create it again with "
        f"delayline setup --queue {queue}"
    )
    return DeliveryLimit(queue, None if number < 0 else number, f"by its argument {ARGUMENT}", remedy)
