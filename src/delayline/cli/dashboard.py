"""`delayline dashboard`: serve the dashboard of endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import ipaddress
import os
import signal
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from delayline.cli.log_format import LogOnStderr, log_options
from delayline.cli.options import PLACE_SETTINGS, examples, json_option, settings_options
from delayline.cli.target import load_endpoint
from delayline.errors import ConfigurationError, MissingExtra
from delayline.opening import refuse_memory
from delayline.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import uvicorn
    from starlette.types import ASGIApp

    from delayline.cli.screen import Screen
    from delayline.endpoint import Endpoint
    from delayline.settings import Settings

TOKEN: Final = "DELAYLINE_DASHBOARD_TOKEN"  # noqa: S105 - the name of the variable
USERS: Final = "DELAYLINE_DASHBOARD_USERS"
LARGEST_FILE: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def url_host(self) -> str:
        """The host as URLs and Host headers write it."""
        return f"[{self.host}]" if ":" in self.host else self.host

    def __str__(self) -> str:
        return f"{self.url_host}:{self.port}"


@click.command(
    epilog=examples(
        "delayline dashboard --endpoint sales",
        "delayline dashboard sales.toml billing.toml --allow-actions",
        "delayline dashboard shop.billing:endpoint",
        f"{TOKEN}=... delayline dashboard --listen 0.0.0.0:8080 --allowed-host ops.example.com",
    )
)
@click.argument("targets", nargs=-1, metavar="[FILE.toml|MODULE:ENDPOINT]...")
@click.option("--listen", default="127.0.0.1:8080", show_default=True, metavar="HOST:PORT", help="Where to listen.")
@click.option("--allow-actions", is_flag=True, help="Let messages be changed; without it the dashboard only shows.")
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="A host name that browsers reach it by, beside those of --listen and loopback. Repeatable.",
)
@click.option(
    "--token-file", type=click.Path(), metavar="FILE", help=f"Ask for the token in this file. [{TOKEN}: the token]"
)
@click.option(
    "--users-file",
    type=click.Path(),
    metavar="FILE",
    help=f"Ask for a user name and password, which are lines NAME:PASSWORD of this file. [{USERS}: the lines]",
)
@log_options
@settings_options(*PLACE_SETTINGS)
@json_option
def dashboard(
    settings: Settings,
    screen: Screen,
    log: LogOnStderr,
    targets: tuple[str, ...],
    listen: str,
    allow_actions: bool,
    allowed_hosts: tuple[str, ...],
    token_file: str | None,
    users_file: str | None,
) -> None:
    """Serve the dashboard until SIGINT or SIGTERM: due, late, pending and failed messages, and actions on them.

    It shows the endpoint of the settings, or the endpoints of the settings files and Endpoint objects given. It listens
    on this machine only; for others it needs a token or users, which travel as they are: put a proxy with TLS in front.
    """
    from delayline.telemetry.http_server import parse_address

    if not targets:
        refuse_memory(settings)
    address = Address(*parse_address(listen))
    endpoints = [_endpoint_at(target) for target in targets] or [settings]
    log.keep()
    token = _secret(TOKEN, token_file)
    users = _users(_secret(USERS, users_file))
    if not address.is_loopback and token is None and not users:
        raise ConfigurationError(
            f"{address} can be reached from other machines, and no token or user is set. "
            f"Set {TOKEN} or {USERS}, or listen on 127.0.0.1:{address.port}"
        )
    application = _application(
        endpoints, allow_actions=allow_actions, hosts=[address.url_host, *allowed_hosts], token=token, users=users
    )
    asyncio.run(_serve(application, address, screen, allow_actions=allow_actions))


def _endpoint_at(target: str) -> Settings | Endpoint:
    if target.endswith(".toml"):
        settings = load_settings(target, environ={})
        refuse_memory(settings)
        return settings
    return load_endpoint(target)


def _secret(variable: str, path: str | None) -> str | None:
    """Return the contents of the file or the variable. Raises ConfigurationError."""
    if path is None:
        secret: str | None = os.environ.get(variable)
    else:
        try:
            with Path(path).open(encoding="utf-8") as file:
                secret = file.read(LARGEST_FILE)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigurationError(f"cannot read {path!r}: {reason}") from error
    if secret is None:
        return None
    if not secret.strip():
        raise ConfigurationError(f"{path or variable} is empty: put a secret into it, or leave it out")
    return secret.strip()


def _users(lines: str | None) -> Mapping[str, str]:
    users: dict[str, str] = {}
    for number, line in enumerate((lines or "").splitlines(), 1):
        if not line.strip():
            continue
        name, colon, password = line.strip().partition(":")
        if not colon or not name:
            raise ConfigurationError(f"line {number} of the users is not NAME:PASSWORD")
        users[name] = password
    return users


def _application(
    endpoints: Sequence[Settings | Endpoint],
    *,
    allow_actions: bool,
    hosts: Sequence[str],
    token: str | None,
    users: Mapping[str, str],
) -> ASGIApp:
    from delayline.dashboard import Actor, app
    from delayline.dashboard.security import LOOPBACK, Credentials

    if token is not None or users:
        authorize: Credentials | None = Credentials(token=token, users=users, may_act=allow_actions)
        return app(endpoints, read_only=not allow_actions, authorize=authorize, allowed_hosts=[*LOOPBACK, *hosts])
    actor = Actor(_user_name(), may_act=allow_actions)
    return app(endpoints, read_only=not allow_actions, authorize=lambda _: actor, allowed_hosts=[*LOOPBACK, *hosts])


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "local user"


async def _serve(application: ASGIApp, address: Address, screen: Screen, *, allow_actions: bool) -> None:
    try:
        from delayline.dashboard.server import server_of
    except ModuleNotFoundError as error:
        raise MissingExtra("dashboard", "delayline dashboard") from error

    made = _listening(address)
    with made:
        bound = Address(address.host, made.getsockname()[1])
        url = f"http://{bound}/"
        screen.echo(f"dashboard at {url}, {'actions allowed' if allow_actions else 'read-only'}. Ctrl+C stops it")
        screen.document({"url": url, "read_only": not allow_actions})
        server = server_of(application)
        server.capture_signals = partial(_ended_by_signal, server)  # type: ignore[method-assign]
        await server.serve(sockets=[made])


@contextlib.contextmanager
def _ended_by_signal(server: uvicorn.Server) -> Iterator[None]:
    """Let SIGINT and SIGTERM end the server; its own handlers raise the signal again when it has ended."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.handle_exit, number, None)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _listening(address: Address) -> socket.socket:
    """Return a socket that listens. Raises ConfigurationError with what to do."""
    from delayline.dashboard.server import listening
    from delayline.telemetry.http_server import refusal

    try:
        return listening(address.host, address.port)
    except OSError as error:
        raise ConfigurationError(refusal(str(address), error)) from error
