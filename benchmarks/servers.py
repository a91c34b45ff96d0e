"""Private servers for the scenarios, with the durability they come with; on a slower disk where that is asked for."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).parents[1]))  # for `tests.servers`

from tests.servers.azurite import AzuriteServer
from tests.servers.mariadb import MariadbServer
from tests.servers.ports import free_port
from tests.servers.postgresql import PostgresqlServer

from benchmarks.processes import cpu_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: fdatasync and fsync that take as long as a disk with a flush to wait for.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
static void wait_for_the_disk(void) { struct timespec t = {0, MICROSECONDS * 1000L}; nanosleep(&t, 0); }
int fdatasync(int fd) { int (*real)(int) = dlsym(RTLD_NEXT, "fdatasync"); wait_for_the_disk(); return real(fd); }
int fsync(int fd) { int (*real)(int) = dlsym(RTLD_NEXT, "fsync"); wait_for_the_disk(); return real(fd); }
"""


FLUSH_MICROSECONDS = int(os.environ.get("BENCHMARK_FSYNC_MICROSECONDS", "0"))
#: What a MariaDB comes with, where the tests' servers are smaller.
AS_IT_COMES = ("innodb_buffer_pool_size=128M", "innodb_log_file_size=96M", "innodb_log_buffer_size=16M")


@contextlib.contextmanager
def postgresql(settings: Sequence[str] = (), databases: int = 1) -> Iterator[list[str]]:
    """Provide URLs of empty databases on a server of its own, with its default settings but for these."""
    with postgresql_server(settings) as server:
        yield [server.new_database() for _ in range(databases)]


@contextlib.contextmanager
def postgresql_server(settings: Sequence[str] = (), flush: int = FLUSH_MICROSECONDS) -> Iterator[PostgresqlServer]:
    """Provide a server of its own, with its default settings but for these, whose flushes take so much longer."""
    with slow_disk(flush):
        server = PostgresqlServer(settings)
    with contextlib.closing(server):
        yield server


def cpu_with(server: PostgresqlServer) -> float:
    """Return the CPU seconds of this process, of those that it has started, and of the server, no child of it."""
    return cpu_of(os.getpid()) + cpu_of(server.pid)


@contextlib.contextmanager
def mariadb() -> Iterator[list[str]]:
    """Provide the URL of an empty database on a server of its own, with its default settings."""
    with mariadb_server() as server:
        yield [server.new_database()]


@contextlib.contextmanager
def mariadb_server() -> Iterator[MariadbServer]:
    """Provide a server of its own, with its default settings."""
    with slow_disk(FLUSH_MICROSECONDS):
        server = MariadbServer(AS_IT_COMES)
    with contextlib.closing(server):
        yield server


@contextlib.contextmanager
def redis_server(program: str) -> Iterator[tuple[int, int]]:
    """Run a Redis of its own with an append-only file, which it flushes every second; yield its port and process id."""
    port = free_port()
    settings = ["--port", str(port), "--bind", "127.0.0.1", "--appendonly", "yes", "--save", ""]
    with tempfile.TemporaryDirectory(prefix="delayline-bench-") as folder:
        command = [program, *settings, "--dir", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                assert any("Ready to accept connections" in line for line in server.stdout), "Redis did not start"
                yield port, server.pid
            finally:
                server.terminate()


@contextlib.contextmanager
def azurite() -> Iterator[AzuriteServer]:
    """Provide an emulator of Azure Storage of its own."""
    with contextlib.closing(AzuriteServer()) as server:
        yield server


@contextlib.contextmanager
def slow_disk(microseconds: int) -> Iterator[None]:
    """Let the processes that are started inside wait so long in every flush."""
    if not microseconds:
        yield
        return
    library = Path("/var/tmp") / f"slow-disk-{microseconds}.so"  # noqa: S108 - readable for the server's user
    source = library.with_suffix(".c")
    source.write_text(SHIM.replace("MICROSECONDS", str(microseconds)))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)  # noqa: S607
    os.environ["LD_PRELOAD"] = str(library)
    try:
        yield
    finally:
        del os.environ["LD_PRELOAD"]
