"""Conformance on RabbitMQ: queues of both types, in both topologies, with stores."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.sampling import OtherLayout

from delayline import QueueNotFound
from delayline.rabbitmq import RabbitMQTransport
from delayline.rabbitmq.amqp.methods import QueueDelete
from delayline.sql import SqlDelayedMessageStore
from delayline.testing import TransportConformance


class OnRabbitmq:
    """A virtual host for every test; see TransportFixtures for the flags."""

    reads_ahead = True
    shows_hidden = False
    logs_expired = False

    @pytest.fixture(autouse=True)
    def vhost(self, rabbitmq_url: str) -> None:
        self.url = rabbitmq_url

    async def subscribe_without_queue(self, transport: Any, queue: str, topics: Sequence[str]) -> None:  # noqa: ANN401
        """The broker takes no subscription of a queue that is not there: delete it afterwards."""
        with pytest.raises(QueueNotFound):
            await transport.subscribe(queue, topics)
        await transport.setup_infrastructure([queue])
        await transport.subscribe(queue, topics)
        await transport.connection.run(lambda channel: channel.call(QueueDelete(queue=queue)))


class TestRabbitmqTransport(OnRabbitmq, TransportConformance):
    """Quorum queues behind fanout exchanges."""

    async def make_transport(self, tmp_path: Path) -> RabbitMQTransport:
        return RabbitMQTransport(self.url)


class TestRabbitmqClassicTransport(OnRabbitmq, TransportConformance):
    """Classic queues at the default exchange."""

    async def make_transport(self, tmp_path: Path) -> RabbitMQTransport:
        return RabbitMQTransport(self.url, queue_type="classic", topology="direct")


class TestSqliteDeliveryOverRabbitmq(OnRabbitmq, OtherLayout):
    """A store in a file, queues in a broker: at least once."""

    async def make_backends(self, tmp_path: Path) -> tuple[RabbitMQTransport, SqlDelayedMessageStore]:
        transport = RabbitMQTransport(self.url, queue_type="classic")
        return transport, SqlDelayedMessageStore(f"sqlite:///{tmp_path / 'store.db'}")


class TestPostgresqlDeliveryOverRabbitmq(OnRabbitmq, OtherLayout):
    """A store on a server, quorum queues."""

    @pytest.fixture(autouse=True)
    def database(self, postgresql_url: str) -> None:
        self.database_url = postgresql_url

    async def make_backends(self, tmp_path: Path) -> tuple[RabbitMQTransport, SqlDelayedMessageStore]:
        return RabbitMQTransport(self.url), SqlDelayedMessageStore(self.database_url)
