"""Where a broker is and how it is used: read from a URL, or from a connection string as NServiceBus has them."""

from __future__ import annotations

import ipaddress
import re
import ssl
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qsl, quote, unquote

from delayline.checks import positive_seconds
from delayline.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

PLAIN_PORT: Final = 5672
TLS_PORT: Final = 5671
SCHEMES: Final = ("amqp", "amqps")
QUEUE_TYPES: Final = ("quorum", "classic")
TOPOLOGIES: Final = ("conventional", "direct")
LONGEST_PREFIX: Final = 200
LONGEST_VHOST: Final = 255
URL_HINT: Final = (
    "Write amqp://USER:PASSWORD@HOST:PORT/VHOST, with / ? # @ : % in names and passwords as %2F %3F %23 %40 %3A %25; "
    "the nodes of a cluster as HOST:PORT,HOST:PORT"
)
HOSTS: Final = "hosts"
NO_HOST: Final = "Invalid connection string. 'host' value must be supplied. e.g: \"host=myServer\""
#: `key=value`, the value bare or in quotes, as .NET's DbConnectionStringBuilder reads it.
PAIR: Final = re.compile(r"""\s*([^=;]+?)\s*=\s*(?:"((?:[^"]|"")*)"|'((?:[^']|'')*)'|([^;]*?))\s*(?:;|$)""")
URL: Final = re.compile(
    r"(?i:amqps?)://(?P<authority>[^/?#]*)(?:/(?P<vhost>[^/?#]*))?(?:\?(?P<query>[^#]*))?", re.DOTALL
)
#: A node in a URL or a connection string: a name, or an address of version 6 in brackets, and a port.
NODE: Final = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:\[\]@\s]+)?(?::(?P<port>[^:@]*))?")
MANAGEMENT_URL: Final = re.compile(
    r"(?P<scheme>(?i:https?))://(?:(?P<user>[^/?#]*)@)?(?P<host>\[[^\[\]]+\]|[^/?#:@\[\]\s]+)(?::(?P<port>[0-9]+))?"
    r"(?P<path>/[^?#\s]*)?"
)


