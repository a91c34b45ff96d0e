"""Servers that tests share: one of each kind per test process, with a new database for each test."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import hypothesis
import pytest

sys.path.append(str(Path(__file__).parents[1]))  # for `tests.servers`, however pytest was started

from tests.eventually import PATIENCE
from tests.sampling import select
from tests.servers import debian
from tests.servers.azurite import AzuriteServer
from tests.servers.mariadb import MariadbServer
from tests.servers.postgresql import PostgresqlServer
from tests.servers.programs import CONFIGURED, Programs
from tests.servers.rabbitmq import RabbitmqServer

from delayline.dashboard import errors
from delayline.dashboard.service import EndpointService
from delayline.events import tracebacks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


# On a busy machine an example takes longer than usual; what limits a test is its timeout.
hypothesis.settings.register_profile("delayline", deadline=None)
hypothesis.settings.load_profile("delayline")

#: Those that start one of a version that Debian 12 does not have.
NEWER: Final = {"rabbitmq4", "crashing_rabbitmq4", "postgresql17", "mariadb118"}
#: The fixtures that start one; parameters are called so, too.
SERVERS: Final = {
    "azurite",
    "azure_url",
    "postgresql",
    "mariadb",
    "crashing",
    "server_url",
    "rabbitmq",
    "crashing_rabbitmq",
    *NEWER,
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that need a server, which run without coverage, and leave long tests to `make test-all`."""
    select(items, config)
    for item in items:
        if needs_server(item):
            item.add_marker(pytest.mark.server)
        if needs_server(item, NEWER):
            item.add_marker(pytest.mark.newer_server)


@pytest.fixture(autouse=True)
def no_earlier_failures() -> None:
    """Log the first traceback of each failure in each test: the process counts those that repeat."""
    tracebacks.forget()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Take back what a test sets of logging: a handler that stays would write the records of all tests after it."""
    known = (logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger))
    before = {logger: (logger.level, logger.handlers[:], logger.filters[:]) for logger in (logging.root, *known)}
    yield
    for logger, (level, handlers, filters) in before.items():
        logger.setLevel(level)
        logger.filters[:] = filters
        for handler in logger.handlers[:]:
            if handler not in handlers:
                logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def patient_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pages wait as long as tests do: a busy machine would be shown as a back end without an answer."""
    monkeypatch.setitem(EndpointService.__init__.__kwdefaults__ or {}, "time_limit", PATIENCE)
    monkeypatch.setattr(errors, "READ_FOR", PATIENCE)


def needs_server(item: pytest.Item, servers: Collection[str] = SERVERS) -> bool:
    """Return whether a fixture of the test, or a parameter, starts one of these servers."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    products = {str(value).removesuffix("_url") for value in parameters}
    return not products.union(getattr(item, "fixturenames", ())).isdisjoint(servers)


Server = TypeVar("Server", PostgresqlServer, MariadbServer, RabbitmqServer, AzuriteServer)


@contextlib.contextmanager
def running(kind: type[Server], *settings: str, **options: Any) -> Iterator[Server]:  # noqa: ANN401
    """Provide a server of the test's own, as fast as one that survives its own death can be."""
    if "programs" not in options and not kind.installed():
        not_installed(f"{kind.product} of {CONFIGURED}", kind.install)
    arguments: list[Any] = [settings] if settings else []
    server = kind(*arguments, **options)
    try:
        yield server
    finally:
        server.close()


def not_installed(product: str, command: str) -> NoReturn:
    """Skip on a laptop; fail where every service has to be there."""
    reason = f"{product} is not installed: {command}"
    if os.environ.get("DELAYLINE_REQUIRE_SERVICES") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


NewerServer = TypeVar("NewerServer", PostgresqlServer, MariadbServer, RabbitmqServer)


