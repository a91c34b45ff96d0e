"""Where uv is: on PATH, beside PATH as `uv run` says, or a module of the Python that the environment was made from."""

from __future__ import annotations

import os
import shutil
import sys


def command() -> list[str]:
    """Return what runs uv."""
    found = os.environ.get("UV") or shutil.which("uv")
    return [found] if found else [f"{sys.base_prefix}/bin/python3", "-m", "uv"]
