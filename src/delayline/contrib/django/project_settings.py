"""The settings of a Django project: `DELAYLINE`, and the database that Django uses."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections

from delayline.backends import backend_of
from delayline.composition import endpoint_from, outbox_of, set_up_queues
from delayline.contrib.django.database_url import url_of
from delayline.errors import ConfigurationError
from delayline.setting_values import did_you_mean
from delayline.settings import PLACES, Settings, setting_names, variable_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from delayline.endpoint import Endpoint
    from delayline.receiving.context import MessageContext

NAME: Final = "DELAYLINE"
#: What DELAYLINE may hold beside delayline's own settings.
OWN_KEYS: Final = ("DATABASE", "QUEUES")


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
        has_outbox = checked.resolved_outbox_url is not None
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
