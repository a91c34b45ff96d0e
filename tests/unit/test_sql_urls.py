"""URLs of databases with several hosts: how they are read, shown and refused."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, create_engine

from delayline.errors import ConfigurationError
from delayline.masking import masked
from delayline.spark.options import StoreOptions
from delayline.sql.databases import SqlDatabase, database_at, engine_at

SECRET = "s3cr3t"  # noqa: S105
SEVERAL = [
    (f"postgresql://u:{SECRET}@h1:5432,h2:5433/db", "h1:5432,h2:5433"),
    (f"postgres://u:{SECRET}@h1:5432,h2:5433/db", "h1:5432,h2:5433"),
    (f"postgresql+psycopg://u:{SECRET}@h1,h2/db", "h1:5432,h2:5432"),
    (f"postgresql://u:{SECRET}@h1,h2:5433/db", "h1:5432,h2:5433"),
    (f"postgresql://u:{SECRET}@h1:,h2:5433,h3/db", "h1:5432,h2:5433,h3:5432"),
    (f"postgresql://u:{SECRET}@[::1]:5432,[fe80::1%25eth0],h3:1/db", "[::1]:5432,[fe80::1%eth0]:5432,h3:1"),
    (f"postgresql://u:{SECRET}@/db?host=h1:5432&host=h2:5433", "h1:5432,h2:5433"),
    (f"postgresql://u:{SECRET}@/db?host=[::1]:5432&host=h2", "[::1]:5432,h2:5432"),
    (f"postgresql://u:{SECRET}@/db?host=h1,h2&port=5432,5433", "h1:5432,h2:5433"),
    (f"postgresql://u:{SECRET}@/db?host=h1,::1&port=6000", "h1:6000,[::1]:6000"),
    (f"postgresql://u:{SECRET}@:6000/db?host=h1,h2", "h1:6000,h2:6000"),
    (f"postgresql://u:{SECRET}@%2Frun%2Fa,h2/db", "/run/a:5432,h2:5432"),
    (f"postgresql://u:{SECRET},/%3A@h1,h2/db", "h1:5432,h2:5432"),
]  # fmt: skip


@pytest.mark.parametrize(("url", "hosts"), SEVERAL)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_several_hosts_reach_the_driver(url: str, hosts: str, asynchronous: bool) -> None:
    # When the URL is opened, here and in the pool of handlers' own transactions
    database, engine = database_at(url), engine_at(SqlDatabase(url), 1, asynchronous=asynchronous)
    # Then libpq gets lists of hosts and of ports, and is asked for one that takes writes
    for made in (database.dialect.sql, engine.dialect):
        _, options = made.create_connect_args(engine.url)
        pairs = zip(options["host"].split(","), options["port"].split(","), strict=True)
        assert ",".join(f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name, port in pairs) == hosts
        assert options["target_session_attrs"] == "read-write"
        assert (options["user"], options["dbname"]) == ("u", "db")
        assert options["password"].startswith(SECRET)
    # And errors name the hosts, and no password
    assert str(database.dialect) == f"PostgreSQL database u@{hosts}/db"
    assert SECRET not in str(database.domain)
    assert SECRET not in masked(url)
    assert SECRET not in repr(SqlDatabase(url))


def test_the_urls_own_target_wins() -> None:
    engine = engine_at(SqlDatabase("postgresql://h1,h2/db?target_session_attrs=any"), 1, asynchronous=False)
    _, options = engine.dialect.create_connect_args(engine.url)
    assert options["target_session_attrs"] == "any"


def test_spellings_of_the_same_hosts_share_a_database() -> None:
    spellings: list[str | Engine] = [
        "postgresql://u@h1:5432,h2:5433/db",
        "postgres://u@h1,h2:5433/db",
        "postgresql://u@/db?host=h1&host=h2:5433",
        "postgresql+psycopg://u@/db?host=h1,h2&port=5432,5433",
        create_engine("postgresql+psycopg://u@/db?host=h1:5432&host=h2:5433"),
    ]
    shared = {id(found): found for found in (database_at(spelling) for spelling in spellings)}
    assert len(shared) == 1


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("postgresql://u@/db?host=h1&port=6000", "h1:6000"),
        ("postgresql://u@/db?host=h1:6000", "h1:6000"),
        ("postgresql://u@/db?host=/run/postgresql", "/run/postgresql:5432"),
        ("postgresql://u@[::1]/db", "[::1]:5432"),
        ("postgresql://u@/db", "localhost:5432"),
    ],
)
def test_one_host_is_named_wherever_it_is_written(url: str, place: str) -> None:
    dialect = database_at(url).dialect
    assert str(dialect) == f"PostgreSQL database u@{place}/db"
    assert dialect.connections.server_address == (place.rpartition(":")[0].strip("[]"), int(place.rpartition(":")[2]))


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:{0}@h1:x,h2/db",
        "postgresql://u:{0}@h1:0,h2/db",
        "postgresql://u:{0}@h1:65536,h2/db",
        "postgresql://u:{0}@h1:9999999999999999,h2/db",
        "postgresql://u:{0}@h1,,h2/db",
        "postgresql://u:{0}@h1,/db",
        "postgresql://u:{0}@,/db",
        "postgresql://u:{0}@h1:1:2,h2/db",
        "postgresql://u:{0}@[::1,h2/db",
        "postgresql://u:{0}@h1%2Ch3,h2/db",
        "postgresql://u:{0}@h 1,h2/db",
        "postgresql://u:a,b@{0}:5432@h1,h2/db",
        "postgresql://u:a@{0},b@h1,h2/db",
        "postgresql://u:{0},x",
        "postgresql://u:12{0},x/db",
        "postgresql://u:{0}@/db?host=h1:1&host=h2:2&port=3",
        "postgresql://u:{0}@/db?host=h1,h2,h3&port=1,2",
        "postgresql://u:{0}@/db?host=h1,h2&port=a,b",
        "postgresql://u:{0}@/db?host=a@b,h2",
    ],
)
def test_hosts_that_cannot_be_read_are_refused_without_the_password(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"database URL cannot be read|more than one '@'") as refused:
        database_at(url.format(SECRET))
    assert SECRET not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize("product", ["mariadb", "mysql", "mssql", "mariadb+pymysql", "mssql+pymssql", "MariaDB"])
@pytest.mark.parametrize("hosts", ["h1,h2", "h1:3306,h2:3307", "[::1]:3306,h2"])
def test_one_host_is_asked_for_where_the_driver_takes_one(product: str, hosts: str) -> None:
    with pytest.raises(ConfigurationError, match=r"several hosts.* one host\. Name ") as refused:
        database_at(f"{product}://u:{SECRET}@{hosts}/db")
    assert SECRET not in str(refused.value)


def test_a_job_on_spark_keeps_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a store whose password is in the environment of each machine
    monkeypatch.setenv("STORE_PASSWORD", "a,b@/:c")
    options = StoreOptions.of(
        {"url": "postgresql://u@h1:5432,[::1]:5433/db", "endpoint": "sales", "passwordEnv": "STORE_PASSWORD"}
    )
    # Then its address is that of the same database, with the password
    database = database_at(options.address)
    assert str(database.dialect) == "PostgreSQL database u@h1:5432,[::1]:5433/db"
    assert database.domain.password == "a,b@/:c"  # type: ignore[attr-defined] # noqa: S105
