"""What Spark's Python workers are forked from in the tests: one process that has imported what they need.

Spark starts a daemon for each kind of worker in each JVM, and Spark Connect a process for each foreachBatch. Each would
import the same things for some seconds, and Spark Connect waits ten at most. Here such a process only asks for its
place to be taken by a fork of that one process, with its files, its arguments and its variables; where there is no such
process it does the work itself.

Nothing that has started threads may be forked: settings keep libraries from starting some.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The variable that says where the process listens.
PLACE: Final = "DELAYLINE_TESTS_FORK_AT"
SERVE: Final = "serve"
#: The argument of a process that is a foreachBatch's.
BATCHES: Final = "batches"
BATCHES_MODULE: Final = "pyspark.sql.connect.streaming.worker.foreach_batch_worker"
ROOT: Final = Path(__file__).parents[2]
SINGLE: Final = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
MODULES: Final = ("delayline.composition", "pandas", "psycopg", "pyarrow.parquet", "pymysql", "pyspark.worker")
#: All modules of these.
PACKAGES: Final = (
    "pyspark.sql.worker",
    "delayline.spark",
    "delayline.sql",
    "delayline.sql.mariadb",
    "delayline.sql.postgresql",
    "delayline.sql.sqlite",
    "delayline.sql.sqlserver",
    "delayline.migration",
)
LOOK_EVERY: Final = 5.0  # seconds, whether the tests are still there


@contextmanager
def forking() -> Iterator[str]:
    """Run the process; yield what PLACE has to be for the daemons that it stands in for."""
    with tempfile.TemporaryDirectory(prefix="delayline-") as folder, socket.socket(socket.AF_UNIX) as listener:
        place = str(Path(folder, "socket"))
        listener.bind(place)
        listener.listen()
        environment = {**os.environ, "PYTHONHASHSEED": "0", **SINGLE}  # the seed is what Spark gives its workers
        command = [sys.executable, "-m", "tests.spark.daemon", SERVE]
        with subprocess.Popen(command, stdin=listener.fileno(), env=environment, cwd=ROOT) as process:
            listener.close()  # otherwise the death of the process would not be reported
            try:
                yield place
            finally:
                process.terminate()


def _preload() -> None:
    import gc
    import pkgutil

    for name in (*MODULES, *([BATCHES_MODULE] if importlib.util.find_spec("grpc") else [])):
        importlib.import_module(name)
    for name in PACKAGES:
        for module in pkgutil.iter_modules(importlib.import_module(name).__path__):
            importlib.import_module(f"{name}.{module.name}")
    threads = Path("/proc/self/task")
    assert not threads.exists() or len(list(threads.iterdir())) == 1, "what was imported has started a thread"
    gc.freeze()


def _serve() -> None:
    parent = os.getppid()
    listener = socket.socket(fileno=os.dup(0))
    _preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener.settimeout(LOOK_EVERY)
    while os.getppid() == parent:
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _take_place(connection)
            connection.close()


def _take_place(connection: socket.socket) -> None:
    """Be the process that has asked, to the end."""
    text, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while more := connection.recv(1 << 16):
        text += more
    asked = json.loads(text)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.argv, sys.path[:] = asked["arguments"], asked["path"]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        _work()
    finally:
        os._exit(1)


def _work() -> None:
    """Be what the arguments say: a foreachBatch, or a daemon."""
    if BATCHES in sys.argv:
        batches = importlib.import_module(BATCHES_MODULE)
        with batches.get_sock_file_to_executor(timeout=None) as file:
            batches.main(file, file)
    else:
        from pyspark.daemon import manager

        manager()


def _ask(place: str) -> None:
    asked = {"environment": dict(os.environ), "folder": str(Path.cwd()), "arguments": sys.argv, "path": sys.path}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(place)
        text = json.dumps(asked).encode()
        sent = socket.send_fds(connection, [text], [0, 1, 2])
        connection.sendall(text[sent:])
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # until it has ended


def main() -> None:
    """Be what Spark has started, or the process that stands in for it."""
    if SERVE in sys.argv:
        _serve()
    elif PLACE in os.environ:
        _ask(os.environ[PLACE])
    else:
        os.environ |= SINGLE
        _preload()
        _work()


if __name__ == "__main__":
    main()
