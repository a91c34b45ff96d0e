from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from delayline import (
    ConfigurationError,
    Endpoint,
    MemoryTransport,
    SqlTransport,
    StoredDelivery,
    SyncEndpoint,
    TransactionMode,
)
from delayline.composition import endpoint_from, store_of, transport_of
from delayline.masking import masked
from delayline.rabbitmq import DelayLevelDelivery, RabbitMQTransport
from delayline.settings import Settings, load_settings, setting_names
from delayline.timeouts import SqlTimeoutPersister, TimeoutManagerDelivery

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Result


def loaded(toml: str = "", *, environ: dict[str, str] | None = None, **flags: Any) -> Settings:  # noqa: ANN401 - wrong ones too
    Path("delayline.toml").write_text(toml)
    return load_settings(environ=environ or {}, flags=flags)


def test_without_anything_there_are_defaults() -> None:
    assert load_settings(environ={}) == Settings()
    assert Settings().url == "sqlite:///delayline.db"


def test_a_variable_wins_over_the_file_and_a_flag_over_both() -> None:
    toml = "batch_size = 1\nconcurrency = 2\nnumber_of_retries = 3"
    environ = {"DELAYLINE_BATCH_SIZE": "10", "DELAYLINE_CONCURRENCY": "20"}
    settings = loaded(toml, environ=environ, batch_size="100", concurrency=None)
    assert (settings.batch_size, settings.concurrency, settings.number_of_retries) == (100, 20, 3)


def test_another_file_can_be_named_and_must_then_exist(folder: Path) -> None:
    other = folder / "other.toml"
    other.write_text('endpoint = "other"')
    assert load_settings(other, environ={}).endpoint == "other"
    with pytest.raises(ConfigurationError, match=r"missing.toml cannot be read: No such file.*--config"):
        load_settings("missing.toml", environ={})


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("batch_size", 0, "must be a whole number of 1 or more"),
        ("batch_size", True, "must be a whole number"),
        ("batch_size", 1.5, "must be a whole number"),
        ("batch_size", "many", "must be a whole number"),
        ("number_of_retries", -1, "must be a whole number of 0 or more"),
        ("delay_levels_from_seconds", -1, "must be a number of seconds of 0 or more"),
        ("delay_levels_from_seconds", "soon", "must be a number of seconds of 0 or more"),
        ("store_circuit_breaker_seconds", 0, "must be a number of seconds above 0"),
        ("store_circuit_breaker_seconds", "nan", "must be a number of seconds above 0"),
        ("store_circuit_breaker_seconds", "1e300", "must be a number of seconds above 0"),
        ("transaction_mode", "TRANSACTION_SCOOP", "did you mean 'TRANSACTION_SCOPE'"),
        ("endpoint", "", "must be a text of 1 to 200 characters"),
        ("endpoint", 5, "must be a text"),
        ("endpoint", " sales", "spaces around it"),
        ("url", "delayline.db", "must be a URL"),
        ("url", "", "not empty"),
    ],
)
def test_a_value_that_cannot_work_is_named_with_its_place_and_the_remedy(
    name: str,
    value: Any,  # noqa: ANN401 - wrong on purpose
    what: str,
) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigurationError, match=rf"{name} = .*from the flag {flag}\).*{what}.*: {flag} "):
        loaded(**{name: value})
    with pytest.raises(ConfigurationError, match=f"{name} = .*argument.*{what}"):
        Settings(**{name: value})


def test_each_place_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"\(from delayline.toml\).*Write for example: batch_size = 500"):
        loaded("batch_size = 0")
    with pytest.raises(ConfigurationError, match=r"variable DELAYLINE_BATCH_SIZE.*DELAYLINE_BATCH_SIZE=500"):
        loaded(environ={"DELAYLINE_BATCH_SIZE": "x"})

    with pytest.raises(ConfigurationError, match=r'Write for example: endpoint = "sales"'):
        loaded("endpoint = 5")


def test_an_example_for_the_file_is_toml() -> None:
    with pytest.raises(ConfigurationError, match=r'Write for example: endpoint = "sales"$'):
        loaded("endpoint = 5")


def test_an_unknown_key_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown setting 'batchsize'; did you mean 'batch_size'"):
        loaded("batchsize = 5")


@pytest.mark.parametrize("name", ["URL", "ENDPOINT", "SCHEMA"])
def test_an_empty_variable_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"the variable DELAYLINE_{name} is set and empty: give it a value"):
        loaded(environ={f"DELAYLINE_{name}": ""})


