"""The public API is `delayline.__all__`, and changes of it are noticed."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import delayline
import delayline.searching
import delayline.spi
import delayline.sql.shards
import delayline.telemetry
import delayline.timeouts

if TYPE_CHECKING:
    from types import ModuleType

#: Reached like the others, and imported on first use: they need an extra.
WITH_AN_EXTRA = {"AzureStorageQueueTransport", "DelayLevelDelivery", "DelayedTableDelivery", "RabbitMQTransport"}
MODULES = [
    delayline, delayline.searching, delayline.spi, delayline.sql.shards, delayline.telemetry, delayline.timeouts
]  # fmt: skip


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.__name__))
def test_the_list_is_sorted_and_has_no_duplicates(module: ModuleType) -> None:
    assert list(module.__all__) == sorted(set(module.__all__))


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.__name__))
def test_every_name_can_be_imported_and_is_documented(module: ModuleType) -> None:
    for name in module.__all__:
        member = getattr(module, name)
        assert member.__name__ == name
        assert inspect.getdoc(member), name


def test_one_name_has_one_home() -> None:
    assert set(delayline.__all__) & set(delayline.spi.__all__) == {"DelayedMessage", "Outcome"}
    assert not set(delayline.timeouts.__all__) & {*delayline.__all__, *delayline.spi.__all__}


def test_every_transport_is_reached_the_same_way() -> None:
    for name in WITH_AN_EXTRA:
        assert getattr(delayline, name).__name__ == name


def test_every_public_member_is_listed() -> None:
    public = {
        name for name in dir(delayline) if not name.startswith("_") and not inspect.ismodule(getattr(delayline, name))
    }
    assert public == {*delayline.__all__, *WITH_AN_EXTRA}


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("from delayline import UnknownMessageType", "write `from delayline.errors import UnknownMessageType`"),
        ("from delayline import DelayedDelivery", "write `from delayline.spi import DelayedDelivery`"),
        ("from delayline import ManualClock", "write `from delayline.testing import ManualClock`"),
        ("from delayline.timeouts import Endpoint", "write `from delayline import Endpoint`"),
        ("from delayline import SQLTransport", "did you mean SqlTransport"),
        ("from delayline import RabbitMqTransport", "did you mean RabbitMQTransport"),
    ],
)
def test_a_name_that_is_elsewhere_is_said_to_be_there(statement: str, text: str) -> None:
    """Given a name of another module, or a misspelt one, then the error has the right one."""
    with pytest.raises(ImportError, match=text):
        exec(statement, {})  # noqa: S102 - as a user's module does
    name = statement.rpartition(" ")[2]
    if statement.startswith("from delayline import"):
        with pytest.raises(AttributeError, match=text):
            getattr(delayline, name)
        assert not hasattr(delayline, name)


def test_a_name_that_nobody_has_is_an_ordinary_error() -> None:
    with pytest.raises(ImportError, match=r"has no attribute 'Zwölf'$"):
        exec("from delayline import Zwölf", {})  # noqa: S102
    with pytest.raises(ImportError, match="cannot import name 'zwölf'"):
        exec("from delayline import zwölf", {})  # noqa: S102
    assert not hasattr(delayline, "__wrapped__")
    from delayline import telemetry  # a module, which is not yet imported when it is asked for

    assert telemetry is delayline.telemetry


def test_the_version_is_that_of_the_installed_package() -> None:
    assert delayline.__version__ == version("delayline")
    assert "__version__" in dir(delayline)


def test_a_folder_that_nothing_has_installed_has_no_known_version() -> None:
    """Given a copy of the package without its metadata, when it is asked for its version, then that is unknown."""
    source = Path(delayline.__file__).parent / "version.py"
    program = "import runpy, sys; print(runpy.run_path(sys.argv[1])['__version__'])"
    command = [sys.executable, "-I", "-S", "-c", program, str(source)]  # -S: without site-packages
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "0+unknown"


def test_sqlalchemy_is_loaded_when_it_is_needed() -> None:
    """Given a fresh interpreter, when delayline is imported, then SQLAlchemy is not, until a name needs it."""
    program = """if True:
        import sys
        import delayline
        assert "sqlalchemy" not in sys.modules
        assert set(delayline.__all__) <= set(dir(delayline))
        assert "sqlalchemy" not in sys.modules
        from delayline import *
        assert SqlTransport is delayline.SqlTransport is delayline.sql.SqlTransport
    """
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_name_that_is_not_there_is_reported() -> None:
    with pytest.raises(AttributeError, match="module 'delayline' has no attribute 'SqlTransprot'"):
        _ = delayline.SqlTransprot  # type: ignore[attr-defined]
