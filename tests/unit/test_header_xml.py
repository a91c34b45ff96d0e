"""Headers in the XML form of NServiceBus: vectors, round trips, and documents that mean harm."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delayline.errors import CorruptHeaders
from delayline.header_xml import from_xml, to_xml
from delayline.message import Message, encode_headers, is_xml

ROOT = (
    '<?xml version="1.0"?>\r\n<ArrayOfHeaderInfo xmlns:xsd="http://www.w3.org/2001/XMLSchema" '
    'xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance">'
)
#: What XmlSerializer writes: indented, an empty value as an empty element, a null one left out.
WRITTEN_BY_NSERVICEBUS = (
    ROOT
    + """
  <HeaderInfo>
    <Key>NServiceBus.MessageId</Key>
    <Value>1b9c0dbe-2d4b-4a5c-9d4c-a8c100f6a9ee</Value>
  </HeaderInfo>
  <HeaderInfo>
    <Key>NServiceBus.EnclosedMessageTypes</Key>
    <Value>Sales.PlaceOrder, Sales&lt;1&gt; &amp; more</Value>
  </HeaderInfo>
  <HeaderInfo>
    <Key>Empty</Key>
    <Value />
  </HeaderInfo>
  <HeaderInfo>
    <Key>Null</Key>
  </HeaderInfo>
  <HeaderInfo>
    <Key>Nil</Key>
    <Value xsi:nil="true" />
  </HeaderInfo>
  <HeaderInfo>
    <Value>without a key</Value>
  </HeaderInfo>
  <HeaderInfo>
    <Key>CorrId</Key>
    <Value>1b9c0dbe-2d4b-4a5c-9d4c-a8c100f6a9ee\\0</Value>
  </HeaderInfo>
</ArrayOfHeaderInfo>"""
)
READ = {
    "NServiceBus.MessageId": "1b9c0dbe-2d4b-4a5c-9d4c-a8c100f6a9ee",
    "NServiceBus.EnclosedMessageTypes": "Sales.PlaceOrder, Sales<1> & more",
    "Empty": "",
    "Null": "",
    "Nil": "",
    "CorrId": "1b9c0dbe-2d4b-4a5c-9d4c-a8c100f6a9ee\\0",
}


def item(key: str, value: str) -> str:
    return f"<HeaderInfo><Key>{key}</Key><Value>{value}</Value></HeaderInfo>"


def document(*items: str) -> bytes:
    return f"{ROOT}{''.join(items)}</ArrayOfHeaderInfo>".encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("after", [b"", b"\x00" * 40, b"</HeaderInfo> and more", b"\xff"])
def test_messages_of_nservicebus_can_be_read(before: bytes, after: bytes) -> None:
    assert from_xml(before + WRITTEN_BY_NSERVICEBUS.encode() + after, "m") == READ


def test_the_written_envelope() -> None:
    assert to_xml({"a": "1 < 2 & 3\r\n", "CorrId": ""}) == (
        b'<?xml version="1.0"?><ArrayOfHeaderInfo xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" '
        b'xmlns:xsd="http://www.w3.org/2001/XMLSchema">'
        b"<HeaderInfo><Key>a</Key><Value>1 &lt; 2 &amp; 3&#xD;\n</Value></HeaderInfo>"
        b"<HeaderInfo><Key>CorrId</Key><Value></Value></HeaderInfo></ArrayOfHeaderInfo>"
    )


def test_a_correlation_id_is_appended_when_absent_and_is_not_read_as_a_header() -> None:
    written = to_xml({"a": "b"})
    assert written.endswith(b"<HeaderInfo><Key>CorrId</Key></HeaderInfo></ArrayOfHeaderInfo>")
    assert from_xml(written, "m") == {"a": "b"}
    assert from_xml(to_xml({"CorrId": ""}), "m") == {"CorrId": ""}


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("a&#x0;b&#1;&#x1F;", "a\x00b\x01\x1f"),
        ("a\x00\x0b\x1fb", "a\x00\x0b\x1fb"),
        ("&#xFFFE;\uffff", "\ufffe\uffff"),
        ("&#xD83D;", "\ud83d"),
        ("\ud83d", "\ud83d"),
        ("\uf8ff \uf8ff0; &#xF8FF;41;", "\uf8ff \uf8ff0; \uf8ff41;"),
        ("&#x1F69A;&#128666;🚚", "🚚🚚🚚"),
        ("&quot;&apos;", "\"'"),
        ("<![CDATA[<b>]]>", "<b>"),
        ("a\r\nb", "a\nb"),
        ("  ", "  "),
        ("<!-- a comment -->x", "x"),
    ],
)
def test_characters_that_xml_cannot_hold_are_read(value: str, read: str) -> None:
    assert from_xml(document(item("k", value)), "m") == {"k": read}


def test_nothing_in_the_list() -> None:
    assert from_xml(b"<ArrayOfHeaderInfo />", "m") == {}
    assert from_xml(document("<Other><Key>a</Key></Other>", "<HeaderInfo />"), "m") == {}


BOMB = (
    '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>'
    "<ArrayOfHeaderInfo><HeaderInfo><Key>k</Key><Value>&b;</Value></HeaderInfo></ArrayOfHeaderInfo>"
)
FILE = (
    '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]>'
    "<ArrayOfHeaderInfo><HeaderInfo><Key>k</Key><Value>&a;</Value></HeaderInfo></ArrayOfHeaderInfo>"
)


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (document(item("a", "1"), item("b", "2"), item("a", "3")), "'a' is there twice"),
        (BOMB.encode(), "document type"),
        (FILE.encode(), "document type"),
        (document(item("k", "&unknown;")), "undefined entity"),
        (document(item("k", "&#x110000;")), "invalid character"),
        (b"<ArrayOfHeaderInfo><HeaderInfo>", "no element found"),
        (b"<Other></Other>", "the root is 'Other'"),
        (b"<\xff\xfe", "utf-8"),
        (b"<", "unclosed token"),
        (b"<a>" * 100_000, "root"),
    ],
    ids=["twice", "bomb", "file", "entity", "character", "cut", "root", "bytes", "bracket", "deep"],
)
def test_unreadable_values_are_corrupt(damaged: bytes, reason: str) -> None:
    with pytest.raises(CorruptHeaders, match="message 'm' has corrupted headers") as caught:
        from_xml(damaged, "m")
    assert reason in str(caught.value)


any_text = st.text(st.characters(codec=None))


@given(st.dictionaries(any_text, any_text))
def test_whatever_is_written_is_read_again(headers: dict[str, str]) -> None:
    written = to_xml(headers)
    assert is_xml(written)
    assert from_xml(written, "m") == headers


@given(st.binary())
def test_whatever_is_read_is_headers_or_corrupt(found: bytes) -> None:
    with contextlib.suppress(CorruptHeaders):
        from_xml(b"<ArrayOfHeaderInfo>" + found, "m")


@given(st.dictionaries(any_text, any_text))
def test_json_is_never_taken_for_xml(headers: dict[str, str]) -> None:
    assert not is_xml(encode_headers(headers))


@given(st.dictionaries(any_text, any_text))
def test_a_message_reads_xml_and_moves_on_as_json(headers: dict[str, str]) -> None:
    message = Message.from_encoded("m", to_xml(headers), b"")
    assert message.encoded_headers == encode_headers(headers)
    assert message.headers == headers


def test_a_message_with_damaged_xml_moves_on_as_it_is() -> None:
    message = Message.from_encoded("m", BOMB.encode(), b"")
    assert message.encoded_headers == BOMB.encode()
    with pytest.raises(CorruptHeaders):
        _ = message.headers
