"""Tests that a class does not claim are skipped before their set-up; wide tests on servers are sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from tests.conftest import needs_server

from delayline import TransactionMode
from delayline.testing.conformance.delivery import DeliveryFixtures

if TYPE_CHECKING:
    from collections.abc import Generator

NOT_CLAIMED: Final = "not claimed: "
#: How many cases of a delivery test `make test` runs on a server, of those that differ in step, error and mode. Memory
#: and SQLite run all.
WIDE: Final = 6

#: Why a class skipped a test, by the class and by the fixture or the transaction mode that it does not claim.
_reasons: Final[dict[tuple[object, str], str]] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if issubclass(getattr(item, "cls", None) or object, DeliveryFixtures) and needs_server(item):
            item.add_marker(pytest.mark.sample(WIDE))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for need in needs(item):
        if reason := _reasons.get((getattr(item, "cls", None), need)):
            pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and call.excinfo is not None and NOT_CLAIMED in (reason := str(call.excinfo.value)):
        # In a fixture the capability is that fixture's; in a test, only a mode is every other test's, too.
        need = call.excinfo.traceback[-1].name if call.when == "setup" else reason.removeprefix(NOT_CLAIMED)
        if need in needs(item):
            _reasons[getattr(item, "cls", None), need] = reason
    return report


def needs(item: pytest.Item) -> set[str]:
    """Return the names of the test's fixtures and of the transaction mode that it is run in."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    modes = {value.name for value in parameters if isinstance(value, TransactionMode)}
    return modes.union(getattr(item, "fixturenames", ()))
