"""A private RabbitMQ node."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final
from urllib.parse import quote

import httpx
from tests.servers.own_process import PATIENCE, OwnProcess
from tests.servers.ports import MANAGEMENT_ABOVE, free_port
from tests.servers.programs import CONFIGURED, RABBITMQ, Programs

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Debian's own command changes the user and the environment; the program behind it takes both as they are.
PROGRAMS: Final = Path(RABBITMQ)
SETTINGS: Final = (
    "loopback_users = none",
    "disk_free_limit.absolute = 50MB",
    "vm_memory_high_watermark.absolute = 2GB",
    "raft.wal_max_size_bytes = 67108864",
    "collect_statistics_interval = 500",
    "log.console = false",
    "log.file.level = warning",
)
#: Due messages without a destination are tried again every second, not every three minutes; counts are as fresh.
ADVANCED: Final = "[{rabbit, [{dead_letter_worker_publisher_confirm_timeout, 1000}, {quorum_tick_interval, 1000}]}].\n"


class RabbitmqServer(OwnProcess):
    """A private node on free ports, with its management plugin and the administrator `guest`.

    feature_flags: the initial flags, by name and with commas between; by default all of them.
    programs: of which system.
    beside: the node whose cluster this one joins.
    """

    product = "RabbitMQ"
    install = "apt-get install rabbitmq-server"
    settings: ClassVar[Sequence[str]] = SETTINGS
    advanced: ClassVar[str] = ADVANCED

    def __init__(
        self,
        settings: Sequence[str] = (),
        feature_flags: str | None = None,
        programs: Programs = CONFIGURED,
        beside: RabbitmqServer | None = None,
    ) -> None:
        self.programs = programs
        self.folder = Path(tempfile.mkdtemp(prefix="delayline-rabbitmq-"))
        self.port = free_port(above=MANAGEMENT_ABOVE)
        self.management_port = self.port + MANAGEMENT_ABOVE
        self._nodes_port = free_port()
        self._names_port: int = free_port() if beside is None else beside._names_port
        self._cookie: str = secrets.token_hex(10).upper() if beside is None else beside._cookie
        self._feature_flags = feature_flags
        self.node = f"test-{uuid.uuid4().hex[:12]}@localhost"
        self._names: subprocess.Popen[bytes] | None = None
        self._shares_names = beside is not None
        if beside is not None:
            peers = enumerate((beside.node, self.node), 1)
            discovery = [f"cluster_formation.classic_config.nodes.{number} = {node}" for number, node in peers]
            settings = [*settings, "cluster_formation.peer_discovery_backend = classic_config", *discovery]
        # A connection of its own for each call: a busy node may close one that is kept while the next call comes.
        each_its_own = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(
            base_url=self.management_url, auth=("guest", "guest"), timeout=PATIENCE, limits=each_its_own
        )
        self._configure([*self.settings, *settings])
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def installed(programs: Programs = CONFIGURED) -> bool:
        """Return whether the server's programs are there."""
        if programs.root is not None:
            return programs.of_tree("rabbitmq-server", "epmd")
        return (PROGRAMS / "rabbitmq-server").exists() and shutil.which("epmd") is not None

    @staticmethod
    def version(programs: Programs = CONFIGURED) -> tuple[int, ...]:
        """Return the version of installed programs, as Debian names their folder."""
        names = [folder.name for folder in programs.at("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*")]
        return max(tuple(map(int, name.rpartition("-")[2].split("."))) for name in names)

    @property
    def management_url(self) -> str:
        """Where the management API answers."""
        return f"http://127.0.0.1:{self.management_port}"

    def start(self) -> None:
        """Start, and wait until it answers."""
        self._start_names()
        self._begin(self.programs.command(PROGRAMS / "rabbitmq-server"), self._environment())

    def settle(self) -> None:
        """Wait until quorum queues declared before survive `kill`: they are registered on disk half a second late."""
        time.sleep(1.0)

    def kill(self) -> None:
        """Kill the node: quorum queues that have not settled come back without a leader and do not answer."""
        super().kill()

    def close(self) -> None:
        """Stop, and leave nothing behind."""
        self.kill()
        if self._names is not None:
            self._names.kill()
            self._names.wait(PATIENCE)
            self._names = None
        self._http.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def api(self, method: str, path: str, **content: object) -> httpx.Response:
        """Call the management API as administrator; a refusal raises an error."""
        return self._http.request(method, f"/api/{path}", **content).raise_for_status()  # type: ignore[arg-type]

    def new_vhost(self) -> str:
        """Create an empty virtual host and return its URL."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        self.api("PUT", f"vhosts/{name}")
        self.api("PUT", f"permissions/{name}/guest", json={"configure": ".*", "write": ".*", "read": ".*"})
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{name}"

    def drop_vhost(self, url: str) -> None:
        """Drop the virtual host despite open connections."""
        self.api("DELETE", f"vhosts/{url.rsplit('/', 1)[1]}")

    def new_user(self, url: str, *, configure: str = ".*", write: str = ".*", read: str = ".*", tags: str = "") -> str:
        """Create a user with these permissions in the URL's virtual host and return the user's URL for it."""
        vhost, name, password = _vhost_of(url), f"user_{uuid.uuid4().hex[:12]}", secrets.token_hex(8)
        self.api("PUT", f"users/{name}", json={"password": password, "tags": tags})
        permissions = {"configure": configure, "write": write, "read": read}
        self.api("PUT", f"permissions/{quote(vhost, safe='')}/{name}", json=permissions)
        return f"amqp://{name}:{password}@127.0.0.1:{self.port}/{vhost}"

    def cut_connections(self, url: str) -> None:
        """Close, from the server's side, every client's connection to the URL's virtual host."""
        self.control("close_all_connections", "--vhost", _vhost_of(url), "cut by a test")

    def raise_memory_alarm(self) -> None:
        """Have the node believe that its memory is used up: it stops reading from connections that publish."""
        self.control("set_vm_memory_high_watermark", "absolute", "1")

    def clear_memory_alarm(self) -> None:
        """End the memory alarm."""
        self.control("set_vm_memory_high_watermark", "absolute", "2GB")

    def halt_leader(self, url: str, queue: str, seconds: float) -> None:
        """Have the leader of a quorum queue answer nobody for so long."""
        resumed_later = f"timer:apply_after({round(1000 * seconds)}, sys, resume, [Leader])"
        self.control("eval", f"{_leader_of(url, queue)}, {resumed_later}, sys:suspend(Leader).")

    def resume_leader(self, url: str, queue: str) -> None:
        """Have a leader that was halted answer again."""
        self.control("eval", f"{_leader_of(url, queue)}, sys:resume(Leader).")

    def halt_replica(self, url: str, queue: str) -> None:
        """Have this node's replica of a quorum queue answer nobody, so that it takes part in no election."""
        self.control("eval", f"sys:suspend({_replica_of(url, queue)}).")

    def resume_replica(self, url: str, queue: str) -> None:
        """Have a replica that was halted answer again."""
        self.control("eval", f"sys:resume({_replica_of(url, queue)}).")

    def control(self, *arguments: str) -> str:
        """Run `rabbitmqctl` (a second or two) and return its output."""
        return self._run("rabbitmqctl", "--quiet", "--node", self.node, *arguments)

    def _configure(self, settings: Sequence[str]) -> None:
        listeners = [
            f"listeners.tcp.1 = 127.0.0.1:{self.port}",
            "management.tcp.ip = 127.0.0.1",
            f"management.tcp.port = {self.management_port}",
        ]
        (self.folder / "rabbitmq.conf").write_text("\n".join([*listeners, *settings, ""]))
        (self.folder / "advanced.config").write_text(self.advanced)
        (self.folder / "enabled_plugins").write_text("[rabbitmq_management].\n")
        cookie = self.folder / ".erlang.cookie"
        cookie.write_text(self._cookie)
        cookie.chmod(0o600)

    def _environment(self) -> dict[str, str]:
        folder = self.folder
        flags = {} if self._feature_flags is None else {"RABBITMQ_FEATURE_FLAGS": self._feature_flags}
        return flags | {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "RUNNING_UNDER_SYSTEMD": "true",  # the node is this process itself, not a child of a shell
            "ERL_EPMD_PORT": str(self._names_port),
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_DIST_PORT": str(self._nodes_port),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "advanced.config"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "no-rabbitmq-env.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(folder / "generated"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "+S 1:1 +SDcpu 1:1 +SDio 4 +sbwt none +A 8 -kernel inet_dist_use_interface {127,0,0,1}"
            ),
        }

    def _start_names(self) -> None:
        """Start a private Erlang port mapper; otherwise the node would leave one running on the machine."""
        if self._names is None and not self._shares_names:
            self._names = subprocess.Popen(
                [*self.programs.command("epmd"), "-port", str(self._names_port), "-address", "127.0.0.1"],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self.folder,
            )  # fmt: skip

    def _run(self, name: str, *arguments: str) -> str:
        return subprocess.run(
            [*self.programs.command(PROGRAMS / name), *arguments],
            check=True, capture_output=True, text=True, timeout=PATIENCE, cwd=self.folder, env=self._environment(),
        ).stdout  # fmt: skip

    def answers(self) -> bool:
        """Return whether it takes connections and queues may be declared."""
        try:
            looks = ("health/checks/virtual-hosts", "overview")  # 4.3 refuses the second in its first seconds
            if any(self._http.get(f"/api/{look}").status_code != httpx.codes.OK for look in looks):
                return False
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
        except (OSError, httpx.TransportError):
            return False


