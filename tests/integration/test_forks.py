"""Endpoints and transports that were started before a fork: the child is refused at once, the parent goes on."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.eventually import PATIENCE
from tests.servers.ports import free_port

from delayline import Endpoint, NotStarted, StoredDelivery, SyncEndpoint
from delayline.azure import AzureStorageQueueTransport, DelayedTableDelivery
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.sql import SqlDelayedMessageStore, SqlTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HOUR = timedelta(hours=1)
REFUSED = "before this process was forked.*after the server has forked its workers"


def on_sql(url: str) -> Endpoint:
    return Endpoint("orders", transport=SqlTransport(url), delayed_delivery=StoredDelivery(SqlDelayedMessageStore(url)))


def on_rabbitmq(url: str) -> Endpoint:
    return Endpoint("orders", transport=RabbitMQTransport(url), delayed_delivery=DelayLevelDelivery())


def on_azure(url: str) -> Endpoint:
    transport = AzureStorageQueueTransport(url)
    return Endpoint("orders", transport=transport, delayed_delivery=DelayedTableDelivery(url))


PARTS: dict[str, Callable[[str], Endpoint]] = {
    "sqlite": on_sql,
    "postgresql_url": on_sql,
    "mariadb_url": on_sql,
    "rabbitmq_url": on_rabbitmq,
    "azure_url": on_azure,
}


@pytest.fixture(params=list(PARTS))
def make(request: pytest.FixtureRequest, file: Path) -> Callable[[], Endpoint]:
    """Provide what makes an endpoint on one of the back ends."""
    name = request.param
    url = f"sqlite:///{file}" if name == "sqlite" else request.getfixturevalue(name)
    return lambda: PARTS[name](url)


def in_child(work: Callable[[], None]) -> None:
    """Fork, do the work in the child, and wait for its success; a child that hangs is killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that a process with threads is forked is the point
        child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0, "the child failed"
            return
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hung")


def test_a_sync_endpoint_that_was_started_before_a_fork_is_refused_in_the_child(make: Callable[[], Endpoint]) -> None:
    # Given a process with a started endpoint
    with SyncEndpoint(make()) as sync:
        sync.send("orders", b"", delay=HOUR)

        def use() -> None:
            with pytest.raises(NotStarted, match=REFUSED):
                sync.send("orders", b"", delay=HOUR)
            with pytest.raises(NotStarted, match=REFUSED):
                sync.run(asyncio.sleep(0))
            with pytest.raises(NotStarted, match=REFUSED):
                sync.start()
            sync.stop()

        # Then a fork of it gets an error at once, and the parent goes on
        in_child(use)
        sync.send("orders", b"", delay=HOUR)
        sync.send("orders", b"")


def test_a_child_may_create_another_sync_endpoint(make: Callable[[], Endpoint]) -> None:
    with SyncEndpoint(make()) as sync:

        def use() -> None:
            with SyncEndpoint(make()) as own:
                own.send("orders", b"", delay=HOUR)

        in_child(use)
        sync.send("orders", b"", delay=HOUR)


async def test_an_endpoint_its_transport_and_its_delivery_are_refused_in_the_child(
    make: Callable[[], Endpoint],
) -> None:
    # Given a started endpoint of this event loop
    async with make() as endpoint:
        await endpoint.send("orders", b"", delay=HOUR)

        async def use() -> None:
            with pytest.raises(NotStarted, match=REFUSED):
                await endpoint.send("orders", b"")
            with pytest.raises(NotStarted, match=REFUSED):
                await endpoint.start()
            await endpoint.stop()
            await endpoint.wait_stopped()
            with pytest.raises(NotStarted):
                await endpoint.transport.count("orders")  # type: ignore[attr-defined]

        def run() -> None:
            asyncio.run(asyncio.wait_for(use(), PATIENCE / 2))

        # Then a fork of it can do no harm, and the parent goes on
        in_child(run)
        await endpoint.send("orders", b"", delay=HOUR)
        await endpoint.send("orders", b"")


def _send(sync: SyncEndpoint) -> str:
    try:
        return sync.send("orders", b"", delay=HOUR)
    except NotStarted as error:
        return str(error)


_inherited: list[SyncEndpoint] = []


def _send_inherited(_: int) -> str:
    return _send(_inherited[0])


def test_a_pool_of_forked_processes_is_refused_and_ends(file: Path) -> None:
    with SyncEndpoint(on_sql(f"sqlite:///{file}")) as sync, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        _inherited[:] = [sync]
        with multiprocessing.get_context("fork").Pool(2) as pool:
            texts = pool.map_async(_send_inherited, range(4)).get(PATIENCE)
        assert all("after the server has forked its workers" in text for text in texts)
        assert "forked" not in _send(sync)


EAGER = """
from datetime import timedelta

from delayline import Endpoint, NotStarted, StoredDelivery, SyncEndpoint
from delayline.sql import SqlDelayedMessageStore, SqlTransport

URL = {url!r}
started = []


def shop():
    if not started:
        delivery = StoredDelivery(SqlDelayedMessageStore(URL), polling=False)
        sync = SyncEndpoint(Endpoint("shop", transport=SqlTransport(URL), delayed_delivery=delivery, send_only=True))
        sync.start()
        started.append(sync)
    return started[0]


def app(environ, start_response):
    try:
        text = shop().send("error", b"", delay=timedelta(hours=1))
        start_response("200 OK", [("Content-Type", "text/plain")])
    except NotStarted as error:
        text = str(error)
        start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
    return [text.encode()]


{before}
"""


@contextlib.contextmanager
def gunicorn(folder: Path, before: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Provide a server that loads its application before it forks, and its address."""
    (folder / "shop_app.py").write_text(EAGER.format(url=f"sqlite:///{folder}/shop.db", before=before))
    port = free_port()
    command = [sys.executable, "-m", "gunicorn", "--preload", "--workers", "2", "--bind", f"127.0.0.1:{port}"]
    with (folder / "gunicorn.log").open("wb") as log:
        server = subprocess.Popen([*command, "shop_app:app"], cwd=folder, stdout=log, stderr=log)
    try:
        yield server, f"http://127.0.0.1:{port}/"
    finally:
        if server.poll() is None:
            server.kill()
        server.wait(PATIENCE)


def get(url: str) -> tuple[int, str]:
    """Return status and text; wait for the server to listen."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE) as answer:  # noqa: S310 - of this machine
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except urllib.error.URLError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("before", "status", "text"),
    [("shop()", 503, "after the server has forked its workers"), ("", 200, "-")],
    ids=["started before the fork", "started by the first request"],
)
def test_gunicorn_with_preload_answers_and_ends(tmp_path: Path, before: str, status: int, text: str) -> None:
    with gunicorn(tmp_path, before) as (server, url):
        for _ in range(4):
            found, said = get(url)
            assert (found, text in said) == (status, True), said
        # And its workers heed SIGTERM
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0, (tmp_path / "gunicorn.log").read_text()
    log = (tmp_path / "gunicorn.log").read_text()
    assert "WORKER TIMEOUT" not in log
    assert "SIGKILL" not in log
