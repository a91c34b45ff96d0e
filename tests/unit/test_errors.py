"""The tree drawn at the top of the file is the real one."""

from __future__ import annotations

import builtins
import re

import pytest

from delayline import errors
from delayline.errors import DelaylineError, DispatchFailed, MissingExtra, QueueNotFound

LINE = re.compile(r"^(?P<lead>[│ ]*)[├└]── (?P<name>\w+)(?: \((?P<parent>\w+)\))?")


def drawn() -> dict[str, tuple[str, str | None]]:
    """Return class name → (parent in the tree, built-in parent), as the docstring draws it."""
    tree: dict[str, tuple[str, str | None]] = {}
    path = {-1: "DelaylineError"}
    for match in filter(None, map(LINE.match, (errors.__doc__ or "").splitlines())):
        depth = len(match["lead"]) // 4
        path[depth] = match["name"]
        tree[match["name"]] = (path[depth - 1], match["parent"])
    return tree


def real() -> dict[str, type[DelaylineError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, DelaylineError) and value is not DelaylineError
    }


def test_the_drawing_names_every_error_once() -> None:
    assert sorted(drawn()) == sorted(real())
    assert len(drawn()) >= 13


@pytest.mark.parametrize("name", sorted(drawn()))
def test_the_drawing_has_the_parents_of_each_error(name: str) -> None:
    parent, builtin = drawn()[name]
    bases = [base.__name__ for base in real()[name].__bases__]
    assert bases == ([parent, builtin] if builtin else [parent])
    assert builtin is None or issubclass(real()[name], getattr(builtins, builtin))


def test_every_error_is_documented() -> None:
    assert all(error.__doc__ for error in real().values())


def test_errors_with_facts_keep_them_and_have_a_remedy() -> None:
    assert QueueNotFound("billing").queue == "billing"
    assert "delayline setup --queue" in str(QueueNotFound("billing"))
    assert MissingExtra("spark", "the audit").extra == "spark"
    assert str(MissingExtra("spark", "the audit")).endswith("pip install 'delayline[spark]'")
    failed = DispatchFailed({3: QueueNotFound("billing"), 5: OSError("x")})
    assert list(failed.failures) == [3, 5]
    assert str(failed).startswith("2 operation(s) were not sent, the first because: queue 'billing'")
