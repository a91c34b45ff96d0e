"""The endpoint of a Django project with all its handlers: what `manage.py delayline run` runs."""

from __future__ import annotations

import django
from django.apps import apps
from django.utils.module_loading import autodiscover_modules

if not apps.ready:
    django.setup()

from delayline.contrib.django.project_endpoint import endpoint

autodiscover_modules("handlers")

__all__ = ["endpoint"]
