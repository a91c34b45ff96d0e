"""`delayline examples`: list, show and copy the examples and the files for deployment that come with the package."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from delayline.cli.options import examples as example_lines
from delayline.cli.options import json_option
from delayline.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.resources.abc import Traversable

    from delayline.cli.screen import Screen

README: Final = "README.md"
#: What is in the folders of deploy/, which have no README.
DEPLOYMENTS: Final = {
    "container": "An image with one endpoint",
    "grafana": "A dashboard for Grafana",
    "kubernetes": "An endpoint's set-up, deployment and autoscaling",
    "prometheus": "Scraping, and rules for alerts",
    "systemd": "A unit for an endpoint",
}
#: Examples that need more of the repository than their folder.
NOT_ALONE: Final = frozenset({"demo", "__pycache__"})


@dataclass(frozen=True)
class Example:
    """A folder with an example, or with files for deployment."""

    name: str
    files: dict[str, Traversable]
    """By their paths below the folder."""

    @property
    def title(self) -> str:
        """What it is, in a line."""
        if README not in self.files:
            return DEPLOYMENTS[self.name.removeprefix("deploy/")]
        return self.files[README].read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


@click.command(
    epilog=example_lines(
        "delayline examples",
        "delayline examples quickstart --to .",
        "delayline examples deploy/systemd/delayline-billing.service",
    )
)
@click.argument("name", required=False)
@click.option("--to", "target", type=click.Path(path_type=Path, file_okay=False), help="Copy into this folder.")
@json_option
def examples(name: str | None, target: Path | None, screen: Screen) -> None:
    """List the examples and the files for deployment, show one, or copy them.

    NAME is an example, whose README is shown, or a file of one.
    """
    found = {example.name: example for example in _all_examples()}
    if target is not None:
        chosen = found.values() if name is None else [_named(name, found)]
        _copy(chosen, target, screen)
    elif name is None:
        _list(found.values(), screen)
    elif name in found:
        _show(found[name], screen)
    else:
        _show_file(name, found, screen)


def _all_examples() -> Iterator[Example]:
    package = files("delayline")
    shipped = package / "_examples"
    root = shipped if shipped.is_dir() else Path(str(package)).parents[1] / "examples"  # of a checkout
    deploy = shipped / "deploy" if shipped.is_dir() else Path(str(package)).parents[1] / "deploy"
    for prefix, parent in (("", root), ("deploy/", deploy)):
        for folder in sorted(parent.iterdir(), key=lambda entry: entry.name):
            if folder.is_dir() and folder.name not in {*NOT_ALONE, "deploy"}:
                yield Example(prefix + folder.name, dict(sorted(_files_below(folder, ""))))


def _files_below(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_file():
            yield prefix + entry.name, entry
        elif entry.name not in NOT_ALONE:
            yield from _files_below(entry, f"{prefix}{entry.name}/")


def _named(name: str, found: dict[str, Example]) -> Example:
    if name not in found:
        raise _unknown(name, found)
    return found[name]


def _unknown(name: str, known: Iterable[str]) -> ConfigurationError:
    similar = difflib.get_close_matches(name, list(known), 3)
    hint = f"did you mean {' or '.join(similar)}?" if similar else "`delayline examples` lists them"
    return ConfigurationError(f"there is no example {name!r}: {hint}")


def _list(found: Iterable[Example], screen: Screen) -> None:
    screen.table(["name", "what"], [(example.name, example.title) for example in found])
    screen.echo("Show one: delayline examples NAME. Copy it: delayline examples NAME --to FOLDER")
    screen.document({"examples": [_document(example) for example in found]})


def _document(example: Example) -> dict[str, object]:
    return {"name": example.name, "what": example.title, "files": list(example.files)}


def _show(example: Example, screen: Screen) -> None:
    readme = example.files.get(README)
    screen.echo(readme.read_text(encoding="utf-8") if readme else example.title + "\n")
    for path in example.files:
        screen.echo(f"{example.name}/{path}")
    screen.document(_document(example))


def _show_file(name: str, found: dict[str, Example], screen: Screen) -> None:
    shown = {f"{example.name}/{path}": file for example in found.values() for path, file in example.files.items()}
    if name not in shown:
        raise _unknown(name, [*found, *shown])
    text = shown[name].read_text(encoding="utf-8")
    if not screen.as_json:
        click.echo(text, nl=False)
    screen.document({"name": name, "text": text})


def _copy(chosen: Iterable[Example], target: Path, screen: Screen) -> None:
    copies = {target / example.name / path: file for example in chosen for path, file in example.files.items()}
    for path in copies:
        if path.exists():
            raise ConfigurationError(f"{path} exists already: remove it, or name another folder with --to")
    for path, file in copies.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.read_bytes())
        except OSError as error:
            raise ConfigurationError(
                f"{path} cannot be written: {error.strerror}. Name another folder with --to"
            ) from None
        screen.echo(f"✓ {path}")
    screen.document({"copied": [str(path) for path in copies]})
