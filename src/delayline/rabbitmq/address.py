"""Where a broker is and how it is used: read from a URL, or from a connection string as NServiceBus has them."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from delayline.checks import positive_seconds
from delayline.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PLAIN_PORT: Final = 5672
TLS_PORT: Final = 5671
SCHEMES: Final = ("amqp", "amqps")
QUEUE_TYPES: Final = ("quorum", "classic")
TOPOLOGIES: Final = ("conventional", "direct")
LONGEST_PREFIX: Final = 200
HINT: Final = (
    "Write amqp://USER:PASSWORD@HOST:PORT/VHOST, with / ? # @ : % in names and passwords as %2F %3F %23 %40 %3A %25"
)
NO_HOST: Final = "Invalid connection string. 'host' value must be supplied. e.g: \"host=myServer\""
#: `key=value`, the value bare or in quotes, as .NET's DbConnectionStringBuilder reads it.
PAIR: Final = re.compile(r"""\s*([^=;]+?)\s*=\s*(?:"((?:[^"]|"")*)"|'((?:[^']|'')*)'|([^;]*?))\s*(?:;|$)""")


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
    """One virtual host of one broker, who connects to it, and how queues and delays are laid out there."""

    host: str = "localhost"
    port: int = PLAIN_PORT
    user: str = "guest"
    password: str = field(default="guest", repr=False)
    vhost: str = "/"
    tls: Tls | None = None
    heartbeat: int = 60
    """Seconds; 0 is none. The broker may ask for less."""
    connection_timeout: float = 10.0
    """Seconds until a broker that does not answer is unavailable."""
    server_timeout: float = 15.0
    """Seconds until a broker that does not answer on an open connection is given up."""
    queue_type: str = "quorum"
    topology: str = "conventional"
    delays: str = "v2"
    """v2, v1 or a prefix of your own."""
    management: str | None = field(default=None, repr=False)
    """The URL of the management API, where it is not at the usual port."""

    @classmethod
    def parse(cls, text: str) -> BrokerAddress:
        """Parse an amqp: or amqps: URL, or `host=...;port=...`; raises ConfigurationError.

        A URL's options follow `?`: heartbeat, connection_timeout (ms), server_timeout (s), queue_type, topology,
        delays, management, and of TLS cacertfile, certfile, keyfile, password, verify (verify_peer, verify_none),
        server_name_indication.
        """
        if not isinstance(text, str) or not text.strip():
            raise ConfigurationError(f"a broker's address must be a text, not {text!r}. {HINT}")
        text = text.strip()
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
        """The heartbeat to ask the broker for, in seconds: short enough for a silent one to be noticed in time."""
        return min(self.heartbeat, max(1, int(self.server_timeout / 2)))

    @property
    def authority(self) -> str:
        """The host and port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def management_url(self) -> str:
        """The management API: as given, else at the usual port of the same host. It has no user and no password."""
        if self.management is not None:
            return self.management.rstrip("/")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}:15671" if self.tls else f"http://{host}:15672"


def _from_url(url: str) -> BrokerAddress:
    scheme = url.partition(":")[0].lower()
    if scheme not in SCHEMES:
        raise ConfigurationError(f"a broker's URL starts with amqp:// or amqps://, not {scheme}://. {HINT}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # its text may have the password
        raise ConfigurationError(f"the {scheme}: URL has no usable host and port. {HINT}") from None
    vhost = parts.path.removeprefix("/")
    if parts.fragment or "/" in vhost:
        raise ConfigurationError(f"the {scheme}: URL has more than a virtual host behind its port. {HINT}")
    address = BrokerAddress(
        host=unquote(host or "localhost"),
        port=port or (TLS_PORT if scheme == "amqps" else PLAIN_PORT),
        user=_decoded(parts.username, "guest"),
        password=_decoded(parts.password, "guest"),
        vhost=_decoded(vhost or None, "/"),
        tls=Tls() if scheme == "amqps" else None,
    )
    return _with_options(address, parse_qsl(parts.query, keep_blank_values=True))


def _decoded(text: str | None, default: str) -> str:
    return default if text is None else unquote(text)


def _from_connection_string(text: str) -> BrokerAddress:
    """Parse a connection string of NServiceBus.RabbitMQ; keys in any case."""
    given = {
        name.lower(): double.replace('""', '"') or single.replace("''", "'") or bare
        for name, double, single, bare in PAIR.findall(text)
    }
    if not given.get("host"):
        raise ConfigurationError(NO_HOST)
    host, colon, port = given.pop("host").rpartition(":")
    if not colon or port.endswith("]"):
        host, port = f"{host}{colon}{port}", ""
    tls = _truth("useTls", given.pop("usetls", "false"))
    address = BrokerAddress(
        host=host.strip("[]"),
        port=_port(given.pop("port", port) or str(TLS_PORT if tls else PLAIN_PORT)),
        user=given.pop("username", "guest"),
        password=given.pop("password", "guest"),
        vhost=given.pop("virtualhost", "/"),
        tls=Tls() if tls else None,
    )
    return _with_options(address, given.items())


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text) < 65536:
        raise ConfigurationError(f"port={text!r} must be a number from 1 to 65535")
    return int(text)


def _truth(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigurationError(f"{name}={text!r} must be true or false")
    return text.lower() == "true"


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) > 2**31:
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


def _verified(name: str, text: str) -> bool:
    return _one_of(("verify_peer", "verify_none"))(name, text) == "verify_peer"


def _text(name: str, text: str) -> str:
    if not text:
        raise ConfigurationError(f"{name}= is empty: give a value or leave it out")
    return text


OPTIONS: Final[dict[str, Callable[[str, str], Any]]] = {
    "heartbeat": lambda name, text: min(_number(name, text), 65535),
    "connection_timeout": lambda name, text: max(_number(name, text), 1) / 1000,
    "server_timeout": _seconds,
    "queue_type": _one_of(QUEUE_TYPES),
    "topology": _one_of(TOPOLOGIES),
    "delays": _prefix,
    "management": _text,
    **{one.name: _text for one in fields(Tls)},
    "verify": _verified,
}


def _with_options(address: BrokerAddress, options: Iterable[tuple[str, str]]) -> BrokerAddress:
    of_tls = {one.name for one in fields(Tls)}
    for name, text in options:
        if name not in OPTIONS:
            raise ConfigurationError(f"a broker's address has no option {name!r}. There are: {', '.join(OPTIONS)}")
        value = OPTIONS[name](name, text)
        if name not in of_tls:
            address = replace(address, **{name: value})
        elif address.tls is None:
            raise ConfigurationError(f"{name} is for TLS: write amqps:// (or useTls=true), or leave {name} out")
        else:
            address = replace(address, tls=replace(address.tls, **{name: value}))
    return address
