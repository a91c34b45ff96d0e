"""A transaction with a branch in each of two databases."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING

from delayline.sql.transactions import SqlTransaction
from delayline.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from delayline.sql.database import Database
    from delayline.sql.two_phase import TwoPhaseCommit


class TwoPhaseTransaction(Transaction):
    """A transaction over the databases of a TwoPhaseCommit; a database takes part with its first statement.

    Where only one of them has, its commit is an ordinary one.
    """

    def __init__(self, coordinator: TwoPhaseCommit) -> None:
        super().__init__(coordinator)
        self._coordinator = coordinator
        self._branches: dict[Database, SqlTransaction] = {}

    def branch(self, database: Database) -> SqlTransaction:
        """Return the part in that database. Raises TypeError for one that takes no part."""
        if database not in self._coordinator.members:
            raise TypeError(f"a transaction of {self._coordinator!r} cannot span {database.dialect}")
        if database not in self._branches:
            self._branches[database] = SqlTransaction(database)
        return self._branches[database]

    @contextlib.asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Roll back the work inside, in every database, when it raises; the transaction goes on."""
        with self._undoing_callbacks():
            async with contextlib.AsyncExitStack() as parts:
                for database in self._coordinator.members:
                    await parts.enter_async_context(self.branch(database).savepoint())
                yield

    async def _commit(self) -> None:
        """Commit to the end whatever happens: cancelled, raise that when the effect is certain."""
        committing = asyncio.ensure_future(self._commit_branches())
        try:
            await asyncio.shield(committing)
        except asyncio.CancelledError:
            while not committing.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([committing])
            if committing.exception() is None:  # cancelled too late: the effect has happened
                for callback in self._after_commit:
                    callback()
            raise

    async def _rollback(self) -> None:
        for branch in self._branches.values():
            await branch.roll_back()

    async def _commit_branches(self) -> None:
        begun = [database for database, branch in self._branches.items() if branch.begun]
        if len(begun) > 1:
            await self._commit_in_two_phases(begun)
        elif begun:
            await self._branches[begun[0]].commit()

    async def _commit_in_two_phases(self, begun: Sequence[Database]) -> None:
        coordinator = self._coordinator
        deciding = self.branch(coordinator.deciding)
        names = {one: coordinator.new_name(one) for one in begun if one is not coordinator.deciding}
        try:
            await deciding.run(partial(coordinator.decide, names=names.values()))
            for database, name in names.items():
                await self._branches[database].end(partial(coordinator.prepare, database=database, name=name))
            await deciding.commit()
        except BaseException:
            await self._rollback()
            if not await coordinator.settle(names):
                raise
        else:
            await coordinator.commit_prepared(names)
