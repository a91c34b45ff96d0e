from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from tests.cli.conftest import Result, delayline_process, messages_in
from tests.eventually import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

SHOP = """
import asyncio, gc, pathlib
from delayline import *
from delayline.sync import SyncEndpoint

url = "sqlite:///delayline.db"
billing = Endpoint("billing", transport=SqlTransport(url))

@billing.handler
async def handle(message, context):
    pathlib.Path("handling").touch()
    if message.text == "slow":
        await asyncio.sleep(0.5)
    if message.text == "endless":
        await asyncio.sleep(3600)
    while message.text == "frozen" and not gc.get_freeze_count():
        await asyncio.sleep(0.01)
    pathlib.Path("handled").write_text(message.text)

async def fail(endpoint, text, error):
    await endpoint.stop()

broken = Endpoint("broken", transport=SqlTransport(url))

@broken.handler
async def stop(message, context):
    broken._critical_error("Failed to receive", OSError("the disk is on fire"))

synchronous = SyncEndpoint(Endpoint("sync", transport=SqlTransport(url)))
number = 5
"""


@pytest.fixture
def shop(ready: Callable[..., Result], folder: Path) -> Callable[..., Result]:
    (folder / "shop.py").write_text(SHOP)
    assert ready("setup", "--queue", "broken").code == 0
    return ready


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_after_messages_in_flight(
    shop: Callable[..., Result], processes: list[subprocess.Popen[str]], number: signal.Signals
) -> None:
    shop("send", "billing", "slow")
    process = delayline_process("run", "shop:billing", "--json")
    processes.append(process)
    eventually(Path("handling").exists)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert json.loads(out) == {"endpoints": ["billing"], "stopped_by": number.name}
    assert Path("handled").read_text() == "slow"
    assert messages_in("billing") == []


def test_the_garbage_collector_leaves_modules_alone(
    shop: Callable[..., Result], processes: list[subprocess.Popen[str]]
) -> None:
    """Given an endpoint that has started, when a handler runs, then full collections pass over what was there."""
    shop("send", "billing", "frozen")
    processes.append(delayline_process("run", "shop:billing"))
    eventually(Path("handled").exists)


def test_logs_are_json_on_request(shop: Callable[..., Result], processes: list[subprocess.Popen[str]]) -> None:
    """Given --log-format json, when a message is handled, then each line of the log is a document."""
    shop("send", "billing", "x", "--id", "order-17")
    process = delayline_process("run", "shop:billing", "--log-format", "json", "--log-level", "debug")
    processes.append(process)
    eventually(Path("handled").exists)
    eventually(lambda: messages_in("billing") == [])
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    documents = [json.loads(line) for line in err.splitlines()]
    handled = next(one for one in documents if one.get("message_id") == "order-17")
    assert (handled["event"], handled["level"]) == ("receive.handled", "debug")
    assert [one["text"] for one in documents[-2:]] == ["endpoint billing stopped", "billing stopped"]


def test_a_critical_error_exits_with_1(shop: Callable[..., Result], processes: list[subprocess.Popen[str]]) -> None:
    shop("send", "broken", "x")
    process = delayline_process("run", "shop:broken")
    processes.append(process)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "broken stopped by itself" in out
    assert "the disk is on fire" in err
    assert err.splitlines()[-1].startswith("error: endpoint 'broken' stopped after a critical error")


def test_without_a_module_it_dispatches_due_messages(
    ready: Callable[..., Result], processes: list[subprocess.Popen[str]]
) -> None:
    process = delayline_process("run")
    processes.append(process)
    assert process.stdout is not None
    started = process.stdout.readline()
    assert started.startswith("sales runs: TRANSACTION_SCOPE, exactly once, 0 handlers.")
    ready("send", "billing", "x", "--delay", "500ms")
    eventually(lambda: len(messages_in("billing")) == 1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "sales stopped\n")


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("shop", "write MODULE:ENDPOINT"),
        ("nowhere:endpoint", "there is no module 'nowhere'"),
        ("shop:biling", "Did you mean 'billing'?"),
        ("shop:number", "is a int, not an Endpoint. Its endpoints are: billing, broken, synchronous"),
    ],
)
def test_a_target_that_is_not_an_endpoint_is_reported(shop: Callable[..., Result], target: str, error: str) -> None:
    ran = shop("run", target)
    assert (ran.code, ran.out) == (2, "")
    assert error in ran.err


def test_handlers_that_take_longer_than_the_grace_period_are_cancelled(
    shop: Callable[..., Result], processes: list[subprocess.Popen[str]]
) -> None:
    # Given a handler at work
    shop("send", "billing", "endless")
    process = delayline_process("run", "shop:billing", "--grace", "100ms")
    processes.append(process)
    eventually(Path("handling").exists)
    # When the process is asked to stop
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    # Then it ends, and the message is in its queue
    assert process.returncode == 0
    assert "1 handlers of billing have not ended within 0:00:00.100000" in err
    assert [message.text for message in messages_in("billing")] == ["endless"]


def test_a_second_signal_ends_it_at_once(shop: Callable[..., Result], processes: list[subprocess.Popen[str]]) -> None:
    shop("send", "billing", "endless")
    process = delayline_process("run", "shop:billing")
    processes.append(process)
    eventually(Path("handling").exists)
    while process.poll() is None:  # the first one may not have been handled yet
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert "SIGTERM, the second signal: ended at once" in err
    assert [message.text for message in messages_in("billing")] == ["endless"]


