"""The servers of Debian 13, which tests have beside those of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.servers.mariadb import MariadbServer
    from tests.servers.postgresql import PostgresqlServer
    from tests.servers.rabbitmq import RabbitmqServer


def test_rabbitmq_is_of_version_4(rabbitmq4: RabbitmqServer) -> None:
    """Given the fixture for version 4, when the node is asked for its version, then it is 4 or later."""
    said = rabbitmq4.api("GET", "overview").json()["rabbitmq_version"]
    assert int(said.split(".")[0]) >= 4


def test_postgresql_is_of_version_17(postgresql17: PostgresqlServer) -> None:
    """Given the fixture for version 17, when the server is asked for its version, then it is 17 or later."""
    with postgresql17.administrator() as connection:
        [said] = connection.execute("SHOW server_version_num").fetchall()[0]
    assert int(said) >= 17_00_00


def test_mariadb_is_of_version_11_8(mariadb118: MariadbServer) -> None:
    """Given the fixture for version 11.8, when the server is asked for its version, then it is 11.8 or later."""
    with mariadb118.administrator() as cursor:
        cursor.execute("SELECT version()")
        said = cursor.fetchone()[0]
    assert tuple(map(int, said.split(".")[:2])) >= (11, 8)
