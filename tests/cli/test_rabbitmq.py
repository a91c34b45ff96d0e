"""`delayline rabbitmq` on a real broker."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.cli.conftest import Result
from tests.eventually import eventually
from tests.integration.test_rabbitmq_infrastructure import a_channel
from tests.integration.test_rabbitmq_migration import conventional, put

from delayline.clock import SystemClock
from delayline.message import to_wire_time
from delayline.rabbitmq.delivery_limits import LIMITED_FROM, NACK_IS_NOT_COUNTED
from delayline.rabbitmq.infrastructure import DelayInfrastructure

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiormq.channel import Channel
    from tests.servers.rabbitmq import RabbitmqServer

V1, V2 = DelayInfrastructure.v1(), DelayInfrastructure.v2()


@pytest.fixture
def on_broker(
    run: Callable[..., Result], rabbitmq: RabbitmqServer, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """The command line with a broker in its settings."""
    monkeypatch.setenv("DELAYLINE_URL", f"{rabbitmq_url}?management={rabbitmq.management_url}")
    return lambda *arguments: run("rabbitmq", *arguments)


def with_channel(url: str, work: Callable[[Channel], Any]) -> Any:  # noqa: ANN401 - whatever the work returns
    async def run() -> Any:  # noqa: ANN401
        async with a_channel(url) as channel:
            return await work(channel)  # type: ignore[arg-type]

    return asyncio.run(run())


def test_levels_are_created_and_verified(on_broker: Callable[..., Result]) -> None:
    # Given a broker without levels
    before = on_broker("verify")
    assert before.code == 1
    assert "✗ exchanges" in before.out

    # When they are created
    created = on_broker("create")
    assert created.code == 0
    assert "29 exchanges, 28 queues, 56 bindings" in created.out

    # Then everything is as it should be
    after = on_broker("verify")
    assert after.code == 0, after.out
    assert "✗" not in after.out
    document = on_broker("verify", "--json").document
    assert document["healthy"]
    assert {"what": "queues", "ok": True, "text": "all 28 are as they should be"} in document["checks"]


def test_levels_of_other_names_are_created_on_request(on_broker: Callable[..., Result]) -> None:
    document = on_broker("create", "--delays", "acme", "--json").document
    assert (document["prefix"], document["queues"]) == ("acme", 28)
    assert on_broker("verify", "--delays", "acme").code == 0
    assert on_broker("verify").code == 1


def test_levels_that_differ_are_reported_by_argument(on_broker: Callable[..., Result], rabbitmq_url: str) -> None:
    with_channel(rabbitmq_url, lambda channel: channel.queue_declare(V2.level(3), durable=True))
    ran = on_broker("create")
    assert ran.code == 1
    assert "'nsb.v2.delay-level-03' has x-" in ran.err


def test_messages_are_migrated_and_others_are_reported(on_broker: Callable[..., Result], rabbitmq_url: str) -> None:
    # Given messages in v1's levels, one of them malformed
    assert (on_broker("create", "--delays", "v1").code, on_broker("create").code) == (0, 0)

    async def fill(channel: Channel) -> None:
        await conventional(channel, "sales")
        now = to_wire_time(SystemClock().now())
        await put(channel, 5000, TimeSent=now)
        await put(channel, 6000, TimeSent=now)
        await put(channel, 7000, TimeSent="?")

    with_channel(rabbitmq_url, fill)

    # When it is only tried
    tried = on_broker("migrate", "--dry-run")
    assert tried.code == 1
    assert "2 would be moved, 1 not: would be put into delays-migrate-poison-messages" in tried.out
    assert on_broker("pending", "--delays", "v1", "--json").document["total"] == 3

    # Then nothing has moved; and when it is done, the good ones have
    done = on_broker("migrate", "--json")
    assert done.code == 1
    assert (done.document["moved"], done.document["poison"]) == (2, 1)
    assert done.document["levels"] == [{"level": 12, "found": 3, "moved": 2, "poison": 1}]
    assert done.document["destinations"] == {"sales": 2}
    [reason] = done.document["reasons"]
    assert "TimeSent is '?'" in reason

    # And there is nothing left to do
    again = on_broker("migrate")
    assert (again.code, again.out.strip()) == (0, "0 moved, 0 not")
    assert on_broker("pending", "--json").document["total"] == 2


@pytest.mark.slow
def test_messages_are_transferred_to_another_broker(
    run: Callable[..., Result], on_broker: Callable[..., Result], rabbitmq: RabbitmqServer, rabbitmq_url: str
) -> None:
    target = rabbitmq.new_vhost()
    try:
        for url in (rabbitmq_url, target):
            assert run("rabbitmq", "create", "--url", url, "--without-management").code == 0
        now = to_wire_time(SystemClock().now())
        with_channel(rabbitmq_url, lambda channel: put(channel, 5000, levels=V2, TimeSent=now))
        with_channel(target, lambda channel: conventional(channel, "sales"))
        source = f"{rabbitmq_url}?management={rabbitmq.management_url}"
        ran = on_broker("transfer", "--source", source, "--target", target)
        assert ran.code == 0, ran.out + ran.err
        assert "1 moved, 0 not" in ran.out
        counted = run("rabbitmq", "pending", "--url", target, "--json", "--without-management")
        assert (counted.code, counted.document["total"]) == (0, 1)
    finally:
        rabbitmq.drop_vhost(target)


def test_pending_messages_are_counted_with_their_due_times(on_broker: Callable[..., Result], rabbitmq_url: str) -> None:
    on_broker("create")
    assert on_broker("pending").out.startswith("0 pending messages in nsb.v2.* at amqp://guest@")

    async def fill(channel: Channel) -> None:
        for delay in (100, 101, 1 << 20):
            await put(channel, delay, levels=V2)

    with_channel(rabbitmq_url, fill)
    ran = on_broker("pending")
    lines = [line.split() for line in ran.out.splitlines()]
    assert ["06", "2", "2", "min", "7", "s", "█" * 24] in lines
    assert ["1", "h", "2", "2", "of", "3"] in lines
    assert ran.out.rstrip().endswith(f"at amqp://guest@{rabbitmq_url.rpartition('@')[2]}")
    assert "guest:guest" not in ran.out
    document = on_broker("pending", "--json").document
    assert document["levels"][0] == {"level": 6, "count": 2, "due_within": 127}


def test_messages_without_a_destination_are_caught_on_request(on_broker: Callable[..., Result]) -> None:
    on_broker("create")
    assert "go to the queue nsb.v2.delay-undeliverable" in on_broker("catch-all", "on").out
    assert on_broker("verify").code == 0
    assert "stay in their level." in on_broker("catch-all", "off").out
    assert "it was off already" in on_broker("catch-all", "off").out


OKS = {"ok": True, "problem": False, "not checked": None}


def levels_of(ran: Result) -> dict[str, tuple[bool | None, str]]:
    found = ran.document["findings"]
    return {one["what"]: (OKS[one["state"]], one["text"]) for one in found if one["what"].startswith("delay levels")}


@pytest.mark.slow
def test_doctor_reports_faults_of_the_levels(
    run: Callable[..., Result], on_broker: Callable[..., Result], rabbitmq_url: str
) -> None:
    # Given an endpoint that is set up on a broker
    assert run("doctor", "--json").code == 1
    assert run("setup").code == 0
    well = run("doctor", "--json")
    assert well.code == 0, well.out
    assert levels_of(well) == {"delay levels": (True, "nsb.v2.* are complete, and due messages get through")}

    # When an endpoint is set up whose name ends in the other's, and due messages have no destination and are not caught
    assert run("setup", "--endpoint", "acme.sales").code == 0
    assert on_broker("catch-all", "off").code == 0

    async def fill(channel: Channel) -> None:
        exchange, key = V2.route(1, "deleted")
        for _ in range(3):
            await channel.basic_publish(b"", exchange=exchange, routing_key=key)
        await asyncio.sleep(3)

    with_channel(rabbitmq_url, fill)

    # Then it reports both
    ill = run("doctor", "--json")
    assert ill.code == 1
    found = levels_of(ill)
    assert "'sales' also gets those for 'acme.sales'" in found["delay levels: names"][1]
    assert found["delay levels: due messages"][1].startswith("3 in nsb.v2.delay-level-00 have no destination")
    assert found["delay levels: catch-all"][1].startswith("off: due messages without a destination stay")


def lose(url: str, levels: DelayInfrastructure = V2, number: int = 3) -> None:
    """Have messages come due whose destination does not exist."""

    async def fill(channel: Channel) -> None:
        exchange, key = levels.route(1, "deleted")
        for _ in range(number):
            await channel.basic_publish(b"", exchange=exchange, routing_key=key)
        await asyncio.sleep(3)

    with_channel(url, fill)


@pytest.mark.slow
def test_caught_messages_are_counted_by_all_commands(
    run: Callable[..., Result], on_broker: Callable[..., Result], rabbitmq_url: str
) -> None:
    # Given an endpoint that is set up, which has due messages without a destination caught
    assert run("setup").code == 0
    lose(rabbitmq_url)

    # Then every count says where they are
    for command in ("verify", "pending"):
        ran = on_broker(command)
        assert ran.code == 1, ran.out
        assert "nsb.v2.delay-undeliverable" in ran.out
    assert on_broker("pending", "--json").document["blocked"] == {"nsb.v2.delay-undeliverable": 3}
    ill = run("doctor", "--json")
    assert ill.code == 1
    assert levels_of(ill)["delay levels: catch-all"][1].startswith("3 due messages are in nsb.v2.delay-undeliverable")


@pytest.mark.slow
def test_due_messages_that_hang_in_a_level_end_every_count_with_1(
    on_broker: Callable[..., Result], rabbitmq_url: str
) -> None:
    # Given messages that hang in the lowest level, where no count of ready messages shows them
    on_broker("create", "--delays", "other")
    on_broker("create")
    on_broker("catch-all", "off")
    lose(rabbitmq_url)

    # Then neither a count nor a move says that there are no messages
    counted = on_broker("pending")
    moved = on_broker("migrate", "--from", "v2", "--delays", "other")
    dry = on_broker("migrate", "--from", "v2", "--delays", "other", "--dry-run")
    for ran in (counted, moved, dry):
        assert ran.code == 1, ran.out
        assert "3 in nsb.v2.delay-level-00" in ran.out
    document = on_broker("migrate", "--from", "v2", "--delays", "other", "--json").document
    assert document["blocked"] == {"nsb.v2.delay-level-00": 3}


@pytest.mark.slow
def test_without_the_management_api_what_is_unknown_is_no_zero(
    run: Callable[..., Result], on_broker: Callable[..., Result], rabbitmq: RabbitmqServer, rabbitmq_url: str
) -> None:
    """Given messages that may hang, when a command cannot ask, then it says so and ends with 1, unless accepted."""
    assert run("setup").code == 0
    on_broker("create", "--delays", "other")
    on_broker("catch-all", "off")
    lose(rabbitmq_url)
    closed = f"{rabbitmq_url}?management=http://127.0.0.1:1"
    moves = ("rabbitmq", "migrate", "--from", "v2", "--delays", "other", "--url", closed)
    transfer = ("rabbitmq", "transfer", "--source", closed, "--target", f"{rabbitmq_url}?delays=other")
    counts_returns = LIMITED_FROM <= rabbitmq.version() < NACK_IS_NOT_COUNTED
    for command in (("rabbitmq", "pending", "--url", closed), moves, (*moves, "--dry-run"), transfer):
        if counts_returns and "--dry-run" in command:  # it returns messages, which such a broker may then send on early
            for refused in (run(*command), run(*command, "--without-management")):
                assert refused.code == 1, refused.out
                assert "unless a policy says otherwise, which could not be looked at: no management" in refused.err
            continue
        ran = run(*command)
        assert ran.code == 1, ran.out
        assert "it is unknown how many due messages hang in the levels, beside those counted: no management" in ran.out
        accepted = run(*command, "--without-management", "--json")
        assert accepted.code == 0, accepted.out
        assert "no management API at http://127.0.0.1:1" in accepted.document["unseen"]
    for words in (["setup", "--url", closed], ["rabbitmq", "create", "--url", closed]):
        ran = run(*words)
        assert ran.code == 1, ran.out
        assert "it may be that due messages without a destination are not caught" in ran.out
        assert "✓ catch-all" not in ran.out
        assert run(*words, "--without-management").code == 0
    assert run("setup", "--url", closed, "--json").document["unknown"]
    assert run("rabbitmq", "create", "--url", closed, "--json").document["catch_all"]["ok"] is None


@pytest.mark.slow
def test_caught_messages_are_counted_without_the_management_api(
    run: Callable[..., Result], rabbitmq: RabbitmqServer, rabbitmq_url: str
) -> None:
    assert run("setup", "--url", f"{rabbitmq_url}?management={rabbitmq.management_url}").code == 0
    lose(rabbitmq_url)
    closed = f"{rabbitmq_url}?management=http://127.0.0.1:1"
    ran = run("rabbitmq", "pending", "--url", closed, "--without-management")
    assert ran.code == 1
    assert "3 in nsb.v2.delay-undeliverable: due, and without a destination" in ran.out


def line_of(ran: Result, what: str) -> str:
    return next(line for line in ran.out.splitlines() if line[2:].startswith(what))


def test_classic_levels_that_drop_due_messages_are_reported(on_broker: Callable[..., Result]) -> None:
    """Given v1 levels, whose due messages without a destination are dropped, when not caught, then verify says so."""
    assert on_broker("create", "--delays", "v1").code == 0
    assert line_of(on_broker("verify", "--delays", "v1"), "due messages").startswith("✓")
    on_broker("catch-all", "off", "--delays", "v1")
    ran = on_broker("verify", "--delays", "v1")
    assert ran.code == 1
    assert line_of(ran, "due messages").startswith("✗ due messages")
    assert "are dropped by the broker, uncounted" in line_of(ran, "due messages")


@pytest.mark.parametrize(("delays", "lost"), [("v1", "are dropped"), ("v2", "hang in their level")])
def test_destinations_that_lead_to_no_queue_are_reported(
    run: Callable[..., Result], rabbitmq: RabbitmqServer, rabbitmq_url: str, delays: str, lost: str
) -> None:
    """Given an endpoint whose queue was deleted and whose exchange was not, when verified, then it is reported."""
    url = f"{rabbitmq_url}?delays={delays}&management={rabbitmq.management_url}"
    assert run("setup", "--url", url).code == 0
    good = run("rabbitmq", "verify", "--url", url)
    assert line_of(good, "destinations").startswith("✓ destinations  all 1 lead to a queue")
    rabbitmq.api("DELETE", f"queues/{rabbitmq_url.rsplit('/', 1)[1]}/sales")
    ran = run("rabbitmq", "verify", "--url", url)
    assert ran.code == 1
    assert f"'sales' leads to no queue, so due messages for it {lost}" in line_of(ran, "destinations")
    assert "delayline setup --queue sales" in line_of(ran, "destinations")


def limit(rabbitmq: RabbitmqServer, url: str, queue: str) -> None:
    """Have a queue take one message and refuse others."""
    # With the limit of returns that set-up would set: a queue has one policy.
    definition = {"max-length": 1, "overflow": "reject-publish", "delivery-limit": 100_000}
    content = {"pattern": f"^{queue}$", "definition": definition, "apply-to": "queues", "priority": 1}
    rabbitmq.api("PUT", f"policies/{url.rsplit('/', 1)[1]}/limit-{queue}", json=content)


@pytest.mark.slow
def test_a_full_destination_is_named_with_the_remedy_that_helps(
    run: Callable[..., Result], on_broker: Callable[..., Result], rabbitmq: RabbitmqServer, rabbitmq_url: str
) -> None:
    """Given due messages that a full queue refuses, when examined, then it is named, and no catch-all is advised."""
    assert run("setup").code == 0
    limit(rabbitmq, rabbitmq_url, "sales")

    # Then a set-up warns of it before it is full
    ran = run("setup")
    assert ran.code == 0, ran.out
    warning = "queue 'sales' refuses messages while it is full (max-length=1, overflow=reject-publish)"
    assert warning in ran.out
    assert warning in run("setup", "--json").document["warnings"][0]
    assert warning in line_of(on_broker("verify"), "destinations")

    # And when it is full, each tool names it
    async def fill(channel: Channel) -> None:
        exchange, key = V2.route(1, "sales")
        for _ in range(60):  # a quorum queue takes some more than its limit
            await channel.basic_publish(b"", exchange=exchange, routing_key=key)

    with_channel(rabbitmq_url, fill)
    eventually(lambda: line_of(on_broker("verify"), "due messages").startswith("✗"))
    found = line_of(on_broker("verify"), "due messages")
    assert "hang, and 32 stop a level for all: queue 'sales' is full and refuses messages (max-length=1" in found
    assert "catch-all on" not in found
    counted = on_broker("pending")
    assert counted.code == 1
    assert "without a destination, or refused by a full one" in counted.out
    assert "'sales' is full and refuses" in levels_of(run("doctor", "--json"))["delay levels: due messages"][1]


@pytest.mark.parametrize("topology", ["conventional", "direct"])
def test_a_queue_that_is_set_up_again_gets_the_messages_that_hang(
    run: Callable[..., Result],
    rabbitmq: RabbitmqServer,
    rabbitmq_url: str,
    topology: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Given due messages of a deleted destination, when its queue is set up by name, then they arrive there."""
    monkeypatch.delenv("DELAYLINE_ENDPOINT")
    url = f"{rabbitmq_url}?topology={topology}&management={rabbitmq.management_url}"
    assert run("rabbitmq", "create", "--url", url).code == 0
    assert run("rabbitmq", "catch-all", "off", "--url", url).code == 0
    lose(rabbitmq_url)
    assert run("setup", "--queue", "deleted", "--url", url).code == 0
    vhost = rabbitmq_url.rsplit("/", 1)[1]
    eventually(lambda: rabbitmq.api("GET", f"queues/{vhost}/deleted").json().get("messages") == 3)


