"""pyright, which most editors run, is clean on what users write, and knows the types of what they import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.docs.test_pages import blocks_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
#: Types of `delayline` that type checkers know, as a part of all: never fewer. The rest are two classes on Django's.
KNOWN_TYPES = 0.9998


def pyright(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run pyright with the packages of this environment."""
    binaries = Path(sys.executable).parent
    environ = os.environ | {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(binaries.parent)}
    command = [sys.executable, "-m", "pyright", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280)


def test_it_finds_the_mistakes_and_nothing_else() -> None:
    """Given right and wrong wiring, then there is an error in each line that says so; in the examples there is none."""
    done = pyright("--pythonpath", sys.executable, "tests/typing", "examples")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_first_pages_have_no_mistakes(tmp_path: Path) -> None:
    """Given the programs of README and tutorials, then there is no error in them."""
    written = []
    for page in PAGES:
        folder = tmp_path / page.stem
        folder.mkdir()
        for number, block in enumerate(blocks_of(page)):
            if block.language == "python" and block.mark != "fragment":
                file = folder / (block.value if block.mark == "file" else f"block{number}.py")
                file.write_text(block.text)
                written.append(file)
    assert len(written) > len(PAGES)
    done = pyright("--pythonpath", sys.executable, *written)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_types_of_what_users_import_are_known() -> None:
    done = pyright("--verifytypes", "delayline", "--ignoreexternal", "--outputjson")
    symbols = [symbol for symbol in json.loads(done.stdout)["typeCompleteness"]["symbols"] if symbol["isExported"]]
    inferred = [symbol["name"] for symbol in symbols if symbol["isTypeAmbiguous"] or not symbol["isTypeKnown"]]
    assert len(symbols) > 5000, done.stdout[-2000:] + done.stderr
    share = 1 - len(inferred) / len(symbols)
    assert share >= KNOWN_TYPES, f"{share:.2%} known: write the types of {', '.join(inferred)}"
