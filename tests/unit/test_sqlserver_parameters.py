"""The types that the drivers declare to SQL Server for all statements with text or bytes.

Only the driver's binary part is replaced: no server runs here.
"""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import make_url

from delayline.bulk.stream_claims import CLAIM_COLUMNS, stream_tables
from delayline.errors import BackendUnavailable, BackendUnusable, ConfigurationError, InvalidMessage
from delayline.message import Message
from delayline.sql.deadlines import FACTOR
from delayline.sql.dispatch_pauses import not_paused
from delayline.sql.journal import Journal
from delayline.sql.prepared import Prepared
from delayline.sql.row_claims import LockStatements
from delayline.sql.schema import queue_tables
from delayline.sql.server import IN_SESSION
from delayline.sql.sqlserver.connections import VarbinaryConnection
from delayline.sql.sqlserver.dialect import LeaseTable, SqlServer
from delayline.sql.statements import QueueStatements, StoreStatements
from delayline.timeouts.nservicebus import timeout_table
from delayline.timeouts.persister import Timeout
from delayline.timeouts.sql import TimeoutManagement, TimeoutStatements

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from delayline.sql.sqlserver.microsoft import DeclaringCursor

Loose = Any  # the types that the drivers accept
WVARCHAR, VARBINARY, BIGINT, TIMESTAMP = -9, -3, -5, 93
AT = datetime(2026, 1, 1)  # noqa: DTZ001 - as the column keeps it
ASCII, CYRILLIC, BEYOND = "a-long-ascii-id", "Ключ", "🚚" * 3
#: Values of every parameter that a statement of delayline's has, by its name there.
TEXTS = [
    "id",
    "destination",
    "queue",
    "name",
    "key",
    "store",
    "this_store",
    "lock",
    "saga",
    "mark",
    "reader",
    "topic",
    "of_topic",
    "of_queue",
]
TEXTS += ["Id", "Destination", "SagaId", "Headers", "PersistenceVersion", "value", "new_id", "new_destination", "event"]
LISTS = ["keys", "names", "topics"]
BYTES = ["headers", "body", "State", "marker", "expiry", "new_headers", "new_body"]
NUMBERS = ["retry_count", "retries", "number", "after", "skip", "claim", "sequence", "new_retry_count"]
TIMES = ["due", "until", "since", "at", "expires", "Time", "later", "new_due"]


def value_of(name: str, text: str) -> Loose:
    if name in TEXTS:
        return text
    if name in LISTS:
        return [text, CYRILLIC, ASCII]
    if name == "numbers":
        return [1, 2]
    return {**dict.fromkeys(BYTES, b"{}"), **dict.fromkeys(NUMBERS, 7), **dict.fromkeys(TIMES, AT)}[name]


class Binary:
    """Replaces the driver's binary part and records its arguments."""

    def __init__(self) -> None:
        self.statements: list[str] = []
        self.batches: list[list[tuple[int, int]]] = []
        self.values: list[list[Any]] = []
        self.singles: list[tuple[list[Any], list[tuple[int, ...]]]] = []
        self.failing: list[tuple[str, str]] = []
        self.handles = 0

    def many(self, _: object, sql: str, columns: Loose, kinds: Loose, *__: object) -> int:
        self.statements.append(sql)
        for kind in kinds:
            refuse_beyond_the_type(kind.paramSQLType, kind.columnSize)
        self.batches.append([(kind.paramSQLType, kind.columnSize) for kind in kinds])
        self.values.append(columns)
        return -1 if self.failing else 0

    def once(self, _: object, sql: str, values: list[Any], sizes: Loose, *__: object) -> int:
        self.statements.append(sql)
        for kind, _, size, _ in sizes:
            refuse_beyond_the_type(kind, size)
        self.singles.append((list(values), list(sizes)))
        return -1 if self.failing else 0


def refuse_beyond_the_type(kind: int, size: int) -> None:
    """Refuse a size as the driver does: beyond these it is that of a stream, 0."""
    if size > {WVARCHAR: 4000, VARBINARY: 8000}.get(kind, size):
        raise ValueError("Invalid precision or scale value; [Microsoft]Invalid precision value")


