"""What a handler's annotations say: the type of messages that it takes, and whether it gets that type."""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
from typing import TYPE_CHECKING, Any, Final, ForwardRef, TypeVar, get_args, get_origin, is_typeddict

from delayline.errors import ConfigurationError
from delayline.message import Message
from delayline.receiving.execution import name_of
from delayline.serialization import PLAIN_TYPES, is_message_kind

if TYPE_CHECKING:
    from collections.abc import Callable

SIGNATURE: Final = "`async def handle(message: Message, context: MessageContext) -> None`"
TYPED_SIGNATURE: Final = "`async def handle(order: OrderPlaced, context: MessageContext) -> None`"
ABSENT: Final = inspect.Parameter.empty
POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Unresolved:
    """An annotation whose names are not known where the handler is defined."""

    def __init__(self, text: str, error: Exception) -> None:
        self.text = text
        self.error = error


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a callable, whether or not the names in its annotations are known.

    Raises ValueError or TypeError for a callable that shows none, as of some extension modules.
    """
    if sys.version_info >= (3, 14):  # annotations are evaluated when they are asked for
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def kind_of(function: Callable[..., Any]) -> Any:  # noqa: ANN401 - a type of messages
    """Return the type of messages that a handler takes, from the annotation of its first parameter.

    Raises:
        ConfigurationError: There is no annotation, or it is no type of messages.
    """
    given = annotation_of(function, 0)
    handler = f"handler {name_of(function)}"
    if given is ABSENT:
        raise ConfigurationError(
            f"{handler} does not say which messages it takes: write {TYPED_SIGNATURE}, or give the type above it, as "
            "in @endpoint.handles(OrderPlaced)"
        )
    if isinstance(given, Unresolved):
        raise ConfigurationError(
            f"the annotation {given.text!r} of {handler} cannot be looked up ({given.error}): import or define the "
            "type in the module of the handler, not under `if TYPE_CHECKING:` and not in a function; or give it above "
            f"the handler: @endpoint.handles({given.text})"
        )
    if given in (Any, object) or isinstance(given, TypeVar):
        raise ConfigurationError(
            f"{handler} takes {_written(given)}, which says nothing of the messages: write {TYPED_SIGNATURE}; "
            f"@endpoint.handler is for every message: {SIGNATURE}"
        )
    check_kind(given, handler)
    return given


def check_kind(kind: Any, subject: str) -> None:  # noqa: ANN401 - anything
    """Raise ConfigurationError for what no message has as its type.

    Args:
        kind: A type, or the name of one.
        subject: What takes it, for the error.
    """
    if isinstance(kind, str):
        return
    written = _written(kind)
    if kind is Message:
        raise ConfigurationError(
            f"{subject} takes Message, which every message is: write @endpoint.handler above it, or annotate the type "
            f"of what is in the messages: {TYPED_SIGNATURE}"
        )
    if _is_union(kind):
        each = " and ".join(f"@endpoint.handles({_written(part)})" for part in get_args(kind))
        raise ConfigurationError(f"{subject} takes {written}, which are several types: write {each} above it")
    plain = get_origin(kind) or kind
    if not isinstance(plain, type):
        raise ConfigurationError(
            f"{subject} takes {written}, which is no type: give a class, such as a dataclass, or the name of a type"
        )
    if plain in PLAIN_TYPES:
        raise ConfigurationError(
            f"{subject} takes {written}, which is sent without the name of a type: write @endpoint.handler for such "
            f'messages and read message.json(), or give the name that their headers have: @endpoint.handles("NAME")'
        )


def check_annotations(
    function: Callable[..., Any],
    kinds: tuple[Any, Any],
    wanted: str,
) -> None:
    """Raise ConfigurationError if an annotation of a handler is of another type than it is called with.

    Args:
        function: The handler.
        kinds: The types that it is called with: of the message, or a type's name, and of the context.
        wanted: How a handler is written, for the error.
    """
    for position, kind in enumerate(kinds):
        given = annotation_of(function, position)
        if given is ABSENT or isinstance(given, Unresolved) or accepts(given, kind):
            continue
        if position:
            raise ConfigurationError(
                f"the second parameter of handler {name_of(function)} is annotated with {_written(given)}, and gets a "
                f"MessageContext: write {wanted}"
            )
        gets = (
            f"what messages of type {kind!r} have in their JSON, as dict" if isinstance(kind, str) else _written(kind)
        )
        advice = f"@endpoint.handles({_written(given)})" if _could_be_kind(given) else wanted
        raise ConfigurationError(
            f"handler {name_of(function)} is annotated with {_written(given)}, and gets {gets}: write "
            f"{'@endpoint.handler' if given is Message else advice}, or change the annotation"
        )


def annotation_of(function: Callable[..., Any], position: int) -> Any:  # noqa: ANN401 - a type, Unresolved or ABSENT
    """Return the annotation of a positional parameter, evaluated; ABSENT for none, Unresolved for unknown names."""
    try:
        parameters = [each for each in signature_of(function).parameters.values() if each.kind in POSITIONAL]
    except (ValueError, TypeError):  # not to be seen
        return ABSENT
    given = parameters[position].annotation if position < len(parameters) else ABSENT
    if given is ABSENT:
        return ABSENT

    def stub() -> None: ...

    stub.__annotations__ = {"given": given}
    try:
        return typing.get_type_hints(stub, globalns=_globals_of(function))["given"]
    except Exception as error:  # a text may have anything in it
        return Unresolved(_written(given).strip("'\""), error)


def accepts(annotation: Any, kind: Any) -> bool:  # noqa: ANN401 - types, and the name of one
    """Return whether values of a type may be given where the annotation is; True where that cannot be known.

    Args:
        annotation: The evaluated annotation.
        kind: The type, or a type's name, whose values are as JSON has them.
    """
    if annotation in (Any, object, kind) or isinstance(annotation, TypeVar):
        return True
    if _is_union(annotation):
        return any(accepts(part, kind) for part in get_args(annotation))
    if is_typeddict(annotation):
        has = getattr(kind, "__annotations__", {}) if is_typeddict(kind) else None
        return isinstance(kind, str) or (has is not None and annotation.__annotations__.keys() <= has.keys())
    wanted = get_origin(annotation) or annotation
    if not isinstance(wanted, type) or getattr(wanted, "_is_protocol", False):
        return True
    if isinstance(kind, str):
        return wanted is not Message and not is_message_kind(wanted)
    given = dict if is_typeddict(kind) else get_origin(kind) or kind
    if given is wanted and (arguments := get_args(kind)) and (named := get_args(annotation)):
        return any(each is Any or isinstance(each, TypeVar) for each in (*arguments, *named)) or arguments == named
    try:
        return issubclass(given, wanted)
    except TypeError:
        return True


def is_handler(given: object) -> bool:
    """Return whether what a decorator was given is the function below it, and not a type or a name."""
    return callable(given) and not isinstance(given, type) and get_origin(given) is None and not is_typeddict(given)


def _could_be_kind(annotation: Any) -> bool:  # noqa: ANN401
    try:
        check_kind(annotation, "")
    except ConfigurationError:
        return False
    return True


def _globals_of(function: Callable[..., Any]) -> dict[str, Any]:
    inner: Any = function
    while True:
        if isinstance(inner, functools.partial):
            inner = inner.func
        elif hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        elif inspect.ismethod(inner):
            inner = inner.__func__
        elif hasattr(inner, "__globals__"):
            return dict(inner.__globals__)
        elif inspect.isroutine(inner) or not hasattr(type(inner), "__call__"):  # noqa: B004 - of its class
            return {}
        else:
            inner = type(inner).__call__


def _is_union(kind: object) -> bool:
    return get_origin(kind) in (typing.Union, types.UnionType)


def _written(kind: Any) -> str:  # noqa: ANN401
    """Return an annotation as it is written in code."""
    if isinstance(kind, ForwardRef):
        return kind.__forward_arg__
    if isinstance(kind, str):
        return kind
    if get_args(kind):
        return str(kind).replace("typing.", "")
    return getattr(kind, "__name__", None) or repr(kind)