class RabbitmqCluster:
    """Three nodes on free ports of loopback, of one private cluster, with one empty virtual host."""

    def __init__(self, programs: Programs = CONFIGURED) -> None:
        self.nodes = [RabbitmqServer(programs=programs)]
        try:
            vhost = self.nodes[0].new_vhost().rpartition("/")[2]  # before others join: until they have, it would hang
            for _ in range(2):
                self.nodes.append(RabbitmqServer(programs=programs, beside=self.nodes[0]))
        except BaseException:
            self.close()
            raise
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        management = ",".join(node.management_url for node in self.nodes)
        self.url = f"amqp://guest:guest@{hosts}/{vhost}?management={management}"
        """All nodes and their management APIs."""

    def close(self) -> None:
        """Stop all nodes, and leave nothing behind."""
        for node in reversed(self.nodes):
            node.close()


def _replica_of(url: str, queue: str) -> str:
    """Return the name of a quorum queue's process, which is the same on each node, in Erlang."""
    return f"'{_vhost_of(url)}_{queue}'"


def _leader_of(url: str, queue: str) -> str:
    """Return what binds `Leader` to the process of a quorum queue, in Erlang."""
    name = f'rabbit_misc:r(<<"{_vhost_of(url)}">>, queue, <<"{queue}">>)'
    return f"{{ok, Queue}} = rabbit_amqqueue:lookup({name}), {{Leader, _}} = amqqueue:get_pid(Queue)"


def _vhost_of(url: str) -> str:
    return url.partition("?")[0].rpartition("/")[2]
