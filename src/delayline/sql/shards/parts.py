"""What a transport and a store over several shards share: their parts, and a transaction in one of them."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from delayline.errors import BackendUnavailable, ConfigurationError
from delayline.shards import EachShard, ShardState, chosen
from delayline.sql.shards.versions import MapVersions
from delayline.transaction import SavepointLost, Transaction, savepoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping

    from delayline.external import ExternalTransaction
    from delayline.shards import Shard, ShardMap

Result = TypeVar("Result")


class ShardPart(Protocol):
    """A transport or a store of a single shard."""

    @property
    def transaction_domain(self) -> Hashable:
        """Equal for parts that can share a transaction."""
        ...

    def transaction(self) -> Transaction:
        """Return a new transaction."""
        ...

    async def enlist(self, external: ExternalTransaction) -> Transaction:
        """Return the external transaction if it is on this shard. Raises ConfigurationError."""
        ...


Part = TypeVar("Part", bound=ShardPart)


@dataclass(frozen=True, slots=True)
class ShardedDomain:
    """The transaction domain of parts over the same shards."""

    parts: tuple[Hashable, ...]

    def __str__(self) -> str:
        return f"{len(self.parts)} shards"


class _RolledBack(Exception):
    """Makes the transaction of a shard roll back."""


class ShardedTransaction(Transaction):
    """A transaction in a single shard: that of the first message in it.

    Args:
        domain: The shards.
        begin: Returns a new transaction of a shard.
    """

    def __init__(self, domain: Hashable, begin: Callable[[str], Transaction]) -> None:
        super().__init__(domain)
        self._begin = begin
        self._entering = asyncio.Lock()
        self.shard: str | None = None
        """The shard that it is in; None while it has done nothing."""
        self._inner: Transaction | None = None
        """The transaction of that shard."""

    async def within(self, name: str) -> Transaction:
        """Return the transaction of the shard. Raises ConfigurationError if it is in another."""
        async with self._entering:
            if self._inner is None:
                inner = self._begin(name)
                await inner.__aenter__()
                self._inner, self.shard = inner, name
            if self.shard != name:
                raise ConfigurationError(
                    f"a transaction is in a single shard, here {self.shard!r}, and the message is in {name!r}: use two"
                )
            return self._inner

    async def adopt(self, name: str, work: Callable[[Transaction], Awaitable[Result]]) -> Result:
        """Run work in a transaction of the shard, which this one becomes if the work returns something true."""
        if self._inner is not None:
            return await work(await self.within(name))
        inner = self._begin(name)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(inner)
            result = await work(inner)
            if result:
                stack.pop_all()
                self._inner, self.shard = inner, name
            return result

    @contextlib.asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Return a part of the transaction; see `SupportsSavepoints`."""
        if self._inner is not None:
            async with savepoint(self._inner):
                yield
            return
        try:
            yield
        except Exception as error:
            if self.shard is not None:  # begun inside
                raise SavepointLost("the first part of a transaction over shards cannot be undone alone") from error
            raise

    async def _commit(self) -> None:
        if self._inner is not None:
            await self._inner.__aexit__(None, None, None)

    async def _rollback(self) -> None:
        if self._inner is not None:
            with contextlib.suppress(_RolledBack):
                await self._inner.__aexit__(_RolledBack, _RolledBack(), None)


