"""`make demo`: the whole pipeline, with the dispatcher killed half way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_a_short_demo_leaves_a_report(tmp_path: Path) -> None:
    words = ["--rows", "300", "--within", "3", "--outage", "0.2", "--dir", "runs", "--report", "demo/report.html"]
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--spark", *words, "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    audit = document["audit"]
    assert document["kept"] and (document["sent"], document["received"]) == (300, 300)
    assert 0 < document["held"] < 300
    assert (audit["scheduled"], audit["dispatched"], audit["lost"], audit["duplicated"]) == (300, 300, 0, 0)
    assert "Lateness" in (tmp_path / "demo" / "report.html").read_text()
