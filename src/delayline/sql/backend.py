"""The back end of SQL databases: queues and delayed messages in their tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, cast

from delayline.backends import Backend, BulkRoute
from delayline.delayed.fairness import FairBy
from delayline.sql import databases
from delayline.sql.store import SqlDelayedMessageStore
from delayline.sql.transport import SqlTransport
from delayline.sql.two_phase import TwoPhaseCommit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayline.backends import BackendOptions, BackendUse, Findings

#: Schemes of products that bulk jobs have no staging tables on.
NOT_STAGED: Final = frozenset({"mssql"})


class SqlBackend(Backend):
    """Tables of an SQL database; an endpoint's queues and delayed messages may be in two."""

    has_tables: ClassVar[bool] = True

    def __init__(self, scheme: str) -> None:
        super().__init__(scheme)
        self.bulk_route = BulkRoute.STORED_ROWS if scheme in NOT_STAGED else BulkRoute.STAGED_ROWS

    def transport(self, url: str, options: BackendOptions) -> SqlTransport:
        """Return a new transport on the database's queue tables."""
        two_phase = cast("TwoPhaseCommit | None", options.two_phase)
        return SqlTransport(url, schema=options.schema, fair_by=options.queues_fair_by, two_phase=two_phase)

    def store(self, url: str, options: BackendOptions) -> SqlDelayedMessageStore:
        """Return a new store on a table of the database."""
        store = SqlDelayedMessageStore(
            url,
            table_name=options.table_name,
            schema=options.schema,
            journal=options.journal,
            two_phase=cast("TwoPhaseCommit | None", options.two_phase),
        )
        if options.fair_by is not None:
            store.be_fair(FairBy.of(options.fair_by))
        return store

    def two_phase_commit(self) -> TwoPhaseCommit:
        """Return a new two-phase commit."""
        return TwoPhaseCommit()

    def must_exist(self, url: str) -> None:
        """Raise BackendUnusable for a file that does not exist; servers say so themselves."""
        databases.must_exist(url)

    async def endpoints(self, url: str, options: BackendOptions) -> Sequence[str]:
        """Return the endpoints whose tables of delayed messages are there."""
        return await databases.endpoints(url, schema=options.schema)

    async def examine(self, url: str, options: BackendOptions, use: BackendUse) -> Findings:
        """Return findings about the database and the versions of its tables."""
        if not use.delays:
            return ()
        return await databases.examine(url, schema=options.schema, prepares=options.two_phase is not None)

    async def planned_setup(self, url: str, options: BackendOptions, use: BackendUse) -> Sequence[str]:
        """Return the SQL that would run."""
        statements: list[str] = []
        if use.delays:
            statements += await self.store(url, options).planned_infrastructure(options.name)
        if use.queues is not None:
            statements += await self.transport(url, options).planned_infrastructure(use.queues)
        return list(dict.fromkeys(statements))
