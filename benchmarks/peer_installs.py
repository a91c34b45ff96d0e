"""Peers that are no dependencies of this project's environment: installed on demand, into a cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "delayline" / "benchmarks"
#: The newest that run on Node.js 20.
NODE_PACKAGES = ("pg-boss@10.4.2", "graphile-worker@0.17.3", "bullmq@6.7.0", "ioredis@5.8.2")
OBAN = "oban==0.7.0"
OBAN_PYTHONS = ("3.14", "3.13", "3.12")


def node_modules() -> Path | None:
    """Return the folder with the peers that run on Node.js, or None without it."""
    if not shutil.which("npm"):
        _missing("pg-boss, graphile-worker and BullMQ need Node.js 20 and npm")
        return None
    folder = CACHE / "node"
    if not all((folder / "node_modules" / one.partition("@")[0]).exists() for one in NODE_PACKAGES):
        options = ["--no-audit", "--no-fund", "--no-save", "--loglevel=error"]
        subprocess.run(["npm", "install", "--prefix", folder, *options, *NODE_PACKAGES], check=True, stdout=sys.stderr)  # noqa: S607
    return folder / "node_modules"


def redis_server() -> str | None:
    """Return the path of Redis' server, or None where it is not installed."""
    found = shutil.which("redis-server")
    if found is None:
        _missing("BullMQ needs a Redis server: apt-get install redis-server")
    return found


def oban_python() -> Path | None:
    """Return the interpreter of an environment with oban-py, or None without a Python that it runs on."""
    python = CACHE / "oban" / "bin" / "python"
    if not python.exists():
        newer = next(filter(_runs, _newer_pythons()), None)
        if newer is None:
            _missing("oban-py needs Python 3.12 or newer, on PATH or of pyenv")
            return None
        subprocess.run(["uv", "venv", "--quiet", "--python", newer, CACHE / "oban"], check=True)  # noqa: S607
        subprocess.run(["uv", "pip", "install", "--quiet", "--python", python, OBAN], check=True)  # noqa: S607
    return python


def _newer_pythons() -> Iterator[str]:
    for version in OBAN_PYTHONS:
        yield from filter(None, [shutil.which(f"python{version}")])
        yield from map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))


def _runs(python: str) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def _missing(what: str) -> None:
    print(f"left out: {what}", file=sys.stderr)
