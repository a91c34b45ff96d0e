"""Real Alembic beside delayline: autogenerate proposes to drop none of its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from alembic.autogenerate import produce_migrations
from alembic.migration import MigrationContext
from alembic.operations.ops import DropTableOp, MigrateOperation, OpContainer
from sqlalchemy import Column, Integer, MetaData, Table, create_engine
from sqlalchemy.pool import NullPool

from delayline import Endpoint, StoredDelivery
from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.sql.alembic import include_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def dropped(url: str, **options: object) -> set[str]:
    """Return the tables that autogenerate would drop from the database, which a user's own metadata does not have."""
    metadata = MetaData()
    Table("orders", metadata, Column("number", Integer, primary_key=True))
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        script = produce_migrations(MigrationContext.configure(connection, opts=options), metadata)
    return {one.table_name for one in operations(script.upgrade_ops) if isinstance(one, DropTableOp)}


def operations(container: OpContainer | None) -> Iterator[MigrateOperation]:
    for one in [] if container is None else container.ops:
        yield one
        if isinstance(one, OpContainer):
            yield from operations(one)


@pytest.mark.parametrize("server", ["sqlite", "postgresql"])
async def test_autogenerate_drops_no_table_of_delayline(
    server: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/shop.db" if server == "sqlite" else str(request.getfixturevalue("postgresql_url"))
    alembic_url = url.replace("postgresql:", "postgresql+psycopg:")
    for name in (None, "reminders"):
        store = SqlDelayedMessageStore(url, table_name=name)
        await Endpoint("shop", transport=SqlTransport(url), delayed_delivery=StoredDelivery(store)).setup()
    # Without the filter Alembic drops all of them, with it none; a table without an owner is dropped in both cases
    assert dropped(alembic_url) >= {"delayline_messages", "delayline_queues", "shop.timeouts", "reminders"}
    assert dropped(alembic_url, include_name=include_name("reminders")) == set()
    assert dropped(alembic_url, include_name=include_name()) == {"reminders"}
