"""The servers of the tests start on ports that nothing else takes, and leave nothing behind when they do not start."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from tests.conftest import not_installed
from tests.servers.ports import MANAGEMENT_ABOVE, PORTS, free_port
from tests.servers.rabbitmq import RabbitmqServer

#: From where Linux takes the ports of outgoing connections.
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
CHILDREN = Path("/proc/thread-self/children")


@pytest.mark.skipif(not OUTGOING.exists(), reason="needs Linux, which says where its ports begin")
def test_no_outgoing_connection_takes_a_port() -> None:
    """Given the ports of outgoing connections, when a server gets one, then they begin above it; none comes twice."""
    assert max(PORTS) + MANAGEMENT_ABOVE < int(OUTGOING.read_text().split()[0])
    assert max(PORTS) < min(PORTS) + MANAGEMENT_ABOVE
    assert len({free_port() for _ in range(100)}) == 100


@pytest.mark.server
def test_a_server_that_does_not_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a setting that RabbitMQ refuses, when it starts, then the error says so; no process and no file is left."""
    if not RabbitmqServer.installed():
        not_installed(RabbitmqServer.product, RabbitmqServer.install)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = CHILDREN.read_text()
    with pytest.raises(RuntimeError, match="RabbitMQ did not start"):
        RabbitmqServer(["no.such.setting = 1"])
    assert (CHILDREN.read_text(), list(tmp_path.iterdir())) == (before, [])
