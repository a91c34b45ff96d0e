"""A private Azurite: queues, tables and containers as Azure Storage has them, on this machine."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import tempfile
from itertools import count
from pathlib import Path
from typing import Final

from tests.servers.own_process import OwnProcess
from tests.servers.ports import free_port

VERSION: Final = "3.35.0"  # the last one that runs on Node 20
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "delayline" / "azurite"
PROGRAM: Final = CACHE / "node_modules" / "azurite" / "dist" / "src" / "azurite.js"
KEEP_ALIVE: Final = Path(__file__).with_name("azurite_keep_alive.cjs")
KEY: Final = base64.b64encode(b"a key that opens nothing but tests").decode()
#: A storage account for each test is the cheapest way to an empty one.
ACCOUNTS: Final = 2000


class AzuriteServer(OwnProcess):
    """A private emulator on free ports. After an orderly stop its data are on disk, except leases."""

    product = "Azurite"
    install = f"npm install --prefix {CACHE} azurite@{VERSION}"

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="delayline-azurite-"))
        self.ports = {service: free_port() for service in ("blob", "queue", "table")}
        self._accounts = count()
        self.start()

    @staticmethod
    def installed() -> bool:
        """Return whether Node.js and the emulator are there."""
        return shutil.which("node") is not None and PROGRAM.exists()

    def start(self) -> None:
        """Start, and wait until it answers."""
        places = [word for service, port in self.ports.items() for word in (f"--{service}Port", str(port))]
        flags = ["--silent", "--skipApiVersionCheck", "--disableTelemetry", "--location", str(self.folder / "data")]
        accounts = {"AZURITE_ACCOUNTS": ";".join(f"test{number}:{KEY}" for number in range(ACCOUNTS))}
        self._begin(["node", "--require", str(KEEP_ALIVE), str(PROGRAM), *flags, *places], os.environ | accounts)

    def answers(self) -> bool:
        """Return whether all three services take connections."""
        try:
            for port in self.ports.values():
                socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Stop, and leave nothing behind."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def new_account(self) -> str:
        """Return the URL of an account with nothing in it."""
        name = f"test{next(self._accounts)}"
        places = "".join(
            f"{service.capitalize()}Endpoint=http://127.0.0.1:{port}/{name};" for service, port in self.ports.items()
        )
        return f"azure:DefaultEndpointsProtocol=http;AccountName={name};AccountKey={KEY};{places}"
