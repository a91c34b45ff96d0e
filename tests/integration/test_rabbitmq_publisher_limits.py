"""A broker with special settings: TLS, and a limit of the message size."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from tests.conftest import not_installed
from tests.integration.rabbitmq_queues import a_message, declare, drain, opened, to_queue
from tests.servers.ports import free_port
from tests.servers.rabbitmq import RabbitmqServer

from delayline import BackendUnavailable, InvalidMessage
from delayline.errors import BackendUnusable
from delayline.rabbitmq import RabbitMQTransport
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.publisher import Publisher
from delayline.testing.conformance.messages import operation
from delayline.testing.conformance.transport_fixtures import received

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MOST = 50_000  # bytes
OF_A_BROKER = ["-subj", "/CN=broker", "-addext", "subjectAltName=DNS:broker.test,IP:127.0.0.1"]


class GuardedBroker:
    """A node that takes messages of 50 000 bytes, and TLS connections with a certificate for broker.test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        key, certificate = (str(folder / name) for name in ("key.pem", "certificate.pem"))
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *OF_A_BROKER]
        subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
        settings = [
            f"listeners.ssl.1 = 127.0.0.1:{self.port}",
            f"ssl_options.cacertfile = {certificate}",
            f"ssl_options.certfile = {certificate}",
            f"ssl_options.keyfile = {key}",
            f"max_message_size = {MOST}",
        ]
        self.server = RabbitmqServer(settings)
        self.vhost = self.server.new_vhost()

    def url(self, options: str) -> str:
        """Return the URL of its TLS port."""
        vhost = self.vhost.rpartition("/")[2]
        return f"amqps://guest:guest@127.0.0.1:{self.port}/{vhost}{options}"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedBroker]:
    if not RabbitmqServer.installed():
        not_installed(RabbitmqServer.product, RabbitmqServer.install)
    broker = GuardedBroker(tmp_path_factory.mktemp("tls"))
    yield broker
    broker.server.close()


@pytest.mark.server
@pytest.mark.parametrize("options", ["", "&server_name_indication=broker.test"])
async def test_messages_go_out_over_tls(broker: GuardedBroker, options: str) -> None:
    """Given the authority's file, when connecting by address or by name, then messages of all sizes go out."""
    await declare(broker.vhost, "tls")
    authority = broker.folder / "certificate.pem"
    async with opened(broker.url(f"?cacertfile={authority}{options}")) as publisher:
        batch = [to_queue("tls", a_message(body=b"x" * size)) for size in (0, 1, MOST)] + [to_queue("absent")]
        assert (await publisher.publish(batch)).keys() == {3}
    assert [len(message.body) for message in await drain(broker.vhost, "tls")] == [0, 1, MOST]


@pytest.mark.server
async def test_a_transport_receives_over_tls(broker: GuardedBroker) -> None:
    """Given a certificate for a name that is not the host's, when that is said, then both connections use TLS."""
    authority = broker.folder / "certificate.pem"
    url = broker.url(f"?cacertfile={authority}&server_name_indication=broker.test")
    transport = RabbitMQTransport(url.replace("127.0.0.1", "localhost"))
    await transport.start()
    await transport.setup_infrastructure(["received"])
    await transport.dispatch([operation("received")])
    [found] = await received(await transport.receiver("received"))
    assert found.message.id == "m"
    await transport.stop()


@pytest.mark.server
async def test_an_untrusted_certificate_is_refused(broker: GuardedBroker) -> None:
    """Given no authority, when connecting, then the error says what to give; without verification it works."""
    with pytest.raises(BackendUnusable, match=r"certificate of amqps://.* is not trusted: self.signed.*cacertfile="):
        await Publisher(BrokerAddress.parse(broker.url(""))).open()
    async with opened(broker.url("?verify=verify_none")) as publisher:
        assert (await publisher.publish([to_queue("absent")])).keys() == {0}


@pytest.mark.server
async def test_a_certificate_for_another_name_is_refused(broker: GuardedBroker) -> None:
    """Given another name to expect, when connecting, then the error names both."""
    authority = broker.folder / "certificate.pem"
    url = broker.url(f"?cacertfile={authority}&server_name_indication=other.test")
    with pytest.raises(BackendUnusable, match=r"'other\.test'.*server_name_indication="):
        await Publisher(BrokerAddress.parse(url)).open()


@pytest.mark.server
async def test_tls_to_a_port_without_it_is_reported(broker: GuardedBroker) -> None:
    """Given the plain port, when connecting with TLS, then the error says which port it may be."""
    url = broker.url("?verify=verify_none&connection_timeout=2000").replace(str(broker.port), str(broker.server.port))
    with pytest.raises(BackendUnusable, match="TLS port is often 5671"):
        await Publisher(BrokerAddress.parse(url)).open()


@pytest.mark.server
async def test_no_tls_to_a_port_with_it_is_reported(broker: GuardedBroker) -> None:
    """Given the TLS port, when connecting without it, then the broker is unavailable."""
    with pytest.raises(BackendUnavailable, match="RabbitMQ at amqp://"):
        await Publisher(BrokerAddress("127.0.0.1", broker.port, connection_timeout=2)).open()


@pytest.mark.server
async def test_a_message_beyond_the_brokers_limit_is_reported_with_both_sizes(broker: GuardedBroker) -> None:
    """Given a limit of 50 000 bytes, when a larger message is published, then the others beside it arrive."""
    await declare(broker.vhost, "limited")
    batch = [to_queue("limited", a_message(f"m-{size}", b"x" * size)) for size in (10, MOST + 1, MOST)]
    async with opened(broker.vhost) as publisher:
        for _ in range(2):  # the second time the limit is known, and nothing is sent to learn it
            failures = await publisher.publish(batch)
            assert failures.keys() == {1}
            assert isinstance(failures[1], InvalidMessage)
            assert f"body of {MOST + 1} bytes, the broker takes {MOST} at most" in str(failures[1])
    there = {message.message_id for message in await drain(broker.vhost, "limited")}
    assert there == {"m-10", f"m-{MOST}"}
