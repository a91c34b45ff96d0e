"""The exchanges, queues and bindings of the delay levels, as a table."""

from __future__ import annotations

import pytest

from delayline.errors import ConfigurationError
from delayline.rabbitmq.infrastructure import DelayInfrastructure, Difference, difference_in


def test_there_are_29_exchanges_28_queues_and_56_bindings() -> None:
    for infrastructure in (DelayInfrastructure.v1(), DelayInfrastructure.v2(), DelayInfrastructure.custom("acme")):
        assert len(set(infrastructure.exchanges)) == 29
        assert len({queue.name for queue in infrastructure.queues}) == 28
        assert len(set(infrastructure.bindings)) == 56


def test_ten_seconds_enter_at_the_third_level() -> None:
    exchange, key = DelayInfrastructure.v2().route(10, "destination")
    assert exchange == "nsb.v2.delay-level-03"
    assert key.endswith(".1.0.1.0.destination")


@pytest.mark.parametrize(
    ("delays", "level", "quorum"),
    [("v1", "nsb.delay-level-00", False), ("v2", "nsb.v2.delay-level-00", True), ("acme", "acme.delay-level-00", True)],
)
def test_a_setting_names_the_levels(delays: str, level: str, quorum: bool) -> None:
    infrastructure = DelayInfrastructure.named(delays)
    assert (infrastructure.level(0), infrastructure.quorum) == (level, quorum)


@pytest.mark.parametrize("prefix", ["", "a b", "a*", "#", "ü", "p" * 201, "a\n", "nsb"])
def test_a_prefix_that_makes_no_good_names_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigurationError, match="prefix"):
        DelayInfrastructure.custom(prefix)


@pytest.mark.parametrize(
    ("text", "difference"),
    [
        (
            "PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'q' in vhost '/': "
            "received the value '8000' of type 'signedint' but current is the value '4000' of type 'long'",
            Difference("queue", "q", "x-message-ttl", theirs="4000", ours="8000"),
        ),
        (
            "PRECONDITION_FAILED - inequivalent arg 'x-queue-type' for queue 'it's' in vhost '/': "
            "received 'quorum' but current is 'classic'",
            Difference("queue", "it's", "x-queue-type", theirs="classic", ours="quorum"),
        ),
        (
            "PRECONDITION_FAILED - inequivalent arg 'x-overflow' for queue 'q' in vhost 'v': "
            "received the value 'reject-publish' of type 'longstr' but current is none",
            Difference("queue", "q", "x-overflow", theirs="none", ours="reject-publish"),
        ),
    ],
)
def test_a_refusal_is_read_as_a_difference_of_arguments(text: str, difference: Difference) -> None:
    assert difference_in(text) == difference


def test_another_refusal_is_none() -> None:
    assert difference_in("PRECONDITION_FAILED - unknown delivery tag 7") is None
