from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from delayline import ConfigurationError, MemoryDelayedMessageStore, MemoryTransport, StoredDelivery
from delayline.composition import endpoint_from, examine, must_exist, store_from, transport_from
from delayline.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

BACKEND = """
from delayline import MemoryDelayedMessageStore, MemoryTransport

urls = []

def transport(url, options):
    urls.append(url)
    made = MemoryTransport()
    made.options = options
    return made

def store(url, options):
    urls.append(url)
    return MemoryDelayedMessageStore()
"""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution with the schemes acme: and broken:, and one that delayline has itself."""
    information = tmp_path / "acme_backend-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-backend\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[delayline.backends]\nacme = acme_backend\nbroken = no_such_module\nmemory = no_such_module\n"
    )
    (tmp_path / "acme_backend.py").write_text(BACKEND)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("distribution")
async def test_a_distribution_adds_a_url_scheme() -> None:
    endpoint = endpoint_from(Settings(endpoint="sales", url="acme://me:secret@host/db", error_queue="failed"))
    assert isinstance(endpoint.transport, MemoryTransport)
    assert isinstance(endpoint.delayed_delivery, StoredDelivery)
    assert isinstance(endpoint.delayed_delivery.store, MemoryDelayedMessageStore)
    options = vars(endpoint.transport)["options"]
    assert (options.name, options.error_queue) == ("sales", "failed")
    must_exist("acme://host/db")
    assert await examine("ACME+driver://host/db") == [("back end", True, "acme: is installed; it has no own checks")]


@pytest.mark.usefixtures("distribution")
def test_an_unknown_scheme_lists_the_known_ones() -> None:
    for make in (transport_from, store_from):
        with pytest.raises(
            ConfigurationError, match=r"'other://me:\*\*\*@host'. The supported schemes are acme:, amqp:"
        ):
            make("other://me:secret@host")


@pytest.mark.usefixtures("distribution")
def test_a_back_end_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"'no_such_module' for broken: URLs cannot be imported"):
        transport_from("broken://host")


@pytest.mark.usefixtures("distribution")
def test_a_distribution_cannot_replace_a_scheme_of_delayline() -> None:
    assert isinstance(transport_from("memory:"), MemoryTransport)
