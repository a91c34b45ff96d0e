"""Servers that cannot be used: a clear error with the remedy, and the password nowhere."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from click.testing import CliRunner
from tests.servers.ports import free_port

from delayline import (
    BackendUnavailable,
    ConfigurationError,
    DelaylineError,
    Endpoint,
    InvalidMessage,
    Message,
    MessageContext,
    SqlDelayedMessageStore,
    SqlTransport,
    StoredDelivery,
    TransactionMode,
    TwoPhaseCommit,
)
from delayline.cli import main
from delayline.errors import BackendUnusable
from delayline.external import ExternalTransaction
from delayline.spi import TransportOperation
from delayline.sql.postgresql import connections
from delayline.testing.conformance.messages import delayed, operation
from delayline.timeouts import SqlTimeoutPersister, TimeoutManagerDelivery

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.postgresql import PostgresqlServer

SECRET = "s3cr3t"  # noqa: S105 - what must not be shown
USER = "guarded"


@pytest.fixture(scope="module")
def guarded(postgresql: PostgresqlServer) -> PostgresqlServer:
    """Provide the server with a user that has a password and no rights."""
    postgresql.guard(USER, SECRET)
    return postgresql


@pytest.fixture
def database(guarded: PostgresqlServer) -> Iterator[str]:
    """Provide the address of an empty database: host, port and name."""
    url = guarded.new_database()
    yield url.partition("@")[2]
    guarded.drop_database(url)


def shows_the_password(error: BaseException) -> bool:
    """Return whether the text appears in a log, a debugger or a traceback."""
    texts = [str(error), repr(error), "".join(traceback.format_exception(error))]
    chained = [one for one in (error.__cause__, error.__context__) if one is not None]
    return any(SECRET in text for text in texts) or any(map(shows_the_password, chained))


async def refusal(url: str, **settings: Any) -> DelaylineError:  # noqa: ANN401
    """What setting up and starting at the URL raise."""
    with pytest.raises(DelaylineError) as raised:
        await SqlTransport(url, **settings).setup_infrastructure(["billing"])
    with pytest.raises(type(raised.value)):
        await SqlDelayedMessageStore(url, **settings).setup_infrastructure("sales")
    assert not shows_the_password(raised.value)
    return raised.value


def error_of(*arguments: str) -> str:
    """Return the command line's error: one line, no stack trace, no password."""
    result = CliRunner().invoke(main, list(arguments), prog_name="delayline")
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code != 0
    assert "Traceback" not in result.output
    assert SECRET not in result.output
    return " ".join(result.output.split())


BAD_URLS: list[tuple[str, type[DelaylineError], str]] = [
    ("postgresql://{user}:wrong{secret}@{database}", BackendUnusable, "password authentication failed.*password"),
    ("postgresql://{user}@{database}", BackendUnusable, "no password supplied.*Put the password"),
    ("postgresql://stranger:{secret}@{database}", BackendUnusable, "stranger.*does not exist"),
    ("postgresql://{user}:{secret}@no.such.host.invalid/x", BackendUnavailable, "no.such.host.invalid"),
    ("postgresql://{user}:{secret}@127.0.0.1:{nobody}/x", BackendUnavailable, "refused.*Check that the server"),
    ("postgresql://{user}:{secret}@{database}?sslmode=require", BackendUnusable, "SSL.*sslmode"),
    ("postgresql://{user}:{secret}@{database}no", BackendUnusable, "does not exist.*Create it"),
    ("postgresql://{user}:{secret}@{database}?sslmod=require", ConfigurationError, "sslmod"),
    ("postgresql://{user}:{secret}@{database}?sslmode=maybe", DelaylineError, "sslmode"),
    ("postgresql://{user}:{secret}@{database}?connect_timeout=soon", DelaylineError, "connect_timeout"),
    ("postgresql://{user}:{secret}@{database}?port=99999999", DelaylineError, "port"),
    ("postgresql://{user}:{secret}@127.0.0.1", ConfigurationError, "names no database"),
    ("postgresql://{user}:{secret}@127.0.0.1:port/x", ConfigurationError, "cannot be read"),
    ("postgresql://{user}:a@{secret}/b@{database}", ConfigurationError, "more than one '@'.*%40"),
    ("postgresql:/{user}:{secret}@{database}", ConfigurationError, "cannot be read"),
    ("oracle://{user}:{secret}@{database}", ConfigurationError, "oracle.*supported.*postgresql://"),
    ("postgresq://{user}:{secret}@{database}", ConfigurationError, "postgresq.*supported.*postgresql://"),
]