class Node(NamedTuple):
    """Where a node of the broker listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


class ManagementPlace(NamedTuple):
    """Where the management API of a node is, and who asks it."""

    url: str
    """Without a user and a password."""
    user: str
    password: str


@dataclass(frozen=True, slots=True)
class Tls:
    """How the broker proves who it is, and this client: paths of PEM files, as RabbitMQ's URIs name them."""

    cacertfile: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    password: str | None = field(default=None, repr=False)
    """Of the key file."""
    verify: bool = True
    server_name_indication: str | None = None
    """The name to expect in the broker's certificate, where it is not the host's."""

    def context(self) -> ssl.SSLContext:
        """Return the TLS context of the standard library. Raises ConfigurationError for unusable files."""
        for name in ("cacertfile", "certfile", "keyfile"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigurationError(f"{name}={path!r} is not a file: give the path of a PEM file")
        try:
            context = ssl.create_default_context(cafile=self.cacertfile)
            if self.certfile is not None:
                context.load_cert_chain(self.certfile, self.keyfile, self.password or "")
        except (ssl.SSLError, OSError) as error:
            raise ConfigurationError(f"the TLS files cannot be used: {error}. They have to be PEM files") from error
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """A virtual host of a broker, who connects to it, and how queues and delays are laid out there."""

    host: str = "localhost"
    port: int = PLAIN_PORT
    user: str = "guest"
    password: str = field(default="guest", repr=False)
    vhost: str = "/"
    tls: Tls | None = None
    heartbeat: int = 60
    """Seconds; 0 is none. The broker may ask for less."""
    connection_timeout: float = 10.0
    """Seconds until a broker that does not answer is unavailable; its nodes share them."""
    server_timeout: float = 15.0
    """Seconds until a broker that does not answer on an open connection is given up."""
    queue_type: str = "quorum"
    topology: str = "conventional"
    delays: str = "v2"
    """v2, v1 or a prefix of your own."""
    management: str | None = field(default=None, repr=False)
    """The URL of the management API, where it is not at the usual port; several with commas between."""
    further_nodes: tuple[Node, ...] = ()
    """Nodes of the same cluster, for when the first one takes no connection."""

    @classmethod
    def parse(cls, text: str) -> BrokerAddress:
        """Parse an amqp: or amqps: URL, or `host=...;port=...`; raises ConfigurationError.

        The nodes of a cluster have commas between them, or follow as the option hosts. A URL's options follow `?`:
        heartbeat, connection_timeout (ms), server_timeout (s), queue_type, topology, delays, management, hosts, and of
        TLS cacertfile, certfile, keyfile, password, verify (verify_peer, verify_none), server_name_indication.
        """
        if not isinstance(text, str) or not text.strip():
            raise ConfigurationError(f"a broker's address must be a text, not {text!r}. {URL_HINT}")
        text = text.strip()
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigurationError(f"a broker's address has characters that are no UTF-8. {URL_HINT}") from None
        if "://" in text.partition("=")[0]:
            return _from_url(text)
        return _from_connection_string(text)

    def __str__(self) -> str:
        """Return the URL without the password and the options: for people, logs and errors."""
        scheme = "amqps" if self.tls else "amqp"
        vhost = "" if self.vhost == "/" else f"/{quote(self.vhost, safe='')}"
        return f"{scheme}://{quote(self.user, safe='')}@{self.authority}{vhost}"

    @property
    def short_heartbeat(self) -> int:
        """The heartbeat to ask the broker for, in seconds: short enough for a silent broker to be noticed in time."""
        return min(self.heartbeat, max(1, int(self.server_timeout / 2)))

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, in the order in which they are tried."""
        return (Node(self.host, self.port), *self.further_nodes)

    def at(self, node: Node) -> BrokerAddress:
        """Return the address of that node alone."""
        return replace(self, host=node.host, port=node.port, further_nodes=())

    def in_turn(self, after: Node | None = None) -> Sequence[BrokerAddress]:
        """Return the addresses of the nodes, each once; the address `after`, and all before it, are last."""
        nodes = self.nodes
        begin = nodes.index(after) + 1 if after in nodes else 0
        return [self.at(node) for node in nodes[begin:] + nodes[:begin]]

    @property
    def authority(self) -> str:
        """The nodes' hosts and ports."""
        return ",".join(map(str, self.nodes))

    @property
    def management_places(self) -> Sequence[ManagementPlace]:
        """The management API of each node: as given, else at the usual port of its host, with the same user."""
        if self.management is not None:
            return _management_places(self.management, self.user, self.password)
        scheme, port = ("https", 15671) if self.tls else ("http", 15672)
        urls = dict.fromkeys(f"{scheme}://{bracketed(node.host)}:{port}" for node in self.nodes)
        return [ManagementPlace(url, self.user, self.password) for url in urls]

    @property
    def management_url(self) -> str:
        """Where the management API is, for people: without users and passwords."""
        return ", ".join(management.url for management in self.management_places)


def bracketed(host: str) -> str:
    """Return the host as a URL has it."""
    return f"[{host}]" if ":" in host else host


def _from_url(url: str) -> BrokerAddress:
    scheme = url.partition(":")[0].lower()
    if scheme not in SCHEMES:
        raise ConfigurationError(f"a broker's URL starts with amqp:// or amqps://, not {scheme}://. {URL_HINT}")
    tls = Tls() if scheme == "amqps" else None
    parts = URL.fullmatch(url)
    user, _, hosts = (parts["authority"] if parts else url.partition("://")[2].partition("/")[0]).rpartition("@")
    try:
        nodes = _nodes(hosts, tls) if hosts else []
    except ConfigurationError:  # its text may have the password
        raise ConfigurationError(f"the {scheme}: URL has no usable host and port. {URL_HINT}") from None
    if parts is None:
        raise ConfigurationError(f"the {scheme}: URL has more than a virtual host behind its port. {URL_HINT}")
    if "@" not in parts["authority"] and "@" in f"{parts['vhost']}{(parts['query'] or '').partition('=')[0]}":
        raise ConfigurationError(f"the {scheme}: URL has @ behind / or ?, perhaps in the password. {URL_HINT}")
    name, colon, password = user.partition(":")
    try:
        options = parse_qsl(parts["query"] or "", keep_blank_values=True, errors="strict")
        address = BrokerAddress(
            user=unquote(name, errors="strict") if user else "guest",
            password=unquote(password, errors="strict") if colon else "guest",
            vhost=unquote(parts["vhost"] or "/", errors="strict"),
            tls=tls,
        )
    except UnicodeDecodeError:
        raise ConfigurationError(f"the {scheme}: URL has %XX that are no UTF-8. {URL_HINT}") from None
    return _with_options(address, nodes, options)


def _from_connection_string(text: str) -> BrokerAddress:
    """Parse a connection string of NServiceBus.RabbitMQ; keys in any case."""
    given = {
        name.lower(): double.replace('""', '"') or single.replace("''", "'") or bare
        for name, double, single, bare in PAIR.findall(text)
    }
    if not given.get("host") and not given.get("hosts"):
        raise ConfigurationError(NO_HOST)
    tls = Tls() if _truth("useTls", given.pop("usetls", "false")) else None
    port, hosts = given.pop("port", ""), given.pop("host", "")
    address = BrokerAddress(
        user=given.pop("username", "guest"),
        password=given.pop("password", "guest"),
        vhost=given.pop("virtualhost", "/"),
        tls=tls,
    )
    nodes = _nodes(hosts, tls, _port(port) if port else None) if hosts else []
    return _with_options(address, nodes, given.items())


def _nodes(text: str, tls: Tls | None, port: int | None = None) -> Sequence[Node]:
    """Return the nodes of a list with commas; `port` is for nodes which have none."""
    usual = port or (TLS_PORT if tls else PLAIN_PORT)
    nodes = []
    for node in text.split(","):
        match = NODE.fullmatch(node.strip())
        if match is None or ("," in text and not match["host"]):
            shown = "" if "@" in text else f", not {text!r}"  # a password, perhaps
            raise ConfigurationError(f"a broker's hosts must be HOST:PORT, or several with commas between{shown}")
        nodes.append(Node(_host(match["host"] or "localhost"), _port(match["port"]) if match["port"] else usual))
    return nodes


def _host(text: str) -> str:
    try:
        host = unquote(text, errors="strict").lower()
        if text.startswith("["):
            return str(ipaddress.IPv6Address(host[1:-1]))
        host.encode("idna")  # as looking it up does
    except ValueError:
        host = ""
    if not host or not host.isprintable() or set(host) & set(" /@?#"):
        raise ConfigurationError(f"{text!r} is no name or address of a host")
    return host


def _management_places(text: str, user: str, password: str) -> Sequence[ManagementPlace]:
    """Return the places of a list of URLs with commas; a URL that names a user is asked as that user."""
    places = []
    for url in re.split(r",(?=\s*https?://)", text.strip()):
        match = MANAGEMENT_URL.fullmatch(url.strip())
        if match is None or not 0 < int((match["port"] or "1")[:9]) < 65536:
            raise ConfigurationError(
                "the management API's URL must start with http:// or https://, followed by HOST:PORT, and by a path "
                "where it has one; several URLs with commas between"
            )
        port, path = f":{match['port']}" if match["port"] else "", (match["path"] or "").rstrip("/")
        name, _, secret = (match["user"] or "").partition(":")
        login = (unquote(name), unquote(secret)) if name else (user, password)
        places.append(ManagementPlace(f"{match['scheme'].lower()}://{match['host']}{port}{path}", *login))
    return places


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text[:9]) < 65536:
        raise ConfigurationError(f"port={text!r} must be a number from 1 to 65535")
    return int(text)


