"""Distributions of the examples, laid out as an installer does."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def install(example: Path, site: Path) -> Path:
    """Return `site`, a folder for Python's path, with the example's module and the entry points of its distribution."""
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    information = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (information / "entry_points.txt").write_text("".join(groups))
    module = example / f"{example.name}.py"
    (site / module.name).symlink_to(module)
    return site