def test_a_queue_is_set_up_on_a_broker_without_levels(
    run: Callable[..., Result], rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given delayed messages in a database, when a queue is set up, then the broker needs no levels."""
    monkeypatch.delenv("DELAYLINE_ENDPOINT")
    ran = run("setup", "--queue", "billing", "--transport-url", rabbitmq_url, "--store-url", "sqlite:///store.db")
    assert (ran.code, "billing" in ran.out) == (0, True), ran.out + ran.err


def test_a_user_who_may_set_no_policy_gets_the_missing_right(
    run: Callable[..., Result], rabbitmq: RabbitmqServer, rabbitmq_url: str
) -> None:
    # Given a user with the right to create the levels, but not to set policies
    user = rabbitmq.new_user(rabbitmq_url, tags="monitoring")
    url = f"{user}?management={rabbitmq.management_url}"

    # Then everything is set up, and the exit code is 1
    for command in (("setup", "--url", url), ("rabbitmq", "create", "--url", url)):
        ran = run(*command)
        assert ran.code == 1, ran.out
        assert "due messages without a destination are not caught" in ran.out
        assert "delayline rabbitmq catch-all on" in ran.out
    ran = run("doctor", "--url", url, "--json")
    assert ran.code == 1
    assert "catch-all on" in levels_of(ran)["delay levels: catch-all"][1]


def test_doctor_does_without_the_management_plugin(
    run: Callable[..., Result], on_broker: Callable[..., Result], rabbitmq_url: str
) -> None:
    closed = f"{rabbitmq_url}?management=http://127.0.0.1:1"
    assert run("setup", "--url", closed, "--without-management").code == 0
    assert run("doctor", "--url", closed).code == 3
    ran = run("doctor", "--url", closed, "--json", "--without-management")
    assert ran.code == 0, ran.out
    [alarms] = [one for one in ran.document["findings"] if one["what"] == "alarms"]
    assert (ran.document["state"], alarms["state"]) == ("not checked", "not checked")
    ok, text = levels_of(ran)["delay levels"]
    assert ok is None
    assert "not looked at more closely: no management API at http://127.0.0.1:1" in text
    assert "Whether another one ends in 'sales' was not looked at" in levels_of(ran)["delay levels: names"][1]
    # And of an endpoint whose name ends in another's, it reports that without the plugin
    assert run("setup", "--url", closed, "--endpoint", "acme.sales", "--without-management").code == 0
    ran = run("doctor", "--url", closed, "--endpoint", "acme.sales", "--json", "--without-management")
    assert ran.code == 1, ran.out
    assert levels_of(ran)["delay levels: names"] == (
        False,
        "'sales' on the broker, in which 'acme.sales' ends, would get its delayed messages too. Rename one",
    )


def test_doctor_looks_for_no_levels_where_messages_wait_in_a_database(
    run: Callable[..., Result], rabbitmq: RabbitmqServer, rabbitmq_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DELAYLINE_TRANSPORT_URL", f"{rabbitmq_url}?management={rabbitmq.management_url}")
    assert run("setup").code == 0
    ran = run("doctor", "--json")
    assert ran.code == 0, ran.out
    assert levels_of(ran) == {}


@pytest.mark.slow
def test_doctor_reports_a_broker_without_memory(
    run: Callable[..., Result], crashing_rabbitmq: RabbitmqServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a broker in a memory alarm, which takes no messages, then doctor is not green until it is over."""

    def alarms() -> tuple[int, bool | None, str]:
        ran = run("doctor", "--json")
        [found] = [one for one in ran.document["findings"] if one["what"] == "alarms"]
        return ran.code, OKS[found["state"]], found["text"]

    monkeypatch.setenv(
        "DELAYLINE_URL", f"{crashing_rabbitmq.new_vhost()}?management={crashing_rabbitmq.management_url}"
    )
    assert run("setup").code == 0
    well = (0, True, "none: memory and disk space suffice")
    assert alarms() == well
    crashing_rabbitmq.control("set_vm_memory_high_watermark", "0.00001")
    eventually(lambda: alarms()[0] == 1)
    code, ok, text = alarms()
    assert (code, ok) == (1, False)
    assert text.startswith("memory of ")
    assert "the broker accepts no messages until there is more" in text
    crashing_rabbitmq.control("set_vm_memory_high_watermark", "0.6")
    eventually(lambda: alarms() == well)


@pytest.mark.parametrize("command", ["create", "verify", "migrate", "pending"])
def test_another_technologys_url_is_wrong_usage(run: Callable[..., Result], command: str) -> None:
    ran = run("rabbitmq", command, "--url", "sqlite:///delayline.db")
    assert ran.code == 2
    assert "a broker's URL starts with amqp:// or amqps://, not sqlite://. Write amqp://" in ran.err


def test_a_broker_that_is_not_there_is_reported_without_the_password(run: Callable[..., Result]) -> None:
    for command in ("create", "pending", "migrate"):
        ran = run("rabbitmq", command, "--url", "amqp://shop:s3cret@127.0.0.1:1/orders")
        assert ran.code == 1
        assert "amqp://shop@127.0.0.1:1/orders" in ran.err
        assert "s3cret" not in ran.err + ran.out


def test_without_the_management_plugin_verify_names_the_plugin_to_enable(run: Callable[..., Result]) -> None:
    ran = run("rabbitmq", "verify", "--url", "amqp://localhost/", "--management-url", "http://127.0.0.1:1")
    assert ran.code == 1
    assert "rabbitmq-plugins enable rabbitmq_management" in ran.err


def test_events_are_subscribed_to_and_no_more(on_broker: Callable[..., Result], rabbitmq_url: str) -> None:
    """Given a queue, when it subscribes to a type of .NET's, then its exchange is bound to the type's, until undone."""
    missing = on_broker("subscribe", "Contoso.Messages.OrderPlaced", "--endpoint", "billing")
    assert (missing.code, "billing" in missing.err) == (1, True)
    with_channel(rabbitmq_url, lambda channel: channel.queue_declare("billing", durable=True))
    with_channel(
        rabbitmq_url, lambda channel: channel.exchange_declare("billing", exchange_type="fanout", durable=True)
    )
    done = on_broker("subscribe", "Contoso.Messages.OrderPlaced", "--endpoint", "billing")
    assert done.out == "✓ billing receives the events of Contoso.Messages.OrderPlaced\n"
    with_channel(rabbitmq_url, lambda channel: channel.exchange_declare("Contoso.Messages:OrderPlaced", passive=True))
    undone = on_broker("unsubscribe", "Contoso.Messages.OrderPlaced", "--endpoint", "billing", "--json")
    assert undone.document == {"endpoint": "billing", "type": "Contoso.Messages.OrderPlaced", "subscribed": False}


@pytest.mark.parametrize("name", ["", ".", "x" * 20_000])
def test_names_that_are_not_types_are_refused(on_broker: Callable[..., Result], name: str) -> None:
    refused = on_broker("subscribe", name, "--endpoint", "billing")
    assert (refused.code, "the full name of a .NET type" in refused.err) == (2, True)
    assert len(refused.err) < 1000
