"""delayline runs on SQLAlchemy 2.0 and 2.1; `make test-sqlalchemy-oldest` runs stores on the oldest release."""

from __future__ import annotations

import importlib.util

import pytest
import sqlalchemy
from sqlalchemy.engine import make_url

from delayline.errors import ConfigurationError
from delayline.sql.sqlserver import connections as sqlserver
from delayline.sql.sqlserver.dialect import SqlServer


def has_microsofts_dialect() -> bool:
    return importlib.util.find_spec("sqlalchemy.dialects.mssql.mssqlpython") is not None


def without_microsofts_dialect(module: str) -> bool:
    return module != "sqlalchemy.dialects.mssql.mssqlpython"


def test_sqlalchemy_brings_microsofts_dialect_since_2_1() -> None:
    assert has_microsofts_dialect() == (tuple(map(int, sqlalchemy.__version__.split(".")[:2])) >= (2, 1))


def test_microsofts_driver_on_sqlalchemy_2_0_names_the_release_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlserver, "_installed", without_microsofts_dialect)
    with pytest.raises(ConfigurationError, match=r"pip install 'sqlalchemy>=2\.1', or .*mssql\+pymssql://"):
        SqlServer(make_url("mssql+mssqlpython://sa@host/db"))


def test_sqlalchemy_2_0_takes_pymssql_when_the_url_leaves_the_driver_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlserver, "_installed", without_microsofts_dialect)
    assert SqlServer(make_url("mssql://sa@host/db")).connections.driver == sqlserver.PYMSSQL