def newer(kind: type[NewerServer], *version: int) -> Programs:
    """Return the configured programs if they have the version, else Debian 13's."""
    tree = debian.tree()
    for programs in (CONFIGURED, tree):
        if debian.has(kind, version, programs):
            return programs
    name = f"{kind.product} {'.'.join(map(str, version))}"
    not_installed(name, f"root can, into {tree}, with `python -m tests.servers.debian trixie`")


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """Provide a server whose commits survive its own death, not that of the machine."""
    with running(PostgresqlServer, "fsync=off", "max_prepared_transactions=50") as server:
        yield server


@pytest.fixture
def postgresql_url(postgresql: PostgresqlServer) -> Iterator[str]:
    """Provide an empty database."""
    url = postgresql.new_database()
    yield url
    postgresql.drop_database(url)


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariadbServer]:
    """Provide a server whose commits survive its own death, not that of the machine."""
    with running(MariadbServer, "innodb_flush_log_at_trx_commit=2") as server:
        yield server


@pytest.fixture
def mariadb_url(mariadb: MariadbServer) -> Iterator[str]:
    """Provide an empty database."""
    url = mariadb.new_database()
    yield url
    mariadb.drop_database(url)


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitmqServer]:
    """Provide a node that no test stops."""
    with running(RabbitmqServer) as server:
        yield server


@pytest.fixture
def rabbitmq_url(rabbitmq: RabbitmqServer) -> Iterator[str]:
    """Provide an empty virtual host."""
    url = rabbitmq.new_vhost()
    yield url
    rabbitmq.drop_vhost(url)


@pytest.fixture
def crashing_rabbitmq() -> Iterator[RabbitmqServer]:
    """Provide a node of the test's own, to kill and to start again on the same data."""
    with running(RabbitmqServer) as server:
        yield server


@pytest.fixture(scope="session")
def rabbitmq4() -> Iterator[RabbitmqServer]:
    """Provide a node of version 4 or later that no test stops."""
    with running(RabbitmqServer, programs=newer(RabbitmqServer, 4)) as server:
        yield server


@pytest.fixture
def rabbitmq4_url(rabbitmq4: RabbitmqServer) -> Iterator[str]:
    """Provide an empty virtual host on version 4 or later."""
    url = rabbitmq4.new_vhost()
    yield url
    rabbitmq4.drop_vhost(url)


@pytest.fixture
def crashing_rabbitmq4() -> Iterator[RabbitmqServer]:
    """Provide a node of version 4 or later, to kill and to start again on the same data."""
    with running(RabbitmqServer, programs=newer(RabbitmqServer, 4)) as server:
        yield server


@pytest.fixture(scope="session")
def postgresql17() -> Iterator[PostgresqlServer]:
    """Provide a PostgreSQL 17 or later whose commits survive its own death, not that of the machine."""
    settings = ("fsync=off", "max_prepared_transactions=50")
    with running(PostgresqlServer, *settings, programs=newer(PostgresqlServer, 17)) as server:
        yield server


@pytest.fixture
def postgresql17_url(postgresql17: PostgresqlServer) -> Iterator[str]:
    """Provide an empty database of PostgreSQL 17 or later."""
    url = postgresql17.new_database()
    yield url
    postgresql17.drop_database(url)


@pytest.fixture(scope="session")
def mariadb118() -> Iterator[MariadbServer]:
    """Provide a MariaDB 11.8 or later whose commits survive its own death, not that of the machine."""
    with running(MariadbServer, "innodb_flush_log_at_trx_commit=2", programs=newer(MariadbServer, 11, 8)) as server:
        yield server


@pytest.fixture
def mariadb118_url(mariadb118: MariadbServer) -> Iterator[str]:
    """Provide an empty database of MariaDB 11.8 or later."""
    url = mariadb118.new_database()
    yield url
    mariadb118.drop_database(url)


@pytest.fixture(scope="session")
def azurite() -> Iterator[AzuriteServer]:
    """Provide an emulator of Azure Storage. Its leases and last writes do not survive its death."""
    with running(AzuriteServer) as server:
        yield server


@pytest.fixture
def azure_url(azurite: AzuriteServer) -> str:
    """Provide a storage account with nothing in it."""
    return azurite.new_account()