def test_several_endpoints_run_in_one_process(
    shop: Callable[..., Result], processes: list[subprocess.Popen[str]]
) -> None:
    # Given two endpoints with one port for probes and metrics
    process = delayline_process("run", "shop:billing", "shop:broken", "--health", "127.0.0.1:0")
    processes.append(process)
    assert process.stdout is not None
    address = process.stdout.readline().split("serves ")[1].split("/live")[0]
    started = [process.stdout.readline().split(" runs:")[0] for _ in range(2)]
    assert started == ["billing", "broken"]
    assert httpx.get(f"{address}/ready").json() == {"ok": True, "reasons": []}
    scraped = httpx.get(f"{address}/metrics").text
    assert 'delayline_handlers_running{delayline_endpoint="billing"' in scraped
    assert 'delayline_handlers_running{delayline_endpoint="broken"' in scraped
    # When one has a critical error
    shop("send", "broken", "x")
    out, err = process.communicate(timeout=60)
    # Then both stop
    assert process.returncode == 1
    assert out.splitlines()[-1] == "billing, broken stopped by itself"
    assert "one of the endpoints billing, broken stopped after a critical error" in err
    assert "endpoint billing stopped" in err


def test_one_signal_stops_all_endpoints_after_their_messages(
    shop: Callable[..., Result], processes: list[subprocess.Popen[str]]
) -> None:
    shop("send", "billing", "slow")
    process = delayline_process("run", "shop:broken", "shop:billing", "--json")
    processes.append(process)
    eventually(Path("handling").exists)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(out) == {"endpoints": ["broken", "billing"], "stopped_by": "SIGTERM"}
    assert Path("handled").read_text() == "slow"
    assert messages_in("billing") == []


def test_one_process_runs_an_endpoint_once(shop: Callable[..., Result]) -> None:
    ran = shop("run", "shop:billing", "shop:billing")
    assert (ran.code, ran.out) == (2, "")
    assert "two endpoints are named 'billing'" in ran.err


def test_metrics_are_served_while_it_runs(shop: Callable[..., Result], processes: list[subprocess.Popen[str]]) -> None:
    """Given --metrics with a free port, when a message has been handled, then a scrape counts it."""
    shop("send", "billing", "x")
    process = delayline_process("run", "shop:billing", "--metrics", "127.0.0.1:0", "--nservicebus-metrics")
    processes.append(process)
    assert process.stdout is not None
    url = process.stdout.readline().removeprefix("serves ").strip()
    eventually(lambda: 'nservicebus_messaging_successes_total{delayline_endpoint="billing"' in httpx.get(url).text)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


@pytest.mark.parametrize("option", ["--metrics", "--health"])
def test_a_port_in_use_ends_it_at_once(shop: Callable[..., Result], option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = shop("run", "shop:billing", option, f"127.0.0.1:{taken.getsockname()[1]}")
    assert found.code == 2
    assert "is in use by another process: choose another port" in found.err


def test_handled_messages_are_logged_at_info_on_request(
    shop: Callable[..., Result], processes: list[subprocess.Popen[str]]
) -> None:
    """Given --log-handled, when a message is handled, then a line at INFO names endpoint, queue and message."""
    shop("send", "billing", "x", "--id", "order-17")
    process = delayline_process("run", "shop:billing", "--log-format", "json", "--log-handled")
    processes.append(process)
    eventually(Path("handled").exists)
    eventually(lambda: messages_in("billing") == [])
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    documents = [json.loads(line) for line in err.splitlines()]
    assert {one["level"] for one in documents} == {"info"}
    [handled] = [one for one in documents if one.get("event") == "receive.handled"]
    assert (handled["message_id"], handled["endpoint"], handled["queue"]) == ("order-17", "billing", "billing")


def test_probes_are_served_while_it_runs(shop: Callable[..., Result], processes: list[subprocess.Popen[str]]) -> None:
    """Given --health and --heartbeat, when it has started, then both probes answer 200, and the file is there."""
    process = delayline_process("run", "shop:billing", "--health", "127.0.0.1:0", "--heartbeat", "heartbeat")
    processes.append(process)
    assert process.stdout is not None
    live, metrics, ready = process.stdout.readline().strip().removeprefix("serves ").split(", ")
    assert "billing runs" in process.stdout.readline()
    for url in (live, ready):
        assert httpx.get(url).json() == {"ok": True, "reasons": []}
    assert "delayline_messages_pending" in httpx.get(metrics).text
    assert Path("heartbeat").exists()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert not Path("heartbeat").exists()


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_notified(
    shop: Callable[..., Result],
    processes: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    abstract: bool,
) -> None:
    """Given a service manager's socket, when it starts, turns and stops, then each is notified."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        address = f"@delayline-{os.getpid()}" if abstract else str(folder / "notify")
        manager.bind(address.replace("@", "\0", 1) if abstract else address)
        manager.settimeout(20)
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        monkeypatch.setenv("WATCHDOG_USEC", "300000")
        process = delayline_process("run", "shop:billing")
        processes.append(process)
        notified = {manager.recv(1000).decode().partition("\n")[0] for _ in range(4)}
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
        manager.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                notified.add(manager.recv(1000).decode().partition("\n")[0])
    assert notified == {"READY=1", "WATCHDOG=1", "STOPPING=1"}


TRACED = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from shop import billing

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=open("spans", "w", buffering=1))))
trace.set_tracer_provider(provider)
"""


def test_spans_go_to_the_global_provider_on_request(
    shop: Callable[..., Result], processes: list[subprocess.Popen[str]], folder: Path
) -> None:
    """Given --opentelemetry and a provider of the application, when a message is handled, then its spans are there."""
    (folder / "traced.py").write_text(TRACED)
    shop("send", "billing", "x")
    process = delayline_process("run", "traced:billing", "--opentelemetry")
    processes.append(process)
    eventually(lambda: Path("spans").exists() and "process billing" in Path("spans").read_text())
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert "settle billing" in Path("spans").read_text()