def test_an_unknown_variable_is_warned_of(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("DELAYLINE_RETRIES", "DELAYLINE_DASHBOARD_TOKEN", "DELAYLINE_REQUIRE_SERVICES"):
        monkeypatch.setenv(name, "5")
    # A command
    assert run("setup").err == (
        "warning: the variable DELAYLINE_RETRIES is not a setting and has no effect; "
        "did you mean DELAYLINE_NUMBER_OF_RETRIES?\n"
    )
    # A program
    Endpoint.from_settings("sales")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "DELAYLINE_RETRIES is not a setting" in caplog.text


def test_a_program_is_made_of_settings_and_what_only_code_can_say(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("delayline.toml").write_text('endpoint = "reminders"\nconcurrency = 3\nnumber_of_retries = 5')
    monkeypatch.setenv("DELAYLINE_CONCURRENCY", "4")
    monkeypatch.delenv("DELAYLINE_ENDPOINT")
    assert Endpoint.from_settings().name == "reminders"
    endpoint = SyncEndpoint.from_settings("sales", send_only=True, transaction_connections=2).endpoint
    assert (endpoint.name, endpoint.send_only, endpoint.transaction_connections) == ("sales", True, 2)
    assert isinstance(endpoint.delayed_delivery, StoredDelivery)
    assert (endpoint.concurrency, endpoint.delayed_delivery.number_of_retries) == (4, 5)
    Path("other.toml").write_text("concurrency = 9")
    monkeypatch.delenv("DELAYLINE_CONCURRENCY")
    assert Endpoint.from_settings("sales", config="other.toml").concurrency == 9


def test_a_variable_with_a_typing_error_is_refused_and_a_strange_one_is_not_ours() -> None:
    with pytest.raises(ConfigurationError, match=r"DELAYLINE_BACH_SIZE.*did you mean DELAYLINE_BATCH_SIZE"):
        loaded(environ={"DELAYLINE_BACH_SIZE": "5"})
    loaded(environ={"DELAYLINE_REQUIRE_SERVICES": "1"})


@pytest.mark.parametrize("toml", ["batch_size 5", "\x00", "endpoint = "])
def test_a_file_that_is_not_toml_is_refused(toml: str) -> None:
    with pytest.raises(ConfigurationError, match=r"delayline.toml is not TOML"):
        loaded(toml)


def test_a_mode_may_be_written_small_and_with_dashes() -> None:
    assert loaded(transaction_mode="receive-only").transaction_mode is TransactionMode.RECEIVE_ONLY


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("oracle://me:secret@host/db", "oracle://me:***@host/db"),
        ("oracle://me:s@e:c/ret@host/db", "oracle://me:***@host/db"),
        ("oracle://host/db?user=me&password=secret&x=1", "oracle://host/db?user=me&password=***&x=1"),
        ("sqlite:///a.db", "sqlite:///a.db"),
    ],
)
def test_passwords_do_not_show(url: str, shown: str) -> None:
    assert masked(url) == shown
    assert "secret" not in repr(Settings(url=url, store_url=url, transport_url=url))
    if not url.startswith("sqlite"):
        for make in (transport_of, store_of):
            with pytest.raises(
                ConfigurationError,
                match=r"schemes are (amqp:, amqps:, )?azure:, mariadb:, memory:, mssql:, mysql:, postgresql:, shards:, "
                r"sqlite:",
            ) as caught:
                make(Settings(url=url))
            assert "secret" not in str(caught.value)
            assert "s@e:c" not in str(caught.value)


def test_urls_become_parts() -> None:
    assert isinstance(transport_of(Settings(url="memory:")), MemoryTransport)
    assert isinstance(transport_of(Settings(url="sqlite:///a.db")), SqlTransport)


def test_an_endpoint_is_composed_from_settings() -> None:
    endpoint = endpoint_from(Settings(endpoint="sales", error_queue="bad", concurrency=3), send_only=True)
    assert isinstance(endpoint, Endpoint)
    assert (endpoint.name, endpoint.error_queue, endpoint.concurrency, endpoint.send_only) == ("sales", "bad", 3, True)
    assert endpoint.transaction_mode is TransactionMode.TRANSACTION_SCOPE


def test_store_and_queues_may_be_in_two_places() -> None:
    settings = Settings(endpoint="sales", store_url="sqlite:///a.db", transport_url="sqlite:///b.db")
    assert endpoint_from(settings).transaction_mode is TransactionMode.SENDS_ATOMIC_WITH_RECEIVE