@pytest.fixture
def binary(monkeypatch: pytest.MonkeyPatch) -> Binary:
    from mssql_python import ddbc_bindings

    fake = Binary()

    def fail(*_: object) -> SimpleNamespace:
        return SimpleNamespace(
            sqlState=fake.failing[0][0][1:6], ddbcErrorMsg=f"[Microsoft][Driver]{fake.failing[0][1]}"
        )

    replaced = {
        "Connection": Handle,
        "SQLExecuteMany": fake.many,
        "DDBCSQLExecute": fake.once,
        "DDBCSQLExecDirect": lambda *_: 0,
        "DDBCSQLRowCount": lambda _: 1,
        "DDBCSQLDescribeCol": lambda *_: None,
        "DDBCSQLResetStmt": lambda *_: 0,
        "DDBCSQLFreeHandle": lambda *_: 0,
        "DDBCSQLCheckError": fail,
        "DDBCSQLGetAllDiagRecords": lambda _: fake.failing,
    }
    for name, stand_in in replaced.items():
        monkeypatch.setattr(ddbc_bindings, name, stand_in)
    return fake


class Handle:
    """A statement's handle, or a connection's."""

    def __init__(self, *_: object) -> None:
        pass

    def alloc_statement_handle(self) -> Handle:
        return Handle()

    def __getattr__(self, name: str) -> Loose:
        return lambda *_: 0


def cursor() -> DeclaringCursor:
    """Return a cursor of the driver's own making, as connections of ours give it."""
    from delayline.sql.sqlserver.microsoft import DeclaringConnection

    return DeclaringConnection("Server=host;Database=db;UID=sa;PWD=s3cret").cursor()  # type: ignore[return-value]


def server(url: str = "mssql://sa:s3cret@host/db") -> SqlServer:
    return SqlServer(make_url(url))


def statements(dialect: SqlServer) -> Iterator[tuple[str, Prepared, Sequence[str]]]:
    """Yield every prepared statement that runs on SQL Server, with the names of its parameters."""
    tables = queue_tables(dialect.catalog.schema_of(None))
    table = dialect.catalog.timeouts_table("sales.timeouts", None)
    store = StoreStatements(table, dialect)
    leases = LeaseTable(table, tables, dialect)
    paused = StoreStatements(table, dialect, not_paused(table, dialect))
    timeouts = TimeoutStatements(timeout_table("Sales_", "dbo", dialect), tables, dialect)
    owners: list[Any] = [store, leases, LockStatements(store, dialect, leases), dialect.forwarding(store, tables)]
    owners += [paused, LockStatements(paused, dialect, leases), dialect.forwarding(paused, tables)]
    owners += [
        QueueStatements(tables, dialect),
        timeouts,
        TimeoutManagement(timeouts, dialect),
        Journal(table, dialect),
    ]
    for owner in owners:
        for name, one in vars(owner).items():
            if isinstance(one, Prepared):
                yield f"{type(owner).__name__}.{name}", one, NAMED[id(one)]


#: The names that each statement was given, which it does not keep.
NAMED: dict[int, Sequence[str]] = {}


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Prepared.__init__

    def keep(self: Prepared, statement: Loose, dialect: Loose, names: Sequence[str], **options: Loose) -> None:
        begin(self, statement, dialect, names, **options)
        NAMED[id(self)] = list(names)

    monkeypatch.setattr(Prepared, "__init__", keep)


def on(driver: Loose) -> Loose:
    """Return what stands for a SQLAlchemy connection whose driver gives this cursor."""
    return SimpleNamespace(connection=SimpleNamespace(cursor=lambda: driver))


def expected(value: object) -> int:
    if isinstance(value, str):
        return WVARCHAR
    return VARBINARY if isinstance(value, bytes) else TIMESTAMP if isinstance(value, datetime) else BIGINT


@pytest.mark.parametrize("text", [ASCII, CYRILLIC, BEYOND, ""])
def test_every_statement_declares_text_as_nvarchar(binary: Binary, text: str) -> None:
    names = set()
    for name, one, parameters in statements(server()):
        # When it runs
        binary.singles.clear()
        one.run(on(cursor()), *(value_of(parameter, text) for parameter in parameters))
        # Then the driver got the type of every parameter, however ASCII the text
        for values, sizes in binary.singles:
            assert [kind for kind, *_ in sizes] == [expected(value) for value in values], name
            names.add(name)
    assert {"StoreStatements.insert", "QueueStatements.register", "QueueStatements.known"} <= names
    assert {"LeaseTable._take", "SqlServerForwarding._move", "TimeoutStatements._insert", "Journal._mark"} <= names