class OnShards(Generic[Part]):
    """Parts in the shards of a map.

    Args:
        shards: The map.
        make: Returns the part of a shard.
        what: What the parts are, for the log.
    """

    def __init__(self, shards: ShardMap, make: Callable[[Shard], Part], what: str) -> None:
        self.map = shards
        self._parts: dict[str, Part] = {shard.name: make(shard) for shard in shards.used}
        self._shards: dict[str, Shard] = {shard.name: shard for shard in shards.used}
        self._domain = ShardedDomain(tuple(part.transaction_domain for part in self._parts.values()))
        self.opening: EachShard = EachShard(what)
        self._versions = MapVersions(shards)
        self._opened: set[str] = set()

    @property
    def parts(self) -> Mapping[str, Part]:
        """The part of each shard, by the shards' names."""
        return self._parts

    @property
    def out_of_reach(self) -> Mapping[str, Exception]:
        """Why a shard is not open, by name."""
        return self.opening.out_of_reach

    @property
    def transaction_domain(self) -> ShardedDomain:
        """The shards; a transaction is in one of them."""
        return self._domain

    def shard_of(self, message_id: str) -> str:
        """Return the name of the shard that a first send with that id goes to. Raises ShardMapOutdated."""
        self._versions.check()
        return self.map.shard_of(message_id)

    @property
    def _reached(self) -> list[str]:
        return [name for name in self._parts if name not in self.opening.out_of_reach]

    @property
    def _living(self) -> list[Part]:
        return [self._parts[name] for name in self._reached]

    async def check_map(self) -> None:
        """Compare the map with what is in use, now and from now on. Raises ShardMapOutdated or ConfigurationError."""

        def open_shards() -> list[Shard]:
            return [self._shards[name] for name in self._reached]

        await self._versions.look(open_shards())
        self._versions.watch(open_shards)

    def _part(self, name: str) -> Part:
        """Return the part of a shard. Raises BackendUnavailable while that is out of reach."""
        if name not in self._opened:
            self.opening.check(name)
        return self._parts[name]

    def _part_in(self, transaction: Transaction, message_id: str = "") -> Part:
        """Return the part that a shard's transaction, or an external one, is in; by the id where several may be."""
        names = [name for name, part in self._parts.items() if part.transaction_domain == transaction.domain]
        if not names:
            raise TypeError(f"a transaction on {transaction.domain} is in none of the shards {', '.join(self._parts)}")
        return self._part(chosen(message_id, [name for name in names if name in self.map.active] or names))

    async def enlist(self, external: ExternalTransaction) -> Transaction:
        """Return the external transaction if it is on one of the shards, and that takes first sends."""
        self._versions.check()
        refusal: ConfigurationError | None = None
        for name, part in self._parts.items():
            if name in self.opening.out_of_reach:
                continue
            try:
                transaction = await part.enlist(external)
            except ConfigurationError as error:
                refusal = error
                continue
            same = [other for other, part in self._parts.items() if part.transaction_domain == transaction.domain]
            if not any(self._shards[other].state is ShardState.ACTIVE for other in same):
                raise ConfigurationError(
                    f"transaction= is on shard {name!r}, which is being drained: begin it on the database of another"
                )
            return transaction
        raise refusal or BackendUnavailable("no shard is in reach")

    async def _each(self, call: Callable[[Part], Awaitable[Result]]) -> dict[str, Result]:
        """Return what the call returns in each shard, by name. Raises the error of the first that fails."""
        parts = {name: self._part(name) for name in self._parts}
        results = await asyncio.gather(*(call(part) for part in parts.values()), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return dict(zip(parts, results, strict=True))  # type: ignore[arg-type] # no exception is left

    async def _search(
        self, message_id: str, call: Callable[[Part], Awaitable[Result]], found: Callable[[Result], bool]
    ) -> Result:
        """Return what the call returns in the shard that has the message; of the last if none has it.

        Where it belongs is asked first, then all others: a message that a handler has sent is in its shard. Raises
        BackendUnavailable if it may be in a shard that is out of reach.
        """
        places = self._versions.places_of(message_id)
        outage: BackendUnavailable | None = None
        result: Result | None = None
        for name in dict.fromkeys([*places, *self._parts]):
            try:
                result = await call(self._part(name))
            except BackendUnavailable as error:
                outage = error
                continue
            if found(result):
                return result
        if outage is not None:
            raise BackendUnavailable(
                f"message {message_id!r} is in no shard that answers, and may be in one that does not: {outage}"
            ) from outage
        return result  # type: ignore[return-value] # there is a shard, which has answered

    def stop_soon(self) -> None:
        """Limit the waits of open connections, so that an endpoint with a silent server stops within 20 seconds."""
        for part in self._parts.values():
            part.stop_soon()  # type: ignore[attr-defined] # every part on a SQL database has it
