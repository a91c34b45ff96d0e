"""The files of deploy/ are checked by the tools of their formats, and name only options that exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import yaml
from click.testing import CliRunner
from tests.conftest import not_installed

from delayline import Endpoint
from delayline.cli import main
from delayline.settings import setting_names, variable_of
from delayline.sql import SqlTransport

if TYPE_CHECKING:
    from collections.abc import Sequence

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFEST = DEPLOY / "kubernetes" / "billing.yaml"
AUTOSCALING = DEPLOY / "kubernetes" / "billing-autoscaling.yaml"
UNIT = DEPLOY / "systemd" / "delayline-billing.service"
CONTAINERFILE = DEPLOY / "container" / "Containerfile"


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def checked(program: str, *arguments: str) -> str:
    """Run a program of this environment, or of the system, and return its output."""
    found = shutil.which(program, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found is not None, program
    done = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=60, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


def options_of(words: Sequence[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def options_of_run() -> set[str]:
    return set(re.findall(r"--[a-z-]+", CliRunner().invoke(main, ["run", "--help"]).output))


def test_the_kubernetes_manifest_is_valid() -> None:
    output = checked("kubernetes-validate", "--strict", str(MANIFEST))

    assert "deployment/billing" in output
    assert "job/billing-setup" in output


def test_the_containerfile_has_no_findings() -> None:
    assert checked("hadolint", "--no-color", str(CONTAINERFILE)) == ""


def test_the_unit_is_valid(tmp_path: Path) -> None:
    """Given the unit with a command that exists here, when systemd verifies it, then it complains of nothing."""
    if shutil.which("systemd-analyze") is None:
        not_installed("systemd-analyze", "apt-get install systemd")
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text()))

    assert checked("systemd-analyze", "verify", "--man=no", str(copy)) == ""


def test_the_files_use_options_and_variables_that_exist() -> None:
    """Given the commands of all files, when their options are collected, then `delayline run` has each of them."""
    # Given
    pods = {one["kind"]: one["spec"]["template"]["spec"] for one in documents(MANIFEST) if "template" in one["spec"]}
    command = pods["Deployment"]["containers"][0]["command"]
    unit = next(line for line in UNIT.read_text().splitlines() if line.startswith("ExecStart="))
    container = re.findall(r'"(--[a-z-]+)"', CONTAINERFILE.read_text())
    # When
    used = options_of(command) | options_of(unit.split()) | options_of(container)
    # Then
    assert {"--health", "--grace", "--heartbeat"} <= used <= options_of_run()
    variables = {env["name"] for pod in pods.values() for env in pod["containers"][0]["env"]}
    assert variables <= {variable_of(name) for name in setting_names()}


def test_stops_have_longer_than_the_grace_period() -> None:
    """Given the grace period of each file, when a stop is limited, then by the grace period and 25 seconds."""
    pod = next(one for one in documents(MANIFEST) if one["kind"] == "Deployment")["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    grace = int(command[command.index("--grace") + 1].removesuffix("s"))

    assert pod["terminationGracePeriodSeconds"] == grace + 25
    assert f"TimeoutStopSec={grace + 25}" in UNIT.read_text()
    assert f"--time {grace + 25}" in CONTAINERFILE.read_text()


@pytest.mark.server
async def test_the_autoscaler_counts_the_messages_of_its_queue(postgresql_url: str) -> None:
    """Given messages in two queues, when the trigger's query runs, then it counts those of the endpoint."""
    # Given
    transport = SqlTransport(postgresql_url)
    async with Endpoint("billing", transport=transport) as billing:
        await transport.setup_infrastructure(["other"])
        for number in range(3):
            await billing.send("billing", b"x", message_id=str(number))
        await billing.send("other", b"x")
    # When
    scaled = next(one for one in documents(AUTOSCALING) if one["kind"] == "ScaledObject")
    with psycopg.connect(postgresql_url) as connection:
        row = connection.execute(scaled["spec"]["triggers"][0]["metadata"]["query"]).fetchone()
    # Then
    assert row == (3,)
    assert scaled["spec"]["minReplicaCount"] >= 1
