"""A private MariaDB server."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pymysql
from tests.servers.own_process import OwnProcess
from tests.servers.ports import free_port
from tests.servers.programs import CONFIGURED, Programs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Debian keeps the server where only root's PATH leads.
PROGRAMS: Final = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
#: Small and quick to start: many of them may run side by side.
SMALL: Final = (
    "innodb_buffer_pool_size=32M",
    "innodb_log_file_size=32M",
    "innodb_log_buffer_size=2M",
    "performance_schema=OFF",
    "max_connections=200",
    "skip_name_resolve=ON",
    "skip_log_bin",
)


def program(name: str) -> str | None:
    """Return the path of one of this machine's programs of MariaDB, or None."""
    return shutil.which(name, path=PROGRAMS)


class MariadbServer(OwnProcess):
    """A private server on a free port, with an administrator `delayline` without a password.

    programs: of which system.
    """

    product = "MariaDB"
    install = "apt-get install mariadb-server"

    def __init__(self, settings: Sequence[str] = (), programs: Programs = CONFIGURED) -> None:
        self.programs = programs
        self.folder = Path(tempfile.mkdtemp(prefix="delayline-mariadb-"))
        self.port = free_port()
        self._settings = [*SMALL, *settings]
        programs.own(self.folder, "mysql")
        self._install()
        self.start()

    @staticmethod
    def installed(programs: Programs = CONFIGURED) -> bool:
        """Return whether the server's programs are there."""
        if programs.root is not None:
            return programs.of_tree("mariadbd", "mariadb-install-db")
        return program("mariadbd") is not None and program("mariadb-install-db") is not None

    @staticmethod
    def version(programs: Programs = CONFIGURED) -> tuple[int, ...]:
        """Return the version of installed programs."""
        command = [*programs.command(program("mariadbd") or "mariadbd"), "--version"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = re.search(r"Ver (\d+)\.(\d+)\.(\d+)", said)
        return tuple(map(int, found.groups())) if found else ()

    def command(self, name: str) -> list[str]:
        """Return what runs one of MariaDB's programs of the server's version."""
        return self.programs.command(program(name) or name)

    @property
    def data(self) -> Path:
        """The folder with the databases."""
        return self.folder / "data"

    def start(self) -> None:
        """Start, and wait until it answers."""
        users = self.folder / "users.sql"
        users.write_text(
            "CREATE USER IF NOT EXISTS delayline@'127.0.0.1';\n"
            "GRANT ALL ON *.* TO delayline@'127.0.0.1' WITH GRANT OPTION;\n"
        )
        self._begin(
            [
                *self.command("mariadbd"),
                *self._where(),
                "--bind-address=127.0.0.1",
                f"--port={self.port}",
                f"--socket={self.folder / 'socket'}",
                f"--pid-file={self.folder / 'pid'}",
                f"--init-file={users}",
                *(f"--{setting}" for setting in self._settings),
            ]
        )

    def answers(self) -> bool:
        """Return whether its administrator can connect."""
        try:
            with self.administrator():
                return True
        except pymysql.Error:
            return False

    def close(self) -> None:
        """Stop, and leave nothing behind."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def administrator(self) -> Iterator[Any]:
        """Connect with every right, in autocommit, and provide a cursor."""
        with (
            pymysql.connect(
                host="127.0.0.1", port=self.port, user="delayline", autocommit=True, ssl_disabled=True
            ) as connection,
            connection.cursor() as cursor,
        ):
            yield cursor

    def new_database(self) -> str:
        """Create an empty database and return its URL."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        with self.administrator() as cursor:
            cursor.execute(f"CREATE DATABASE {name}")
        return f"mariadb://delayline@127.0.0.1:{self.port}/{name}"

    def drop_database(self, url: str) -> None:
        """Drop the database despite open connections."""
        name = url.rsplit("/", 1)[1]
        with self.administrator() as cursor:
            cursor.execute("SELECT id FROM information_schema.processlist WHERE db = %s", (name,))
            for (connection,) in cursor.fetchall():
                with contextlib.suppress(pymysql.Error):  # it has ended by itself
                    cursor.execute(f"KILL {connection}")
            cursor.execute(f"DROP DATABASE IF EXISTS {name}")

    def _where(self) -> list[str]:
        return ["--no-defaults", *self._user(), f"--datadir={self.data}", f"--tmpdir={self.folder}"]

    def _user(self) -> list[str]:
        """Return who it runs as, which it has to be told as root: of this machine, or of a user's namespace."""
        if os.geteuid() == 0:
            return ["--user=mysql"]
        return ["--user=root"] if self.programs.root is not None else []

    def _install(self) -> None:
        command = [
            *self.command("mariadb-install-db"),
            *self._where(),
            "--skip-test-db",
            "--auth-root-authentication-method=normal",
        ]
        with (self.folder / "commands.log").open("a") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log, cwd=self.folder)
