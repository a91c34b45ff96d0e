"""Every page is run: its python blocks, its console commands, its files, in a folder of its own.

A comment before a block says what is special about it. `...` in an output stands for anything.

<!-- fragment: why -->       it is not run, only parsed
<!-- file: name -->          it is saved for the others to use
<!-- output -->              it is what the block before it prints
<!-- background: text -->    it goes on running once it has printed that text
<!-- exit: 1 -->             it ends with that code
<!-- needs: module -->       it runs in a process of its own, where that module is installed
<!-- server: rabbitmq -->    the whole page is run on such a server: DELAYLINE_URL leads there
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from tests.spark.daemon import forking
from tests.spark.spark_settings import variables

from delayline.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.servers.rabbitmq import RabbitmqServer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("README.md"))]
OURS = [page for page in PAGES if page.parent.name not in {"custom_store", "reminders"}]
#: The page that starts Spark as it comes.
AS_A_NEWCOMER = "spark-pipeline.md"
#: Their commands run on a private server: DELAYLINE_URL leads there.
ON_A_BROKER, ON_POSTGRESQL = (
    [page for page in OURS if f"<!-- server: {server} -->" in page.read_text(encoding="utf-8")]
    for server in ("rabbitmq", "postgresql")
)
#: Pages that take half a minute each, for Spark's start and its jobs.
ON_SPARK = [
    page
    for page in OURS
    if page.name in {AS_A_NEWCOMER, "runbook.md", "cold-tier.md", "spark-schedule.md", "spark-audit.md"}
]
BLOCK = re.compile(
    r"^(?:<!-- ([\w-]+)(?:: ([^\n]*?))? -->\n+)?^(`{3,})(\w*)[^\n]*\n(.*?)^\3$", re.MULTILINE | re.DOTALL
)
#: Shown but not run here: `make` has tests elsewhere, and installing changes the machine.
NOT_RUN = ("make", "pip", "flask", "gunicorn")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    mark: str | None
    value: str


def blocks_of(page: Path) -> list[Block]:
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(one[4], one[5], one[1], one[2] or "") for one in found]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


class Session:
    """Runs one page's blocks, in their order."""

    def __init__(self, folder: Path, printed: Callable[[], str]) -> None:
        self.folder = folder
        self.output = ""
        #: Whether `python` and `delayline` are those of an environment that PATH leads to.
        self.elsewhere = False
        self._printed = printed
        self._running: list[subprocess.Popen[str]] = []

    def run(self, block: Block) -> None:
        match block:
            case Block(mark="file"):
                target = self.folder / block.value
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(block.text, encoding="utf-8")
            case Block(mark="fragment"):
                assert block.value, "a fragment says why it is not run"
                if block.language == "python":
                    ast.parse(block.text)
            case Block(mark="output"):
                matches(self.output, block.text)
            case Block(language="python"):
                self._python(block)
            case Block(language="console"):
                self._console(block)

    def _python(self, block: Block) -> None:
        script = self.folder / "block.py"
        script.write_text(block.text, encoding="utf-8")
        if block.mark == "needs" or self.elsewhere:
            if not self.elsewhere and importlib.util.find_spec(block.value) is None:
                ast.parse(block.text)
                return
            code, self.output = self._command("python block.py", patience=200)  # of whatever is so large to be an extra
            assert code == 0, self.output
            return
        self._printed()
        runpy.run_path(str(script), run_name="__main__")
        self.output = self._printed()

    def _console(self, block: Block) -> None:
        for command, expected in commands_of(block.text):
            if command.startswith(NOT_RUN):
                continue
            if block.mark == "background":
                self._start(command, block.value)
                continue
            code, self.output = self._command(command)
            assert code == int(block.value if block.mark == "exit" else 0), f"$ {command}\n{self.output}"
            matches(self.output, expected)

    def _command(self, command: str, *, patience: float = 60) -> tuple[int, str]:
        patience = patience if not self.elsewhere else 400  # modules are compiled first, and Spark is started often
        words = shlex.split(command)
        if words[0] == "delayline" and not self.elsewhere and not set(command) & set("|&;<>$"):
            result = CliRunner().invoke(main, words[1:])
            return result.exit_code, result.output
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, capture_output=True, text=True, timeout=patience, check=False
        )
        output = done.stdout + done.stderr
        assert "Exception ignored" not in output
        return done.returncode, output

    def _start(self, command: str, ready: str) -> None:
        log = self.folder / f"background-{len(self._running)}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                shlex.split(command), cwd=self.folder, stdout=file, stderr=subprocess.STDOUT, text=True
            )
        self._running.append(process)
        deadline = time.monotonic() + 120
        while ready not in log.read_text():
            assert process.poll() is None, f"$ {command}\n{log.read_text()}"
            assert time.monotonic() < deadline, f"$ {command} never printed {ready!r}:\n{log.read_text()}"
            time.sleep(0.02)

    def end(self) -> None:
        for process in self._running:
            process.send_signal(signal.SIGTERM)
        for process in self._running:
            process.wait(timeout=20)


