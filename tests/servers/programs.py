"""Where the servers' programs come from: this machine, or a tree that holds another system beside it.

DELAYLINE_SERVERS_ROOT names a tree, such as the Debian 13 that `make test-versions` makes: its programs run in it, with
chroot in a mount namespace of their own, and their files stay in the temporary folder of this machine.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

FOLDERS: Final = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin")
#: The commands of the same names in /usr/sbin change the user and the environment.
RABBITMQ: Final = "/usr/lib/rabbitmq/bin"
POSTGRESQL: Final = "/usr/lib/postgresql"
#: Run as root of a new mount namespace: which ends with the last process in it, and its mounts with it.
ENTER: Final = """
tree=$1 temporary=$2; shift 2
mount --rbind /proc "$tree/proc" && mount --rbind /dev "$tree/dev" &&
mkdir -p "$tree$temporary" && mount --rbind "$temporary" "$tree$temporary" && exec chroot "$tree" "$@"
"""


@dataclass(frozen=True)
class Programs:
    """The programs of one system.

    root: the tree; None is this machine.
    """

    root: Path | None = None

    @classmethod
    def configured(cls) -> Self:
        """Return those of DELAYLINE_SERVERS_ROOT, by default of this machine."""
        root = os.environ.get("DELAYLINE_SERVERS_ROOT")
        return cls(Path(root).resolve() if root else None)

    def __str__(self) -> str:
        """Return where they are."""
        return str(self.root or "this machine")

    def at(self, path: str) -> Path:
        """Return where a path of that system is, seen from this one."""
        return Path(path) if self.root is None else self.root / path.lstrip("/")

    def of_tree(self, *names: str) -> bool:
        """Return whether the tree has these programs, and they can be run."""
        return all(self._inside(name) for name in names) and self._may_enter()

    def command(self, program: str | Path, *, user: str | None = None) -> list[str]:
        """Return what runs a program: a path or name of this machine's, which a tree is asked for by name.

        user: who runs it, instead of root, who some servers do not want to be.
        """
        as_user = ["runuser", "-u", user, "--"] if user and os.geteuid() == 0 else []
        if self.root is None:
            return [*as_user, str(program)]
        name = Path(program).name
        inside = self._inside(name)
        if inside is None:
            raise FileNotFoundError(f"{self.root} has no {name}")
        environment = ["env", f"PATH={os.pathsep.join(FOLDERS)}", "LC_ALL=C.UTF-8"]
        return [*self._enter(), *environment, *as_user, inside]

    def own(self, folder: Path, user: str) -> None:
        """Give a folder to a user, whose number may be another in a tree; as root only."""
        if os.geteuid() == 0:
            os.chown(folder, *self._user_and_group(user))

    def _may_enter(self) -> bool:
        """Return whether the tree's programs can be run here: by root, or where user namespaces are allowed."""
        try:
            subprocess.run([*self._enter(), "true"], check=True, capture_output=True, timeout=30)
        except (OSError, subprocess.SubprocessError):
            return False
        return True

    def _enter(self) -> list[str]:
        as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
        return ["unshare", "--mount", *as_root, "sh", "-c", ENTER, "sh", str(self.root), tempfile.gettempdir()]

    def _inside(self, name: str) -> str | None:
        """Return the path in the tree; links in it lead to other places from here, so they are not followed."""
        newest = sorted(self.at(POSTGRESQL).glob("*"), key=lambda path: int(path.name), reverse=True)
        folders = [RABBITMQ, *(f"{POSTGRESQL}/{path.name}/bin" for path in newest), *FOLDERS]
        return next((f"{folder}/{name}" for folder in folders if os.path.lexists(self.at(f"{folder}/{name}"))), None)

    def _user_and_group(self, user: str) -> tuple[int, int]:
        if self.root is None:
            found = pwd.getpwnam(user)
            return found.pw_uid, found.pw_gid
        for row in self.at("/etc/passwd").read_text().splitlines():
            name, _, user_id, group_id, *_ = row.split(":")
            if name == user:
                return int(user_id), int(group_id)
        raise LookupError(f"{self.root} has no user {user}")


#: Those that tests use where they do not ask for others.
CONFIGURED: Final = Programs.configured()
