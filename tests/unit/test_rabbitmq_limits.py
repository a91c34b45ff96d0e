"""Which of argument, policy, operator policy and version limits the returns to a queue of RabbitMQ."""

from __future__ import annotations

import asyncio
import shlex

import pytest

from delayline.errors import BackendUnusable
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.admin.limits import Policies, levels_policy, read, unlimited_policy
from delayline.rabbitmq.admin.management_api import ManagementApi, Policy, QueueFacts
from delayline.rabbitmq.infrastructure import DelayInfrastructure

NEW, OLD = (4, 0, 5), (3, 13, 7)


def limit(
    version: tuple[int, ...],
    argument: object = None,
    policy: object = None,
    operator: object = None,
    kind: str = "quorum",
) -> int | None:
    arguments = {} if argument is None else {"x-delivery-limit": argument}
    facts = QueueFacts("shop", kind, True, False, False, arguments, 0, 0, 0, None if policy is None else "theirs")
    users = [] if policy is None else [Policy("theirs", ".*", {"delivery-limit": policy}, "queues")]
    operators = [] if operator is None else [Policy("over", "^sh", {"delivery-limit": operator}, "all")]
    return Policies("/", version, users, operators).limit_of(facts).returns


@pytest.mark.parametrize(
    ("argument", "policy", "operator", "new", "old"),
    [
        (None, None, None, 20, None),
        (5, None, None, 5, 5),
        (None, 5, None, 5, 5),
        (None, None, 5, 5, 5),
        (5, 7, 9, 5, 5),
        (9, 7, 5, 5, 5),
        (0, 7, None, 0, 0),
        (-1, None, None, None, 0),
        (-1, 5, None, 5, 0),
        (5, -1, None, 5, 0),
        (None, -1, 5, 5, 0),
        (-1, -1, -1, None, 0),
        (100_000, None, None, 100_000, 100_000),
        (100_000, 20, None, 20, 20),
        (20, 100_000, None, 20, 20),
        ("5", True, 2.5, 20, None),
    ],
)
def test_the_lowest_counts(
    argument: object, policy: object, operator: object, new: int | None, old: int | None
) -> None:
    """A number below 0 is none from version 4 on, and 0 before; values of other types set nothing."""
    assert limit(NEW, argument, policy, operator) == new
    assert limit(OLD, argument, policy, operator) == old
    assert limit(NEW, argument, policy, operator, kind="classic") is None
    assert limit(NEW, argument, policy, operator, kind="stream") is None


def test_patterns_are_those_of_net() -> None:
    escaped = unlimited_policy("a.b*c+d?e|f{g[h(i)j^k$l#m n\\o\tp-q]r}s/t").pattern
    assert escaped == r"^a\.b\*c\+d\?e\|f\{g\[h\(i\)j\^k\$l\#m\ n\\o\tp-q]r}s/t$"
    for prefix, other in (("nsb.v2", "nsbXv2"), ("own", "ownn")):
        policy = levels_policy(DelayInfrastructure.custom(prefix))
        assert all(policy.reaches(level.name, "quorum") for level in DelayInfrastructure.custom(prefix).queues)
        assert not policy.reaches(f"{other}.delay-level-03", "quorum")
        assert not policy.reaches(f"{prefix}.delay-level-03x", "quorum")


def test_a_command_survives_the_shell() -> None:
    facts = QueueFacts("it's", "quorum", True, False, False, {}, 0, 0, 0, "theirs")
    policy = Policy("theirs", "^it's$", {"max-length": 5, "dead-letter-exchange": "ü"}, "queues", 7)
    remedy = Policies("a b", NEW, [policy], []).limit_of(facts).remedy
    words = shlex.split(remedy.partition("rabbitmqctl ")[2])
    assert words[:5] == ["set_policy", "-p", "a b", "theirs", "^it's$"]
    assert words[5] == '{"max-length": 5, "dead-letter-exchange": "ü", "delivery-limit": 100000}'
    assert words[6:] == ["--priority", "7", "--apply-to", "queues"]


@pytest.mark.parametrize("body", [b"[]", b"{}", b"7", b'[{"name": 1}]', b'{"name": []}', b"null", b"no json"])
async def test_another_server_in_place_of_the_management_api(body: bytes) -> None:
    """Given a server that answers something else, then limits are unknown, and nothing breaks."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    address = BrokerAddress.parse(f"amqp://127.0.0.1:1?management=http://127.0.0.1:{port}")
    async with server, ManagementApi(address) as api:
        for asked in (api.queue("shop"), api.policies(), api.queues(), api.version(), read(api, NEW, ["shop"])):
            try:
                await asked
            except BackendUnusable as error:
                assert "is not a RabbitMQ management API" in str(error)
