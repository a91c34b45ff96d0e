"""Messages as types: their names on the wire, and the serializers of their bodies."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import msgspec
import msgspec.inspect

from delayline.errors import ConfigurationError, InvalidMessage, InvalidPayload

Kind = TypeVar("Kind", bound=type)
_NAME: Final = "__delayline_message_type__"
_FORMER_NAMES: Final = "__delayline_former_message_types__"
#: Modules of the program that was started, also in a process that it has spawned.
_MAIN_MODULES: Final = frozenset({"__main__", "__mp_main__"})
#: Types whose values have no type name on the wire.
PLAIN_TYPES: Final = frozenset({bytes, str, dict, list, tuple, set, frozenset, int, float, bool, type(None)})
HOW_TO_WRITE: Final = "make the class a dataclass, a msgspec Struct, a TypedDict or a pydantic model"
#: Their classes, such as pydantic.BaseModel, are bases of messages and no messages.
_LIBRARIES: Final = frozenset({"builtins", "typing", "msgspec", "pydantic", "pydantic_settings", "sqlmodel"})
#: How deep the search for a value that cannot be serialized goes.
_DEPTH: Final = 50


@runtime_checkable
class Serializer(Protocol):
    """Turns the bodies of typed messages into bytes and back.

    Example:
        ```python
        class Msgpack:
            content_type = "application/vnd.msgpack"

            def dumps(self, value):
                return msgspec.msgpack.encode(value)

            def loads(self, data, kind):
                return msgspec.msgpack.decode(data, type=kind)
        ```
    """

    content_type: str
    """The content type header of its messages."""

    def dumps(self, value: Any) -> bytes:  # noqa: ANN401 - any type of message
        """Return the value as bytes; an exception is reported as InvalidMessage.

        Args:
            value: The body given to `send`.
        """
        ...

    def loads(self, data: bytes, kind: Any) -> Any:  # noqa: ANN401 - as above
        """Return the bytes as a value of the type; an exception is reported as InvalidPayload.

        Args:
            data: The body of a message.
            kind: The type that a handler asks for; `typing.Any` for any.
        """
        ...


@runtime_checkable
class SupportsKindCheck(Protocol):
    """Capability of a serializer: tell before the first message whether it reads a type."""

    def check_kind(self, kind: Any) -> None:  # noqa: ANN401 - any type of message
        """Raise ConfigurationError if values of the type can never be read."""
        ...


class JsonSerializer:
    """JSON, with dataclasses, TypedDicts, pydantic models, msgspec structs and attrs classes.

    Within them datetime, date, time, timedelta, Decimal, UUID, Enum, set and bytes are written as text or lists, as
    msgspec does: https://jcristharif.com/msgspec/supported-types.html
    """

    content_type = "application/json"

    def dumps(self, value: Any) -> bytes:  # noqa: ANN401 - any type of message
        """Return the value as JSON. Raises InvalidMessage, naming the key that cannot be written."""
        try:
            return _as_json(value)
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            path, cause = _unserializable(value, "body", error)
            raise InvalidMessage(
                f"{path}, of type {type(cause).__name__}, cannot be written as JSON: {error}. Give bytes, text, or "
                "values that JSON has"
            ) from error

    def check_kind(self, kind: Any) -> None:  # noqa: ANN401 - any type of message
        """Raise ConfigurationError for a class whose values cannot be read from JSON."""
        try:
            found = msgspec.inspect.type_info(kind)
        except Exception:  # names of its fields that are not known yet, for example: the first message shows them
            return
        if isinstance(found, msgspec.inspect.CustomType) and not hasattr(found.cls, "model_validate"):
            raise ConfigurationError(
                f"messages cannot be read as {found.cls.__qualname__}, which is a plain class: {HOW_TO_WRITE}"
            )

    def loads(self, data: bytes, kind: Any) -> Any:  # noqa: ANN401 - as above
        """Return the JSON as a value of the type. Raises InvalidPayload, naming the key that does not fit."""
        try:
            return msgspec.json.decode(data.removeprefix(b"\xef\xbb\xbf"), type=kind, dec_hook=_from_builtins)
        except (msgspec.MsgspecError, RecursionError, ValueError, TypeError) as error:
            raise InvalidPayload(f"it is not the JSON of a {name_of_kind(kind)}: {error}") from error


def message_type(name: str, *, formerly: Collection[str] = ()) -> Callable[[Kind], Kind]:
    """Return a class decorator that gives messages of the class this name on the wire.

    Without it the name is made of the module and the class. Names of .NET are made of the namespace and the class;
    whatever follows a comma, such as the assembly, is ignored when a message is received.

    Args:
        name: 1 to 200 printable characters without `,` or `;`.
        formerly: Other names under which messages of the class may still be on their way: its handlers take these too.

    Raises:
        ConfigurationError: A name is empty, too long, or has such a character.

    Example:
        ```python
        @message_type("Contoso.Messages.OrderPlaced")
        @dataclass
        class OrderPlaced:
            order_id: str
        ```
    """
    if isinstance(formerly, str):
        raise ConfigurationError(f"formerly must be a list of names, not {formerly!r}: write [{formerly!r}]")
    for given in (name, *formerly):
        if not isinstance(given, str) or not 0 < len(given) <= 200 or not given.isprintable() or {",", ";"} & {*given}:
            raise ConfigurationError(
                f"message type {given!r} must be a text of 1 to 200 printable characters without ',' and ';'"
            )

    def named(kind: Kind) -> Kind:
        setattr(kind, _NAME, name)
        setattr(kind, _FORMER_NAMES, tuple(formerly))
        return kind

    return named


def name_of_kind(kind: Any) -> str:  # noqa: ANN401 - a type, or a name
    """Return the name of a message type on the wire; a text is a name already."""
    if isinstance(kind, str):
        return kind
    named = getattr(kind, "__dict__", {}).get(_NAME)
    if isinstance(named, str):
        return named
    module = getattr(kind, "__module__", "")
    if module in _MAIN_MODULES:
        module = _name_of_program(module) or module
    return f"{module}.{getattr(kind, '__qualname__', repr(kind))}"


def names_taken(kind: Any) -> list[str]:  # noqa: ANN401 - a type, or a name
    """Return the type names that a handler takes: the name that messages of the type are sent with, and former ones."""
    former = [] if isinstance(kind, str) else getattr(kind, "__dict__", {}).get(_FORMER_NAMES, ())
    return list(dict.fromkeys([name_of_kind(kind), *former]))


def _name_of_program(module: str) -> str | None:
    """Return the name under which other processes import the program that was started; None for a session's input."""
    main = sys.modules.get(module)
    if (spec := getattr(main, "__spec__", None)) is not None:
        return str(spec.name)
    file = getattr(main, "__file__", None)
    return None if file is None else Path(file).stem


