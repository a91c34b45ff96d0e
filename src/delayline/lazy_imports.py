"""Names of a package that are imported on first use, because their libraries are slow to load or an extra."""

from __future__ import annotations

import contextlib
import difflib
import dis
import importlib
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


#: Where a name is looked for that a package does not have.
PUBLIC_MODULES: Final = ("delayline", "delayline.errors", "delayline.spi", "delayline.testing", "delayline.timeouts")
IMPORT_FROM: Final = dis.opmap["IMPORT_FROM"]


def lazy_imports(package: str, sources: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package, as of https://peps.python.org/pep-0562/.

    Args:
        package: The package's name.
        sources: The module of each name that is imported on first use.
    """

    def get(name: str) -> object:
        if name not in sources:
            problem = f"module {package!r} has no attribute {name!r}"
            if not name[:1].isupper():  # what tools look for in any module
                raise AttributeError(problem, name=name)
            problem = f"{problem}{_remedy(package, name, sources)}"
            caller = sys._getframe(1)
            if (
                caller.f_code.co_code[caller.f_lasti] == IMPORT_FROM
            ):  # which would leave out the text of an AttributeError
                raise ImportError(problem, name=package)
            raise AttributeError(problem, name=name)
        return getattr(importlib.import_module(sources[name]), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *sources})

    return get, names


def _remedy(package: str, name: str, sources: Mapping[str, str]) -> str:
    """Return where there is a name that a package does not have, or which it has that is like it."""
    for module in PUBLIC_MODULES:
        with contextlib.suppress(ImportError):  # of one that needs an extra
            if module != package and name in vars(importlib.import_module(module)):
                return f": write `from {module} import {name}`"
    known = {known.lower(): known for known in (*vars(sys.modules[package]), *sources) if known[0].isupper()}
    similar = difflib.get_close_matches(name.lower(), known, n=1)
    return f": did you mean {known[similar[0]]}?" if similar else ""