@pytest.mark.parametrize(("url", "kind", "text"), BAD_URLS, ids=[url for url, _, _ in BAD_URLS])
async def test_a_url_that_leads_nowhere(database: str, url: str, kind: type[DelaylineError], text: str) -> None:
    with pytest.raises(kind, match=f"(?s){text}") as raised:
        raise await refusal(url.format(user=USER, secret=SECRET, database=database, nobody=free_port()))
    assert not shows_the_password(raised.value)


@pytest.mark.parametrize("url", [url for url, _, _ in BAD_URLS])
def test_the_command_line_reports_it_without_a_stack_trace(database: str, url: str) -> None:
    address = url.format(user=USER, secret=SECRET, database=database, nobody=free_port())
    assert "error: " in error_of("setup", "--endpoint", "sales", "--url", address)


async def test_a_right_that_is_missing(guarded: PostgresqlServer, database: str) -> None:
    # Given a user with only the right to connect
    url, own = f"postgresql://{USER}:{SECRET}@{database}", f"postgresql://delayline@{database}"
    error = await refusal(url)
    assert isinstance(error, BackendUnusable)
    assert "permission denied for schema public" in str(error)
    assert str(error).endswith(f"GRANT CREATE ON SCHEMA public TO {USER}")
    # When an administrator creates the tables, and one right is missing
    store, transport = SqlDelayedMessageStore(own), SqlTransport(own)
    await store.setup_infrastructure("sales")
    await transport.setup_infrastructure(["billing"])
    with guarded.administrator(database.rpartition("/")[2]) as administrator:
        administrator.execute(f"GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA public TO {USER}")
        administrator.execute(f"REVOKE INSERT ON delayline_messages FROM {USER}")
        limited = SqlDelayedMessageStore(url)
        await limited.initialize("sales", TransactionMode.RECEIVE_ONLY)
        sender = SqlTransport(url)
        await sender.start()
        try:
            # Then what may be done works, and the error of the rest names the table and the rights
            for name in ("first", "second"):  # of which the event loop has sent one by itself
                await limited.store(delayed(name))
            with pytest.raises(BackendUnusable, match=rf'GRANT DELETE ON TABLE public."sales.timeouts" TO {USER}$'):
                await limited.remove(delayed())
            missing = rf"denied for table delayline_messages.*GRANT INSERT, DELETE ON .*delayline_messages TO {USER}$"
            with pytest.raises(BackendUnusable, match=missing) as raised:
                await sender.dispatch([operation("billing")])
            assert not shows_the_password(raised.value)
            # And so does the event loop's, when a right is withdrawn later, and that of a caller's transaction
            administrator.execute(f'REVOKE INSERT ON "sales.timeouts" FROM {USER}')
            with pytest.raises(BackendUnusable, match=r'GRANT INSERT, DELETE ON TABLE public."sales.timeouts"'):
                await limited.store(delayed("third"))
            with psycopg.connect(url) as mine:
                joined = await limited.enlist(ExternalTransaction(mine))
                with pytest.raises(BackendUnusable, match=r'GRANT INSERT, DELETE ON TABLE public."sales.timeouts"'):
                    await limited.store(delayed("fourth"), joined)
        finally:
            await sender.stop()
            await limited.close()


@dataclass
class OrderPlaced:
    """An event."""

    number: int


async def ignore(message: Message, context: MessageContext) -> None:
    """Handle nothing."""


def working(url: str) -> Endpoint:
    """Return an endpoint that was set up before."""
    delivery = StoredDelivery(SqlDelayedMessageStore(url))
    return Endpoint("sales", transport=SqlTransport(url), delayed_delivery=delivery, setup_infrastructure=False)


