"""A private Azurite: queues, tables and containers as Azure Storage has them, on this machine."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Final

from tests.servers.postgresql import free_port

PATIENCE: Final = 60.0
VERSION: Final = "3.35.0"  # the last one that runs on Node 20
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "delayline" / "azurite"
PROGRAM: Final = CACHE / "node_modules" / "azurite" / "dist" / "src" / "azurite.js"
INSTALL: Final = f"npm install --prefix {CACHE} azurite@{VERSION}"
KEY: Final = base64.b64encode(b"a key that opens nothing but tests").decode()
#: A storage account for each test is the cheapest way to an empty one.
ACCOUNTS: Final = 2000


class AzuriteServer:
    """An emulator of its own on free ports, keeping its data on disk."""

    product = "Azurite"

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="delayline-azurite-"))
        self.ports = {service: free_port() for service in ("blob", "queue", "table")}
        self._accounts = count()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @staticmethod
    def installed() -> bool:
        """Tell whether Node.js and the emulator are there."""
        return shutil.which("node") is not None and PROGRAM.exists()

    def start(self) -> None:
        """Start, and wait until it answers."""
        places = [word for service, port in self.ports.items() for word in (f"--{service}Port", str(port))]
        accounts = ";".join(f"test{number}:{KEY}" for number in range(ACCOUNTS))
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["node", str(PROGRAM), "--silent", "--location", str(self.folder / "data"), "--skipApiVersionCheck",
                 "--disableTelemetry", *places],
                stdout=log, stderr=log, cwd=self.folder, env=os.environ | {"AZURITE_ACCOUNTS": accounts},
            )  # fmt: skip
        self._wait()

    def stop(self) -> None:
        """Stop in order: what it was told is on disk then, but for leases, which it forgets."""
        self._end("terminate")

    def close(self) -> None:
        """Stop, and leave nothing behind."""
        self._end("kill")
        shutil.rmtree(self.folder, ignore_errors=True)

    def new_account(self) -> str:
        """Return the URL of an account with nothing in it."""
        name = f"test{next(self._accounts)}"
        places = "".join(
            f"{service.capitalize()}Endpoint=http://127.0.0.1:{port}/{name};" for service, port in self.ports.items()
        )
        return f"azure:DefaultEndpointsProtocol=http;AccountName={name};AccountKey={KEY};{places}"

    def _wait(self) -> None:
        deadline = time.monotonic() + PATIENCE
        for port in self.ports.values():
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    running = self._process is not None and self._process.poll() is None
                    if not running or time.monotonic() > deadline:
                        log = (self.folder / "log").read_text(errors="replace")
                        raise RuntimeError(f"Azurite did not start: {log[-2000:]}") from None
                    time.sleep(0.02)

    def _end(self, how: str) -> None:
        if self._process is not None:
            getattr(self._process, how)()
            self._process.wait(PATIENCE)
            self._process = None
