"""URLs and connection strings without their passwords, as logs, errors and people may see them."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote_plus

MASK: Final = "***"
#: What begins a URL in a text: its own beginning, or that of a value, as in `?management=http://...`.
BEGINNING: Final = re.compile(r"(?:^|(?<=[\s\"'(\[<,]))(?=[A-Za-z][\w+.-]*://)|(?<==)(?=https?://)", re.ASCII)
SCHEME: Final = re.compile(r"\s*(?:jdbc:)?[A-Za-z][\w+.-]*:/+", re.ASCII)
_HOST: Final = r"(?:\[[^\[\]/?#@]*\]|[^:\[\]/?#@,]*)(?::[0-9]*)?"
#: Hosts with ports and commas between: a text without a user and a password.
HOST_LIST: Final = re.compile(rf"{_HOST}(?:,{_HOST})*")
CONNECTION_STRING: Final = re.compile(r"\s*(?:[a-z]+:)?(?!/)[A-Za-z][\w .-]*=", re.ASCII)
SECRET_PAIR: Final = re.compile(
    r"""(?P<before>^|[?&;\s,:])(?P<name>[^?&;=\s,:/@"']+(?:[ ][^?&;=\s,:/@"']+)?)(?P<equals>\s*=\s*)"""
)
#: Words with spaces between, as in an error's text: without an @ they are no URL.
PROSE: Final = re.compile(r"\w\W*\s\W*\w")
#: A value of a connection string in quotes or braces, which may have a ; in it.
QUOTED: Final = re.compile(
    r"""(?:"(?:[^"]|"")*(?:"|\Z)|'(?:[^'\\]|''|\\.)*(?:'|\Z)|\{(?:[^}]|\}\})*(?:\}|\Z))(?=\s|;|\Z)""", re.DOTALL
)
SECRET: Final = re.compile(
    r"pass(?:word|wd|phrase|code)?\d*$|pwd|secret|token|credential|signature|^sig$|odbc_?connect|^auth(?:orization)?$"
    r"|(?:account|access|shared|api|private|client|encryption|master)[\s_-]?(?:access[\s_-]?)?key$"
)
#: Options whose values have an @ that belongs to no password in front of it.
PLAIN: Final = {"user", "username", "user id", "uid", "email", "host", "hosts", "account", "application_name", "schema"}


def masked(text: str) -> str:
    """Return a URL, a connection string, or a text with URLs in it, with *** in place of every password.

    A text that is written wrongly may lose more than its passwords, never less.
    """
    starts = sorted({0, *(match.start() for match in BEGINNING.finditer(text))})
    ends = [*starts[1:], len(text)]
    return "".join(_without_pairs(_without_login(text[start:end])) for start, end in zip(starts, ends, strict=True))


def _without_login(url: str) -> str:
    """Mask what is between the first colon behind the scheme and the @ in front of the host."""
    scheme = SCHEME.match(url)
    if scheme is None and CONNECTION_STRING.match(url):
        return url
    if scheme is None and "@" not in url and PROSE.search(url):
        return url
    begin = scheme.end() if scheme else 0
    rest = url[begin:]
    end = _end_of_login(rest, authority=re.split(r"[/?#;]", rest, maxsplit=1)[0])
    colon = rest.find(":", 0, max(end, 0))
    if colon < 0 < end and url[begin - 2 : begin] == ":/":  # with a slash less, what seems a scheme may be the user
        return f"{url[: begin - 1]}{MASK}{rest[end:]}"
    return url if colon < 0 else f"{url[: begin + colon + 1]}{MASK}{rest[end:]}"


def _end_of_login(rest: str, authority: str) -> int:
    """Return where the @ behind the password is; what is no list of hosts and has no @ is masked to its end."""
    path, _, query = rest.partition("?")
    end = path.rfind("@")
    if end < 0 and not HOST_LIST.fullmatch(authority):
        end = rest.rfind("@")
        return len(authority) if end < 0 else end
    at = len(path) + 1
    for item in query.split("&"):
        name, equals, value = item.partition("=")
        if "@" in name or ("@" in value and equals and not _plain(name)):
            end = at + item.rfind("@")
        at += len(item) + 1
    return end


def _plain(name: str) -> bool:
    return (decoded := _decoded(name)) in PLAIN or SECRET.search(decoded) is not None


def _without_pairs(text: str) -> str:
    """Mask the values of options that are secrets: to the next & in a URL, to the next ; in a connection string."""
    parts: list[str] = []
    at = 0
    while match := SECRET_PAIR.search(text, at):
        begin = match.end("equals")
        end = _end_of_value(text, begin, match["before"])
        value = text[begin:end]
        parts.append(text[at:begin])
        if SECRET.search(_decoded(match["name"])):
            parts.append(MASK)
            at = end
        elif "%3a%2f%2f" in value.lower():  # a URL, encoded
            parts.append(masked(unquote_plus(value)))
            at = end
        else:
            at = begin
    return "".join(parts) + text[at:]


def _end_of_value(text: str, begin: int, before: str) -> int:
    in_url = before in ("?", "&")
    if not in_url and (quoted := QUOTED.match(text, begin)):
        return quoted.end()
    end = text.find("&" if in_url else ";", begin)
    return len(text) if end < 0 else end


def _decoded(name: str) -> str:
    return unquote_plus(name).strip().lower()
