"""The ledger of jobs of an older delayline, as a database that it has set up has it."""

from __future__ import annotations

import asyncio

from delayline.bulk.job_tables import earlier_runs_table
from delayline.sql.databases import database_at


def make_earlier_ledger(url: str) -> None:
    """Create the table that set-up makes no more."""
    database = database_at(url)
    table = earlier_runs_table(database.dialect.catalog.schema_of(None))

    async def make() -> None:
        await database.open()
        try:
            await database.write(table.create)
        finally:
            await database.close()

    asyncio.run(make())
