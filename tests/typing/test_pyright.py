"""pyright, which most editors run, agrees with mypy on what is wired right and wrongly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_pyright_finds_the_mistakes_and_nothing_else() -> None:
    """Given right and wrong wiring, then pyright finds an error in each line that says so, and in no other."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "tests/typing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
