"""The endpoint of a Django project, which the `handlers.py` of its apps register handlers with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from delayline.contrib.django.project_settings import ProjectSettings

if TYPE_CHECKING:
    from delayline.endpoint import Endpoint

endpoint: Final[Endpoint] = ProjectSettings.of_project().endpoint()
