"""A message that kills its process: its neighbours are handled all the same, and it ends in the error queue."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Final

import pytest
from tests.eventually import PATIENCE

from delayline import Endpoint, Headers, Recoverability
from delayline.backends import BackendOptions, backend_of
from delayline.message import Message

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from delayline.transport import Transport

pytestmark = pytest.mark.timeout(500)

#: Forks a process that handles until it is idle for long, and another one whenever `poison` has killed it.
WORKER: Final = """
import asyncio, json, os, signal, sys, time
from datetime import timedelta
from delayline import AzureStorageQueueTransport, Endpoint, Recoverability
from delayline.backends import BackendOptions, backend_of

settings = json.loads(sys.argv[1])

async def main():
    url = settings["url"]
    endpoint = Endpoint(
        "sales",
        transport=AzureStorageQueueTransport(url, visibility_timeout=timedelta(seconds=2))
        if url.startswith("azure")
        else backend_of(url, kind="transport").transport(url, BackendOptions()),
        concurrency=settings["concurrency"],
        recoverability=Recoverability(maximum_crashes=settings["maximum"]),
    )
    running, handled = set(), asyncio.Event()

    @endpoint.handler
    async def handle(message, context):
        running.add(message.id)
        handled.set()
        if message.id.startswith("poison"):
            with open(settings["journal"], "a") as journal:
                journal.write(f"crash {message.id} {len(running)}\\n")
            await asyncio.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(settings["seconds"])
        running.discard(message.id)
        with open(settings["journal"], "a") as journal:
            journal.write(f"handled {message.id} {len(running)}\\n")

    async with endpoint:
        while True:
            handled.clear()
            try:
                await asyncio.wait_for(handled.wait(), settings["idle"])
            except TimeoutError:
                return

killed = 0
for kill_after in [*settings["kill_after"], *[None] * (settings["most"] + 1)]:
    child = os.fork()
    if child == 0:
        asyncio.run(main())
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    elif os.WIFSIGNALED(os.waitpid(child, 0)[1]):
        killed += 1
    else:
        break
print(killed)
"""


class Crashes:
    """Processes of one endpoint, started again whenever a message has killed one."""

    def __init__(self, url: str, folder: Path, *, maximum: int = 5, concurrency: int = 8, seconds: float = 0.1) -> None:
        self._url = url
        self._journal = folder / "journal"
        self._settings = {
            "url": url,
            "journal": str(self._journal),
            "maximum": maximum,
            "concurrency": concurrency,
            "seconds": seconds,
            "idle": 6.0 if url.startswith("azure") else 3.0,
        }

    @property
    def transport(self) -> Transport:
        return backend_of(self._url, kind="transport").transport(self._url, BackendOptions())

    def run(self, most: int, processes: int = 1, kill_after: Sequence[float] = ()) -> int:
        """Run processes until they end by themselves, each again when it was killed; return how often that was.

        Args:
            most: How often messages may kill each of them.
            processes: How many run at the same time.
            kill_after: Seconds after which they are killed from outside, the first so many times.
        """
        settings = json.dumps(self._settings | {"most": most, "kill_after": list(kill_after)})
        running = [
            subprocess.Popen([sys.executable, "-c", WORKER, settings], stdout=subprocess.PIPE, text=True)
            for _ in range(processes)
        ]
        killed = sum(int(process.communicate(timeout=2 * PATIENCE)[0]) for process in running)
        assert killed <= most, f"killed {killed} times"
        return killed

    def lines(self, kind: str) -> list[tuple[str, int]]:
        """Return which messages were handled, or killed a process, and how many were handled beside each."""
        found = (line.split() for line in self._journal.read_text().splitlines())
        return [(name, int(beside)) for what, name, beside in found if what == kind]

    async def send(self, *ids: str) -> None:
        endpoint = Endpoint("sales", transport=self.transport, recoverability=Recoverability(delayed_retries=0))
        await endpoint.setup()
        async with Endpoint("sales", transport=self.transport, send_only=True) as sender:
            for id in ids:
                await sender.send("sales", b"", message_id=id)

    async def in_queue(self, queue: str) -> list[Message]:
        transport = self.transport
        await transport.start()
        try:
            return list(await transport.browse(queue, 1000))  # type: ignore[attr-defined]
        finally:
            await transport.stop()


@pytest.fixture(params=["sqlite", "postgresql", "mariadb", "rabbitmq", "rabbitmq4", "azure"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'delayline.db'}"
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


def neighbours(number: int) -> list[str]:
    return [f"m{one}" for one in range(number)]


@pytest.mark.slow
@pytest.mark.parametrize("maximum", [2, 5])
def test_a_message_that_kills_its_process_goes_to_the_error_queue(url: str, tmp_path: Path, maximum: int) -> None:
    crashes, others = Crashes(url, tmp_path, maximum=maximum), neighbours(40)
    # Given a message that kills its process, among others
    asyncio.run(crashes.send(*others[:5], "poison", *others[5:]))
    if url.startswith("amqp"):
        maximum = max(4, maximum)
    # When the process is started again whenever that has happened
    killed = crashes.run(most=maximum + 1)
    # Then it is as often as the setting says; from the second time on nothing was handled beside it
    assert killed == maximum
    assert [beside for _, beside in crashes.lines("crash")][2:] == [1] * (maximum - 2)
    # And it is in the error queue, with the number, and every other message was handled
    (moved,) = asyncio.run(crashes.in_queue("error"))
    assert (moved.id, moved.headers[Headers.CRASHES]) == ("poison", str(maximum))
    assert moved.headers[Headers.EXCEPTION_TYPE] == "delayline.errors.TooManyCrashes"
    assert {id for id, _ in crashes.lines("handled")} == set(others)
    assert asyncio.run(crashes.in_queue("sales")) == []


@pytest.mark.slow
def test_several_processes_survive_two_messages_that_kill_them(url: str, tmp_path: Path) -> None:
    crashes, others = Crashes(url, tmp_path), neighbours(60)
    asyncio.run(crashes.send("poison1", *others[:20], "poison2", *others[20:]))
    # A crash of one process may be followed by one of another before it is noticed
    crashes.run(most=30, processes=3)
    moved = asyncio.run(crashes.in_queue("error"))
    assert sorted(message.id for message in moved) == ["poison1", "poison2"]
    assert {id for id, _ in crashes.lines("handled")} == set(others)


@pytest.mark.slow
def test_kills_of_innocent_processes_move_no_message(url: str, tmp_path: Path) -> None:
    crashes, others = Crashes(url, tmp_path, seconds=0.3), neighbours(60)
    asyncio.run(crashes.send(*others))
    # When processes are killed from outside at any moment
    crashes.run(most=0, kill_after=[1.0 + number / 4 for number in range(6)])
    # Then all messages are handled, and none is in the error queue
    assert asyncio.run(crashes.in_queue("error")) == []
    assert set(Counter(id for id, _ in crashes.lines("handled"))) == set(others)