async def test_every_missing_right_is_named_at_start_in_one_block_of_grants(
    guarded: PostgresqlServer, database: str
) -> None:
    # Given tables, and a user without the right to use their schema
    url, own = f"postgresql://{USER}:{SECRET}@{database}", f"postgresql://delayline@{database}"
    await working(own).setup()
    with guarded.administrator(database.rpartition("/")[2]) as administrator:
        administrator.execute("REVOKE USAGE ON SCHEMA public FROM PUBLIC")
        # When an endpoint that handles starts
        refused = working(url)
        refused.handler(ignore)
        with pytest.raises(BackendUnusable) as raised:
            await refused.start()
        # Then every right is in one block, and doctor prints the same
        first, *grants = str(raised.value).splitlines()
        assert "as the owner of the tables" in first
        assert grants == [
            f"GRANT USAGE ON SCHEMA public TO {USER};",
            f"GRANT SELECT ON TABLE public.delayline_schema TO {USER};",
            f"GRANT SELECT ON TABLE public.delayline_queues TO {USER};",
            f"GRANT SELECT, INSERT, DELETE ON TABLE public.delayline_messages TO {USER};",
            f"GRANT SELECT ON TABLE public.delayline_subscriptions TO {USER};",
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE public.delayline_receivers TO {USER};",
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE public.delayline_suspects TO {USER};",
            f'GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE public."sales.timeouts" TO {USER};',
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE public.delayline_pauses TO {USER};",
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE public.delayline_sleeping TO {USER};",
        ]
        seen = await asyncio.to_thread(error_of, "doctor", "--endpoint", "sales", "--url", url)
        assert " ".join(grants) in seen
        # And the granted rights suffice, for all tables
        for grant in grants:
            administrator.execute(grant)
        handled, allowed = asyncio.Event(), working(url)

        @allowed.handler
        async def handle(message: Message, context: MessageContext) -> None:
            handled.set()

        async with allowed, asyncio.timeout(20):
            await allowed.send("sales", b"", delay=timedelta(milliseconds=1))
            await handled.wait()


async def test_what_a_subscriber_lacks_is_named_at_start(guarded: PostgresqlServer, database: str) -> None:
    # Given a user with the rights of an endpoint that handles, and one that subscribes
    url, own = f"postgresql://{USER}:{SECRET}@{database}", f"postgresql://delayline@{database}"
    await working(own).setup()
    with guarded.administrator(database.rpartition("/")[2]) as administrator:
        for grant in (
            *await SqlTransport(url).missing_rights("sales", takes=True),
            *await SqlDelayedMessageStore(url).missing_rights("sales", takes=True),
        ):
            administrator.execute(grant)
        got = asyncio.Event()

        def subscriber() -> Endpoint:
            endpoint = working(url)

            @endpoint.subscribes(OrderPlaced)
            async def note(event: OrderPlaced, context: MessageContext) -> None:
                got.set()

            return endpoint

        # When the subscriber starts
        with pytest.raises(BackendUnusable) as raised:
            await subscriber().start()
        # Then the rest is named, and suffices; without subscriptions nothing is missing
        [grant] = str(raised.value).splitlines()[1:]
        assert grant == f"GRANT INSERT, DELETE ON TABLE public.delayline_subscriptions TO {USER};"
        async with working(url) as plain:
            administrator.execute(grant)
            async with subscriber() as allowed, asyncio.timeout(20):
                await plain.publish(OrderPlaced(1))
                await got.wait()
                await allowed.unsubscribe(OrderPlaced)


