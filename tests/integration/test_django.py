"""Sends in Django's own transactions, with real Django on SQLite, PostgreSQL and MariaDB."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from delayline import ConfigurationError, Endpoint, StoredDelivery
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: Runs in a separate process: Django has one configuration per process. Django's MySQL back end imports MySQLdb.
BEGIN = """
    import json, sys
    import pymysql
    pymysql.install_as_MySQLdb()
    import django
    from django.conf import settings
    database, url = json.loads(sys.argv[1])
    settings.configure(DATABASES={"default": database}, USE_TZ=True)
    django.setup()
    from datetime import timedelta
    from django.db import connection, connections, transaction
    from delayline import ConfigurationError, Endpoint, StoredDelivery, SyncEndpoint
    from delayline.sql import SqlDelayedMessageStore, SqlTransport
    delivery = StoredDelivery(SqlDelayedMessageStore(url), polling=False)
    shop = Endpoint("shop", transport=SqlTransport(url), delayed_delivery=delivery, send_only=True)
    DAY = timedelta(days=1)

    def waiting(sync):
        return sorted(message.id for message in sync.run(shop.delayed.pending()))

    def refused(send):
        try:
            send()
        except ConfigurationError as error:
            return str(error)
        raise AssertionError("it was not refused")
"""


def django_at(url: str) -> dict[str, object]:
    """Return the entry of DATABASES for the database at the URL."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": url.removeprefix("sqlite:///")}
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    engine = "postgresql" if parts.scheme.startswith("postgresql") else "mysql"
    settings: dict[str, object] = {
        "ENGINE": f"django.db.backends.{engine}",
        "NAME": parts.path.lstrip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or query.get("host", ""),
        "PORT": str(parts.port or query.get("port", "")),
    }
    if engine == "mysql" and "unix_socket" in query:
        settings["HOST"] = query["unix_socket"]
    return settings


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/shop.db"
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def in_django(url: str, tmp_path: Path) -> Callable[[str], None]:
    """Return a function that runs code in a process with Django set up on the database."""

    async def set_up() -> None:
        endpoint = Endpoint(
            "shop", transport=SqlTransport(url), delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url))
        )
        await endpoint.setup()

    asyncio.run(set_up())

    def run(code: str) -> None:
        script = tmp_path / "in_django.py"
        script.write_text(textwrap.dedent(BEGIN) + textwrap.dedent(code))
        done = subprocess.run(
            [sys.executable, "-W", "ignore", script, json.dumps([django_at(url), url])],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={name: value for name, value in os.environ.items() if not name.startswith("COV_")},
        )
        assert done.returncode == 0, done.stderr

    return run


@pytest.mark.parametrize("given", ["connection", "connections['default']", "'default'"])
@pytest.mark.sample(3)
def test_a_send_in_djangos_atomic_is_committed_and_rolled_back_with_it(
    in_django: Callable[[str], None], given: str
) -> None:
    in_django(f"""
    with SyncEndpoint(shop) as sync:
        with transaction.atomic():
            sync.send("shop", "kept", delay=DAY, message_id="kept", transaction={given})
            sync.send("shop", "kept now", message_id="kept now", transaction={given})
            assert waiting(sync) == [], waiting(sync)
        assert waiting(sync) == ["kept"], waiting(sync)
        try:
            with transaction.atomic():
                sync.send("shop", "undone", delay=DAY, message_id="undone", transaction={given})
                raise LookupError
        except LookupError:
            pass
        with transaction.atomic():
            try:
                with transaction.atomic():
                    sync.send("shop", "undone too", delay=DAY, message_id="undone too", transaction={given})
                    raise LookupError
            except LookupError:
                pass
            sync.send("shop", "kept too", delay=DAY, message_id="kept too", transaction={given})
        assert waiting(sync) == ["kept", "kept too"], waiting(sync)
    """)


def test_a_cancel_in_djangos_atomic_is_committed_and_rolled_back_with_it(in_django: Callable[[str], None]) -> None:
    in_django("""
    with SyncEndpoint(shop) as sync:
        sync.send("shop", "", delay=DAY, message_id="reminder")
        for given in (connection, "default"):
            try:
                with transaction.atomic():
                    assert sync.delayed.cancel("reminder", transaction=given) == "done"
                    raise LookupError
            except LookupError:
                pass
            assert waiting(sync) == ["reminder"], waiting(sync)
        text = refused(lambda: sync.delayed.cancel("reminder", transaction=connection))
        assert "atomic" in text, text
        with transaction.atomic():
            assert sync.delayed.cancel("reminder", transaction=connection) == "done"
            assert waiting(sync) == ["reminder"], waiting(sync)
        assert waiting(sync) == [], waiting(sync)
    """)


