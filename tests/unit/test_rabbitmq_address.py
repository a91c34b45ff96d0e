"""Addresses of brokers: URLs, NServiceBus's connection strings, and their errors."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import pytest

from delayline import ConfigurationError
from delayline.rabbitmq.address import BrokerAddress, Tls

if TYPE_CHECKING:
    from pathlib import Path

PORT = 5672
HOST = "Invalid connection string. 'host' value must be supplied. e.g: \"host=myServer\""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("amqp://", BrokerAddress()),
        ("amqp://broker", BrokerAddress("broker")),
        ("amqp://broker/", BrokerAddress("broker")),
        ("AMQP://broker:5673/%2f", BrokerAddress("broker", 5673)),
        ("amqp://a:b@broker/sales", BrokerAddress("broker", PORT, "a", "b", "sales")),
        ("amqp://a%40b:p%2F%3A%23%C3%A4@h/v%2Fw", BrokerAddress("h", PORT, "a@b", "p/:#ä", "v/w")),
        ("amqp://a:@h", BrokerAddress("h", PORT, "a", "")),
        ("amqp://[::1]:5673/v", BrokerAddress("::1", 5673, vhost="v")),
        ("amqps://broker", BrokerAddress("broker", 5671, tls=Tls())),
        ("amqp://h?heartbeat=5&connection_timeout=1500", BrokerAddress("h", heartbeat=5, connection_timeout=1.5)),
        ("amqp://h?queue_type=classic&topology=direct", BrokerAddress("h", queue_type="classic", topology="direct")),
        ("amqp://h?delays=acme.eu", BrokerAddress("h", delays="acme.eu")),
        ("amqp://h?management=http%3A%2F%2Fm%3A1", BrokerAddress("h", management="http://m:1")),
        ("amqps://h?verify=verify_none", BrokerAddress("h", 5671, tls=Tls(verify=False))),
        (
            "amqps://h?cacertfile=/ca.pem&certfile=c&keyfile=k&password=s&server_name_indication=n",
            BrokerAddress("h", 5671, tls=Tls("/ca.pem", "c", "k", "s", server_name_indication="n")),
        ),
        ("host=broker", BrokerAddress("broker")),
        ("HOST=broker:5673; UserName = a ;Password=b;VirtualHost=v", BrokerAddress("broker", 5673, "a", "b", "v")),
        ("host=broker;port=7;useTls=true", BrokerAddress("broker", 7, tls=Tls())),
        ("host=broker;useTls=True", BrokerAddress("broker", 5671, tls=Tls())),
        ("host=[::1];port=7", BrokerAddress("::1", 7)),
        ('host=h;password="a;b=\'""c"', BrokerAddress("h", PORT, "guest", "a;b='\"c")),
        ("host=h;password='a;b=''c'", BrokerAddress("h", PORT, "guest", "a;b='c")),
        ("host=h;password=a=b==", BrokerAddress("h", PORT, "guest", "a=b==")),
        ("host=h;topology=direct;", BrokerAddress("h", topology="direct")),
    ],
)
def test_an_address_is_read(text: str, expected: BrokerAddress) -> None:
    """Given a URL or a connection string, when read, then every part of it is where it belongs."""
    assert BrokerAddress.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must be a text"),
        ("broker", HOST),
        ("port=5672", HOST),
        ("host=", HOST),
        ("http://broker", "starts with amqp:// or amqps://, not http://"),
        ("amqp://broker:port", "no usable host and port"),
        ("amqp://broker:70000", "no usable host and port"),
        ("amqp://broker/a/b", "more than a virtual host"),
        ("amqp://broker/a#b", "more than a virtual host"),
        ("amqp://broker?heartbeet=5", "no option 'heartbeet'. There are: heartbeat, connection_timeout"),
        ("amqp://broker?heartbeat=often", "heartbeat='often' must be a whole number"),
        ("amqp://broker?queue_type=stream", "queue_type='stream' must be one of quorum, classic"),
        ("amqp://broker?topology=", "topology='' must be one of conventional, direct"),
        ("amqp://broker?delays=", "delays='' must be v2, v1 or a prefix"),
        ("amqp://broker?delays=%0a", r"delays='\n' must be v2, v1 or a prefix"),
        ("amqp://broker?cacertfile=/ca.pem", "cacertfile is for TLS: write amqps://"),
        ("amqps://broker?verify=no", "verify='no' must be one of verify_peer, verify_none"),
        ("amqps://broker?cacertfile=", "cacertfile= is empty"),
        ("host=h;port=x", "port='x' must be a number from 1 to 65535"),
        ("host=h:0", "port='0' must be a number from 1 to 65535"),
        ("host=h;useTls=yes", "useTls='yes' must be true or false"),
        ("host=h;requestedHeartbeat=5", "no option 'requestedheartbeat'"),
    ],
)
def test_an_address_that_cannot_work_is_refused(text: str, said: str) -> None:
    """Given an invalid address, when parsed, then the error names the fault and the remedy."""
    with pytest.raises(ConfigurationError) as caught:
        BrokerAddress.parse(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "amqp://user:secr/et@broker",
        "amqp://user:secret@broker:port",
        "amqp://user:sec#ret@broker",
        "amqp://user:sec?ret@broker",
        "amqp://user:secret@broker/a/b",
        "amqp://user:secret@broker?topology=x",
        "http://user:secret@broker",
        "host=broker;password=secret;port=x",
        "host=broker;password=secret;topology=x",
        "password=secret",
    ],
)
def test_errors_do_not_contain_passwords(text: str) -> None:
    """Given a wrong address with a password, when refused, then the error has no part of the password."""
    with pytest.raises(ConfigurationError) as caught:
        BrokerAddress.parse(text)
    error = f"{caught.value!r} {caught.value.__cause__!r}"
    assert all(part not in error for part in ("secr", "cret", "sec#", "ret@", "'et"))


def test_an_address_does_not_show_its_passwords() -> None:
    """Given an address with passwords, when shown, then they are not, and the rest can be connected to."""
    address = BrokerAddress.parse("amqps://us%2Fer:secret@[::1]:7/v%2Fw?password=hidden&keyfile=k")
    assert "secret" not in repr(address) + str(address)
    assert "hidden" not in repr(address) + str(address)
    assert str(address) == "amqps://us%2Fer@[::1]:7/v%2Fw"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("amqp://u:p@broker/v", "http://broker:15672"),
        ("amqps://broker", "https://broker:15671"),
        ("amqp://[::1]", "http://[::1]:15672"),
        ("amqp://broker?management=https://m/rabbit/", "https://m/rabbit"),
    ],
)
def test_the_management_api_is_guessed(text: str, url: str) -> None:
    """Given an address, when its management API is not, then it is where it usually is."""
    assert BrokerAddress.parse(text).management_url == url


def test_certificates_are_checked_by_default() -> None:
    """Given no options, when a TLS context is made, then it verifies; verify_none is for those who know."""
    assert Tls().context().verify_mode is ssl.CERT_REQUIRED
    assert Tls(verify=False).context().verify_mode is ssl.CERT_NONE


def test_a_tls_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Given the path of no file, when a TLS context is made, then the error names option and path."""
    with pytest.raises(ConfigurationError, match=r"cacertfile='.*/none\.pem' is not a file"):
        Tls(cacertfile=str(tmp_path / "none.pem")).context()


def test_a_tls_file_that_is_not_pem_is_refused(tmp_path: Path) -> None:
    """Given a file with something else in it, when a TLS context is made, then the error says so."""
    (tmp_path / "ca.pem").write_text("hello")
    with pytest.raises(ConfigurationError, match="have to be PEM files"):
        Tls(cacertfile=str(tmp_path / "ca.pem")).context()