async def test_the_rights_on_a_journal_on_decisions_and_on_timeouts_are_in_the_block(
    guarded: PostgresqlServer, database: str
) -> None:
    # Given a store with a journal, a transport that decides, and a timeout manager, and a user without any right
    url, own = f"postgresql://{USER}:{SECRET}@{database}", f"postgresql://delayline@{database}"

    def parts(at: str) -> tuple[SqlDelayedMessageStore, SqlTransport, TimeoutManagerDelivery]:
        two_phase = TwoPhaseCommit()
        transport = SqlTransport(at, two_phase=two_phase)
        return SqlDelayedMessageStore(at), transport, TimeoutManagerDelivery(SqlTimeoutPersister(at))

    await SqlDelayedMessageStore(own, journal=True).setup_infrastructure("sales")
    await parts(own)[1].setup_infrastructure(["sales", "error", "sales.Timeouts", "sales.TimeoutsDispatcher"])
    await SqlTimeoutPersister(own).setup_infrastructure("sales")
    every, none = "SELECT, INSERT, UPDATE, DELETE", f"TO {USER};"
    # When each part reports its missing rights
    store, transport, manager = parts(url)
    of_store = await store.missing_rights("sales", takes=True)
    of_transport = await transport.missing_rights("sales", takes=True)
    of_manager = await manager.missing_rights("sales", takes=True)
    # Then the tables that only these settings use are named
    assert f"GRANT INSERT ON TABLE public.delayline_journal {none}" in of_store
    assert f"GRANT {every} ON TABLE public.delayline_decisions {none}" in of_transport
    assert f'GRANT {every} ON TABLE public."sales_TimeoutData" {none}' in of_manager
    assert f"GRANT {every} ON TABLE public.delayline_leases {none}" in of_manager
    assert not await TimeoutManagerDelivery(SqlTimeoutPersister(url), polling=False).missing_rights("sales", takes=True)
    plain = await SqlTransport(url).missing_rights("sales", takes=True)
    assert [grant for grant in plain if "decisions" in grant] == []
    # And doctor prints the missing rights of the timeout manager, and they suffice for an endpoint with one
    with guarded.administrator(database.rpartition("/")[2]) as administrator:
        for grant in {*of_store, *plain, *of_manager}:
            administrator.execute(grant.encode())
        endpoint = Endpoint(
            "sales", transport=SqlTransport(url), delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url)),
            draining=TimeoutManagerDelivery(SqlTimeoutPersister(url)), setup_infrastructure=False,
        )  # fmt: skip
        handled = asyncio.Event()

        @endpoint.handler
        async def handle(message: Message, context: MessageContext) -> None:
            handled.set()

        async with endpoint, asyncio.timeout(20):
            await endpoint.send("sales", b"", delay=timedelta(milliseconds=1))
            await handled.wait()
        administrator.execute(f'REVOKE DELETE ON "sales_TimeoutData" FROM {USER}')
        with pytest.raises(BackendUnusable, match=r'GRANT DELETE ON TABLE public."sales_TimeoutData"'):
            await endpoint.start()


async def test_rights_on_a_schema_and_a_sequence_and_of_an_owner(guarded: PostgresqlServer, database: str) -> None:
    # Given a user who owns nothing, and a schema whose name needs quotes
    url, name = f"postgresql://{USER}:{SECRET}@{database}", database.rpartition("/")[2]
    store = SqlDelayedMessageStore(f"postgresql://delayline@{database}", schema="of 100%")
    with guarded.administrator(name) as administrator:
        administrator.execute('CREATE SCHEMA "of 100%"')
        await store.setup_infrastructure("sales")
        limited = SqlDelayedMessageStore(url, schema="of 100%")
        # When rights are missing one after the other, then the error names the missing one and how to grant it
        both = 'CREATE for `delayline setup` only: GRANT USAGE, CREATE ON SCHEMA "of 100%" TO '
        with pytest.raises(BackendUnusable, match=both):
            await limited.setup_infrastructure("sales")
        administrator.execute(f'GRANT USAGE, CREATE ON SCHEMA "of 100%" TO {USER}')
        administrator.execute(f'GRANT ALL ON ALL TABLES IN SCHEMA "of 100%" TO {USER}')
        await limited.setup_infrastructure("sales")
        await limited.initialize("sales", TransactionMode.RECEIVE_ONLY)
        try:
            administrator.execute('ALTER TABLE "of 100%"."sales.timeouts" ALTER seq DROP IDENTITY')
            administrator.execute('CREATE SEQUENCE "of 100%".numbers')
            administrator.execute(
                'ALTER TABLE "of 100%"."sales.timeouts" ALTER seq SET DEFAULT nextval(\'"of 100%".numbers\')'
            )
            with pytest.raises(BackendUnusable, match=r'GRANT USAGE ON SEQUENCE "of 100%".numbers TO '):
                await limited.store(delayed())
        finally:
            await limited.close()
        administrator.execute('ALTER TABLE "of 100%".delayline_messages DROP expires')
        administrator.execute('UPDATE "of 100%".delayline_schema SET revision = 1')
        with pytest.raises(BackendUnusable, match=r"must be owner.*Only its owner may do that: run it as delayline$"):
            await limited.setup_infrastructure("sales")
        administrator.execute(f"REVOKE CONNECT ON DATABASE {name} FROM PUBLIC")
        with pytest.raises(BackendUnusable, match=r"(?s)permission denied for database.*GRANT CONNECT"):
            await limited.setup_infrastructure("sales")
        administrator.execute(f"GRANT CONNECT ON DATABASE {name} TO PUBLIC")