def commands_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command with the output shown below it."""
    command, expected = "", ""
    for line in text.splitlines(keepends=True):
        if line.startswith("$ ") and not command.endswith("\\"):
            if command:
                yield command, expected
            command, expected = line[2:].rstrip("\n"), ""
        elif command.endswith("\\"):
            command = command[:-1] + line.strip()
        else:
            expected += line
    if command:
        yield command, expected


def matches(output: str, expected: str) -> None:
    """Check that the expected lines stand in the output, in their order; `...` is anything within a line."""
    lines = iter(output.splitlines())
    for wanted in filter(None, (line.strip() for line in expected.splitlines())):
        pattern = re.compile(
            ".*?".join(r"\s+".join(map(re.escape, re.split(" +", part))) for part in wanted.split("..."))
        )
        if not any(pattern.fullmatch(line.strip()) for line in lines):
            pytest.fail(f"the page promises {wanted!r}, in this order; there was\n{output}")


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Session]:
    for variable in [name for name in os.environ if name.startswith("DELAYLINE_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TZ", "UTC")
    # The delivery suite takes a third of all these tests' time; tests/conformance runs it on a six-verb store.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:cacheprovider -k 'not Delivery'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    one = Session(tmp_path, lambda: capfd.readouterr().out)
    yield one
    one.end()
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(scope="session")
def forked() -> Iterator[str]:
    """Say where Spark's Python workers are forked."""
    with forking() as place:
        yield place


@pytest.fixture
def small_sparks(
    session: Session, forked: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have a page start Spark as other tests do, which takes a third of the time."""
    del session  # which hides variables named DELAYLINE_*
    for name, value in variables(tmp_path_factory.mktemp("conf"), forked).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("page", ON_A_BROKER, ids=name_of)
def test_the_examples_of_a_page_work_on_a_broker(
    page: Path, session: Session, rabbitmq: RabbitmqServer, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELAYLINE_URL", f"{rabbitmq_url}?management={rabbitmq.management_url}")
    for block in blocks_of(page):
        session.run(block)


@pytest.mark.parametrize("page", ON_POSTGRESQL, ids=name_of)
def test_the_examples_of_a_page_work_on_postgresql(
    page: Path, session: Session, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELAYLINE_URL", postgresql_url)
    for block in blocks_of(page):
        session.run(block)


@pytest.mark.timeout(300)
@pytest.mark.sample(1)
@pytest.mark.parametrize("page", ON_SPARK, ids=name_of)
def test_the_examples_of_a_page_work_on_spark(page: Path, session: Session, request: pytest.FixtureRequest) -> None:
    test_the_examples_of_a_page_work(page, session, request)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "page", [page for page in OURS if page not in ON_A_BROKER + ON_POSTGRESQL + ON_SPARK], ids=name_of
)
def test_the_examples_of_a_page_work(page: Path, session: Session, request: pytest.FixtureRequest) -> None:
    if page.name != AS_A_NEWCOMER and "spark" in page.read_text(encoding="utf-8").lower():
        request.getfixturevalue("small_sparks")
    for block in blocks_of(page):
        if page.parent.parent.name == "examples":
            with contextlib.suppress(FileExistsError):
                for beside in page.parent.glob("*.py"):
                    (session.folder / beside.name).symlink_to(beside)
        session.run(block)


def test_fragments_are_few() -> None:
    python = [block for page in OURS for block in blocks_of(page) if block.language == "python"]
    fragments = [block for block in python if block.mark == "fragment"]
    assert len(fragments) * 5 <= len(python), [block.value for block in fragments]


def test_every_mark_is_known() -> None:
    marks = {block.mark for page in OURS for block in blocks_of(page)}
    assert marks <= {None, "fragment", "file", "output", "background", "exit", "needs", "generated", "server"}


def test_every_example_runs_and_has_a_readme() -> None:
    """Examples whose README is not a page of the site run here; the others have tests elsewhere."""
    for folder in sorted(path for path in (ROOT / "examples").iterdir() if any(path.glob("*.py"))):
        assert (folder / "README.md").exists(), f"{folder.name} has no README.md"
        if folder.name in {"reminders", "demo", "dotnet"} or folder / "README.md" in OURS:
            continue
        script = folder / f"{folder.name}.py"
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout, f"{script.name} shows nothing"


def test_the_readme_shows_the_quickstart_as_it_is() -> None:
    shown = next(block.text for block in blocks_of(ROOT / "README.md") if block.language == "python")
    assert shown == (ROOT / "examples/quickstart/quickstart.py").read_text(encoding="utf-8")


def test_make_has_every_target_that_a_page_names() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in [*OURS, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"(?:^\$ |`)make ([a-z-]+)`?", text, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{name_of(page)} names make {target}"


def test_the_page_on_dotnet_shows_its_example() -> None:
    """Given the two programs of the example, then the page has the Python one whole, and the heart of the other."""
    blocks, example = blocks_of(ROOT / "docs" / "how-to" / "dotnet.md"), ROOT / "examples" / "dotnet"
    assert [one.text for one in blocks if one.language == "python"] == [(example / "billing.py").read_text()]
    [heart] = [one.text for one in blocks if one.language == "csharp"]
    program = (example / "Program.cs").read_text()
    assert heart in program
    assert f"the {len(program.splitlines())} lines in" in (ROOT / "docs" / "how-to" / "dotnet.md").read_text()
