"""External transactions that are aborted already: one error of delayline's says so, whatever the driver."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import psycopg2
import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool

from delayline import (
    BackendUnavailable,
    ConfigurationError,
    Endpoint,
    SqlDelayedMessageStore,
    SqlTransport,
    StoredDelivery,
    TransactionAborted,
    TransactionMode,
)
from delayline.sql.transactions import SqlTransaction
from delayline.testing.conformance.messages import delayed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

LATER = timedelta(days=1)
ABORTED = "aborted.*roll it back"


class Model(DeclarativeBase):
    """The application's tables."""


class Order(Model):
    """A row of the application's."""

    __tablename__ = "orders"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


@contextlib.asynccontextmanager
async def shop_in(url: str) -> AsyncIterator[Endpoint]:
    transport = SqlTransport(url, poll_interval=timedelta(seconds=30))
    delivery = StoredDelivery(SqlDelayedMessageStore(url))
    async with Endpoint("shop", transport=transport, delayed_delivery=delivery) as shop:
        yield shop


async def refused_until_rolled_back(shop: Endpoint, given: Any, roll_back: Callable[[], Any]) -> None:  # noqa: ANN401
    """Each kind of send raises the error; after the rollback the connection can be used again."""
    for delay in (None, LATER):
        with pytest.raises(TransactionAborted, match=ABORTED):
            await shop.send("shop", "aborted", delay=delay, transaction=given)
    done = roll_back()
    if asyncio.iscoroutine(done):
        await done
    await shop.send("shop", "again", delay=LATER, transaction=given)


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
async def test_an_aborted_transaction_of_a_driver_is_refused(postgresql_url: str, driver: str) -> None:
    """Given a statement that failed on a raw connection, when it is sent in, then the error says to roll back."""
    connect: Any = {"psycopg": psycopg, "psycopg2": psycopg2}[driver].connect
    async with shop_in(postgresql_url) as shop:
        with contextlib.closing(connect(postgresql_url)) as connection:
            with pytest.raises(Exception, match="division by zero"):
                connection.cursor().execute("SELECT 1/0")
            await refused_until_rolled_back(shop, connection, connection.rollback)


async def test_an_aborted_transaction_of_an_asynchronous_psycopg_connection_is_refused(postgresql_url: str) -> None:
    async with shop_in(postgresql_url) as shop, await psycopg.AsyncConnection.connect(postgresql_url) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            await connection.execute("SELECT 1/0")
        await refused_until_rolled_back(shop, connection, connection.rollback)


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
@pytest.mark.parametrize("kind", ["Connection", "Session"])
async def test_an_aborted_transaction_of_sqlalchemy_is_refused(postgresql_url: str, driver: str, kind: str) -> None:
    engine = create_engine(postgresql_url.replace("postgresql:", f"postgresql+{driver}:"), poolclass=NullPool)
    async with shop_in(postgresql_url) as shop:
        with engine.connect() if kind == "Connection" else Session(engine) as given:
            with pytest.raises(SQLAlchemyError, match="division by zero"):
                given.execute(text("SELECT 1/0"))
            await refused_until_rolled_back(shop, given, given.rollback)
            given.commit()
            assert [message.message.text for message in await shop.delayed.pending()] == ["again"]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("kind", ["AsyncConnection", "AsyncSession"])
async def test_an_aborted_transaction_of_asynchronous_sqlalchemy_is_refused(
    postgresql_url: str, driver: str, kind: str
) -> None:
    engine = create_async_engine(postgresql_url.replace("postgresql:", f"postgresql+{driver}:"), poolclass=NullPool)
    theirs = engine.connect() if kind == "AsyncConnection" else AsyncSession(engine)
    async with shop_in(postgresql_url) as shop, theirs as given:
        with pytest.raises(SQLAlchemyError, match="division by zero"):
            await given.execute(text("SELECT 1/0"))
        await refused_until_rolled_back(shop, given, given.rollback)


