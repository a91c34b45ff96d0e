"""RabbitMQ 4 drops a message at its 21st return: no queue of an endpoint does, and nothing everyday comes near it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from pamqp import commands
from tests.eventually import PATIENCE, eventually_async

from delayline import Endpoint, Event, Message, MessageContext, Recoverability
from delayline.cli import main
from delayline.dashboard.model import Unavailable
from delayline.dashboard.service import EndpointService
from delayline.errors import BackendUnusable
from delayline.filters import MessageFilter
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.rabbitmq import receiver as receiver_module
from delayline.rabbitmq.address import BrokerAddress
from delayline.rabbitmq.admin import limits
from delayline.rabbitmq.admin.management_api import ManagementApi
from delayline.rabbitmq.amqp.methods import QueueDeclare
from delayline.rabbitmq.delivery_limits import NACK_IS_NOT_COUNTED
from delayline.rabbitmq.encoding import Publication
from delayline.rabbitmq.forwarding import sent_on
from delayline.settings import load_settings
from delayline.testing import Signals
from delayline.testing.conformance.messages import operation
from delayline.testing.conformance.transport_fixtures import ids, received

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from tests.servers.rabbitmq import RabbitmqServer

    from delayline.actions import ActionRecord
    from delayline.rabbitmq.amqp.properties import Delivery

DEFAULT: Final = 20
MORE_THAN_THAT: Final = DEFAULT + 4
SECOND: Final = timedelta(seconds=1)
NO_RETRIES: Final = Recoverability(immediate_retries=0, delayed_retries=0)
FAILED: Final = {"NServiceBus.FailedQ": "customers", "NServiceBus.ExceptionInfo.StackTrace": ""}


def vhost_of(url: str) -> str:
    return url.partition("?")[0].rsplit("/", 1)[1]


def with_api(server: RabbitmqServer, url: str) -> str:
    return f"{url}?management={server.management_url}"


def policies(server: RabbitmqServer, url: str) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in server.api("GET", f"policies/{vhost_of(url)}").json()}


def arguments(server: RabbitmqServer, url: str, queue: str) -> dict[str, Any]:
    return dict(server.api("GET", f"queues/{vhost_of(url)}/{quote(queue, safe='')}").json()["arguments"])


def set_policy(
    server: RabbitmqServer, url: str, name: str, pattern: str, kind: str = "policies", **more: object
) -> None:
    content = {"pattern": pattern, "apply-to": "queues", "priority": 0, **more}
    server.api("PUT", f"{kind}/{vhost_of(url)}/{name}", json=content)


def count(server: RabbitmqServer, url: str, queue: str) -> int:
    """Return the number of messages in the queue, with those that somebody holds, as the queue itself has it."""
    rows = server.control("list_queues", "--vhost", vhost_of(url), "name", "messages", "--no-table-headers")
    return {name: int(number) for name, _, number in (row.partition("\t") for row in rows.splitlines())}[queue]


async def eventually_counted(server: RabbitmqServer, url: str, queue: str, number: int) -> None:
    async def counted() -> bool:
        return await asyncio.to_thread(count, server, url, queue) == number

    await eventually_async(counted, f"{number} messages in {queue}")


async def declared(transport: RabbitMQTransport, queue: str, **arguments: int) -> None:
    """Create a queue as other programs do."""
    declaration = QueueDeclare(queue=queue, durable=True, arguments={"x-queue-type": "quorum", **arguments})
    await transport.connection.run(lambda channel: channel.call(declaration))


@pytest.fixture
async def limited(rabbitmq4_url: str) -> AsyncIterator[RabbitMQTransport]:
    """Provide a transport whose queue `old` was made before: it drops at the default limit, and nothing lifts that."""
    transport = RabbitMQTransport(rabbitmq4_url, topology="direct", error_queue="failed")
    await transport.start()
    for queue in ("old", "failed"):
        await declared(transport, queue)
    yield transport
    await transport.stop()


def endpoint(url: str) -> Endpoint:
    return Endpoint("shop", transport=RabbitMQTransport(url), delayed_delivery=DelayLevelDelivery())


async def run(*words: str) -> tuple[int, str]:
    """Run a command; return its exit code and its output, on one line."""
    result = await asyncio.to_thread(CliRunner().invoke, main, words)
    return result.exit_code, " ".join(result.output.split())


class TestLifted:
    """A set-up lifts the limit of every queue that is received from or moved to."""

    async def test_by_the_policy_of_nservicebus(self, rabbitmq4: RabbitmqServer, rabbitmq4_url: str) -> None:
        # Given a queue with a name that has characters of regular expressions
        url = with_api(rabbitmq4, rabbitmq4_url)
        transport = RabbitMQTransport(url)
        # When it is set up, twice
        for _ in range(2):
            await transport.setup_infrastructure(["Shop.Orders (new)", "error"])
        # Then it has the policy that NServiceBus would give it, and no argument, which NServiceBus' declaration lacks
        found = policies(rabbitmq4, url)
        assert found["nsb.Shop.Orders (new).delivery-limit"] == {
            "vhost": vhost_of(url),
            "name": "nsb.Shop.Orders (new).delivery-limit",
            "pattern": r"^Shop\.Orders\ \(new\)$",
            "apply-to": "quorum_queues",
            "definition": {"delivery-limit": 100_000},
            "priority": 0,
        }
        assert set(found) == {"nsb.Shop.Orders (new).delivery-limit", "nsb.error.delivery-limit"}
        assert arguments(rabbitmq4, url, "Shop.Orders (new)") == {"x-queue-type": "quorum"}
        # And the broker applies it

        def is_applied() -> bool:
            place = f"queues/{vhost_of(url)}/{quote('Shop.Orders (new)')}"
            facts = rabbitmq4.api("GET", place, params=TOTALS).json()
            return bool(facts.get("policy") == "nsb.Shop.Orders (new).delivery-limit")

        await eventually_async(is_applied)

    async def test_for_an_endpoint_with_all_its_queues(self, rabbitmq4: RabbitmqServer, rabbitmq4_url: str) -> None:
        url = with_api(rabbitmq4, rabbitmq4_url)
        await endpoint(url).setup()
        assert set(policies(rabbitmq4, url)) >= {
            "nsb.shop.delivery-limit",
            "nsb.error.delivery-limit",
            "nsb.nsb.v2.delay-level.delivery-limit",
            "nsb.nsb.v2.delay-undeliverable.delivery-limit",
        }
        address = BrokerAddress.parse(url)
        async with ManagementApi(address) as api:
            levels = await limits.read_levels(api, (4,), endpoint(url).delayed_delivery.levels)  # type: ignore[union-attr]
        assert len(levels) == 28
        assert not [limit for limit in levels if limit.drops]
        for words in (("doctor", "--endpoint", "shop"), ("rabbitmq", "verify")):
            code, text = await run(*words, "--url", url)
            assert "delivery" not in text or "no queue drops messages" in text, text
            assert "✗" not in text
            assert code == 0, text

    @pytest.mark.parametrize("value", [-1, 100_000, 250_000])
    async def test_whoever_has_lifted_it_before(
        self, rabbitmq4: RabbitmqServer, rabbitmq4_url: str, value: int
    ) -> None:
        """Given the policy of an earlier or later NServiceBus, or one for all queues, then it stays as it is."""
        url = with_api(rabbitmq4, rabbitmq4_url)
        set_policy(rabbitmq4, url, "nsb.shop.delivery-limit", "shop", definition={"delivery-limit": value})
        set_policy(rabbitmq4, url, "all", ".*", definition={"delivery-limit": value}, priority=-1)
        before = policies(rabbitmq4, url)
        transport = RabbitMQTransport(url)
        await transport.setup_infrastructure(["shop", "error"])
        assert policies(rabbitmq4, url) == before
        await transport.start()
        assert not (await transport.limits.of("shop")).drops
        assert not (await transport.limits.of("error")).drops
        await transport.stop()

    @pytest.mark.parametrize("right", ["none", "no api"])
    async def test_by_an_argument_where_no_policy_can_be_set(
        self, rabbitmq4: RabbitmqServer, rabbitmq4_url: str, right: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        # Given a user who may not set policies, or a broker without a reachable management API
        url = rabbitmq4_url
        if right == "none":
            url = with_api(rabbitmq4, rabbitmq4.new_user(rabbitmq4_url, tags="management"))
        # When queues are created, and set up again
        transport = RabbitMQTransport(url)
        for _ in range(2):
            await transport.setup_infrastructure(["shop", "error"])
        await transport.start()
        assert await transport.difference("shop") == ""
        assert not (await transport.limits.of("shop")).drops
        await transport.stop()
        # Then they have the argument, in silence, and another process sees that
        assert arguments(rabbitmq4, url, "shop") == {"x-queue-type": "quorum", "x-delivery-limit": 100_000}
        assert not caplog.records
        other = RabbitMQTransport(url)
        await other.start()
        assert not (await other.limits.of("shop")).drops
        await other.setup_infrastructure(["shop"])
        await other.stop()
        assert not caplog.records
        # And whoever may set policies uses them as they are
        await RabbitMQTransport(with_api(rabbitmq4, rabbitmq4_url)).setup_infrastructure(["shop"])
        assert not policies(rabbitmq4, url)
        assert not caplog.records

    async def test_again_for_a_queue_that_is_deleted(self, rabbitmq4: RabbitmqServer, rabbitmq4_url: str) -> None:
        transport = RabbitMQTransport(rabbitmq4_url)
        await transport.start()
        await transport.setup_infrastructure(["shop"])
        receiver = await transport.receiver("shop")
        receiving = asyncio.create_task(receiver.receive(1))
        rabbitmq4.api("DELETE", f"queues/{vhost_of(rabbitmq4_url)}/shop")
        await eventually_async(lambda: exists(transport, "shop"))
        assert arguments(rabbitmq4, rabbitmq4_url, "shop")["x-delivery-limit"] == 100_000
        await receiver.stop()
        await receiving
        await transport.stop()

    async def test_of_hostile_names(self, rabbitmq4: RabbitmqServer) -> None:
        """Given names that URLs, shells, JSON and regular expressions take for something else."""
        vhost = "a b/ü%2F'\"$?"
        place = quote(vhost, safe="")
        rabbitmq4.api("PUT", f"vhosts/{place}")
        rabbitmq4.api("PUT", f"permissions/{place}/guest", json={"configure": ".*", "write": ".*", "read": ".*"})
        url = f"amqp://guest:guest@127.0.0.1:{rabbitmq4.port}/{place}?management={rabbitmq4.management_url}"
        names = [
            "Größe 🚚",
            "a/b%2Fc?d#e&f",
            "x'y\"z`$(id)",
            "^.*$",
            "\\E[",
            "(?i",
            "a\tb",
            "ä" * 127 + "z",
            "no",
            "nose",
        ]
        transport = RabbitMQTransport(url, topology="direct")
        await transport.setup_infrastructure(names)
        await transport.start()
        for name in names:
            limit = await transport.limits.of(name)
            assert limit.seen
            assert not limit.drops, limit
        await transport.stop()

        def has_policies() -> bool:  # which the management plugin tells some seconds later on a busy machine
            found = rabbitmq4.api("GET", f"queues/{place}", params=TOTALS).json()
            policies = {queue["name"]: queue.get("policy") for queue in found}
            return policies == {name: f"nsb.{name}.delivery-limit" for name in names}

        await eventually_async(has_policies)
        rabbitmq4.api("DELETE", f"vhosts/{place}")

    async def test_not_of_classic_queues(self, rabbitmq4: RabbitmqServer, rabbitmq4_url: str) -> None:
        url = with_api(rabbitmq4, rabbitmq4_url)
        transport = RabbitMQTransport(url, queue_type="classic")
        await transport.setup_infrastructure(["shop"])
        await transport.start()
        assert not (await transport.limits.of("shop")).drops
        await transport.stop()
        assert not policies(rabbitmq4, url)


TOTALS: Final = {"disable_stats": "true", "enable_queue_totals": "true"}


async def exists(transport: RabbitMQTransport, queue: str) -> bool:
    with contextlib.suppress(Exception):
        await transport.count(queue)
        return True
    return False


class TestNamed:
    """A limit that a set-up cannot lift is named, with what cures it."""

    @pytest.mark.parametrize(
        ("cause", "named"),
        [
            ({"argument": 5}, "by its argument x-delivery-limit"),
            ({"policies": 7}, "by policy 'theirs'"),
            ({"operator-policies": 9}, "by operator policy 'theirs'"),
            ({"policies": None}, "the default of RabbitMQ 4"),
        ],
    )
    async def test_by_setup_doctor_and_start(
        self,
        rabbitmq4: RabbitmqServer,
        rabbitmq4_url: str,
        cause: dict[str, int | None],
        named: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        # Given a queue that an argument, a policy or an operator limits, or that has a policy for something else
        url, ((kind, number),) = with_api(rabbitmq4, rabbitmq4_url), cause.items()
        transport = RabbitMQTransport(url)
        await transport.start()
        if kind == "argument":
            await declared(transport, "shop", **{"x-delivery-limit": number or 0})
        else:
            definition = {"max-length": 1000} | ({} if number is None else {"delivery-limit": number})
            if kind == "operator-policies":
                definition.pop("max-length")
            set_policy(rabbitmq4, url, "theirs", "^shop$", kind, definition=definition, priority=3)
            await declared(transport, "shop")
        await transport.stop()
        # When it is set up
        code, text = await run("setup", "--endpoint", "shop", "--url", url)
        # Then it fails with the cause, and leaves the other policy alone
        assert code == 1, text
        assert named in text
        assert f"more than {number or DEFAULT} times" in text
        expected = {"nsb.error.delivery-limit", "theirs"} if kind == "policies" else {"nsb.error.delivery-limit"}
        assert {name for name in policies(rabbitmq4, url) if "delay" not in name} - {
            "nsb.shop.delivery-limit"
        } == expected
        # And so does the doctor; a start only warns
        code, text = await run("doctor", "--endpoint", "shop", "--url", url, "--json")
        assert code == 1
        wrong = [one["text"] for one in json.loads(text)["findings"] if one["state"] == "problem"]
        assert any(named in one for one in wrong), wrong
        caplog.clear()
        async with endpoint(url):
            pass
        [warning] = [one for one in caplog.records if getattr(one, "event", None) == Event.DELIVERY_LIMITED]
        assert named in warning.getMessage()
        if kind == "policies":
            code, text = await run("rabbitmq", "verify", "--url", url)
            assert code == 1
            assert named in text
        # And the command in it cures it
        if kind != "argument":
            words = shlex.split(warning.getMessage().partition("rabbitmqctl ")[2])
            await asyncio.to_thread(rabbitmq4.control, *words)
            assert policies(rabbitmq4, url).get("theirs", {"priority": 3})["priority"] == 3
            code, text = await run("setup", "--endpoint", "shop", "--url", url)
            assert code == 0, text

    async def test_by_a_start_that_sets_nothing_up(
        self, rabbitmq4: RabbitmqServer, rabbitmq4_url: str, limited: RabbitMQTransport
    ) -> None:
        """Without a management API the limit is unknown, which is said with the command."""
        seen = Endpoint("old", transport=RabbitMQTransport(rabbitmq4_url, topology="direct", error_queue="failed"),
                        setup_infrastructure=False, error_queue="failed")  # fmt: skip
        seen.handler(nothing)
        with Signals() as signals:
            async with seen, asyncio.timeout(PATIENCE):
                found = await signals.wait_for(Event.DELIVERY_LIMITED, count=2)
        texts = [record.getMessage() for record in found]
        assert "'^old$'" in texts[0]
        assert "could not be looked at" in texts[0]
        code, text = await run("doctor", "--endpoint", "old", "--url", f"{rabbitmq4_url}?topology=direct")
        assert code == 1
        assert "nsb.old.delivery-limit" in text

    async def test_of_a_queue_whose_name_is_too_long_for_an_answer(self, rabbitmq4_url: str) -> None:
        """RabbitMQ 4 ends the connection over an error of more than 255 bytes that is not ASCII."""
        transport = RabbitMQTransport(rabbitmq4_url, queue_type="classic")
        await transport.start()
        for name in ("é" * 120, "n" * 240):
            await transport.setup_infrastructure([name])
            channel = await transport.connection.channel()
            assert not (await transport.limits.of(name)).seen
            assert await transport.count(name) == 0
            assert channel.closed is None
        await transport.stop()

    async def test_of_any_version(self, rabbitmq: RabbitmqServer, rabbitmq_url: str) -> None:
        """Given a policy of an operator, then it is named; on RabbitMQ 3 an argument of -1 is 0."""
        url = with_api(rabbitmq, rabbitmq_url)
        version = tuple(map(int, rabbitmq.api("GET", "overview").json()["rabbitmq_version"].split(".")))
        transport = RabbitMQTransport(url)
        await transport.start()
        await declared(transport, "below", **{"x-delivery-limit": -1})
        await transport.setup_infrastructure(["shop", "error"])
        if version < (4,):
            assert not policies(rabbitmq, url)
            assert (await transport.limits.of("below")).returns == 0
        await transport.stop()
        set_policy(rabbitmq, url, "theirs", "^shop$", "operator-policies", definition={"delivery-limit": 3})
        set_policy(rabbitmq, url, "mine", "^err", definition={"delivery-limit": 9}, priority=3)
        later = RabbitMQTransport(url)  # what has set a queue up knows its limit for a minute
        await later.start()
        assert (await later.limits.of("shop")).returns == 3
        await later.stop()
        code, text = await run("doctor", "--endpoint", "shop", "--url", url)
        assert code == 1
        assert "by operator policy 'theirs'" in text
        assert "more than 9 times, by policy 'mine'" in text


async def nothing(message: Message, context: MessageContext) -> None: ...


async def sent(transport: RabbitMQTransport, queue: str, *message_ids: str, **headers: str) -> None:
    """Send messages to a queue without an exchange of its own."""
    found = [Publication(Message(one, headers, b"{}"), "", queue) for one in message_ids]
    assert not await transport.publisher.publish(found)


async def returned(transport: RabbitMQTransport, queue: str, times: int) -> None:
    """Take the messages of a queue and give them back, as a process that crashes does."""
    number = await transport.count(queue)
    for _ in range(times):
        channel = await transport.connection.channel()
        async with asyncio.timeout(PATIENCE):
            taken = 0
            while taken < number:
                taken += await channel.get(queue) is not None
        await transport.connection.release(channel)


async def returns_of(transport: RabbitMQTransport, queue: str) -> dict[str, int]:
    """Return how often each message was returned, once all of them are ready."""
    channel = await transport.connection.channel()
    found = {}
    while (delivered := await channel.get(queue)) is not None:
        found[delivered.properties.message_id] = delivered.returns
    await transport.connection.release(channel)
    return found


async def failures_of(transport: RabbitMQTransport, queue: str) -> set[int]:
    """Return how many deliveries of the messages counted as failed, and return them by a nack."""
    channel = await transport.connection.channel()
    failures = set()
    while (delivered := await channel.get(queue)) is not None:
        failures.add(delivered.failures)
    await channel.requeue_all()
    await transport.connection.release(channel)
    return failures


async def ready(transport: RabbitMQTransport, queue: str, number: int) -> None:
    """Return once so many messages are in the queue that nobody holds."""

    async def counted() -> bool:
        return await transport.count(queue) == number

    await eventually_async(counted, f"{number} messages ready in {queue}")


class TestLooked:
    """No look brings a message to the limit, also where nothing has lifted it."""

    @pytest.mark.parametrize("look", ["errors list", "errors show nowhere", "errors retry nowhere", "peek old"])
    async def test_by_a_command(
        self, rabbitmq4: RabbitmqServer, rabbitmq4_url: str, limited: RabbitMQTransport, look: str
    ) -> None:
        await sent(limited, "old", "m0", "m1", "m2")
        words = [*look.split(), "--url", f"{rabbitmq4_url}?topology=direct"]
        for _ in range(MORE_THAN_THAT):
            await run(*words, *([] if look.startswith("peek") else ["--error-queue", "old"]))
        await eventually_counted(rabbitmq4, rabbitmq4_url, "old", 3)
        assert {message.id for message in await limited.browse("old", 10)} == {"m0", "m1", "m2"}

    async def test_by_the_transport(self, limited: RabbitMQTransport) -> None:
        await sent(limited, "old", "m0", "m1", "m2")
        for _ in range(MORE_THAN_THAT):
            seen: Sequence[Message] = []
            async with asyncio.timeout(PATIENCE):
                while len(seen) < 3:  # those of the last look may still be on their way back
                    seen = await limited.browse("old", 100)
            assert {message.id for message in seen} == {"m0", "m1", "m2"}
            assert await limited.take("old", "none") is False

    async def test_once_for_each_message_of_many_pages(self, rabbitmq4_url: str, limited: RabbitMQTransport) -> None:
        """A long queue is looked through in one pass, not from its beginning for each page."""
        await sent(limited, "old", *(f"m{number}" for number in range(450)))
        code, _ = await run("errors", "show", "none", "--url", rabbitmq4_url, "--error-queue", "old")
        assert code == 1
        await ready(limited, "old", 450)
        is_counted = await limited.connection.version() < NACK_IS_NOT_COUNTED
        assert set((await returns_of(limited, "old")).values()) == {int(is_counted)}

    async def test_with_its_properties_kept(self, limited: RabbitMQTransport) -> None:
        """A message that was returned often is replaced by its like, whose count begins again."""
        properties = commands.Basic.Properties(
            message_id="m1", headers={"a": 1, "b": "ü"}, priority=3, expiration="600000", message_type="Kind"
        )
        await limited.publisher.publish(
            [Publication(Message("", {}, b"\x00body"), "", "old", properties=properties.marshal())]
        )
        await returned(limited, "old", 12)
        [seen] = await limited.browse("old", 10)
        assert seen.body == b"\x00body"
        channel = await limited.connection.channel()
        await ready(limited, "old", 1)
        copy = await channel.get("old")
        assert copy is not None
        assert copy.returns <= 1
        assert copy.body == b"\x00body"
        kept = sent_on(copy.encoded_properties, expires=True)
        assert kept == sent_on(properties.marshal(), expires=True)
        assert b"600000" in kept
        await limited.connection.release(channel)

    async def test_and_refused_where_no_copy_can_be_made(
        self, rabbitmq4: RabbitmqServer, rabbitmq4_url: str, limited: RabbitMQTransport
    ) -> None:
        await sent(limited, "old", "m1")
        await returned(limited, "old", 12)
        reader = RabbitMQTransport(rabbitmq4.new_user(rabbitmq4_url, write="^$", configure="^$"), topology="direct")
        await reader.start()
        with pytest.raises(BackendUnusable, match="'old' drops a message that is returned more than 20 times"):
            await reader.browse("old", 10)
        await reader.stop()
        await eventually_counted(rabbitmq4, rabbitmq4_url, "old", 1)


class TestRetried:
    """A retry takes each message of the error queue once."""

    @pytest.fixture
    async def groups(self, limited: RabbitMQTransport) -> RabbitMQTransport:
        """Provide an error queue with thirty failed messages of one kind beside thirty of another."""
        await declared(limited, "customers")
        for kind in "AB":
            headers = FAILED | {"NServiceBus.ExceptionInfo.ExceptionType": kind}
            await sent(limited, "old", *(f"{kind}{number}" for number in range(30)), **headers)
        return limited

    async def test_by_the_dashboard_and_leaves_the_others(self, rabbitmq4_url: str, groups: RabbitMQTransport) -> None:
        settings = load_settings(
            environ={}, flags={"endpoint": "shop", "url": f"{rabbitmq4_url}?topology=direct", "error_queue": "old"}
        )
        async with EndpointService(settings) as service:
            found = (await service.errors.groups()).groups  # type: ignore[union-attr]
            key = next(group.key for group in found if group.exception_type == "B")

            name = (await service.errors.retry_all(MessageFilter(group=key), actor="me", rate=500)).name

            async def ended() -> ActionRecord | None:
                records = await service.actions.recorded()
                found = [] if isinstance(records, Unavailable) else records
                return next((record for record in found if record.name == name and record.over), None)

            await eventually_async(ended)
            job = await ended()
            assert job is not None
            assert (job.done, job.failed, list(job.problems)) == (30, 0, [])
            some = await service.errors.retry(["A3", "A3", "A4", "none"], actor="me")
            assert [(one.id, one.done) for one in some] == [("A3", True), ("A4", True), ("none", False)]
            [dropped] = await service.errors.purge(["A5"], actor="me")
            assert dropped.done
            edited = await service.errors.edit("A6", headers=FAILED, body=b"new", actor="me")
            assert edited.done
        await ready(groups, "old", 26)
        left = await returns_of(groups, "old")
        assert set(left) == {f"A{number}" for number in range(30)} - {"A3", "A4", "A5", "A6"}
        assert max(left.values()) <= 6
        arrived = await returns_of(groups, "customers")
        assert set(arrived) == {f"B{number}" for number in range(30)} | {"A3", "A4", "A6"}

    async def test_by_the_command(self, rabbitmq4_url: str, groups: RabbitMQTransport) -> None:
        place = ["--url", f"{rabbitmq4_url}?topology=direct", "--error-queue", "old"]
        code, text = await run("errors", "retry", "B7", "B8", "none", *place)
        assert code == 1
        assert "2 retried, 1 not" in text
        code, text = await run("errors", "retry", "--all", "--yes", *place)
        assert code == 0, text
        assert "58 retried" in text
        assert await groups.count("old") == 0
        assert await groups.count("customers") == 60

    async def test_and_ends_although_messages_fail_again(self, rabbitmq4_url: str, groups: RabbitMQTransport) -> None:
        """Given messages that come back to the error queue at once, then a retry of all ends."""
        code, text = await run(
            "errors",
            "retry",
            "--all",
            "--yes",
            "--to",
            "old",
            "--url",
            f"{rabbitmq4_url}?topology=direct",
            "--error-queue",
            "old",
        )
        assert code == 0, text
        assert "60 retried" in text
        await ready(groups, "old", 60)


class TestReceived:
    """What is received goes to the error queue before its queue would drop it."""

    async def test_as_often_as_it_takes_where_the_limit_is_lifted(
        self, rabbitmq4: RabbitmqServer, rabbitmq4_url: str
    ) -> None:
        """Given processes that crash, stop and give messages back, more often than the broker's default allows."""
        transport = RabbitMQTransport(rabbitmq4_url)
        await transport.start()
        await transport.setup_infrastructure(["shop"])
        await transport.dispatch([operation("shop", f"m{number}") for number in range(5)])
        for number in range(3 * MORE_THAN_THAT):
            receiver = await transport.receiver("shop")
            found = await received(receiver, 5)
            if number % 3 == 0:
                await receiver._channel.close()  # type: ignore[union-attr]
                continue
            if number % 3 == 1:
                await receiver.stop()
            for one in found:
                await receiver.release(one)
            await receiver.stop()
        await eventually_counted(rabbitmq4, rabbitmq4_url, "shop", 5)
        receiver = await transport.receiver("shop")
        found = await received(receiver, 5)
        assert sorted(ids(found)) == [f"m{number}" for number in range(5)]
        assert min(one.earlier_deliveries for one in found) >= DEFAULT
        await receiver.stop()
        await transport.stop()

    async def test_one_by_one_after_two_returns(self, rabbitmq4_url: str) -> None:
        """Given messages that may have ended their processes, then those behind them are not taken along."""
        transport = RabbitMQTransport(rabbitmq4_url)
        await transport.start()
        await transport.setup_infrastructure(["shop"])
        await transport.dispatch([operation("shop", "killer")])
        await returned(transport, "shop", 2)
        await transport.dispatch([operation("shop", f"m{number}") for number in range(9)])
        for _ in range(3):
            receiver = await transport.receiver("shop")
            [first] = await receiver.receive(32)
            assert first.message.id == "killer"
            await receiver._channel.close()  # type: ignore[union-attr]
        receiver = await transport.receiver("shop")
        [first] = await receiver.receive(32)
        assert await receiver.acknowledge(first)
        others = await received(receiver, 9)
        assert {one.earlier_deliveries for one in others} == {0}
        for one in others:
            await receiver.acknowledge(one)
        await receiver.stop()
        await transport.stop()

    async def test_to_the_error_queue_at_its_last_return(
        self, rabbitmq4: RabbitmqServer, rabbitmq4_url: str, limited: RabbitMQTransport
    ) -> None:
        # Given a queue with a limit of its own, and a message that it would drop at the next return
        set_policy(rabbitmq4, rabbitmq4_url, "theirs", "^old$", definition={"delivery-limit": 2})
        await sent(limited, "old", "m1", "m2")
        await returned(limited, "old", 2)
        await sent(limited, "old", "m3")
        # When an endpoint that knows the limit receives
        handled: list[str] = []
        url = with_api(rabbitmq4, rabbitmq4_url) + "&topology=direct"
        transport = RabbitMQTransport(url, error_queue="failed")
        receiving = Endpoint("old", transport=transport, setup_infrastructure=False, error_queue="failed")

        @receiving.handler
        async def handle(message: Message, context: MessageContext) -> None:
            handled.append(message.id)

        await transport.start()
        async with receiving:
            await eventually_counted(rabbitmq4, rabbitmq4_url, "failed", 2)
            await eventually_async(lambda: handled == ["m3"])
            # Then it is in the error queue, from where it can be retried
            code, text = await run("errors", "retry", "--all", "--yes", "--url", url, "--error-queue", "failed")
            assert code == 0, text
            await eventually_async(lambda: sorted(handled) == ["m1", "m2", "m3"])
        await transport.stop()

    @pytest.mark.parametrize("sets", ["policies", "operator-policies"])
    async def test_also_of_a_queue_that_takes_nothing_back(
        self, rabbitmq4: RabbitmqServer, rabbitmq4_url: str, limited: RabbitMQTransport, sets: str
    ) -> None:
        """Given a limit of 0, or one that is set while the endpoint runs, then messages are handled as ever."""
        transport = RabbitMQTransport(with_api(rabbitmq4, rabbitmq4_url) + "&topology=direct", error_queue="failed")
        await transport.start()
        receiver = await transport.receiver("old")
        set_policy(rabbitmq4, rabbitmq4_url, "theirs", "^old$", sets, definition={"delivery-limit": 0})
        await sent(limited, "old", "m1", "m2")
        found = await received(receiver, 2)
        assert sorted(ids(found)) == ["m1", "m2"]
        for one in found:
            assert await receiver.acknowledge(one)
        await receiver.stop()
        await transport.stop()
        assert await limited.count("failed") == 0

    async def test_and_stays_without_an_error_queue(
        self, rabbitmq4: RabbitmqServer, rabbitmq4_url: str, limited: RabbitMQTransport
    ) -> None:
        # Given messages that the broker would drop at the next return, one of them unreadable, and no error queue
        set_policy(rabbitmq4, rabbitmq4_url, "theirs", "^old$", definition={"delivery-limit": 2})
        await sent(limited, "old", "m1", "m2", "")
        await returned(limited, "old", 2)
        transport = RabbitMQTransport(with_api(rabbitmq4, rabbitmq4_url) + "&topology=direct", error_queue="gone")
        await transport.start()
        # When a receiver is started and stopped, again and again
        for _ in range(4):
            receiver = await transport.receiver("old")
            receiving = asyncio.create_task(receiver.receive(5))
            await asyncio.wait([receiving], timeout=1)
            await receiver.stop()
            with contextlib.suppress(Exception):
                await receiving
        await transport.stop()
        # Then they are there
        await eventually_counted(rabbitmq4, rabbitmq4_url, "old", 3)

    @pytest.mark.parametrize("is_cancelled", [False, True])
    async def test_and_stays_when_its_receiver_stops_while_it_is_moved(
        self,
        rabbitmq4: RabbitmqServer,
        rabbitmq4_url: str,
        limited: RabbitMQTransport,
        monkeypatch: pytest.MonkeyPatch,
        *,
        is_cancelled: bool,
    ) -> None:
        monkeypatch.setattr(receiver_module, "STOP_PATIENCE", PATIENCE)
        # Given a message that the broker would drop at the next return, and a broker that is slow to refuse its move
        set_policy(rabbitmq4, rabbitmq4_url, "theirs", "^old$", definition={"delivery-limit": 2})
        await sent(limited, "old", "m1")
        await returned(limited, "old", 2)
        transport = RabbitMQTransport(with_api(rabbitmq4, rabbitmq4_url) + "&topology=direct", error_queue="gone")
        await transport.start()
        receiver = await transport.receiver("old")
        move, began, goes_on = receiver._move_aside, asyncio.Event(), asyncio.Event()

        async def move_slowly(delivered: Delivery, marks: Mapping[str, str]) -> None:
            began.set()
            await goes_on.wait()
            await move(delivered, marks)

        receiver._move_aside = move_slowly
        receiving = asyncio.create_task(receiver.receive(5))
        await asyncio.wait_for(began.wait(), PATIENCE)
        # When the receiver stops meanwhile
        if is_cancelled:
            receiving.cancel()
        stopping = asyncio.create_task(receiver.stop())
        await asyncio.wait([stopping], timeout=0.5)
        goes_on.set()
        await asyncio.gather(stopping, receiving, return_exceptions=True)
        await transport.stop()
        # Then the message is there
        await eventually_counted(rabbitmq4, rabbitmq4_url, "old", 1)


