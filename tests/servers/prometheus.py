"""A private Prometheus with the shipped alert rules."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import httpx
from tests.servers.own_process import OwnProcess
from tests.servers.ports import free_port

ROOT: Final = Path(__file__).parents[2]
RULES: Final = ROOT / "deploy" / "prometheus" / "delayline-alerts.yml"
SETTINGS: Final = """
global: {{scrape_interval: {every}, evaluation_interval: {every}}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: delayline
    static_configs: [{{targets: {targets}}}]
"""


class PrometheusServer(OwnProcess):
    """Scrapes the targets, and evaluates the alert rules, `every` so long."""

    product = "Prometheus"
    install = "apt-get install prometheus"

    def __init__(self, *targets: str, every: str = "1s") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="delayline-prometheus-"))
        self.url = f"http://127.0.0.1:{free_port()}"
        settings = self.folder / "prometheus.yml"
        settings.write_text(SETTINGS.format(rules=RULES, targets=list(targets), every=every))
        self._begin(
            [
                "prometheus",
                f"--config.file={settings}",
                f"--storage.tsdb.path={self.folder / 'data'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ]
        )

    @staticmethod
    def installed() -> bool:
        """Return whether the programs are there."""
        return shutil.which("prometheus") is not None and shutil.which("promtool") is not None

    def answers(self) -> bool:
        """Return whether it is ready."""
        try:
            return httpx.get(f"{self.url}/-/ready").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def ask(self, path: str, **parameters: str) -> Any:  # noqa: ANN401 - JSON
        """Return the data of an answer of its HTTP API."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def stop(self) -> None:
        super().stop()
        shutil.rmtree(self.folder)
