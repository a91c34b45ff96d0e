"""The settings of a Django project: `DELAYLINE`, and the database that Django uses."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, close_old_connections, connections
from django.utils.connection import ConnectionDoesNotExist
from sqlalchemy import URL

from delayline.backends import backend_of
from delayline.composition import endpoint_from, outbox_of, set_up_queues
from delayline.errors import ConfigurationError
from delayline.setting_values import did_you_mean
from delayline.settings import Settings, setting_names, variable_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from delayline.endpoint import Endpoint
    from delayline.receiving.context import MessageContext

NAME: Final = "DELAYLINE"
#: What DELAYLINE may hold beside delayline's own settings.
OWN_KEYS: Final = ("DATABASE", "QUEUES")
PLACES: Final = ("url", "store_url", "transport_url")
#: Options of libpq that Django passes on as they are.
LIBPQ_OPTIONS: Final = (
    "sslmode", "sslrootcert", "sslcert", "sslkey", "target_session_attrs", "connect_timeout", "options",
)  # fmt: skip
#: MySQLdb's options for TLS, and what a URL calls them.
MYSQL_TLS: Final = {"ca": "ssl_ca", "cert": "ssl_cert", "key": "ssl_key"}


@dataclass(frozen=True, slots=True)
class ProjectSettings:
    """What `DELAYLINE` in Django's settings says.

    Attributes:
        database: The alias, in DATABASES, of the database that messages are sent with: that of the project's rows.
        queues: Further queues that a migration creates.
        given: delayline's settings, by their names.
    """

    database: str
    queues: tuple[str, ...]
    given: Mapping[str, object]

    @staticmethod
    def of_project() -> ProjectSettings:
        """Return the project's. Raises ImproperlyConfigured, with the way to write them."""
        written = getattr(settings, NAME, None)
        if not isinstance(written, dict):
            raise ImproperlyConfigured(
                f'{NAME} must be a dict in the settings, not {written!r}: write {NAME} = {{"ENDPOINT": "shop"}}'
            )
        known = (*OWN_KEYS, *map(str.upper, setting_names()))
        for key in written:
            if key not in known:
                hint = did_you_mean(str(key), known)
                raise ImproperlyConfigured(f"{NAME} has an unknown key {key!r}{hint}. The keys are: {', '.join(known)}")
        if not written.get("ENDPOINT"):
            raise ImproperlyConfigured(f'{NAME} names no endpoint: write {NAME} = {{"ENDPOINT": "shop"}}')
        queues = written.get("QUEUES", ())
        if isinstance(queues, str) or not all(isinstance(queue, str) for queue in queues):
            raise ImproperlyConfigured(f'{NAME}["QUEUES"] must be a list of names, not {queues!r}')
        given = {key.lower(): value for key, value in written.items() if key not in OWN_KEYS}
        return ProjectSettings(written.get("DATABASE", "default"), tuple(queues), given)

    def checked(self) -> Settings:
        """Return delayline's settings: queues and delayed messages are in Django's database if nothing else is said.

        Where none is there, an outbox is, so that messages can be sent in Django's transactions. Raises
        ImproperlyConfigured.
        """
        values: dict[str, Any] = dict(self.given)
        try:
            if not any(values.get(place) for place in PLACES):
                values["url"] = url_of(self.database)
            elif not values.get("outbox_url") and not values.get("inbox_url"):
                values["outbox_url"] = url_of(self.database)
            return Settings(**values)
        except ConfigurationError as error:
            raise ImproperlyConfigured(f"{NAME} in the settings: {error}") from error

    def environment(self) -> dict[str, str]:
        """Return the environment variables that say the same, for delayline's commands."""
        checked = self.checked()
        places = {name: getattr(checked, name) for name in (*PLACES, "outbox_url")}
        named = {name: value for name, value in (dict(self.given) | places).items() if value is not None}
        return {variable_of(name): getattr(value, "name", str(value)) for name, value in named.items()}

    def endpoint(self) -> Endpoint:
        """Return the endpoint that delivers and handles, not started. Raises ImproperlyConfigured."""
        try:
            endpoint = endpoint_from(self.checked())
        except ConfigurationError as error:
            raise ImproperlyConfigured(f"{NAME} in the settings: {error}") from error
        endpoint.around_handlers(with_usable_connections)
        return endpoint

    def sending_endpoint(self) -> Endpoint:
        """Return the endpoint that views send with, not started: it dispatches nothing, but what is in an outbox."""
        checked = replace(self.checked(), inbox_url=None, history=False)
        has_outbox = outbox_of(checked) is not None
        return endpoint_from(checked, polling=has_outbox, send_only=True, setup_infrastructure=False)

    async def set_up(self, checked: Settings) -> None:
        """Create queues and tables where a database has them; only the outbox where they are on a broker."""
        if backend_of(checked.resolved_transport_url).has_tables:
            await endpoint_from(checked).setup()
            if self.queues:
                await set_up_queues(checked, self.queues)
        elif (outbox := outbox_of(checked)) is not None:
            await outbox.setup_infrastructure(checked.named_endpoint)