def is_message_kind(kind: type) -> bool:
    """Return whether values of the class are typed messages, whose type name is sent with them."""
    return kind not in PLAIN_TYPES and (
        _NAME in vars(kind)
        or dataclasses.is_dataclass(kind)
        or issubclass(kind, msgspec.Struct)
        or hasattr(kind, "model_validate")
        or hasattr(kind, "__attrs_attrs__")
    )


def names_of_value(value: object) -> str | None:
    """Return the type names of a typed message, most derived first, as the header has them; None for other values.

    Raises InvalidMessage if no other process could know the type by its name.
    """
    kind: object = type(value)
    return _names_of_values(kind)


@functools.lru_cache(maxsize=1024)
def _names_of_values(kind: Any) -> str | None:  # noqa: ANN401 - a type
    if not is_message_kind(kind):
        return None
    if (name := name_of_kind(kind)).partition(".")[0] in _MAIN_MODULES:
        raise InvalidMessage(
            f"type {kind.__qualname__} is of an interactive session: no other process knows it as {name!r}. Name it "
            f'with @message_type("shop.{kind.__qualname__}"), or import it from a module'
        )
    bases = [name_of_kind(base) for base in kind.__mro__[1:] if is_message_kind(base) and not _is_of_library(base)]
    return ";".join([name, *bases])


def _is_of_library(kind: type) -> bool:
    """Return whether the class is no message, but what messages are derived from."""
    return kind.__module__.partition(".")[0] in _LIBRARIES and _NAME not in vars(kind)


def names_in_header(value: str) -> list[str]:
    """Return the type names in the header of a message, without assemblies and versions."""
    return [name for entry in value.split(";") if (name := entry.partition(",")[0].strip())]


def _as_json(value: Any) -> bytes:  # noqa: ANN401
    plain = value if type(value) is dict else msgspec.to_builtins(value, enc_hook=_to_builtins)
    return json.dumps(plain, separators=(",", ":"), allow_nan=False, default=_default).encode()


def _default(value: Any) -> Any:  # noqa: ANN401
    return msgspec.to_builtins(value, enc_hook=_to_builtins)


def _to_builtins(value: Any) -> Any:  # noqa: ANN401
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    kind = type(value)
    advice = f"; {HOW_TO_WRITE}" if kind.__module__ not in sys.stdlib_module_names else ""
    raise TypeError(f"objects of type {kind.__name__} have no form in JSON{advice}")


def _from_builtins(kind: Any, value: Any) -> Any:  # noqa: ANN401
    if hasattr(kind, "model_validate"):
        return kind.model_validate(value)
    raise TypeError(f"the type {name_of_kind(kind)} cannot be read from JSON")


def _unserializable(value: object, path: str, error: Exception, depth: int = 0) -> tuple[str, object]:
    """Return the path to the innermost value that cannot be written, and that value."""
    if depth < _DEPTH and not isinstance(error, RecursionError):
        for name, child in _children(value):
            try:
                _as_json(child)
            except (TypeError, ValueError, msgspec.MsgspecError) as inner:
                return _unserializable(child, f"{path}{name}", inner, depth + 1)
    return path, value


def _children(value: object) -> list[tuple[str, object]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", child) for key, child in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{position}]", child) for position, child in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return []
