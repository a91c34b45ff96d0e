"""Trees with newer Debian systems, in the user's cache folder, for versions of servers that this machine does not have.

`python -m tests.servers.debian trixie` makes Debian 13's where it is missing: RabbitMQ 4.0, PostgreSQL 17 and MariaDB
11.8, in one to four minutes and 1 GB. It prints the tree's folder, or why it cannot be made here, with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.servers.mariadb import MariadbServer
from tests.servers.postgresql import PostgresqlServer
from tests.servers.programs import CONFIGURED, Programs
from tests.servers.rabbitmq import RabbitmqServer

if TYPE_CHECKING:
    from collections.abc import Iterator

SUITES: Final = ("trixie", "sid")
PACKAGES: Final = ("rabbitmq-server", "postgresql", "mariadb-server")
DEFAULT_MIRROR: Final = "http://deb.debian.org/debian"
#: Seconds for one step: with a slow mirror the downloads take minutes.
STEP_LIMIT: Final = 1800
#: No service starts when its package is installed.
NO_SERVICES: Final = "#!/bin/sh\nexit 101\n"
#: A tree can be made again, so nothing has to be flushed; nobody reads its documentation.
DPKG: Final = (
    "force-unsafe-io\npath-exclude=/usr/share/doc/*\npath-exclude=/usr/share/man/*\npath-exclude=/usr/share/locale/*\n"
)
#: Packages of sid are not set up without /proc. The mount ends with its namespace.
ENTER: Final = 'mount --rbind /proc "$1/proc" && exec chroot "$@"'
#: What leads apt to its mirrors on this machine, and so in a tree.
NETWORK: Final = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")


Server = type[PostgresqlServer] | type[MariadbServer] | type[RabbitmqServer]
#: The versions of Debian 13, which tests with a newer server want.
NEWER: Final[Sequence[tuple[Server, tuple[int, ...]]]] = (
    (RabbitmqServer, (4,)),
    (PostgresqlServer, (17,)),
    (MariadbServer, (11, 8)),
)


class CannotMakeTree(Exception):
    """A tree cannot be made on this machine; the text says why."""


def has(kind: Server, version: tuple[int, ...], programs: Programs = CONFIGURED) -> bool:
    """Return whether a server is installed in this version or a later one."""
    return kind.installed(programs) and kind.version(programs) >= version


def tree(suite: str = "trixie") -> Programs:
    """Return the programs of a suite's tree, which may not have been made yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Programs(cache / "delayline" / "servers" / suite)


def make(suite: str) -> Path:
    """Make the tree where it is missing, and return its folder; a second process waits for the first.

    It is made under another name: what has the suite's name is complete.

    Raises:
        CannotMakeTree: Not here.
    """
    folder = tree(suite).root
    assert folder is not None
    if folder.exists():
        return folder
    if os.geteuid() != 0:
        return _make_as_root(suite, folder)
    _run(["unshare", "--mount", "true"], "programs of a tree cannot be run in a mount namespace of their own")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{suite}.lock")):
        if not folder.exists():
            unfinished = folder.with_name(f"{suite}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
            try:
                _install(suite, unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _make_as_root(suite: str, folder: Path) -> Path:
    _run(["sudo", "-n", "true"], "only root can make a tree, and this user may not become root without a password")
    command = [sys.executable, "-m", "tests.servers.debian", suite]
    cache = f"XDG_CACHE_HOME={folder.parents[2]}"
    environment = [f"{name}={value}" for name, value in os.environ.items() if name.lower().endswith("_proxy")]
    _run(["sudo", "-n", "env", cache, *environment, *command], f"{suite} was not made by root")
    return folder


def _install(suite: str, folder: Path) -> None:
    mirror = _mirror()
    if not shutil.which("debootstrap"):
        _run(["apt-get", "update", "-qq"], "debootstrap is missing, and apt-get cannot install it")
        _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "debootstrap"], "debootstrap is missing")
    _run(
        ["debootstrap", "--variant=minbase", suite, str(folder), mirror],
        f"debootstrap cannot install {suite} from {mirror}",
    )
    policy = folder / "usr/sbin/policy-rc.d"
    policy.write_text(NO_SERVICES)
    policy.chmod(0o755)
    (folder / "etc/dpkg/dpkg.cfg.d/tree").write_text(DPKG)
    for path in (*NETWORK, *map(str, _settings_of_apt())):
        with contextlib.suppress(FileNotFoundError):
            copy = folder / path.lstrip("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    inside = ["unshare", "--mount", "sh", "-c", ENTER, "sh", str(folder)]
    apt = [*inside, "env", "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C.UTF-8", "apt-get"]
    _run([*apt, "update", "-qq"], f"apt-get in {suite} does not reach {mirror}")
    _run([*apt, "install", "-y", "-qq", "--no-install-recommends", *PACKAGES], f"{suite} has not all packages")
    for leftover in ("var/cache/apt", "var/lib/apt/lists"):
        shutil.rmtree(folder / leftover)


def _mirror() -> str:
    """Return the mirror that apt uses on this machine, if that is a Debian."""
    sites = [
        "apt-get",
        "indextargets",
        "--format",
        "$(SITE)",
        "Created-By: Packages",
        "Origin: Debian",
        "Label: Debian",
    ]
    try:
        found = subprocess.run(sites, check=True, capture_output=True, text=True, timeout=60).stdout.split()
    except (OSError, subprocess.SubprocessError):
        found = []
    return os.environ.get("DELAYLINE_DEBIAN_MIRROR") or next(iter(found), DEFAULT_MIRROR)


def _settings_of_apt() -> list[Path]:
    """Return this machine's settings of proxies and mirrors, and of signatures that are too old."""
    files = [path for path in Path("/etc/apt/apt.conf.d").glob("*") if path.is_file()]
    return [path for path in files if any(word in path.read_text().lower() for word in ("acquire", "mirror"))]


def _run(command: Sequence[str], reason: str) -> None:
    """Run a step; if it fails, say the reason and what it printed last."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=STEP_LIMIT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotMakeTree(f"{reason} ({error})") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-5:]
        raise CannotMakeTree("\n".join([f"{reason}:", *said]))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Make a tree and print its folder."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.servers.debian", description="Make a tree where it is missing."
    )
    parser.add_argument("suite", choices=SUITES, help="trixie is Debian 13")
    parser.add_argument("--if-older", action="store_true", help="not where this machine's own servers are as new")
    arguments = parser.parse_args()
    if arguments.if_older and all(has(kind, version) for kind, version in NEWER):
        return
    try:
        print(make(arguments.suite))  # noqa: T201
    except CannotMakeTree as error:
        sys.exit(f"no tree with Debian's {arguments.suite}: {error}")


if __name__ == "__main__":
    main()