BROKER = "amqp://me:secret@broker/orders"


def test_a_broker_alone_keeps_delayed_messages_in_its_levels() -> None:
    endpoint = endpoint_from(Settings(endpoint="sales", url=BROKER))
    assert isinstance(endpoint.transport, RabbitMQTransport)
    assert isinstance(endpoint.delayed_delivery, DelayLevelDelivery)
    assert endpoint.delayed_delivery.stored is None
    assert endpoint.transaction_mode is TransactionMode.RECEIVE_ONLY
    assert "secret" not in repr(Settings(url=BROKER))


def test_a_store_beside_a_broker_keeps_them_all() -> None:
    endpoint = endpoint_from(Settings(endpoint="sales", url=BROKER, store_url="sqlite:///a.db"))
    assert isinstance(endpoint.transport, RabbitMQTransport)
    assert isinstance(endpoint.delayed_delivery, StoredDelivery)


@pytest.mark.parametrize(("seconds", "stored_below"), [("0", None), ("1.5", timedelta(seconds=1.5))])
def test_a_setting_puts_the_store_in_front_of_the_levels(seconds: str, stored_below: timedelta | None) -> None:
    settings = loaded(endpoint="sales", url=BROKER, store_url="sqlite:///a.db", delay_levels_from_seconds=seconds)
    delivery = endpoint_from(settings).delayed_delivery
    assert isinstance(delivery, DelayLevelDelivery)
    assert isinstance(delivery.stored, StoredDelivery)
    assert delivery.stored_below == stored_below


def test_delay_levels_need_a_broker() -> None:
    with pytest.raises(ConfigurationError, match=r"delay_levels_from_seconds = 7 needs queues on RabbitMQ"):
        endpoint_from(loaded(endpoint="sales", delay_levels_from_seconds=7))
    with pytest.raises(ConfigurationError, match=r"needs a RabbitMQTransport, not SqlTransport"):
        endpoint_from(Settings(endpoint="sales", store_url=BROKER))


def test_messages_in_delay_levels_cannot_be_listed() -> None:
    with pytest.raises(ConfigurationError, match=r"counted, not listed.*delayline rabbitmq pending"):
        store_of(Settings(url=BROKER))


def test_an_endpoint_needs_a_name() -> None:
    with pytest.raises(ConfigurationError, match=r"--endpoint NAME, the variable DELAYLINE_ENDPOINT, or endpoint ="):
        endpoint_from(Settings())


def test_every_setting_can_come_from_a_variable() -> None:
    values = {"URL": "memory:", "TRANSACTION_MODE": "NONE", "STORE_URL": "memory:", "TRANSPORT_URL": "memory:"}
    values |= {"TIMEOUTS_URL": "sqlite:///my.db", "DISABLE_TIMEOUT_MANAGER": "True", "JOURNAL": "True"}
    values |= {"TWO_PHASE": "True", "TIMEOUT_MANAGER": "True", "HISTORY": "True"}
    values |= {"INBOX_URL": "sqlite:///my.db", "OUTBOX_URL": "sqlite:///my.db"}
    for name in setting_names():
        value = values.get(name.upper(), "7")
        assert str(getattr(loaded(environ={f"DELAYLINE_{name.upper()}": value}), name)) in {value, "7.0", "0"}


@pytest.mark.parametrize("toml", [f"batch_size = {'9' * 5000}", f"endpoint = {'[' * 100_000}", f"{'[a.' * 50_000}"])
def test_a_hostile_file_is_refused_in_one_sentence(toml: str) -> None:
    with pytest.raises(ConfigurationError, match=r"delayline.toml is not TOML"):
        loaded(toml)


@pytest.mark.parametrize(
    ("toml", "what"),
    [
        (f"batch_size = {'9' * 4000}", "batch_size = '13288 bits'.* must be a whole number of 1 to 2147483647"),
        (f"store_circuit_breaker_seconds = {'9' * 4000}", "must be a number of seconds above 0"),
        ("store_circuit_breaker_seconds = nan", "must be a number of seconds above 0"),
        (f"transaction_mode = '{'x' * 100_000}'", "must be one of"),
        ('url = "sqlite:///a\\u0000b"', "must be UTF-8 text without NUL"),
        (f"{'x' * 100_000} = 1", "unknown setting 'xxx"),
    ],
)
def test_a_hostile_value_is_refused_in_a_sentence_of_bounded_length(toml: str, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what) as refused:
        loaded(toml)
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize("name", ["url", "store_url", "cold_tier", "schema", "table_name", "endpoint"])
def test_a_value_that_is_not_utf8_is_refused(name: str) -> None:
    variable = f"DELAYLINE_{name.upper()}"
    with pytest.raises(ConfigurationError, match=rf"{name} = .*variable {variable}"):
        loaded(environ={variable: "sqlite:///\udcff.db"})


