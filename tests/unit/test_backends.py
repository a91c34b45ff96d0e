from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from delayline import ConfigurationError, MemoryDelayedMessageStore, MemoryTransport, StoredDelivery
from delayline.backends import BackendUse, backend_of, schemes_with
from delayline.composition import endpoint_from, options_of, planned_setup, store_of, transport_of
from delayline.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

BACKEND = """
from delayline import MemoryDelayedMessageStore, MemoryTransport
from delayline.spi import Backend

class Acme(Backend):
    def transport(self, url, options):
        made = MemoryTransport()
        made.options = options
        return made

    def store(self, url, options):
        return MemoryDelayedMessageStore()
"""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution with the schemes acme:, broken: and old:, and one that delayline has itself."""
    information = tmp_path / "acme_backend-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-backend\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[delayline.backends]\nacme = acme_backend:Acme\nbroken = no_such_module\nold = acme_backend\n"
        "memory = no_such_module\n"
    )
    (tmp_path / "acme_backend.py").write_text(BACKEND)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("delayline.backends._loaded", {})
    return tmp_path


@pytest.mark.usefixtures("distribution")
async def test_a_distribution_adds_a_url_scheme() -> None:
    settings = Settings(endpoint="sales", url="acme://me:secret@host/db", error_queue="failed")
    endpoint = endpoint_from(settings)
    assert isinstance(endpoint.transport, MemoryTransport)
    assert isinstance(endpoint.delayed_delivery, StoredDelivery)
    assert isinstance(endpoint.delayed_delivery.store, MemoryDelayedMessageStore)
    options = vars(endpoint.transport)["options"]
    assert (options.name, options.error_queue) == ("sales", "failed")
    backend = backend_of("ACME+driver://host/db")
    backend.must_exist("acme://host/db")
    findings = await backend.examine("acme://host/db", options_of(settings), BackendUse(["sales"], delays=True))
    assert findings == [("back end", True, "acme: is installed; it has no own checks")]


@pytest.mark.usefixtures("distribution")
async def test_what_a_back_end_cannot_do_is_said_with_its_scheme() -> None:
    settings = Settings(endpoint="sales", url="acme://host/db", journal=True)
    backend, options = backend_of(settings.url), options_of(settings)
    with pytest.raises(ConfigurationError, match="journal = true needs a store in a SQL database, not at 'acme://"):
        store_of(settings)
    with pytest.raises(ConfigurationError, match="acme: holds no messages until they are due: give a store_url"):
        backend.delivery(settings.url, options)
    with pytest.raises(ConfigurationError, match="--dry-run prints SQL, which acme: URLs do not use"):
        await backend.planned_setup(settings.url, options, BackendUse([], delays=True))
    with pytest.raises(ConfigurationError, match="jobs cannot write to acme: URLs: give a database as store_url"):
        backend.sink(settings.url, "a job")
    with pytest.raises(ConfigurationError, match="acme: cannot list, cancel or reschedule"):
        backend.pending(settings.url, options)


async def test_a_dry_run_of_queues_alone_shows_their_database_alone(tmp_path: Path) -> None:
    store, queues = (f"sqlite:///{tmp_path / name}.db" for name in ("store", "queues"))
    assert list(await planned_setup(Settings(store_url=store, transport_url=queues), ["billing"])) == [queues]
    both = await planned_setup(Settings(endpoint="sales", store_url=store, transport_url=queues), [])
    assert list(both) == [store, queues]
    assert all(both.values())


@pytest.mark.usefixtures("distribution")
def test_an_unknown_scheme_lists_the_known_ones() -> None:
    for make in (transport_of, store_of):
        with pytest.raises(
            ConfigurationError, match=r"'other://me:\*\*\*@host'. The supported schemes are acme:, amqp:"
        ):
            make(Settings(url="other://me:secret@host"))


@pytest.mark.usefixtures("distribution")
def test_a_back_end_that_cannot_be_used_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"'no_such_module' for broken: URLs cannot be imported"):
        transport_of(Settings(url="broken://host"))
    with pytest.raises(ConfigurationError, match=r"'acme_backend' for old: URLs is no subclass of delayline.spi"):
        transport_of(Settings(url="old://host"))


@pytest.mark.usefixtures("distribution")
def test_a_distribution_cannot_replace_a_scheme_of_delayline() -> None:
    assert isinstance(transport_of(Settings(url="memory:")), MemoryTransport)


@pytest.mark.usefixtures("distribution")
def test_schemes_are_listed_by_what_their_back_ends_can_do() -> None:
    assert schemes_with(lambda backend: backend.has_tables) == ["mariadb", "mssql", "mysql", "postgresql", "sqlite"]
    assert schemes_with(lambda backend: backend.native_delays is not None) == ["amqp", "amqps"]
