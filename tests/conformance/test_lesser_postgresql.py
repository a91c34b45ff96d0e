"""Conformance where PostgreSQL refuses what engines lack that only speak its protocol.

Every transaction is serializable, no notification can be sent or heard, and every twentieth change of a table is given
up in favour of another transaction (SQLSTATE 40001), as by CockroachDB, YugabyteDB and Aurora DSQL. None of them was
run.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Final

import psycopg
import pytest
from psycopg import sql
from psycopg.errors import FeatureNotSupported

from delayline.sql import SqlDelayedMessageStore, SqlTransport
from delayline.sql.postgresql import notifications
from delayline.sql.server import run
from delayline.testing import DeliveryConformance, StoreConformance, TransportConformance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy import Connection
    from tests.servers.postgresql import PostgresqlServer

SERIALIZABLE: Final = "?options=-c%20default_transaction_isolation%3Dserializable"
CONFLICTS: Final = """
CREATE SEQUENCE conflicts;
CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF nextval('public.conflicts') % 20 = 0 THEN
    RAISE EXCEPTION 'could not serialize access due to concurrent update' USING ERRCODE = '40001';
  END IF;
  RETURN NULL;
END $$;
CREATE FUNCTION watch() RETURNS event_trigger LANGUAGE plpgsql AS $$ DECLARE made record; BEGIN
  FOR made IN SELECT object_identity FROM pg_event_trigger_ddl_commands() WHERE command_tag = 'CREATE TABLE' LOOP
    EXECUTE format('CREATE TRIGGER conflict BEFORE INSERT OR UPDATE OR DELETE ON %s '
      'FOR EACH STATEMENT EXECUTE FUNCTION public.conflict()', made.object_identity);
  END LOOP;
END $$;
CREATE EVENT TRIGGER conflicts ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION watch();
"""


def refuse(connection: Connection, statement: str, *values: object) -> object:
    """Run a statement as a server without notifications does."""
    if "LISTEN" in statement or "pg_notify" in statement:
        raise FeatureNotSupported("this engine has no notifications")
    return run(connection, statement, *values)


class WithoutLuxuries:
    """A database for every test."""

    has_conflicts = True

    @pytest.fixture(autouse=True)
    def database(self, postgresql: PostgresqlServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        name = f"lesser_{uuid.uuid4().hex[:12]}"
        with postgresql.administrator() as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        url = f"postgresql://delayline@127.0.0.1:{postgresql.port}/{name}"
        if self.has_conflicts:
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(CONFLICTS)
        monkeypatch.setattr(notifications, "run", refuse)
        self.url = url + SERIALIZABLE
        yield
        with postgresql.administrator() as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.mark.slow
class TestStoreWithoutLuxuries(WithoutLuxuries, StoreConformance):
    durable = True

    async def make_store(self, tmp_path: Path) -> SqlDelayedMessageStore:
        return SqlDelayedMessageStore(self.url)


@pytest.mark.slow
class TestTransportWithoutLuxuries(WithoutLuxuries, TransportConformance):
    async def make_transport(self, tmp_path: Path) -> SqlTransport:
        return SqlTransport(self.url)


@pytest.mark.slow
class TestDeliveryWithoutLuxuries(WithoutLuxuries, DeliveryConformance):
    """Without conflicts: a handler whose transaction was given up runs once more, and these tests count its runs."""

    has_conflicts = False

    async def make_backends(self, tmp_path: Path) -> tuple[SqlTransport, SqlDelayedMessageStore]:
        return SqlTransport(self.url), SqlDelayedMessageStore(self.url)