def test_a_send_in_an_aborted_atomic_is_refused(in_django: Callable[[str], None]) -> None:
    """Django silently rolls back a transaction that is marked for rollback: the message would be lost."""
    in_django("""
    from delayline import TransactionAborted
    with SyncEndpoint(shop) as sync:
        with transaction.atomic():
            try:
                with transaction.atomic(savepoint=False):
                    raise LookupError
            except LookupError:
                pass
            try:
                sync.send("shop", "lost", delay=DAY, transaction=connection)
            except TransactionAborted as error:
                assert "aborted" in str(error), error
            else:
                raise AssertionError("it was not refused")
        with transaction.atomic():
            sync.send("shop", "kept", delay=DAY, message_id="kept", transaction=connection)
        assert waiting(sync) == ["kept"], waiting(sync)
    """)


def test_a_send_before_django_has_connected_is_never_outside_its_transaction(in_django: Callable[[str], None]) -> None:
    """Django's `connection.connection` is None then; the message used to be committed at once, by itself."""
    in_django("""
    with SyncEndpoint(shop) as sync:
        assert connection.connection is None
        text = refused(lambda: sync.send("shop", "", delay=DAY, transaction=connection.connection))
        assert "django.db.connection itself" in text, text
        text = refused(lambda: sync.send("shop", "", delay=DAY, transaction=connection))
        assert "atomic" in text, text
        text = refused(lambda: sync.send("shop", "", delay=DAY, transaction="other"))
        assert "'other'" in text and "not an alias" in text and "default" in text, text
        assert waiting(sync) == []
        connection.close()
        settings.DATABASES["default"]["AUTOCOMMIT"] = False
        connections["default"].settings_dict["AUTOCOMMIT"] = False
        assert connection.connection is None
        sync.send("shop", "", delay=DAY, message_id="first statement", transaction=connection)
        assert waiting(sync) == []
        connection.rollback()
        assert waiting(sync) == []
        sync.send("shop", "", delay=DAY, message_id="m", transaction=connection)
        connection.commit()
        assert waiting(sync) == ["m"]
    """)


def test_djangos_connection_on_an_event_loop_is_refused_where_it_cannot_connect(
    in_django: Callable[[str], None],
) -> None:
    in_django("""
    import asyncio
    async def main():
        async with shop:
            try:
                await shop.send("shop", "", delay=DAY, transaction=connection)
            except ConfigurationError as error:
                assert "SyncEndpoint" in str(error), error
            else:
                raise AssertionError("it was not refused")
    asyncio.run(main())
    """)


async def test_a_text_without_django_is_refused(tmp_path: Path) -> None:
    async with Endpoint("shop", transport=SqlTransport(f"sqlite:///{tmp_path}/shop.db")) as shop:
        with pytest.raises(ConfigurationError, match="alias of Django's DATABASES"):
            await shop.send("shop", "", transaction="default")


@pytest.mark.parametrize("url", ["mariadb118"], indirect=True)
def test_an_atomic_block_that_goes_on_after_a_conflict_is_rolled_back(in_django: Callable[[str], None]) -> None:
    """Given a snapshot that another send has overtaken, when the block swallows the error, then nothing is kept."""
    in_django("""
    connections.settings["default"].setdefault("OPTIONS", {})["isolation_level"] = "repeatable read"
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE orders (id VARCHAR(50) PRIMARY KEY)")
    from django.db import DatabaseError
    from delayline import BackendUnavailable

    with SyncEndpoint(shop) as sync:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("INSERT INTO orders VALUES ('before')")
                cursor.execute("SELECT * FROM orders")
            sync.send("shop", "", delay=DAY, message_id="same")
            try:
                sync.send("shop", "", delay=DAY, message_id="same", transaction=connection)
            except BackendUnavailable:
                pass
            else:
                raise AssertionError("there was no conflict")
            try:
                with connection.cursor() as cursor:
                    cursor.execute("INSERT INTO orders VALUES ('after')")
            except DatabaseError:
                pass
            else:
                raise AssertionError("the block went on")
        with connection.cursor() as cursor:
            cursor.execute("SELECT id FROM orders")
            assert list(cursor.fetchall()) == [], cursor.fetchall()
    """)
