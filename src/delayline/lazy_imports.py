"""Names of a package that are imported on first use, because their libraries are slow to load or an extra."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy_imports(package: str, sources: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package, as of https://peps.python.org/pep-0562/.

    Args:
        package: The package's name.
        sources: The module of each name that is imported on first use.
    """

    def get(name: str) -> object:
        if name not in sources:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(sources[name]), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *sources})

    return get, names
