"""URLs and connection strings as people see them: no part of a password, and the right broker or database."""

from __future__ import annotations

import string
import time
from urllib.parse import quote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from delayline.bulk.shared_folder import without_secrets
from delayline.masking import masked


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("", ""),
        ("memory:", "memory:"),
        ("sqlite:////a/b.db", "sqlite:////a/b.db"),
        ("postgresql://u:SECRET@h/d", "postgresql://u:***@h/d"),
        ("postgresql://u@h:1/d?sslpassword=SECRET&x=1", "postgresql://u@h:1/d?sslpassword=***&x=1"),
        ("mariadb://u@h/d?PassWd=SECRET", "mariadb://u@h/d?PassWd=***"),
        ("postgresql://u@h/d?pass%77ord=SECRET", "postgresql://u@h/d?pass%77ord=***"),
        ("postgresql://h:5432/d?user=me@corp", "postgresql://h:5432/d?user=me@corp"),
        ("postgresql://u:p@/d?host=h1:1&host=h2:2", "postgresql://u:***@/d?host=h1:1&host=h2:2"),
        ("amqp://u:SECRET@a:1,b:2,[::1]:3/v?hosts=c,d", "amqp://u:***@a:1,b:2,[::1]:3/v?hosts=c,d"),
        ("amqp://a:1,[::1]:2/v", "amqp://a:1,[::1]:2/v"),
        ("amqp://u:SECRET@h:5/v?management=http://a:SECRET@m:1", "amqp://u:***@h:5/v?management=http://a:***@m:1"),
        ("amqp://h/v?management=http://a:SECRET@m,https://b:SECRET@n&x=1",
         "amqp://h/v?management=http://a:***@m,https://b:***@n&x=1"),
        ("amqp://h/v?management=http%3A%2F%2Fa%3ASECRET%40m&x=1", "amqp://h/v?management=http://a:***@m&x=1"),
        ("azure:AccountName=a;AccountKey = SECRET;X=1", "azure:AccountName=a;AccountKey = ***;X=1"),
        ("azure:BlobEndpoint=https://x;SharedAccessSignature=sv=1&sig=SECRET;X=1",
         "azure:BlobEndpoint=https://x;SharedAccessSignature=***;X=1"),
        ("azure://a?sv=1&sig=SECRET", "azure://a?sv=1&sig=***"),
        ("mssql://h/d?odbc_connect=UID=u;PWD={SECRET};X=1", "mssql://h/d?odbc_connect=***"),
        ("host=h;password='SECRET;''SECRET';port=3", "host=h;password=***;port=3"),
        ("host=h;userName=u;Password=SE@CRET", "host=h;userName=u;Password=***"),
        ("jdbc:sqlserver://h:1;user=u;password=SECRET;x=1", "jdbc:sqlserver://h:1;user=u;password=***;x=1"),
        # Written wrongly: better too little than too much.
        ("mariadb://u:SECRET/SECRET@h/d", "mariadb://u:***@h/d"),
        ("amqp://u:1/SECRET@h", "amqp://u:***@h"),
        ("amqp://u:1?SECRET@h", "amqp://u:***@h"),
        ("postgresql://u:SEC@RET/SECRET@h/d", "postgresql://u:***@h/d"),
        ("postgresql:/u:SECRET@h/d", "postgresql:/u:***@h/d"),
        ("u:SECRET@h/d", "u:***@h/d"),
        ("postgresql://u:SECRET", "postgresql://u:***"),
        ("cannot read s3://k:SECRET@b/x: no", "cannot read s3://k:***@b/x: no"),
    ],
)  # fmt: skip
def test_passwords_are_masked_and_the_rest_is_shown(url: str, shown: str) -> None:
    """Given a URL or a connection string, when masked, then its passwords are ***, and nothing else is."""
    assert masked(url) == shown


AROUND = [
    "postgresql://u:{}@h:1/d?x=1", "amqp://u:{}@a,b:2/v", "amqp://u:p@h/v?management=http://a:{}@m:1&heartbeat=1",
    "postgresql://h1:1,h2:2/d?password={}", "postgresql://h/d?a=1&sslpassword={}&x=1", "amqps://h?password={}",
    "azure://a?sv=1&sig={}", "mssql+pyodbc://u@h/d?PWD={}", "s3://k:{}@b/x?secret_key={}",
]  # fmt: skip
RAW = [*AROUND[:2], "postgresql:/u:{}@h/d", "mariadb://u:{}@h"]


@given(st.sampled_from(AROUND), st.text(st.characters(codec="utf-8"), min_size=5, max_size=20))
def test_no_encoded_password_is_shown(around: str, password: str) -> None:
    """Given any password, as a URL has to have it, when masked, then neither it nor its encoding is there."""
    encoded = quote(password, safe="")
    assume(encoded not in around)
    shown = masked(around.replace("{}", encoded))
    assert encoded not in shown
    assert password not in shown


@given(
    st.sampled_from(RAW),
    st.text(string.ascii_uppercase + ":@/?#[]!$&'()*+,;=%-._~ \"{}<>|\\", min_size=6, max_size=20),
)
def test_no_password_with_characters_that_should_be_encoded_is_shown(around: str, password: str) -> None:
    """Given a password as it is, when the URL is masked, then the password is not there."""
    assume("://" not in password)
    assert password not in masked(around.replace("{}", password))


@pytest.mark.parametrize(
    "part", ["a", "a:", "=", "a=", "'", "password='", "http://", "@", "?", "[,", "/", "password=", "'\\", "a b ", " "]
)
def test_long_texts_are_masked_soon(part: str) -> None:
    """Given a long text of whatever, when masked, then that takes no more than a moment of the processor."""
    began = time.process_time()
    masked(part * 20_000)
    assert time.process_time() - began < 10


def test_the_folder_of_a_cold_tier_shows_no_keys() -> None:
    """Given a URI with keys, when shown, then neither a key nor its name is there."""
    assert without_secrets("s3://KEY:SECRET@b/x?secret_key=SECRET&region=eu") == "s3://***@b/x?secret_key=***&region=eu"


def test_an_errors_text_keeps_its_words() -> None:
    text = (
        "An error occurred.\n: java.sql.SQLException: No suitable driver\n\tat java.sql/x for postgresql://u:s3cret@h/d"
    )
    assert masked(text) == text.replace("s3cret", "***")