async def test_a_schema_that_is_missing(postgresql_url: str) -> None:
    error = await refusal(postgresql_url, schema="nowhere")
    assert isinstance(error, BackendUnusable)
    assert "no such schema" in str(error)
    assert "nowhere" in str(error)


async def test_a_server_that_is_too_old(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "OLDEST_POSTGRESQL", 99)
    error = await refusal(postgresql_url)
    assert isinstance(error, BackendUnusable)
    assert "delayline needs 99 or newer" in str(error)


async def test_a_server_without_room_for_a_connection(guarded: PostgresqlServer, database: str) -> None:
    # Given a user with room for few connections, and a transport that has one
    with guarded.administrator(database.rpartition("/")[2]) as administrator:
        administrator.execute(f"GRANT ALL ON SCHEMA public TO {USER}")
        administrator.execute(f"ALTER ROLE {USER} CONNECTION LIMIT 2")
        try:
            transport = SqlTransport(f"postgresql://{USER}:{SECRET}@{database}")
            await transport.setup_infrastructure(["billing"])
            await transport.start()
            # When more are needed than there are, in every second round
            failed = sent = 0
            for number in range(40):
                try:
                    async with contextlib.AsyncExitStack() as stack:
                        for _ in range(1 + number % 2):
                            transaction = await stack.enter_async_context(transport.transaction())
                            await transport.dispatch([operation("billing", str(number))], transaction)
                        await transport.dispatch([operation("billing", f"alone {number}")])
                    sent += 2
                except BackendUnavailable as error:
                    assert "is full" in str(error)
                    assert "max_connections" in str(error)
                    failed += 1
            # Then those that found none fail with the reason, and the connections that there are stay in use
            assert sent > 0
            assert failed > 0
            administrator.execute(f"ALTER ROLE {USER} CONNECTION LIMIT -1")
            await transport.dispatch([operation("billing", "last")])
            assert await transport.count("billing") >= sent + 1
            await transport.stop()
        finally:
            administrator.execute(f"ALTER ROLE {USER} CONNECTION LIMIT -1")


async def test_a_body_that_the_server_could_not_take(postgresql_url: str) -> None:
    # Given half a gigabyte of virtual memory
    huge = bytes(500_000_000)
    store, transport = SqlDelayedMessageStore(postgresql_url), SqlTransport(postgresql_url)
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    await transport.start()
    try:
        for send in (
            store.store(delayed(body=huge)),
            transport.dispatch([TransportOperation(Message("m", {}, huge), "billing")]),
        ):
            with pytest.raises(InvalidMessage, match=r"'m' has 500,000,\d+ bytes; PostgreSQL .* 500,000,000"):
                await send
    finally:
        await transport.stop()
        await store.close()


async def test_names_that_are_too_long(postgresql_url: str) -> None:
    store = SqlDelayedMessageStore(postgresql_url)
    await store.setup_infrastructure("sales")
    await store.initialize("sales", TransactionMode.RECEIVE_ONLY)
    try:
        for message in (delayed("i" * 251), delayed(destination="d" * 201)):
            with pytest.raises(InvalidMessage, match="length"):
                await store.store(message)
        await store.store_many([delayed("ü" * 250), delayed(destination="ü" * 200)])
    finally:
        await store.close()


@pytest.mark.parametrize(
    ("url", "fits", "cut"),
    [
        ("postgresql://nobody@127.0.0.1:1/x", "ü" * 31 + "x", "ü" * 32),
        ("mariadb://nobody@127.0.0.1:1/x", "x" * 64, "x" * 65),
        ("mysql://nobody@127.0.0.1:1/x", "x" * 64, "x" * 65),
    ],
)
async def test_table_names_that_would_be_cut_are_refused_unasked(url: str, fits: str, cut: str) -> None:
    for verb in ("setup_infrastructure", "planned_infrastructure"):
        with pytest.raises(ConfigurationError, match=r"longer than the 6[34] .* allows: give the endpoint a shorter"):
            await getattr(SqlDelayedMessageStore(url), verb)(cut)
        with pytest.raises(ConfigurationError, match=r"longer than the 6[34] "):
            await getattr(SqlDelayedMessageStore(url, table_name=cut), verb)("sales")
        with pytest.raises(BackendUnavailable):
            await getattr(SqlDelayedMessageStore(url, table_name=fits), verb)("sales")
