"""`manage.py delayline`: the command line of delayline with the project's settings."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError

from delayline.cli import main
from delayline.contrib.django.project_settings import ProjectSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What `run` runs.
WORKER = "delayline.contrib.django.worker:endpoint"


class Command(BaseCommand):  # type: ignore[misc]  # Django is not typed
    """Runs a command of delayline: its arguments are delayline's, not Django's."""

    help = "delayline with the settings of this project: run, doctor, pending, errors and others."

    def run_from_argv(self, argv: list[str]) -> None:
        """Run the command of a command line, as `manage.py delayline run --health 127.0.0.1:8081`."""
        own = [word for word in argv[2:] if not word.startswith(("--settings=", "--pythonpath="))]
        self.check()
        sys.exit(self._run(own, prog_name=f"{Path(argv[0]).name} {argv[1]}"))

    def print_help(self, prog_name: str, subcommand: str) -> None:
        """Print delayline's own help."""
        self._run(["--help"], prog_name=f"{prog_name} {subcommand}")

    def handle(self, *args: str, **options: Any) -> None:  # noqa: ANN401 - of Django
        """Run the command, as of `call_command("delayline", "pending", "--count")`. Raises CommandError if it fails."""
        del options
        if code := self._run(list(args), prog_name="manage.py delayline"):
            raise CommandError(f"delayline {' '.join(args)} has ended with exit code {code}", returncode=code)

    def add_arguments(self, parser: Any) -> None:  # noqa: ANN401 - of Django
        """Take all arguments of `call_command`."""
        parser.add_argument("args", nargs=argparse.REMAINDER)

    def _run(self, words: Sequence[str], *, prog_name: str) -> int:
        try:
            os.environ.update(ProjectSettings.of_project().environment())
        except ImproperlyConfigured as error:
            raise CommandError(str(error), returncode=2) from error
        given = list(words)
        if given[:1] == ["run"]:
            given.insert(1, WORKER)
        try:
            return int(main.main(given, prog_name=prog_name, standalone_mode=False) or 0)
        except click.exceptions.Exit as ended:
            return ended.exit_code
        except click.ClickException as error:
            error.show()
            return error.exit_code
        except click.Abort:
            return 1