def test_every_batch_declares_text_as_nvarchar(binary: Binary) -> None:
    tried = 0
    for name, one, parameters in statements(server()):
        if one.lists:
            continue
        # Given the mixture of ids that became question marks: the longest is ASCII
        rows = [tuple(value_of(parameter, text) for parameter in parameters) for text in (ASCII, CYRILLIC, "Путь")]
        if not parameters:
            continue
        binary.batches.clear()
        one.change_many(on(cursor()), rows)
        for columns, kinds in zip(binary.values[-1:], binary.batches, strict=True):
            for column, (kind, size) in zip(columns, kinds, strict=True):
                assert kind == expected(column[0]), name
                if kind == WVARCHAR:
                    longest = max(len(value.encode("utf-16-le")) // 2 for value in column)
                    assert longest <= size or size == 0, name
            tried += 1
    assert tried > 20


def test_the_drivers_default_declares_a_batch_by_its_longest_text(binary: Binary) -> None:
    """The fault that the declarations cure: where this fails, they are not needed any more."""
    from mssql_python.cursor import Cursor

    plain = cursor()
    plain.__class__ = Cursor  # type: ignore[assignment]
    plain.executemany("INSERT INTO t VALUES (?)", [(ASCII,), (CYRILLIC,)])
    assert binary.batches == [[(12, len(ASCII))]]  # SQL_VARCHAR


def test_a_batch_with_a_long_body_goes_row_by_row_and_counts_all_rows(binary: Binary) -> None:
    one = cursor()
    one.executemany("INSERT INTO t VALUES (?, ?)", [(ASCII, b"x" * 8001), (CYRILLIC, b""), ("Путь", b"x")])
    assert one.rowcount == 3
    assert [[kind for kind, *_ in sizes] for _, sizes in binary.singles] == [[WVARCHAR, VARBINARY]] * 3
    assert not binary.batches


@pytest.mark.parametrize("length", [0, 1, 2, 3, 256, 257, 700, 4000, 4001, 8000, 8001, 300_000])
def test_values_of_any_length_have_few_declarations_that_the_driver_takes(binary: Binary, length: int) -> None:
    cursor().execute("INSERT INTO t VALUES (?, ?)", ("Ж" * length, b"x" * length))
    [[_, sizes]] = binary.singles
    (text, _, text_size, _), (content, _, content_size, _) = sizes
    assert (text, content) == (WVARCHAR, VARBINARY)
    assert text_size == (256 if length <= 256 else 4000 if length <= 4000 else 0)
    assert content_size == (8000 if length <= 8000 else 0)


def test_rows_behind_an_error_that_ends_the_transaction_are_not_inserted(binary: Binary) -> None:
    """Given a batch, which the driver sends at once, then each of its statements is refused outside a transaction."""
    import mssql_python

    cursor().executemany("INSERT INTO t VALUES (?)", [(b"a",), (b"b",)])
    [sent] = binary.statements
    guard, ended = "IF @@TRANCOUNT = 0 RAISERROR(N'{}', 16, 1) ELSE ", "delayline: the transaction has ended"
    assert sent == guard.format(ended) + "INSERT INTO t VALUES (?)"  # noqa: S608
    # And that refusal is an outage, not the message's fault
    error = mssql_python.ProgrammingError("42000", f"[Microsoft][ODBC Driver 18 for SQL Server][SQL Server]{ended}")
    assert isinstance(server().errors.translated(error), BackendUnavailable)
    # But a single row, which may commit by itself
    cursor().executemany("INSERT INTO t VALUES (?)", [(b"a",)])
    assert binary.statements[-1] == "INSERT INTO t VALUES (?)"


def test_tables_of_streams_are_declared_too(binary: Binary) -> None:
    dialect = server()
    from sqlalchemy import insert

    statement = Prepared(insert(stream_tables(dialect.catalog.schema_of(None))[1]), dialect.sql, CLAIM_COLUMNS)
    row = ["reader", 1, ASCII, CYRILLIC, AT, b"{}", b""]
    statement.change_many(on(cursor()), [tuple(row), (*row[:2], CYRILLIC, *row[3:])])
    kinds = [kind for kind, _ in binary.batches[0]]
    assert kinds == [WVARCHAR, BIGINT, WVARCHAR, WVARCHAR, TIMESTAMP, VARBINARY, VARBINARY]


def test_nulls_are_declared(binary: Binary) -> None:
    cursor().executemany("INSERT INTO t VALUES (?, ?)", [(None, None), (None, AT)])
    assert [kind for kind, _ in binary.batches[0]] == [WVARCHAR, TIMESTAMP]


def test_every_connection_of_the_engine_declares() -> None:
    for url in ("mssql://sa:s3cret@127.0.0.1:1/db", "mssql+pymssql://sa:p@127.0.0.1:1/db"):
        one = server(url)
        assert event.contains(one.connections.engine, "do_connect", one.connections._connect_driver)


def test_the_declaring_connection_is_the_drivers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import mssql_python

    from delayline.sql.sqlserver.microsoft import DeclaringConnection

    given: list[Any] = []
    monkeypatch.setattr(mssql_python.Connection, "__init__", lambda self, *a, **k: given.append((a, k)))
    monkeypatch.setattr(mssql_python.Connection, "__del__", lambda self: None)
    made = server().connections._connect_driver(None, None, ("Server=host",), {"timeout": 3})
    assert type(made) is DeclaringConnection
    assert given == [(("Server=host",), {"timeout": 3})]


def limits_given(url: str, seconds: float) -> dict[str, Any]:
    """Return the arguments with which the driver would connect."""
    one = server(url)
    options: dict[str, Any] = {}
    one.connections.server_timeout = seconds
    one.connections.limit_connect(options)
    return options


def test_the_drivers_are_given_limits() -> None:
    assert limits_given("mssql://sa:s3cret@host/db", 15) == {"timeout": 10}
    assert limits_given("mssql://sa:s3cret@host/db", 2.5) == {"timeout": 3}
    assert limits_given("mssql://sa:s3cret@host/db?timeout=7", 2.5) == {}
    assert limits_given("mssql+pymssql://sa:p@host/db", 15) == {"login_timeout": 10, "timeout": 3600}
    assert limits_given("mssql+pymssql://sa:p@host/db", 0.2) == {"login_timeout": 1, "timeout": 48}


def test_the_urls_own_limits_win_over_those_of_pymssql() -> None:
    one = server("mssql+pymssql://sa:p@host/db?timeout=7&login_timeout=4")
    _, options = one.sql.create_connect_args(one.connections.url)
    given = dict(options)
    one.connections.limit_connect(given)
    assert (given["timeout"], given["login_timeout"]) == ("7", "4")


@pytest.mark.parametrize(("in_session", "factor", "seconds"), [(True, 1, 3), (True, 10, 25), (False, 1, 25)])
def test_each_cursor_of_microsofts_driver_has_the_limit_of_the_work(
    binary: Binary, *, in_session: bool, factor: int, seconds: int
) -> None:
    del binary
    one = server()
    one.connections.server_timeout = 2.5
    record = SimpleNamespace(info={IN_SESSION: in_session})
    connection = one.connections._connect_driver(None, record, ("Server=host;Database=db;UID=sa;PWD=s3cret",), {})
    token = FACTOR.set(factor)
    try:
        assert connection.cursor()._timeout == seconds
    finally:
        FACTOR.reset(token)


def test_pymssql_is_given_bytes_that_are_not_text() -> None:
    from pymssql import _mssql

    sent: list[bytes] = []

    class Driver:
        rowcount = 1

        def execute(self, sql: str, values: tuple[Any, ...]) -> None:
            substitute: Loose = _mssql.substitute_params
            sent.append(substitute(sql, values, "utf-8"))

        def executemany(self, sql: str, rows: list[tuple[Any, ...]]) -> None:
            for row in rows:
                self.execute(sql, row)

        def close(self) -> None:
            pass

    tried = 0
    connection = VarbinaryConnection(SimpleNamespace(cursor=Driver))
    for name, one, parameters in statements(server("mssql+pymssql://sa:s3cret@host/db")):
        if one.lists or not parameters:
            continue
        sent.clear()
        one.change_many(on(connection.cursor()), [tuple(value_of(p, t) for p in parameters) for t in (ASCII, CYRILLIC)])
        text = b" ".join(sent).decode()
        # Then text is N'...', and what are bytes to us is a binary literal even where it is UTF-8
        if any(parameter in TEXTS for parameter in parameters):
            assert f"N'{ASCII}'" in text, name
            assert f"N'{CYRILLIC}'" in text, name
        assert "'{}'" not in text, name
        if any(parameter in BYTES for parameter in parameters):
            assert "0x7b7d" in text, name
        tried += 1
    assert tried > 20


@pytest.mark.parametrize(
    ("record", "text", "kind"),
    [
        ("[23000] (2627)", "[SQL Server]Verletzung der PRIMARY KEY-Einschränkung", InvalidMessage),
        ("[42S02] (208)", "[SQL Server]Ungültiger Objektname 'dbo.t'.", BackendUnusable),
        ("[42000] (1222)", "[SQL Server]Das Timeout für die Sperranforderung wurde überschritten.", BackendUnavailable),
        ("[40001] (1205)", "[SQL Server]Deadlockopfer", BackendUnavailable),
    ],
)
@pytest.mark.parametrize("many", [False, True])
def test_errors_are_distinguished_by_number_whatever_the_language(
    binary: Binary, record: str, text: str, kind: type[Exception], many: bool
) -> None:
    import mssql_python

    binary.failing = [(record, text)]
    with pytest.raises(mssql_python.Error) as caught:
        if many:
            cursor().executemany("INSERT INTO t VALUES (?)", [("a",), ("b",)])
        else:
            cursor().execute("INSERT INTO t VALUES (?)", ("a",))
    assert type(server().errors.translated(caught.value)) is kind


def test_errors_without_a_number_are_classified_by_sqlstate() -> None:
    import mssql_python

    error = mssql_python.ProgrammingError("Base table or view not found", "[Microsoft][Driver]Table perdue")
    assert type(server().errors.translated(error)) is BackendUnusable


def test_an_error_of_connecting_is_never_the_drivers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import mssql_python

    def fail() -> None:
        raise mssql_python.ProgrammingError(
            "Syntax error or access violation", "[Microsoft][Driver]Neither user nor password"
        )

    one = server("mssql://sa@host/db")
    monkeypatch.setattr(one.connections.engine, "connect", fail)
    with pytest.raises(BackendUnusable, match=r"Neither user nor password\. Check the user, the password"):
        one.connections.connect()


def test_a_type_error_of_ours_is_no_unknown_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise TypeError("unsupported operand")

    one = server()
    monkeypatch.setattr(one.connections.engine, "connect", fail)
    with pytest.raises(TypeError, match="unsupported operand"):
        one.connections.connect()


def test_an_unknown_option_of_pymssql() -> None:
    with pytest.raises(ConfigurationError, match="option unknown to the driver"):
        server("mssql+pymssql://sa:p@127.0.0.1:1/db?wrong=1").connections.connect()


def test_pymssql_errors_are_one_line_without_repetition() -> None:
    one = server("mssql+pymssql://sa:p@127.0.0.1:1/db")
    with pytest.raises(one.errors.kinds) as caught:
        one.connections.connect()
    text = str(one.errors.translated(caught.value))
    assert "\n" not in text
    assert text.count("Unable to connect") == 1
    assert "DB-Lib" not in text


def test_a_timeout_is_added_with_the_same_declarations(binary: Binary, monkeypatch: pytest.MonkeyPatch) -> None:
    from delayline.sql.sqlserver.microsoft import DeclaringCursor

    monkeypatch.setattr(DeclaringCursor, "fetchall", lambda _: [])
    dialect = server()
    tables = queue_tables(dialect.catalog.schema_of(None))
    own = TimeoutStatements(timeout_table("Sales_", "dbo", dialect), tables, dialect)
    timeout = Timeout("1" * 32, Message("m", {}, b"x"), "счёт", AT.replace(tzinfo=UTC))
    own.add(SimpleNamespace(connection=SimpleNamespace(cursor=cursor)), timeout)  # type: ignore[arg-type]
    text = WVARCHAR
    [*_, (_, sizes)] = binary.singles
    assert [kind for kind, *_ in sizes] == [text, text, text, VARBINARY, TIMESTAMP, text, text]
