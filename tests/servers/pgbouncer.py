"""A private PgBouncer in front of a PostgreSQL server."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.servers.ports import free_port
from tests.servers.postgresql import PATIENCE

PROGRAM: Final = Path("/usr/sbin/pgbouncer")
SETTINGS: Final = """
[databases]
* = host=127.0.0.1 port={server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {users}
pool_mode = transaction
default_pool_size = 3
"""


class PgbouncerServer:
    """A pooler in transaction mode with three connections to the server for all clients of a database."""

    product = "PgBouncer"
    install = "apt-get install pgbouncer"

    def __init__(self, server_port: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="delayline-pgbouncer-"))
        self.port = free_port()
        users, settings = self.folder / "users.txt", self.folder / "pgbouncer.ini"
        users.write_text('"delayline" ""\n')
        settings.write_text(SETTINGS.format(server=server_port, port=self.port, users=users))
        command = [str(PROGRAM), "-q", str(settings)]
        if os.geteuid() == 0:  # PgBouncer refuses to run as root
            self.folder.chmod(0o755)
            command[1:1] = ["-u", "nobody"]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + PATIENCE
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PgBouncer did not start: {(self.folder / 'log').read_text()}")
            time.sleep(0.02)

    @staticmethod
    def installed() -> bool:
        """Return whether the program is there."""
        return PROGRAM.exists()

    def url(self, server_url: str) -> str:
        """Return the URL of a database of the server through the pooler."""
        head, _, database = server_url.rpartition("/")
        return f"{head.rpartition(':')[0]}:{self.port}/{database}"

    def close(self) -> None:
        """Stop, and leave nothing behind."""
        self._process.terminate()
        self._process.wait(PATIENCE)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
