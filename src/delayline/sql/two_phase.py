"""A transaction over two databases: the store's database prepares, the commit in the transport's database decides.

A transaction writes its name into `delayline_decisions` in the transport's database, is prepared in the store's
database, commits in the transport's, and is committed in the store's. To finish a prepared transaction, a process looks
for its name: if it is there, the transaction is committed; if not, rolled back; if it is locked, the transaction is
still in progress. The process that has prepared it finishes it on the connection that has prepared it, to which it
belongs in some products; where that is lost, or it does not know the outcome, it ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn

from sqlalchemy import bindparam, delete, insert, select

from delayline.errors import (
    BackendUnavailable,
    BackendUnusable,
    ConfigurationError,
    DelaylineError,
    NotStarted,
    UnsupportedTransactionMode,
)
from delayline.events import Event, emit
from delayline.sql.prepared import Prepared
from delayline.sql.schema import queue_tables
from delayline.sql.transaction_names import PREFIX, new_name
from delayline.sql.transactions import CompositeTransaction, PreparableTransaction, SqlTransaction

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from sqlalchemy import Connection

    from delayline.sql.database import Database
    from delayline.sql.dialect import DecisionReader, Dialect, PreparedTransactions

logger: logging.Logger = logging.getLogger(__name__)

LOOK_EVERY: Final = 10.0  # seconds between looks for prepared transactions of crashed processes
LOOK_AGAIN: Final = 1.0  # after trouble of our own
DECISIONS_FORGOTTEN_AT_ONCE: Final = 100
LOG: Final = "log"
COMMIT: Final = "commit"

#: The name of a prepared transaction.
Name = str


class TwoPhaseCommit:
    """Joins the transactions of a SqlTransport and a SqlDelayedMessageStore on two databases: pass it to both.

    The store's database has to be able to prepare transactions. Belongs to an event loop while endpoints run.
    """

    def __init__(self) -> None:
        self._deciding: Database | None = None
        self._decisions: Decisions | None = None
        self._members: list[Database] = []
        self._tags: dict[Database, str] = {}
        self._log = ""
        self._finished: list[Name] = []
        self._users = 0
        self._trouble = asyncio.Event()
        self._left: set[Name] = set()
        self._recovery: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"TwoPhaseCommit({', '.join(str(database.dialect) for database in self._members)})"

    @property
    def in_doubt(self) -> int:
        """How many prepared transactions were left unsettled by the last look."""
        return len(self._left)

    @property
    def members(self) -> tuple[Database, ...]:
        """The databases, the deciding database first."""
        return tuple(self._members)

    @property
    def deciding(self) -> Database:
        """The database whose commit decides. Raises ConfigurationError before a transport is known."""
        if self._deciding is None:
            raise ConfigurationError("this TwoPhaseCommit has no transport: pass it to SqlTransport(two_phase=...) too")
        return self._deciding

    def decide_in(self, database: Database, schema: str | None) -> None:
        """Keep the decisions in that schema of the transport's database. Raises UnsupportedTransactionMode."""
        decides_of(database)
        if self._deciding not in (None, database):
            raise ConfigurationError(
                "a TwoPhaseCommit takes one transport's database: give the other transport its own"
            )
        self._deciding, self._decisions = database, Decisions(database.dialect, schema)
        self._add(database, first=True)

    def take_part(self, database: Database) -> None:
        """Prepare transactions in the store's database. Raises UnsupportedTransactionMode."""
        two_phase_of(database)
        self._add(database)

    def transaction(self) -> TwoPhaseTransaction:
        """Return a transaction over all of the databases."""
        return TwoPhaseTransaction(self)

    async def start(self) -> None:
        """Connect, check the set-up, and finish transactions left by a crash. Every start needs a `stop`.

        Raises BackendUnusable if a database cannot prepare transactions or the decisions' table is missing.
        """
        deciding = self.deciding
        for number, database in enumerate(self._members):
            try:
                await database.open()
            except BaseException:
                await self._close(self._members[:number])
                raise
        try:
            self._log = await deciding.read(self._decided.log)
            for database in self._prepared_in:
                self._tags[database] = await database.read(two_phase_of(database).check)
            await self.recover()
        except BaseException:
            await self._close(self._members)
            raise
        self._users += 1
        if self._recovery is None:
            self._trouble = asyncio.Event()
            if self._left:
                self._trouble.set()
            self._recovery = asyncio.create_task(self._look(), name="delayline two-phase recovery")

    async def stop(self) -> None:
        """Undo a `start`; the last deletes the decisions of finished transactions."""
        self._users -= 1
        if self._users == 0 and self._recovery is not None:
            recovery, self._recovery = self._recovery, None
            recovery.cancel()
            await asyncio.wait([recovery])
            with contextlib.suppress(DelaylineError):  # a recovery will
                await self._forget(self.take_finished())
        await self._close(self._members)

    async def recover(self) -> None:
        """Finish every prepared transaction that is not in progress, and delete obsolete decisions."""
        decided = set(await self.deciding.read(partial(self._decided.all, prefix=self._prefix)))
        doubtful = await self._in_doubt()
        self._left = await self._settle_all(doubtful)
        ours = tuple(f"{self._prefix}{tag}-" for tag in self._tags.values())
        await self._forget(name for name in decided - set(doubtful) if name.startswith(ours))

    def is_identified(self, connection: Connection) -> bool:
        """Return whether `identify` has nothing to do."""
        return self._decided.is_identified(connection)

    def identify(self, connection: Connection) -> None:
        """Set up the table of decisions."""
        self._decided.identify(connection)

    def branch(self, database: Database) -> SqlTransaction:
        """Return a new branch of a transaction in that database."""
        if database is self._deciding:
            return SqlTransaction(database)
        if database not in self._tags:
            raise NotStarted(f"{database.dialect} is not open: start the endpoint first")
        return PreparableTransaction(database, two_phase_of(database), new_name(self._log, self._tags[database]))

    def decide(self, connection: Connection, names: Iterable[Name]) -> None:
        """Write the decision to commit, to become true with the deciding database's commit."""
        self._decided.put(connection, names)
        if len(self._finished) >= DECISIONS_FORGOTTEN_AT_ONCE:
            self._decided.remove(connection, self.take_finished())

    async def commit_prepared(self, branches: Mapping[Database, PreparableTransaction]) -> None:
        """Carry the decision out, now or, where a database is away, when it is back."""
        for database, branch in branches.items():
            try:
                await self._finish_branch(database, branch, commit=True)
            except DelaylineError as error:
                self._in_trouble(error)

    async def settle(self, branches: Mapping[Database, PreparableTransaction]) -> bool:
        """Finish a transaction whose commit went wrong and return whether it is committed; unknown counts as not."""
        outcomes = [await self._settled(database, branch) for database, branch in branches.items()]
        return all(outcomes)

    def take_finished(self) -> list[Name]:
        """Return the obsolete decisions, once."""
        finished, self._finished = self._finished, []
        return finished

    @property
    def _prefix(self) -> str:
        return f"{PREFIX}{self._log}-"

    @property
    def _prepared_in(self) -> list[Database]:
        return [database for database in self._members if database is not self._deciding]

    @property
    def _decided(self) -> Decisions:
        assert self._decisions is not None  # noqa: S101 - comes with the deciding database
        return self._decisions

    def _add(self, database: Database, *, first: bool = False) -> None:
        if database not in self._members:
            self._members.insert(0 if first else len(self._members), database)

    async def _settled(self, database: Database, branch: PreparableTransaction) -> bool:
        try:
            outcome = await self._outcome(branch.name)
            if outcome is not None:
                await self._finish_branch(database, branch, commit=outcome)
        except DelaylineError as error:
            outcome = None
            self._in_trouble(error)
        else:
            if outcome is None:
                self._trouble.set()
        return outcome is True

    async def _outcome(self, name: Name) -> bool | None:
        """Return whether it was decided to commit; None while the transaction that decides may still be under way."""
        try:
            return await self.deciding.read(partial(self._decided.ask, name=name))
        except BackendUnavailable:
            return None

    async def _finish_branch(self, database: Database, branch: PreparableTransaction, *, commit: bool) -> None:
        """Finish a prepared branch of our own, on another connection where its own is lost."""
        try:
            finished = await branch.finish(commit=commit)
        except DelaylineError:
            finished = False
        if not (finished or await self._finish(database, branch.name, commit=commit)):
            self._trouble.set()  # the server does not know yet that the branch's connection is lost
        elif commit:
            self._finished.append(branch.name)

    async def _finish(self, database: Database, name: Name, *, commit: bool) -> bool:
        two_phase = two_phase_of(database)
        finish = two_phase.commit_prepared if commit else two_phase.roll_back_prepared
        return await database.read(partial(finish, name=name))

    async def _forget(self, names: Iterable[Name]) -> None:
        gone = list(names)
        if gone:
            await self.deciding.write(partial(self._decided.remove, names=gone))

    async def _in_doubt(self) -> dict[Name, Database]:
        """Return all prepared transactions, and whether each is in progress."""
        in_doubt: dict[Name, Database] = {}
        for database in self._prepared_in:
            names = await database.read(partial(two_phase_of(database).in_doubt, prefix=self._prefix))
            in_doubt |= dict.fromkeys(names, database)
        return in_doubt

    async def _settle_all(self, doubtful: Mapping[Name, Database]) -> set[Name]:
        """Finish transactions that are not in progress; return the rest."""
        left: set[Name] = set()
        for name, database in doubtful.items():
            outcome = await self._outcome(name)
            if outcome is None or not await self._finish(database, name, commit=outcome):
                left.add(name)
                continue
            done = "committed" if outcome else "rolled back"
            template = "a transaction that was left prepared in the %s is %s: %s"
            emit(logger, logging.WARNING, Event.SETTLED, template, database.dialect, done, name)
        return left

    async def _look(self) -> None:
        """Finish transactions of other processes that were found prepared by several looks."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._trouble.wait(), LOOK_EVERY)
                self._trouble.clear()
                await self.deciding.clock.sleep(LOOK_AGAIN)
            try:
                doubtful = await self._in_doubt()
                known = {name: database for name, database in doubtful.items() if name in self._left}
                self._left = set(doubtful) - set(known) | await self._settle_all(known)
                if self._left:
                    self._trouble.set()
            except Exception as error:
                self._in_trouble(error)

    def _in_trouble(self, error: Exception) -> None:
        template = "prepared transactions of %r wait to be finished, trying again in %g s: %s"
        emit(logger, logging.WARNING, Event.SETTLING_FAILED, template, self, LOOK_AGAIN, error)
        self._trouble.set()

    @staticmethod
    async def _close(databases: Iterable[Database]) -> None:
        for database in databases:
            await database.close()


class Decisions:
    """The table of decisions, with a row for each transaction that is decided, and a row that identifies the table."""

    def __init__(self, dialect: Dialect, schema: str | None) -> None:
        table, sql = queue_tables(schema).decisions, dialect.sql
        self._transactions = dialect.transactions
        new, key = dialect.words.insert_new(table, "id"), table.c.id == bindparam("key")
        self._put = Prepared(insert(table), sql, ["id", "value"])
        self._put_new = Prepared(new, sql, ["id", "value"])
        self._value = Prepared(select(table.c.value).where(key), sql, ["key"])
        self._ids = Prepared(select(table.c.id), sql, [])
        self._delete = Prepared(delete(table).where(dialect.words.one_of(table.c.id, "keys")), sql, ["keys"])

    def is_identified(self, connection: Connection) -> bool:
        """Return whether it has its name."""
        return self._value.one(connection, LOG) is not None

    def identify(self, connection: Connection) -> None:
        """Name the transaction, once."""
        self._put_new.change(connection, LOG, uuid.uuid4().hex[:16])

    def log(self, connection: Connection) -> str:
        """Return the table's name."""
        name = self._value.one(connection, LOG)
        if name is None:
            raise BackendUnusable("the table 'delayline_decisions' is not set up: run `delayline setup`")
        return str(name)

    def put(self, connection: Connection, names: Iterable[Name]) -> None:
        """Write decisions."""
        for name in names:
            self._put.change(connection, name, COMMIT)

    def ask(self, connection: Connection, name: Name) -> bool:
        """Return whether it was decided to commit; an error is raised while it is being decided."""
        self._transactions.begin(connection)
        try:
            with self._transactions.waiting_briefly(connection):
                self._put_new.change(connection, name, "roll back")
                return bool(self._value.one(connection, name) == COMMIT)
        finally:
            self._transactions.rollback(connection)

    def all(self, connection: Connection, prefix: str) -> list[Name]:
        """Return the names of the transactions that are decided."""
        return [name for (name,) in self._ids.rows(connection) if name.startswith(prefix)]

    def remove(self, connection: Connection, names: Iterable[Name]) -> None:
        """Delete decisions."""
        self._delete.change_each(connection, keys=list(names))


