"""delayline in a Django project, whose settings are `DELAYLINE = {"ENDPOINT": "shop"}`.

With `"delayline.contrib.django"` in INSTALLED_APPS, `endpoint` takes the handlers of the `handlers.py` of each app,
`sender()` sends from views, `manage.py delayline run` delivers and handles, and `manage.py migrate` creates the tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from delayline.lazy_imports import lazy_imports as _lazy_imports

if TYPE_CHECKING:
    from delayline.contrib.django.sending import sender
    from delayline.endpoint import Endpoint

    endpoint: Endpoint

__all__ = ["endpoint", "sender"]

if not TYPE_CHECKING:
    # Imported on first use: Django's settings are not there yet when Django imports the app.
    __getattr__, __dir__ = _lazy_imports(
        __name__,
        {"endpoint": "delayline.contrib.django.project_endpoint", "sender": "delayline.contrib.django.sending"},
    )
