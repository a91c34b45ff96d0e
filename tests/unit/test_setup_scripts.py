"""`make setup` on machines that lack what it begins with: a Debian without pip, without npm, without root's rights."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

SERVERS: Final = Path(__file__).parents[1] / "servers"
#: What every Debian has.
BASIC: Final = ("sh", "cat", "env", "grep", "ls", "touch", "true")
#: As in Debian 13: pip is a package of its own, and leaves alone what Debian's packages manage.
PYTHON: Final = """#!/bin/sh
case "$*" in
"-m uv --version") [ -e "$MACHINE/uv" ] ;;
"-m pip --version") [ -e "$MACHINE/pip" ] ;;
"-m pip install --quiet uv") echo "error: externally-managed-environment" >&2; exit 1 ;;
"-m pip install --quiet --user --break-system-packages uv") touch "$MACHINE/uv" ;;
*) exit 2 ;;
esac
"""
APT: Final = """#!/bin/sh
echo "apt-get $*" >>"$MACHINE/log"
case "$*" in *" python3-pip"*) touch "$MACHINE/pip" ;; esac
case "$*" in *" npm"*) printf '#!/bin/sh\\necho "npm $1 $8" >>"$MACHINE/log"\\n' >"$MACHINE/bin/npm" ;; esac
[ ! -e "$MACHINE/bin/npm" ] || /bin/chmod +x "$MACHINE/bin/npm"
"""
#: Runs apt-get only: what the scripts write as root stays unwritten.
SUDO: Final = """#!/bin/sh
shift
case "$1" in env | apt-get) exec "$@" ;; tee) cat >/dev/null ;; esac
"""
NO_SUDO: Final = "#!/bin/sh\necho 'sudo: a password is required' >&2; exit 1\n"


class Machine:
    """A PATH with these programs alone."""

    def __init__(self, folder: Path, **programs: str) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name in BASIC:
            found = shutil.which(name)
            assert found is not None
            (folder / "bin" / name).symlink_to(found)
        for name, script in ({"id": "#!/bin/sh\necho 1000\n"} | programs).items():
            program = folder / "bin" / name.replace("_", "-")
            program.write_text(script)
            program.chmod(0o755)

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": str(self.folder / "bin"), "MACHINE": str(self.folder), "HOME": str(self.folder)}
        return subprocess.run([SERVERS / script], capture_output=True, text=True, env=environ, timeout=60)

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""


def test_uv_is_installed_on_a_debian_whose_python_has_no_pip(tmp_path: Path) -> None:
    machine = Machine(tmp_path, python3=PYTHON, apt_get=APT, sudo=SUDO)
    done = machine.run("uv.sh")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "uv").exists()
    assert "apt-get install -y -qq --no-install-recommends python3-pip\n" in machine.log


def test_pip_that_is_there_is_not_installed_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path, python3=PYTHON, apt_get=APT, sudo=SUDO)
    (tmp_path / "pip").touch()
    assert machine.run("uv.sh").returncode == 0
    assert (tmp_path / "uv").exists()
    assert machine.log == ""


@pytest.mark.parametrize("program", ["uv", "python3"])
def test_nothing_is_done_where_uv_is_there(program: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, **{program: "#!/bin/sh\nexit 0\n"}, apt_get=APT, sudo=SUDO)
    done = machine.run("uv.sh")
    assert (done.returncode, done.stdout, done.stderr, machine.log) == (0, "", "", "")


@pytest.mark.parametrize("programs", [{"apt_get": APT, "sudo": NO_SUDO}, {}], ids=["no rights", "no apt-get"])
def test_where_pip_cannot_be_installed_the_command_is_named(programs: dict[str, str], tmp_path: Path) -> None:
    machine = Machine(tmp_path, python3=PYTHON, **programs)
    done = machine.run("uv.sh")
    assert done.returncode == 1
    assert "apt-get install python3-pip" in done.stdout
    assert machine.log == ""


def test_npm_is_installed_for_azurite(tmp_path: Path) -> None:
    machine = Machine(tmp_path, apt_get=APT, sudo=SUDO)
    done = machine.run("install.sh")
    assert done.returncode == 0, done.stdout + done.stderr
    _, installed, azurite = machine.log.splitlines()
    assert " nodejs npm" in installed
    assert azurite == "npm install azurite@3.35.0"


def test_without_rights_everything_that_is_missing_is_named_in_one_command(tmp_path: Path) -> None:
    machine = Machine(tmp_path, apt_get=APT, sudo=NO_SUDO)
    done = machine.run("install.sh")
    assert done.returncode == 0
    command = done.stdout.splitlines()[-1]
    assert command.startswith("they fail. On Debian and Ubuntu: apt-get install ")
    assert " nodejs npm" in command
    assert machine.log == ""


@pytest.mark.skipif(not Path("/sbin/ldconfig").exists(), reason="has no /sbin/ldconfig")
def test_libraries_that_are_there_are_found_though_sbin_is_not_on_the_path(tmp_path: Path) -> None:
    """A user's PATH on Debian has neither /sbin nor /usr/sbin."""
    known = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    done = Machine(tmp_path, apt_get=APT, sudo=NO_SUDO).run("install.sh")
    assert ("libodbc2" in done.stdout) == ("libodbc.so.2" not in known)
    assert ("libltdl7" in done.stdout) == ("libltdl.so.7" not in known)