@pytest.mark.parametrize("product", ["sqlite", "postgresql", "mariadb"])
async def test_a_session_whose_flush_has_failed_is_refused(
    product: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Given a Session that SQLAlchemy has rolled back, when it is sent in, then the error says to roll it back too."""
    url = f"sqlite:///{tmp_path}/shop.db" if product == "sqlite" else request.getfixturevalue(f"{product}_url")
    engine = create_engine(url_of_theirs(url), poolclass=NullPool)
    Model.metadata.create_all(engine)
    async with shop_in(url) as shop:
        with Session(engine) as session:
            session.add(Order(number=17))
            session.commit()
        with Session(engine) as session:
            session.add(Order(number=17))
            with pytest.raises(SQLAlchemyError):
                session.flush()
            await refused_until_rolled_back(shop, session, session.rollback)


@pytest.mark.parametrize("product", ["postgresql", "mariadb"])
async def test_a_transaction_whose_connection_is_lost_is_refused(product: str, request: pytest.FixtureRequest) -> None:
    """Given a SQLAlchemy connection that the server has ended, when it is sent in, then delayline's errors come out."""
    url = request.getfixturevalue(f"{product}_url")
    async with shop_in(url) as shop:
        with create_engine(url_of_theirs(url), poolclass=NullPool).connect() as connection:
            pid = connection.execute(text(IDS[product])).scalar()
            with create_engine(url_of_theirs(url), poolclass=NullPool, isolation_level="AUTOCOMMIT").connect() as other:
                other.execute(text(KILLS[product].format(pid)))
            with pytest.raises(BackendUnavailable):
                await shop.send("shop", "lost", delay=LATER, transaction=connection)
            with pytest.raises(SQLAlchemyError):
                connection.execute(text("SELECT 1"))
            await refused_until_rolled_back(shop, connection, connection.rollback)


async def test_a_transaction_that_is_over_is_refused(postgresql_url: str) -> None:
    """Given a block whose transaction has ended, or a closed connection, when it is sent in, then it is refused."""
    engine = create_engine(postgresql_url.replace("postgresql:", "postgresql+psycopg:"), poolclass=NullPool)
    async with shop_in(postgresql_url) as shop:
        with engine.connect() as connection, connection.begin() as begun:
            begun.rollback()
            with pytest.raises(ConfigurationError, match="transaction= cannot be used"):
                await shop.send("shop", "over", delay=LATER, transaction=connection)
        with pytest.raises(ConfigurationError, match="transaction= cannot be used"):
            await shop.send("shop", "closed", delay=LATER, transaction=connection)


async def test_a_commit_that_becomes_a_rollback_fails(postgresql_url: str) -> None:
    """Given an aborted transaction of delayline's, when it commits, then the silent rollback raises an error."""
    store = SqlDelayedMessageStore(postgresql_url)
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.TRANSACTION_SCOPE)
    try:
        with pytest.raises(TransactionAborted, match=ABORTED):
            async with store.transaction() as transaction:
                await store.store(delayed(), transaction)
                assert isinstance(transaction, SqlTransaction)
                with pytest.raises(SQLAlchemyError):
                    await transaction.run(lambda connection: connection.exec_driver_sql("SELECT 1/0"))
        assert await store.pending() == []
    finally:
        await store.close()


IDS = {"postgresql": "SELECT pg_backend_pid()", "mariadb": "SELECT CONNECTION_ID()"}
KILLS = {"postgresql": "SELECT pg_terminate_backend({}, 5000)", "mariadb": "KILL {}"}


def url_of_theirs(url: str) -> str:
    """Return the URL as applications give it to SQLAlchemy."""
    named = make_url(url)
    drivers = {"postgresql": "postgresql+psycopg", "mariadb": "mariadb+pymysql"}
    return named.set(drivername=drivers.get(named.drivername, named.drivername)).render_as_string(hide_password=False)