def _truth(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigurationError(f"{name}={text!r} must be true or false")
    return text.lower() == "true"


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text[:11]) > 2**31:
        raise ConfigurationError(f"{name}={text!r} must be a whole number of 0 or more")
    return int(text)


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    return positive_seconds(name, seconds)


def _one_of(known: tuple[str, ...]) -> Callable[[str, str], str]:
    def read(name: str, text: str) -> str:
        if text not in known:
            raise ConfigurationError(f"{name}={text!r} must be one of {', '.join(known)}")
        return text

    return read


def _prefix(name: str, text: str) -> str:
    if not text or not text.isprintable() or len(text.encode()) > LONGEST_PREFIX:
        raise ConfigurationError(f"{name}={text!r} must be v2, v1 or a prefix of 1 to {LONGEST_PREFIX} bytes")
    return text


def _management(name: str, text: str) -> str:
    _management_places(_text(name, text), "", "")
    return text


def _verified(name: str, text: str) -> bool:
    return _one_of(("verify_peer", "verify_none"))(name, text) == "verify_peer"


def _text(name: str, text: str) -> str:
    if not text:
        raise ConfigurationError(f"{name}= is empty: give a value or leave it out")
    return text


AMQP_URL_OPTIONS: Final[dict[str, Callable[[str, str], Any]]] = {
    "heartbeat": lambda name, text: min(_number(name, text), 65535),
    "connection_timeout": lambda name, text: max(_number(name, text), 1) / 1000,
    "server_timeout": _seconds,
    "queue_type": _one_of(QUEUE_TYPES),
    "topology": _one_of(TOPOLOGIES),
    "delays": _prefix,
    "management": _management,
    **{field.name: _text for field in fields(Tls)},
    "verify": _verified,
}


def _with_options(address: BrokerAddress, nodes: Sequence[Node], options: Iterable[tuple[str, str]]) -> BrokerAddress:
    of_tls = {field.name for field in fields(Tls)}
    for name, written in options:
        if name == HOSTS:
            nodes = [*nodes, *_nodes(written, address.tls)]
            continue
        if name not in AMQP_URL_OPTIONS:
            known = ", ".join((*AMQP_URL_OPTIONS, HOSTS))
            raise ConfigurationError(f"a broker's address has no option {name!r}. There are: {known}")
        value = AMQP_URL_OPTIONS[name](name, written)
        if name not in of_tls:
            address = replace(address, **{name: value})
        elif address.tls is None:
            raise ConfigurationError(f"{name} is for TLS: write amqps:// (or useTls=true), or leave {name} out")
        else:
            address = replace(address, tls=replace(address.tls, **{name: value}))
    if len(address.vhost.encode()) > LONGEST_VHOST:
        raise ConfigurationError(
            f"a virtual host's name has at most {LONGEST_VHOST} bytes, not {address.vhost[:40]!r}..."
        )
    first, *further = dict.fromkeys(nodes) or [Node("localhost", TLS_PORT if address.tls else PLAIN_PORT)]
    return replace(address, host=first.host, port=first.port, further_nodes=tuple(further))
