"""Addresses of brokers: URLs, NServiceBus's connection strings, and their errors."""

from __future__ import annotations

import contextlib
import ssl
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayline import ConfigurationError
from delayline.rabbitmq.address import BrokerAddress, Node, Tls

if TYPE_CHECKING:
    from pathlib import Path

PORT = 5672
B = Node("b", PORT)
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
        ("amqp://a,b,c", BrokerAddress("a", further_nodes=(Node("b", PORT), Node("c", PORT)))),
        ("amqps://u:p%2C@a:1,b/v", BrokerAddress("a", 1, "u", "p,", "v", Tls(), further_nodes=(Node("b", 5671),))),
        ("amqp://u:p,q@[::1]:7,b,[::2]", BrokerAddress("::1", 7, "u", "p,q", further_nodes=(B, Node("::2", PORT)))),
        ("amqp:///v?hosts=a,b:5672", BrokerAddress("a", vhost="v", further_nodes=(B,))),
        ("amqp://a/v?hosts=b,a", BrokerAddress("a", vhost="v", further_nodes=(B,))),
        ("host=a:7,b;port=9", BrokerAddress("a", 7, further_nodes=(Node("b", 9),))),
        ("hosts=a, b;topology=direct", BrokerAddress("a", topology="direct", further_nodes=(B,))),
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
        ("amqp://a,,b", "no usable host and port"),
        ("amqp://a,b:x", "no usable host and port"),
        ("amqp://a..b", "no usable host and port"),
        ("amqp://[::1", "no usable host and port"),
        ("amqp://[::x]", "no usable host and port"),
        ("amqp://a?hosts=b,:1", "must be HOST:PORT, or several with commas between, not 'b,:1'"),
        ("amqp://a?hosts=u:p@b", "must be HOST:PORT, or several with commas between"),
        ("amqp://a;amqp://b", "more than a virtual host"),
        ("amqp://user:pass@a/\udcff", "characters that are no UTF-8"),
        ("host=a;password=\udcff", "characters that are no UTF-8"),
        ("amqp://user:%ff@a", "%XX that are no UTF-8"),
        ("amqp://a?delays=%ff", "%XX that are no UTF-8"),
        ("amqp://a/" + 256 * "v", "at most 255 bytes"),
        ("amqp://a?heartbeat=" + 5000 * "9", "must be a whole number"),
        ("amqp://a:" + 5000 * "9", "no usable host and port"),
        ("amqp://a?management=m:15672", "must start with http:// or https://"),
        ("amqp://a?management=http://m:99999", "must start with http:// or https://"),
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
        "amqp://user:123/secret@broker",
        "amqp://user:123?secret@broker",
        "amqp://a?hosts=user:secret@b",
        "amqp://a?management=ftp://user:secret@m",
        "amqp://a?management=http://user:secret@m:port",
        "host=user:secret@b",
    ],
)
def test_errors_do_not_contain_passwords(text: str) -> None:
    """Given a wrong address with a password, when refused, then the error has no part of the password."""
    with pytest.raises(ConfigurationError) as caught:
        BrokerAddress.parse(text)
    error = f"{caught.value!r} {caught.value.__cause__!r}"
    assert all(part not in error for part in ("secr", "cret", "sec#", "ret@", "'et"))


PARTS = st.sampled_from([
    "amqp://", "amqps://", "host=", "hosts=", "u:p@", "h", ":5672", ":99999", ",", "/v", "?", "&", ";", "=", "%ff", "%",
    "\ud800", "\0", "[::1]", "[", "]", "@", "#", "é", "٣", "x" * 300, "9" * 5000, "heartbeat=", "management=http://",
    "password=", "port=", "useTls=true", "connection_timeout=", "server_timeout=nan", "verify=", "delays=", " ", "'",
])  # fmt: skip


@given(st.lists(PARTS | st.text(max_size=5), max_size=9).map("".join))
def test_any_text_is_an_address_or_a_configuration_error(text: str) -> None:
    """Given any text, when parsed, then it is refused with our error, or every use of the address works."""
    with contextlib.suppress(ConfigurationError):
        address = BrokerAddress.parse(text)
        assert str(address)
        assert address.management_url
        assert len(address.in_turn()) == len(address.nodes)


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
        ("amqp://a,b:5673,[::1]", "http://a:15672, http://b:15672, http://[::1]:15672"),
        ("amqp://a:5672,a:5673", "http://a:15672"),
        ("amqp://a,b?management=http://u:p@m1:1,https://m2/x", "http://m1:1, https://m2/x"),
    ],
)
def test_the_management_api_is_guessed(text: str, url: str) -> None:
    """Given an address, when its management API is not, then it is where it usually is."""
    assert BrokerAddress.parse(text).management_url == url


def test_the_management_api_has_a_user_of_its_own_where_its_url_names_one() -> None:
    """Given URLs of the management API with and without a user, when read, then each is asked as who it names."""
    address = BrokerAddress.parse("amqp://me:mine@a?management=http://admin:s%40fe@m1,http://m2,http://:x@m3")
    asked = [(place.user, place.password) for place in address.management_places]
    assert asked == [("admin", "s@fe"), ("me", "mine"), ("me", "mine")]
    assert address.management_url == "http://m1, http://m2, http://m3"


def test_nodes_are_tried_in_turn_beginning_behind_the_lost_one() -> None:
    """Given three nodes, when one was lost, then those behind it come first and it comes last."""
    address = BrokerAddress.parse("amqp://a,b,c:7/v")
    nodes = address.in_turn()
    assert [str(node) for node in nodes] == ["amqp://guest@a:5672/v", "amqp://guest@b:5672/v", "amqp://guest@c:7/v"]
    assert [node.host for node in address.in_turn(nodes[1].nodes[0])] == ["c", "a", "b"]
    assert [node.host for node in address.in_turn(nodes[2].nodes[0])] == ["a", "b", "c"]
    assert str(address) == "amqp://guest@a:5672,b:5672,c:7/v"


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