class TestDryRun:
    """A dry run moves nothing."""

    @pytest.mark.parametrize("lifted", [True, False])
    async def test_of_a_transfer(self, rabbitmq4: RabbitmqServer, rabbitmq4_url: str, *, lifted: bool) -> None:
        # Given waiting messages, in levels whose limit is lifted or not
        source = with_api(rabbitmq4, rabbitmq4_url) if lifted else rabbitmq4_url
        target = rabbitmq4.new_vhost()
        await endpoint(target).setup()
        shop = endpoint(source)
        async with shop:
            for number in range(5):
                await shop.send("shop", b"{}", message_id=f"m{number}", delay=3000 * SECOND)
        # When a dry run is made more often than the broker's default allows, if looks count
        level = "nsb.v2.delay-level-11"
        await eventually_counted(rabbitmq4, source, level, 5)
        looking = RabbitMQTransport(source)
        await looking.start()
        is_allowed = lifted or await looking.connection.version() >= NACK_IS_NOT_COUNTED
        for _ in range(MORE_THAN_THAT if is_allowed else 2):
            code, text = await run("rabbitmq", "transfer", "--source", source, "--target", target, "--dry-run")
            # Then it looks at them, or is refused with the remedy
            if is_allowed:
                assert "5 would be moved" in text, text
                assert await looking.count(level) == 5  # for what comes next, a move perhaps
            else:
                assert code == 1
                assert "nsb.nsb.v2.delay-level.delivery-limit" in text
        # And they stay, without a failure where a dry run may be made whatever the limit
        if await looking.connection.version() >= NACK_IS_NOT_COUNTED:
            assert await failures_of(looking, level) == {0}
        await looking.stop()
        await eventually_counted(rabbitmq4, source, level, 5)
        rabbitmq4.drop_vhost(target)
