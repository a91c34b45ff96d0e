"""A private PostgreSQL server."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg
from tests.eventually import eventually
from tests.servers.ports import free_port
from tests.servers.programs import CONFIGURED, POSTGRESQL, Programs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PATIENCE: Final = 150.0
#: Debian's folder of the server's programs, which is not on PATH.
DEBIAN: Final = Path(POSTGRESQL)
END_OTHERS: Final = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
#: Everything tests create lives in schemas; `public` goes with them, or the rights granted on it would stay.
DROPS: Final = """
SELECT format('DROP SCHEMA %I CASCADE', nspname) FROM pg_namespace
WHERE nspname <> 'information_schema' AND nspname NOT LIKE 'pg\\_%'
"""
PUBLIC: Final = """
CREATE SCHEMA public AUTHORIZATION pg_database_owner;
GRANT USAGE ON SCHEMA public TO PUBLIC
"""


def program(name: str) -> str | None:
    """Return the path of one of this machine's programs of PostgreSQL, or None."""
    found = shutil.which(name)
    newest = sorted(DEBIAN.glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    return str(newest[-1]) if newest else found


class PostgresqlServer:
    """A private server on a free port, with a trusted superuser `delayline`.

    programs: of which system.
    """

    product = "PostgreSQL"
    install = "apt-get install postgresql"

    def __init__(self, settings: Sequence[str] = (), programs: Programs = CONFIGURED) -> None:
        self.programs = programs
        self.folder = Path(tempfile.mkdtemp(prefix="delayline-postgresql-"))
        self.port = free_port()
        self._empty: list[str] = []
        self._settings = [
            "listen_addresses=127.0.0.1",
            f"port={self.port}",
            f"unix_socket_directories={self.folder}",
            "max_connections=200",
            *settings,
        ]
        programs.own(self.folder, "postgres")
        self._run("initdb", "-D", str(self.data), "-U", "delayline", "-A", "trust", "-E", "UTF8", "--no-sync")
        self.start()

    @staticmethod
    def installed(programs: Programs = CONFIGURED) -> bool:
        """Return whether the server's programs are there."""
        if programs.root is not None:  # it does not run as root, and in a tree only root can become another user
            return os.geteuid() == 0 and programs.of_tree("initdb", "pg_ctl")
        return program("initdb") is not None

    @staticmethod
    def version(programs: Programs = CONFIGURED) -> tuple[int, ...]:
        """Return the version of installed programs, as Debian names their folder."""
        return max((int(folder.name),) for folder in programs.at(POSTGRESQL).glob("*"))

    def command(self, name: str, *, user: str | None = None) -> list[str]:
        """Return what runs one of PostgreSQL's programs of the server's version."""
        return self.programs.command(program(name) or name, user=user)

    @property
    def data(self) -> Path:
        """The folder with the databases."""
        return self.folder / "data"

    def start(self) -> None:
        """Start, and wait until it answers."""
        options = " ".join(f"-c {setting}" for setting in self._settings)
        self._run("pg_ctl", "-D", str(self.data), "-l", str(self.folder / "log"), "-w", "-o", options, "start")

    @property
    def pid(self) -> int:
        """The process id of the postmaster, for signals; it is running."""
        return int((self.data / "postmaster.pid").read_text().splitlines()[0])

    def stop(self, mode: str = "fast") -> None:
        """Stop; `immediate` is a crash of every process."""
        self._run("pg_ctl", "-D", str(self.data), "-m", mode, "-w", "stop")

    def kill(self) -> None:
        """Kill the postmaster; its children notice and end. Return when none of them can answer any more."""
        pid = self.pid
        children = [Path("/proc", child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE
        while (_answers(self.port) or any(child.exists() for child in children)) and time.monotonic() < deadline:
            time.sleep(0.01)

    def follow(self, primary: PostgresqlServer) -> None:
        """Become a hot standby of the primary; it confirms no commit then that is not on this server too."""
        self.stop("immediate")
        shutil.rmtree(self.data)
        source = ["-h", "127.0.0.1", "-p", str(primary.port), "-U", "delayline"]
        self._run("pg_basebackup", *source, "-D", str(self.data), "-R", "-c", "fast", "--no-sync")
        self.start()
        with primary.administrator() as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")

    def promote(self) -> None:
        """Take over as the primary; return when it takes writes."""
        with self.administrator() as connection:
            connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
            connection.execute("SELECT pg_reload_conf()")
        self._run("pg_ctl", "-D", str(self.data), "-w", "promote")

    def close(self) -> None:
        """Stop, and leave nothing behind."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self.stop("immediate")
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def administrator(self, database: str = "postgres") -> Iterator[psycopg.Connection]:
        """Connect as superuser, in autocommit."""
        with psycopg.connect(
            host="127.0.0.1", port=self.port, user="delayline", dbname=database, autocommit=True
        ) as connection:
            yield connection

    def guard(self, user: str, password: str) -> None:
        """Create a user with a password."""
        rules = self.data / "pg_hba.conf"
        rules.write_text(f"host all {user} 127.0.0.1/32 scram-sha-256\n{rules.read_text()}")
        with self.administrator() as connection:
            connection.execute(f"DROP ROLE IF EXISTS {user}")
            connection.execute(f"CREATE ROLE {user} LOGIN PASSWORD '{password}'")
            before = connection.execute("SELECT pg_conf_load_time()").fetchone()
            connection.execute("SELECT pg_reload_conf()")

        def is_loaded() -> bool:
            with self.administrator() as connection:
                return connection.execute("SELECT pg_conf_load_time()").fetchone() != before

        eventually(is_loaded, "new sessions follow the rules")

    def new_database(self) -> str:
        """Create an empty database, or rename one that was emptied, which is quicker, and return its URL."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        with self.administrator() as connection:
            if self._empty:
                connection.execute(f"ALTER DATABASE {self._empty.pop()} RENAME TO {name}")
            else:
                connection.execute(f"CREATE DATABASE {name}")
        return f"postgresql://delayline@127.0.0.1:{self.port}/{name}"

    def drop_database(self, url: str) -> None:
        """Empty the database despite open connections, and keep it for the next test.

        Fails if a transaction is prepared.
        """
        name = url.rsplit("/", 1)[1]
        with self.administrator(name) as connection:
            connection.execute(END_OTHERS)
            connection.execute("SET lock_timeout = '5s'")
            for (drop,) in connection.execute(DROPS).fetchall():
                connection.execute(drop)
            connection.execute(PUBLIC)
        self._empty.append(name)

    def _run(self, name: str, *arguments: str) -> None:
        command = [*self.command(name, user="postgres"), *arguments]  # PostgreSQL refuses to run as root
        with (self.folder / "commands.log").open("a") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log, cwd=self.folder)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
