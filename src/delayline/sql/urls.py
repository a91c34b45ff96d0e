"""URLs of databases: with a single host, or on PostgreSQL with several, as libpq writes them or as SQLAlchemy does."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from delayline.checks import full_scheme
from delayline.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The user and password as SQLAlchemy finds them, and the hosts behind them.
URL_PARTS: Final = re.compile(
    r"(?P<before>(?P<product>\w+)(?:\+\w+)*://(?:[^:/]*(?::[^@]*)?@)?)(?P<hosts>[^/?]*)(?P<rest>.*)", re.DOTALL
)
#: A name, or an address of version 6 in brackets, and a port.
PLACE: Final = re.compile(r"(?:\[(?P<address>[^\[\],@\s]+)\]|(?P<name>[^:\[\],@\s]+))(?::(?P<port>[0-9]{0,5}))?")
SEVERAL_HOSTS: Final = "postgresql"
DEFAULT_PORT: Final = 5432
LARGEST_PORT: Final = 65535
#: Products whose drivers take a single host, and what to do about it.
ONE_HOST: Final = {
    "mariadb": "PyMySQL connects to one host. Name a proxy (MaxScale, HAProxy) or a virtual address that follows the "
    "primary",
    "mysql": "PyMySQL connects to one host. Name a proxy (MySQL Router, ProxySQL, HAProxy) or a virtual address that "
    "follows the primary",
    "mssql": "the drivers of SQL Server connect to one host. Name the listener of the availability group; a port "
    "follows a colon: host:1433",
}


class Host(NamedTuple):
    """Where a server listens."""

    name: str
    port: int

    def __str__(self) -> str:
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"


def read_url(text: str) -> URL:
    """Return the URL. Several hosts are in its query, where libpq and SQLAlchemy read them alike: host=a,b&port=1,2.

    With several hosts the connection is to a host that takes writes, unless the URL says otherwise.

    Raises:
        ConfigurationError: The URL cannot be read, or has several hosts for a driver that connects to a single host.
    """
    try:
        unquote(text, errors="strict").replace("\0", "\udc00").encode()  # rejects NUL and invalid UTF-8
        return _read(full_scheme(text))
    except ConfigurationError:  # which is a ValueError
        raise
    except (ArgumentError, ValueError):
        raise ConfigurationError(
            "the database URL cannot be read; write it like sqlite:///file.db or "
            "postgresql://user:password@host/database, with special characters in the password as %XX, in UTF-8; "
            "several hosts of PostgreSQL as host:port,host:port"
        ) from None  # its text may have a part of the password


def hosts_of(url: URL, default_port: int) -> Sequence[Host]:
    """Return where the server may be, in the order in which it is tried; `localhost` where the URL does not say."""
    places = _listed(url.query.get("host")) or [url.host or "localhost"]
    ports = _listed(url.query.get("port")) or [str(url.port or default_port)]
    ports = ports * len(places) if len(ports) == 1 else ports
    hosts = []
    for host, port in zip(places, ports, strict=False):
        match = PLACE.fullmatch(host)
        own = (match["port"] if match else None) or port
        name = (match["address"] or match["name"]) if match else host
        hosts.append(Host(name, int(own) if own.isdecimal() else default_port))
    return hosts


def listed(hosts: Sequence[Host]) -> dict[str, str]:
    """Return the hosts as options of libpq."""
    return {"host": ",".join(host.name for host in hosts), "port": ",".join(str(host.port) for host in hosts)}


def _read(address: str) -> URL:
    parts = URL_PARTS.match(address)
    product = parts["product"].lower() if parts else ""
    places: list[str] = []
    if parts and "," in parts["hosts"] and "@" not in parts["hosts"]:  # with an @ it has a part of the password
        if product in ONE_HOST:
            raise ConfigurationError(f"the {product}:// URL has several hosts, and {ONE_HOST[product]}")
        if product == SEVERAL_HOSTS:
            places = [unquote(host) for host in parts["hosts"].split(",")]
            address = parts["before"] + parts["rest"]
    url = make_url(address)
    if product != SEVERAL_HOSTS:
        return url
    ports: list[str] = []
    if given := _listed(url.query.get("host")):  # which replace those in front of the path
        places, ports = given, _listed(url.query.get("port")) or ([str(url.port)] if url.port else [])
    if len(places) < 2:
        return url
    hosts = _hosts(places, ports)
    query = {"target_session_attrs": "read-write", **url.query, **listed(hosts)}
    return URL.create(url.drivername, url.username, url.password, database=url.database, query=query)


def _hosts(places: Sequence[str], ports: Sequence[str]) -> list[Host]:
    """Return the hosts, with ports of their own or from a list of as many, or of 1. Raises ValueError."""
    hosts = [_host(host) for host in places]
    if not ports:
        return [Host(name, _port(port)) for name, port in hosts]
    if any(port for _, port in hosts) or len(ports) not in (1, len(hosts)):
        raise ValueError("the hosts and the ports do not match")
    each = ports if len(ports) > 1 else [*ports] * len(hosts)
    return [Host(name, _port(port)) for (name, _), port in zip(hosts, each, strict=True)]


def _host(host: str) -> tuple[str, str]:
    """Return the name and the port of a host, a folder of sockets, or an address without brackets."""
    if host.startswith("/") or (host.count(":") > 1 and re.fullmatch(r"[0-9A-Fa-f:.]+(%[\w.-]+)?", host)):
        return host, ""
    match = PLACE.fullmatch(host)
    if match is None:
        raise ValueError("this is not a host")
    return match["address"] or match["name"], match["port"] or ""


def _port(text: str) -> int:
    """Return the port, or libpq's own where there is none. Raises ValueError."""
    port = int(text or DEFAULT_PORT)
    if not 1 <= port <= LARGEST_PORT:
        raise ValueError("this is not a port")
    return port


def _listed(value: str | Sequence[str] | None) -> list[str]:
    """Return the items of an option, given with commas or several times."""
    values = [value] if isinstance(value, str) else value or ()
    return [item for listed in values for item in listed.split(",")]