def decides_of(database: Database) -> DecisionReader:
    """Return how the database is asked for decisions. Raises UnsupportedTransactionMode."""
    return database.dialect.transactions.decides or _refuse(database, "keeps no decisions", "queues")


def two_phase_of(database: Database) -> PreparedTransactions:
    """Return how the database prepares transactions. Raises UnsupportedTransactionMode."""
    transactions = database.dialect.transactions
    return transactions.two_phase or _refuse(database, transactions.prepares_nothing, "store")


def _refuse(database: Database, why: str, part: str) -> NoReturn:
    raise UnsupportedTransactionMode(
        f"the {database.dialect} cannot take part in a two-phase commit with the {part}: it {why}. Keep the {part} in "
        "PostgreSQL, MariaDB or MySQL, keep queues and store in one database, or leave out two_phase and use "
        "TransactionMode.SENDS_ATOMIC_WITH_RECEIVE"
    )


class TwoPhaseTransaction(CompositeTransaction):
    """A transaction over the databases of a TwoPhaseCommit; a database takes part with its first statement.

    Where only one has, its commit is an ordinary one.
    """

    def __init__(self, coordinator: TwoPhaseCommit) -> None:
        super().__init__(coordinator)
        self._coordinator = coordinator
        self._branches: dict[Database, SqlTransaction] = {}

    def branch(self, database: Database) -> SqlTransaction:
        """Return the branch in that database. Raises TypeError for a database that is not a member."""
        if database not in self._coordinator.members:
            raise TypeError(f"a transaction of {self._coordinator!r} cannot span {database.dialect}")
        if database not in self._branches:
            self._branches[database] = self._coordinator.branch(database)
        return self._branches[database]

    @contextlib.asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Roll back the work inside, in every database, when it raises; the transaction goes on."""
        with self._undoing_callbacks():
            async with contextlib.AsyncExitStack() as branches:
                for database in self._coordinator.members:
                    await branches.enter_async_context(self.branch(database).savepoint())
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
        others = {database: self._branches[database] for database in begun if database is not coordinator.deciding}
        branches = {
            database: branch for database, branch in others.items() if isinstance(branch, PreparableTransaction)
        }
        try:
            await deciding.run(partial(coordinator.decide, names=[branch.name for branch in branches.values()]))
            for branch in branches.values():
                await branch.prepare()
            await deciding.commit()
        except BaseException:
            await self._rollback()
            if not await coordinator.settle(branches):
                raise
        else:
            await coordinator.commit_prepared(branches)
        finally:
            for branch in branches.values():
                branch.leave()
