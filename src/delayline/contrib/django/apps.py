"""The app of Django: its tables are created by `manage.py migrate`, its settings are checked by `manage.py check`."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from django.apps import AppConfig
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.models.signals import post_migrate

from delayline.contrib.django.project_settings import ProjectSettings
from delayline.contrib.django.sending import stop_sender

if TYPE_CHECKING:
    from collections.abc import Callable


class DelaylineConfig(AppConfig):  # type: ignore[misc]  # Django is not typed
    """Starts nothing: views send with `sender()`, and `manage.py delayline run` delivers and handles."""

    name = "delayline.contrib.django"
    label = "delayline"

    def ready(self) -> None:
        """Have the settings checked, tables created after a migration, and no connection left where tests end."""
        checks.register(check_settings)
        post_migrate.connect(create_tables, sender=self)
        for connection in connections.all():
            creation = connection.creation
            creation.destroy_test_db = partial(stopped_before, creation.destroy_test_db)


def check_settings(**options: object) -> list[checks.CheckMessage]:
    """Return an error if DELAYLINE in the settings cannot be used."""
    del options
    try:
        ProjectSettings.of_project().endpoint()
    except ImproperlyConfigured as error:
        return [checks.Error(str(error), id="delayline.E001")]
    return []


def stopped_before(destroy: Callable[..., None], *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - Django's
    """Stop the sender, whose connections would keep a server from dropping the database of the tests."""
    stop_sender()
    destroy(*arguments, **options)


def create_tables(*, using: str, **options: Any) -> None:  # noqa: ANN401 - of the signal
    """Create delayline's tables in the database that was migrated, or upgrade them, where it has any there."""
    project = ProjectSettings.of_project()
    if using != project.database:
        return
    if options.get("verbosity", 1):
        print("  Setting up delayline's tables", file=options.get("stdout"))
    with ThreadPoolExecutor(1) as thread:  # the caller's may run an event loop
        thread.submit(asyncio.run, project.set_up(project.checked())).result()
