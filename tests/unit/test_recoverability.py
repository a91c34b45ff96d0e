from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from delayline import ConfigurationError, Headers, Message, Recoverability
from delayline.failures import brief, cut, error_operations, failure_headers
from delayline.message import to_wire_time
from delayline.receiving.recoverability import MoveToErrors, RetryLater, RetryNow
from delayline.spi import TransportOperation

if TYPE_CHECKING:
    from collections.abc import Mapping

NOW = datetime(2026, 1, 1, tzinfo=UTC)
BOOM = ValueError("boom")


def round_of(number: str, begun: datetime = NOW) -> dict[str, str]:
    return {Headers.RETRIES: number, Headers.RETRIES_TIMESTAMP: to_wire_time(begun)}


@pytest.mark.parametrize("attempt", [1, 5])
def test_the_first_failures_are_retried_at_once(attempt: int) -> None:
    assert Recoverability().decide(BOOM, attempt, {}, NOW) == RetryNow()


@pytest.mark.parametrize(("done", "seconds"), [("0", 10), ("1", 20), ("2", 30)])
def test_the_sixth_failure_is_retried_later_and_later(done: str, seconds: int) -> None:
    assert Recoverability().decide(BOOM, 6, round_of(done), NOW) == RetryLater(
        timedelta(seconds=seconds),
        {Headers.RETRIES: str(int(done) + 1), Headers.RETRIES_TIMESTAMP: to_wire_time(NOW)},
    )


def test_after_the_last_round_it_is_an_error() -> None:
    assert Recoverability().decide(BOOM, 6, round_of("3"), NOW) == MoveToErrors()


def test_no_retries_means_one_attempt() -> None:
    assert Recoverability(immediate_retries=0, delayed_retries=0).decide(BOOM, 1, {}, NOW) == MoveToErrors()


def test_a_round_that_began_more_than_a_day_ago_is_the_last() -> None:
    day = timedelta(hours=24)
    settings = Recoverability(immediate_retries=0)
    assert isinstance(settings.decide(BOOM, 1, round_of("1", NOW - day), NOW), RetryLater)
    assert settings.decide(BOOM, 1, round_of("1", NOW - day - timedelta(seconds=1)), NOW) == MoveToErrors()


@pytest.mark.parametrize("number", ["", "x", "-4", "1.5", "9" * 5000, "²"])
def test_a_damaged_round_header_counts_as_the_first_round(number: str) -> None:
    decision = Recoverability(immediate_retries=0).decide(BOOM, 1, {Headers.RETRIES: number}, NOW)
    assert isinstance(decision, RetryLater)
    assert decision.delay == timedelta(seconds=10)


def test_a_damaged_timestamp_is_ignored() -> None:
    headers = {Headers.RETRIES: "1", Headers.RETRIES_TIMESTAMP: "yesterday"}
    assert isinstance(Recoverability(immediate_retries=0).decide(BOOM, 1, headers, NOW), RetryLater)


def test_unrecoverable_exceptions_and_their_subclasses_are_errors_at_once() -> None:
    settings = Recoverability(unrecoverable=(LookupError,))
    assert settings.decide(KeyError("a"), 1, {}, NOW) == MoveToErrors()
    assert settings.decide(BOOM, 1, {}, NOW) == RetryNow()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("immediate_retries", -1),
        ("immediate_retries", 1.5),
        ("immediate_retries", True),
        ("delayed_retries", -1),
        ("delayed_retries", "3"),
        ("time_increase", timedelta(0)),
        ("time_increase", timedelta(seconds=-1)),
        ("time_increase", 10),
        ("immediate_pause", timedelta(-1)),
        ("immediate_pause", 0.01),
    ],
)
def test_settings_that_cannot_work_are_refused(setting: str, value: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigurationError, match=f"{setting} must be") as caught:
        Recoverability(**{setting: value})
    assert repr(value) in str(caught.value)


