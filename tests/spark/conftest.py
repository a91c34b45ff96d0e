"""One Spark session for the whole run: a task may fail twice before its job does."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # for `tests.spark`, however pytest was started

from tests.integration.test_rabbitmq_migration import V2
from tests.spark.broker import with_levels
from tests.spark.daemon import forking
from tests.spark.sharded import NAMES, Shards
from tests.spark.spark_settings import variables
from tests.spark.stores import StoreAt
from tests.spark.tiers import Tiers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession
    from tests.servers.mariadb import MariadbServer
    from tests.servers.postgresql import PostgresqlServer

#: Two cores, and three attempts a task: plain `local[2]` never tries again.
MASTER: Final = "local[2,3]"
#: Of Debian's libpostgresql-jdbc-java.
JDBC_DRIVER: Final = Path("/usr/share/java/postgresql.jar")


PRODUCTS: Final = {"postgresql", "mariadb", "sqlite"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.spark)
            item.add_marker(pytest.mark.timeout(300))  # the first job of a session takes its time
            # tests/integration has what differs between products: staging, commits, the journal
            if hasattr(item, "callspec") and PRODUCTS.issuperset(map(str, item.callspec.params.values())):
                item.add_marker(pytest.mark.sample(1))


@pytest.fixture(scope="session", autouse=True)
def small_sparks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have every JVM that a test starts compile little, and fork its Python workers, which find the tests."""
    with forking() as place:
        os.environ.update(variables(tmp_path_factory.mktemp("conf"), place))
        yield


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from delayline.spark.session import spark_session

    conf = {
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        **({"spark.jars": str(JDBC_DRIVER)} if JDBC_DRIVER.exists() else {}),
    }
    session = spark_session(MASTER, conf=conf)
    yield session
    session.stop()


@pytest.fixture
def small_batches(spark: SparkSession) -> Iterator[None]:
    """Have tasks hand their rows on a hundred at a time, so that one can fail in between."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    spark.conf.set(name, 100)
    yield
    spark.conf.set(name, str(before))


@pytest.fixture
def store(postgresql_url: str) -> StoreAt:
    """Provide a store on PostgreSQL."""
    return StoreAt(postgresql_url)


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> StoreAt:
    """Provide a store on each product."""
    if request.param == "sqlite":
        return StoreAt(f"sqlite:///{tmp_path / 'delayline.db'}")
    return StoreAt(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def tiers(store: StoreAt, tmp_path: Path, spark: SparkSession) -> Tiers:
    """Provide a store on PostgreSQL with a cold tier."""
    return Tiers(store, tmp_path / "cold", spark)


@pytest.fixture
def any_tiers(any_store: StoreAt, tmp_path: Path, spark: SparkSession) -> Tiers:
    """Provide a store on each product with a cold tier."""
    return Tiers(any_store, tmp_path / "cold", spark)


@pytest.fixture
def shards(postgresql: PostgresqlServer, mariadb: MariadbServer, tmp_path: Path) -> Iterator[Shards]:
    """Provide a shard on each product."""
    urls = [postgresql.new_database(), mariadb.new_database(), f"sqlite:///{tmp_path / 'three.db'}"]
    yield Shards(tmp_path, dict(zip(NAMES, urls, strict=True)))
    postgresql.drop_database(urls[0])
    mariadb.drop_database(urls[1])


@pytest.fixture
def broker(rabbitmq_url: str) -> str:
    """Provide a broker with delay levels and the queue `billing`."""
    with_levels(rabbitmq_url, V2)
    return rabbitmq_url
