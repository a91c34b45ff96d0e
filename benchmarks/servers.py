"""Private servers for the scenarios, with the durability they come with; `slow` gives them a disk of the real world."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).parents[1]))  # for `tests.servers`

from tests.servers.postgresql import PostgresqlServer

if TYPE_CHECKING:
    from collections.abc import Iterator

#: fdatasync and fsync that take as long as a disk with a flush to wait for.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
static void wait_for_the_disk(void) { struct timespec t = {0, MICROSECONDS * 1000L}; nanosleep(&t, 0); }
int fdatasync(int fd) { int (*real)(int) = dlsym(RTLD_NEXT, "fdatasync"); wait_for_the_disk(); return real(fd); }
int fsync(int fd) { int (*real)(int) = dlsym(RTLD_NEXT, "fsync"); wait_for_the_disk(); return real(fd); }
"""


@contextlib.contextmanager
def postgresql() -> Iterator[str]:
    """Provide the URL of an empty database on a server of its own, with its default settings.

    BENCHMARK_FSYNC_MICROSECONDS: how long every flush to disk takes in addition.
    """
    with slow_disk(int(os.environ.get("BENCHMARK_FSYNC_MICROSECONDS", "0"))):
        server = PostgresqlServer()
    try:
        yield server.new_database()
    finally:
        server.close()


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