def test_the_pauses_between_attempts_at_once() -> None:
    default, long = Recoverability(), Recoverability(immediate_pause=timedelta(seconds=3))
    pauses = [default.pause_after(attempt).total_seconds() for attempt in range(1, 9)]
    assert pauses == [0, 0.01, 0.02, 0.04, 0.08, 0.1, 0.1, 0.1]
    assert [long.pause_after(attempt).total_seconds() for attempt in (1, 2, 3, 10_000)] == [0, 3, 3, 3]
    assert Recoverability(immediate_pause=timedelta(0)).pause_after(5) == timedelta(0)


def failure(error: BaseException) -> dict[str, str]:
    def fail() -> None:
        raise error

    try:
        fail()
    except BaseException as raised:
        return failure_headers(raised, "billing", "sales", NOW)
    raise AssertionError


def test_the_headers_of_a_failure() -> None:
    headers = failure(BOOM)
    assert headers[Headers.EXCEPTION_TYPE] == "builtins.ValueError"
    assert headers[Headers.EXCEPTION_MESSAGE] == "boom"
    assert headers[Headers.EXCEPTION_SOURCE] == "builtins"
    assert headers[Headers.EXCEPTION_HELP_LINK] == ""
    assert headers[Headers.EXCEPTION_STACK_TRACE].endswith("ValueError: boom\n")
    assert __file__.rsplit("/", maxsplit=1)[-1] in headers[Headers.EXCEPTION_STACK_TRACE]
    assert headers[Headers.TIME_OF_FAILURE] == to_wire_time(NOW)
    assert headers[Headers.FAILED_QUEUE] == "billing"
    assert headers[Headers.PROCESSING_ENDPOINT] == "sales"
    assert headers[Headers.PROCESSING_MACHINE] in headers[Headers.HOST_DISPLAY_NAME]
    assert Headers.INNER_EXCEPTION_TYPE not in headers


@pytest.mark.parametrize(("length", "kept"), [(16_384, 16_384), (16_385, 16_384), (0, 0)])
def test_the_message_of_a_failure_is_cut(length: int, kept: int) -> None:
    assert len(failure(ValueError("x" * length))[Headers.EXCEPTION_MESSAGE]) == kept


def test_the_inner_exception_is_the_cause_before_the_context() -> None:
    error = ValueError("outer")
    error.__context__ = LookupError("context")
    assert failure(error)[Headers.INNER_EXCEPTION_TYPE] == "builtins.LookupError"
    error.__cause__ = OSError("cause")
    assert failure(error)[Headers.INNER_EXCEPTION_TYPE] == "builtins.OSError"


def test_a_context_suppressed_by_from_none_is_no_inner_exception() -> None:
    error = ValueError("outer")
    error.__context__ = LookupError("context")
    error.__suppress_context__ = True
    assert Headers.INNER_EXCEPTION_TYPE not in failure(error)


def test_an_exception_whose_str_raises_has_headers() -> None:
    class WithoutText(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert failure(WithoutText())[Headers.EXCEPTION_MESSAGE] == "<WithoutText whose text cannot be had>"


def forms(message: Message, error: Exception = BOOM) -> list[TransportOperation]:
    return list(
        error_operations(message, error, failed_queue="billing", error_queue="error", endpoint_name="sales", now=NOW)
    )


def moved(message: Message) -> TransportOperation:
    return forms(message)[0]


def test_a_message_goes_to_the_error_queue_under_its_logical_id_with_why_it_failed() -> None:
    operation = moved(Message("copy", {Headers.MESSAGE_ID: "m", "tenant": "acme"}, b"body"))
    assert (operation.destination, operation.message.id, operation.message.body) == ("error", "m", b"body")
    assert operation.message.headers["tenant"] == "acme"
    assert operation.message.headers[Headers.FAILED_QUEUE] == "billing"


def test_a_message_whose_headers_cannot_be_read_goes_as_it_is() -> None:
    damaged = Message.from_encoded("m", b"{", b"body")
    assert moved(damaged).message is damaged


def causes(number: int, text: str) -> Exception:
    """An exception that a chain of so many others led to."""
    error = ValueError(f"{text} 0")
    for link in range(1, number):
        outer = ValueError(f"{text} {link}")
        outer.__cause__ = error
        error = outer
    return error


def size(headers: Mapping[str, str]) -> int:
    return sum(len(name.encode()) + len(value.encode()) for name, value in headers.items())


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x" * 20_000_000),
        ValueError("größe 🚚" * 50_000),
        ValueError("\udcff\0" * 100_000),
        causes(400, "y" * 200_000),
        causes(5000, "z"),
        type("N" * 200_000, (Exception,), {})("long name"),
    ],
    ids=["20 MB", "not ASCII", "no Unicode", "400 causes", "5000 causes", "class name"],
)
def test_failure_headers_are_bounded(error: Exception) -> None:
    headers = failure(error)
    assert size(headers) < 40_000
    assert headers[Headers.FAILED_QUEUE] == "billing"