def test_a_database_url_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the database URL cannot be read"):
        SqlTransport("sqlite:///\udcff.db")


@pytest.mark.parametrize("digits", ["9" * 5000, "9" * 20])
def test_a_number_of_many_digits_in_a_variable_is_refused(digits: str) -> None:
    with pytest.raises(ConfigurationError, match="must be a whole number of 1") as refused:
        loaded(environ={"DELAYLINE_BATCH_SIZE": digits})
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("postgres://me:secret@host/db", "postgresql://me:secret@host/db"),
        ("postgres+psycopg://host/db", "postgresql+psycopg://host/db"),
        ("POSTGRES://host/db", "postgresql://host/db"),
        ("sqlite:///postgres:x.db", "sqlite:///postgres:x.db"),
    ],
)
def test_a_url_of_postgres_is_one_of_postgresql(given: str, taken: str) -> None:
    assert Settings(url=given).url == taken
    assert loaded(environ={"DELAYLINE_STORE_URL": given}).store_url == taken


def test_a_program_may_write_postgres_as_well() -> None:
    pytest.importorskip("psycopg")
    long, short = (SqlTransport(f"{scheme}://me@host/db") for scheme in ("postgresql", "postgres"))
    assert long.transaction_domain == short.transaction_domain
    assert isinstance(transport_of(Settings(url="postgres://me@host/db")), SqlTransport)


def test_a_timeout_manager_is_composed_from_settings() -> None:
    settings = loaded('endpoint = "sales"\ntimeout_manager = true\ntimeout_manager_outage_seconds = 0\nbatch_size = 7')
    delivery = endpoint_from(settings).delayed_delivery
    assert isinstance(delivery, TimeoutManagerDelivery)
    assert isinstance(delivery.persister, SqlTimeoutPersister)
    assert (delivery.time_to_wait_before_triggering_critical_error, delivery.batch_size) == (timedelta(0), 7)


def test_the_outage_of_a_drained_timeout_manager_can_be_set() -> None:
    settings = loaded(
        endpoint="sales", url="sqlite:///q.db", timeouts_url="sqlite:///t.db", timeout_manager_outage_seconds="5"
    )
    draining = endpoint_from(settings).draining
    assert isinstance(draining, TimeoutManagerDelivery)
    assert draining.time_to_wait_before_triggering_critical_error == timedelta(seconds=5)


@pytest.mark.parametrize(
    ("name", "value"),
    [("table_name", "x"), ("journal", "yes"), ("cold_tier", "x"), ("timeouts_url", "sqlite:///t.db")],
)
def test_a_timeout_manager_excludes_store_settings(name: str, value: str) -> None:
    given: dict[str, Any] = {name: value}
    with pytest.raises(ConfigurationError, match=f"timeout_manager = true and {name} exclude each other"):
        endpoint_from(loaded(endpoint="sales", timeout_manager="yes", **given))


def test_two_phases_need_two_databases() -> None:
    with pytest.raises(ConfigurationError, match="two_phase = true needs queues and delayed messages in two SQL"):
        endpoint_from(loaded(endpoint="sales", two_phase="yes"))
    with pytest.raises(ConfigurationError, match="two SQL databases"):
        endpoint_from(loaded(endpoint="sales", two_phase="yes", transport_url=BROKER))


def test_two_phases_are_composed_from_settings() -> None:
    pytest.importorskip("psycopg")
    pytest.importorskip("pymysql")
    endpoint = endpoint_from(
        loaded(
            endpoint="sales", two_phase="yes", store_url="postgresql://me@host/db", url="postgresql://me@host/queues"
        )
    )
    assert endpoint.transaction_mode is TransactionMode.TRANSACTION_SCOPE
    assert endpoint.delayed_delivery is not None
    assert endpoint.delayed_delivery.transaction_domain == endpoint.transport.transaction_domain


def test_the_limit_of_a_wait_on_a_server_comes_with_its_url() -> None:
    pytest.importorskip("psycopg")
    settings = loaded(endpoint="sales", url="postgres://me@limited/db?server_timeout=5")
    transport = endpoint_from(settings).transport
    assert isinstance(transport, SqlTransport)
    assert transport.server_timeout == 5
