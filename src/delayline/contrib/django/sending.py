"""The sender of a process that serves requests: it starts with the first send, and takes part in `atomic()`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar

from django.db import connections

from delayline.contrib.django.project_settings import ProjectSettings
from delayline.external import UNSET
from delayline.sync import SyncEndpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from delayline.external import ExternalConnection, Unset

Result = TypeVar("Result")
_lock: Final = threading.Lock()
_senders: Final[dict[str, DjangoSender]] = {}


class DjangoSender(SyncEndpoint):
    """Sends from views and other code of a Django project; may be called from any thread.

    Inside of `atomic()` all it does is part of Django's transaction; outside it is done at once. `transaction=` names
    another.

    Args:
        project: The project's settings.
    """

    def __init__(self, project: ProjectSettings) -> None:
        super().__init__(project.sending_endpoint())
        self.database: str = project.database
        self.place: object = database_name(project.database)

    @property
    def is_usable(self) -> bool:
        """Whether it is started in this process, and Django's database is the one that it was started with."""
        return self.endpoint.started and self.place == database_name(self.database)

    def run_in(
        self, transaction: ExternalConnection | Unset, work: Callable[..., Coroutine[Any, Any, Result]]
    ) -> Result:
        """Run a coroutine function of the endpoint in Django's transaction, if one is open, else in its own."""
        if transaction is UNSET and connections[self.database].in_atomic_block:
            transaction = connections[self.database]
        return super().run_in(transaction, work)


def sender() -> DjangoSender:
    """Return this process's sender, started.

    Call it where you send, not when a module is imported: servers fork their workers after that. It needs no stop, as a
    message is stored when `send` returns.

    Raises:
        ImproperlyConfigured: DELAYLINE in the settings cannot be used.
        DelaylineError: It cannot be started: see `Endpoint.start`.

    Example:
        ```python
        with transaction.atomic():
            order = Order.objects.create(number=17)
            sender().send("shop", Remind(order.pk), delay=timedelta(days=14), message_id=f"remind-{order.pk}")
        ```
    """
    found = _senders.get("sender")
    if found is not None and found.is_usable:
        return found
    with _lock:
        found = _senders.get("sender")
        if found is None or not found.is_usable:
            if found is not None:
                found.stop()  # nothing, in a process that was forked
            found = DjangoSender(ProjectSettings.of_project())
            found.start()
            _senders["sender"] = found
        return found


def stop_sender() -> None:
    """Stop this process's sender, if it is started; the next call of `sender` starts another."""
    with _lock:
        found = _senders.pop("sender", None)
        if found is not None:
            found.stop()


def database_name(database: str) -> object:
    """Return what Django calls the database at present: tests have one of their own."""
    return connections[database].settings_dict["NAME"]