def test_a_long_chain_of_causes_keeps_both_ends() -> None:
    trace = failure(causes(400, "boom"))[Headers.EXCEPTION_STACK_TRACE]
    assert "ValueError: boom 0\n" in trace
    assert "ValueError: boom 399\n" in trace
    assert "392 exceptions of the chain are left out" in trace


def test_a_cut_text_has_both_ends_and_is_reported() -> None:
    text = cut("a" * 1000 + "ü" * 1000, 200)
    assert text.startswith("aaa")
    assert text.endswith("üüü")
    assert "2000 characters in all" in text
    assert len(text.encode()) <= 200
    assert cut("ü" * 100, 200) == "ü" * 100


@pytest.mark.parametrize("room", [0, 1, 10, 50, 300])
def test_a_text_is_cut_to_any_room(room: int) -> None:
    assert len(cut("🚚" * 1000, room).encode()) <= room


def test_an_exception_that_cannot_be_formatted_still_has_headers() -> None:
    class Awkward(SyntaxError):
        @property
        def text(self) -> str:  # type: ignore[override]
            raise LookupError("no text")

    trace = failure(Awkward("a", ("file", 1, 1, "text")))[Headers.EXCEPTION_STACK_TRACE]
    assert "cannot be formatted: builtins.LookupError" in trace


def test_the_forms_of_a_failed_message_become_smaller_down_to_the_message_itself() -> None:
    message = Message("m", {"tenant": "acme", Headers.MESSAGE_ID: "m"}, b"body")
    found = [form.message for form in forms(message, ValueError("x" * 1_000_000))]
    sizes = [size(form.headers) for form in found]
    assert sizes == sorted(sizes, reverse=True)
    assert [size > limit for size, limit in zip(sizes, [30_000, 1000, 250, 0], strict=True)] == [True] * 4
    assert sizes[1] < 3000
    assert sizes[2] < 1000
    assert found[2].headers[Headers.FAILED_QUEUE] == "billing"
    assert found[3] == message
    assert {form.id for form in found} == {"m"}


@pytest.mark.parametrize("named", ["n" * 300, "\ud800", "a\0b"])
def test_a_message_id_that_cannot_be_kept_is_replaced_and_stays_in_the_header(named: str) -> None:
    message = Message("copy", {Headers.MESSAGE_ID: named}, b"body")
    ids = {form.message.id for form in forms(message)}
    assert ids == {message.logical.id}
    assert len(message.logical.id) == 36
    assert {form.message.headers[Headers.MESSAGE_ID] for form in forms(message)} == {named}
    assert Message("another copy", {Headers.MESSAGE_ID: named}, b"").logical.id == message.logical.id


def test_an_exception_in_a_log_is_one_short_line() -> None:
    assert brief(BOOM) == "ValueError: boom"
    assert brief(ValueError()) == "ValueError"
    assert brief(ValueError("a\nb")) == "ValueError: a b"
    assert len(brief(ValueError("x" * 1_000_000))) < 400