@contextlib.contextmanager
def with_usable_connections(context: MessageContext) -> Iterator[None]:
    """Close Django's connections that have failed or are old before and after a handler, as it does for requests."""
    close_old_connections()
    try:
        yield
    finally:
        if context.own is None:  # else its transaction is still to be committed
            close_old_connections()


def url_of(database: str) -> str:
    """Return the URL of a database in Django's DATABASES.

    Args:
        database: Its alias.

    Raises:
        ImproperlyConfigured: There is none, or delayline cannot use it as it is written.
    """
    try:
        written: dict[str, Any] = connections[database].settings_dict
    except ConnectionDoesNotExist as error:
        raise ImproperlyConfigured(f'{NAME}["DATABASE"] is {database!r}, which DATABASES does not have') from error
    engine, name, options = written["ENGINE"].rpartition(".")[2], str(written["NAME"] or ""), written.get("OPTIONS", {})
    query: dict[str, str] = {}
    match engine:
        case "sqlite3":
            if not name or ":memory:" in name or name.startswith("file:"):
                raise ImproperlyConfigured(
                    f"the database {database!r} is in this process's memory ({name!r}), where no other process finds "
                    'messages. Give it a file, for tests in DATABASES: {..., "TEST": {"NAME": "test.sqlite3"}}'
                )
            return f"sqlite:///{Path(name).absolute()}"
        case "postgresql" | "postgis":
            scheme, query = "postgresql", {key: str(options[key]) for key in LIBPQ_OPTIONS if key in options}
        case "mysql":
            scheme, tls = _scheme_of_mysql(database), options.get("ssl") or {}
            query = {MYSQL_TLS[key]: str(value) for key, value in tls.items() if key in MYSQL_TLS}
        case _:
            raise ImproperlyConfigured(
                f"delayline has no tables in a database of {written['ENGINE']}. Give the URL of another in "
                f'{NAME}["URL"], as "postgresql://user@host/name"'
            )
    host, user, password = written["HOST"] or None, written["USER"] or None, written["PASSWORD"] or None
    if host is not None and host.startswith("/"):
        query["host" if scheme == "postgresql" else "unix_socket"], host = host, None
    port = int(written["PORT"]) if written["PORT"] and host is not None else None
    if written["PORT"] and host is None and scheme == "postgresql":
        query["port"] = str(written["PORT"])
    made = URL.create(scheme, user, password, host, port, name or None, query)
    return made.render_as_string(hide_password=False)


def _scheme_of_mysql(database: str) -> str:
    """Return the scheme of the product that Django has connected to, mysql where it cannot connect."""
    try:
        return "mariadb" if connections[database].mysql_is_mariadb else "mysql"
    except OperationalError:
        return "mysql"
