"""Probes: when a process is alive and ready, and how they are served over HTTP."""

from __future__ import annotations

import http.client
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from delayline import ConfigurationError
from delayline.telemetry import HttpServer, Measurements, Probes, probes

if TYPE_CHECKING:
    from pathlib import Path

AWAY = OSError("the database is away")


@pytest.fixture
def measurements() -> Measurements:
    return Measurements()


@pytest.fixture
async def watching(measurements: Measurements) -> Probes:
    watching = Probes(measurements)
    watching.started()
    return watching


def get(address: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.read()


def test_an_endpoint_is_ready_between_its_start_and_its_stop(measurements: Measurements) -> None:
    watching = Probes(measurements)
    assert watching.ready().reasons == ("the endpoint is starting",)
    watching.started()
    assert watching.ready().ok
    watching.stopping()
    assert watching.ready().reasons == ("the endpoint is stopping",)


def test_a_failure_after_a_success_counts_only_after_the_breakers_time(
    watching: Probes, measurements: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a poller that worked, when it fails, then it is ready for 30 s more, and again after a success."""
    # Given
    measurements.polled(0, None)
    # When
    measurements.polled(0, AWAY)
    # Then
    assert watching.ready().ok
    monkeypatch.setattr(probes, "FAILURE_LIMIT", 0.0)
    assert watching.ready().reasons == ("the poller has failed for 0 s",)
    measurements.polled(0, None)
    assert watching.ready().ok


def test_a_part_that_never_succeeded_is_not_ready(watching: Probes, measurements: Measurements) -> None:
    measurements.received("billing", 0, AWAY)
    assert watching.ready().reasons == ("the receiver of 'billing' has failed for 0 s, and never succeeded",)


def test_a_triggered_breaker_is_not_ready(watching: Probes, measurements: Measurements) -> None:
    measurements.breaker_changed("DelayedMessageFetch", 1)
    assert watching.ready().ok
    measurements.breaker_changed("DelayedMessageFetch", 2)
    assert watching.ready().reasons == ("the circuit breaker 'DelayedMessageFetch' has triggered",)


async def test_a_blocked_event_loop_is_reported_while_it_is_blocked(
    measurements: Measurements, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given probes over HTTP, when a handler blocks the event loop, then /live answers 503 meanwhile."""
    monkeypatch.setattr(probes, "LOOP_LIMIT", -1.0)  # blocked at any time
    async with Probes(measurements) as watching:
        with HttpServer("127.0.0.1:0", watching.routes()) as server, ThreadPoolExecutor(1) as threads:
            status, body = threads.submit(get, server.address, "/live").result()  # blocks the loop
    assert status == 503
    answer = json.loads(body)
    assert not answer["ok"]
    assert re.fullmatch(r"the event loop has not turned for \d+ s", *answer["reasons"])


async def test_the_heartbeat_file_exists_while_the_probes_run(measurements: Measurements, tmp_path: Path) -> None:
    heartbeat = tmp_path / "heart\nbeat"
    async with Probes(measurements, heartbeat=heartbeat):
        assert heartbeat.exists()
    assert not heartbeat.exists()


async def test_a_heartbeat_file_that_cannot_be_written_is_refused(measurements: Measurements, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot write the heartbeat file .*: No such file"):
        async with Probes(measurements, heartbeat=tmp_path / "missing" / "heartbeat"):
            pass
