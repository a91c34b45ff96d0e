"""Access to the dashboard and its actions, and checks of requests before a page handles them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import inspect
import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http.cookies import SimpleCookie
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import ImmutableMultiDict, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from delayline.clock import SystemClock
from delayline.dashboard.rendering import STATIC, plain_page, route_path
from delayline.dashboard.sign_in import SignInLimits
from delayline.errors import ConfigurationError
from delayline.events import Event, emit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from delayline.clock import Clock

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Actor:
    """Who opened the dashboard; every action is logged with the name."""

    name: str
    """Such as a user name; shown on the page and in the log."""
    may_act: bool = False
    """Whether the actor may change messages. A read-only dashboard refuses actions anyway."""


#: Called with each request. Returns the actor, None to refuse, or a response such as a redirect to a sign-in page.
Authorize = Callable[[Request], "Actor | Response | Awaitable[Actor | Response | None] | None"]

LOOPBACK: Final = ("localhost", "127.0.0.1", "[::1]")
"""Host names that a dashboard answers to where no others are given."""
LARGEST_FORM: Final = 1024 * 1024
"""Bytes of a form: an edited message fits, with headers and body."""
MOST_FIELDS: Final = 500
CSRF_COOKIE: Final = "delayline_csrf"
CSRF_FIELD: Final = "csrf"
SESSION_COOKIE: Final = "delayline_session"
SESSION_SECONDS: Final = 12 * 3600
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
#: Right headers that are known again; one more is compared anew.
MOST_HEADERS: Final = 1_000
SHORTEST_TOKEN: Final = 16
SHORTEST_PASSWORD: Final = 8

#: No script or style but the files of the dashboard, no frame around it, no form to another site.
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class Refused(Exception):
    """The request ends here, with this status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class Guard:
    """ASGI middleware that every request passes: Host, size, origin, authorization, read-only, CSRF token, headers.

    It leaves the actor, the CSRF token and the parsed form in `request.state`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        allowed_hosts: Sequence[str],
        authorize: Authorize | None,
        read_only: bool,
        secret: bytes,
        mounted_at: str,
    ) -> None:
        self._app = app
        self._mounted_at = mounted_at.rstrip("/")
        self._hosts = frozenset(host.lower() for host in allowed_hosts)
        self._authorize = authorize
        self._read_only = read_only
        self._secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        scope = self._placed(scope)
        request = Request(scope, receive)
        new_cookie: list[str] = []
        answering = _with_headers(request, send, new_cookie)
        try:
            response = await self._check(request, new_cookie)
        except Refused as refused:
            emit(
                logger,
                logging.WARNING,
                Event.DASHBOARD_REFUSED,
                "refused %s %s: %s",
                request.method,
                request.url.path,
                refused.text,
                status=refused.status,
                client=request.client.host if request.client else None,
            )
            response = plain_page(request, "Refused", refused.text, status=refused.status)
        except ClientDisconnect:
            return
        await self._answer(response or self._app, request, receive, answering)

    def _placed(self, scope: Scope) -> Scope:
        """Return the scope as ASGI has it: `path` with the `root_path` that the dashboard is mounted at."""
        root = scope.get("root_path", "")
        path = scope["path"].removeprefix(root).rstrip("/") or "/"
        if not root.endswith(self._mounted_at):
            root += self._mounted_at
        return {
            **scope,
            "app": self._app,  # with an application around, unknown paths are an HTTPException
            "root_path": root,
            "path": root + path,
            "state": dict(scope.get("state", {})),
        }

    async def _answer(self, app: ASGIApp, request: Request, receive: Receive, send: Send) -> None:
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await app(request.scope, receive, sending)
        except HTTPException as error:
            missing = error.status_code == 404
            title, sentence = ("Not found", "There is no such page.") if missing else ("Refused", error.detail)
            await plain_page(request, title, sentence, status=error.status_code)(request.scope, receive, send)
        except Exception as error:
            reference = secrets.token_hex(4)
            emit(
                logger,
                logging.ERROR,
                Event.DASHBOARD_FAILED,
                "%s %s failed, reference %s",
                request.method,
                request.url.path,
                reference,
                exception=error,
            )
            if started:
                raise
            sentence = f"The dashboard failed to answer. Its log has the reason beside the reference {reference}."
            await plain_page(request, "Something went wrong", sentence, status=500)(request.scope, receive, send)

    async def _check(self, request: Request, new_cookie: list[str]) -> Response | None:
        """Return a response that authorization gave instead of an actor. Raises Refused."""
        self._check_host(request)
        state = request.state
        state.form = ImmutableMultiDict()
        if request.method not in SAFE_METHODS:
            check_origin(request)
            state.form = await _read_form(request)
        elif route_path(request).startswith(STATIC):
            return None
        actor = await self._actor(request)
        if isinstance(actor, Response):
            return actor
        state.actor = actor
        state.may_act = actor.may_act and not self._read_only
        cookie = request.cookies.get(CSRF_COOKIE, "")
        if len(cookie) != 2 * _KEY_BYTES:
            cookie = secrets.token_hex(_KEY_BYTES)
            new_cookie.append(cookie)
        state.csrf_token = self._token(cookie, actor)
        if request.method not in SAFE_METHODS:
            if not state.may_act:
                why = "this dashboard is read-only" if self._read_only else f"{actor.name} may only look"
                raise Refused(403, f"not done: {why}")
            if not hmac.compare_digest(state.form.get(CSRF_FIELD, "").encode(), state.csrf_token.encode()):
                raise Refused(403, "not done: the page was opened too long ago. Go back, load it again and repeat")
        return None

    def _check_host(self, request: Request) -> None:
        host = host_name(request.headers.get("host", ""))
        if "*" in self._hosts or host in self._hosts:
            return
        raise Refused(
            400,
            f"this dashboard does not answer to the host name {host[:100]!r}. "
            "Allow it: app(..., allowed_hosts=[...]) or delayline dashboard --allowed-host NAME",
        )

    async def _actor(self, request: Request) -> Actor | Response:
        if self._authorize is None:
            return Actor("anonymous", may_act=False)
        answer = self._authorize(request)
        actor = await answer if inspect.isawaitable(answer) else answer
        if actor is None:
            raise Refused(403, "you may not open this dashboard")
        return actor

    def _token(self, cookie: str, actor: Actor) -> str:
        return hmac.new(self._secret, f"csrf:{cookie}:{actor.name}".encode(), hashlib.sha256).hexdigest()


_KEY_BYTES: Final = 16


def host_name(host: str) -> str:
    """Return the name in a Host header, without the port: localhost, [::1]."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.partition(":")[0]


def check_origin(request: Request) -> None:
    """Refuse a form that another site's page has sent."""
    site = request.headers.get("sec-fetch-site")
    if site is not None and site not in {"same-origin", "none"}:
        raise Refused(403, "not done: the form came from another site")
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower():
        raise Refused(403, "not done: the form came from another site")


async def _read_form(request: Request) -> ImmutableMultiDict[str, str]:
    """Return the fields of a form. Raises Refused for a form that is too large or damaged."""
    if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        raise Refused(415, "send a form: application/x-www-form-urlencoded")
    too_large = Refused(413, f"the form is larger than {LARGEST_FORM:,} bytes: use the command line for such a message")
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit() or len(length) > 12 or int(length) > LARGEST_FORM:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > LARGEST_FORM:
            raise too_large
    try:
        pairs = parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="strict")
    except ValueError as error:
        raise Refused(400, "the form is damaged, or has too many fields") from error
    return ImmutableMultiDict(pairs)


def _with_headers(request: Request, send: Send, new_cookie: list[str]) -> Send:
    """Return `send` with the security headers, and on pages with the cookie of the CSRF token."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            headers.setdefault("Cache-Control", "no-store")
            if new_cookie and headers.get("content-type", "").startswith("text/html"):
                headers.append("Set-Cookie", set_cookie(request, CSRF_COOKIE, new_cookie[0], None))
        await send(message)

    return sending


def set_cookie(request: Request, name: str, value: str, seconds: int | None) -> str:
    """Return a Set-Cookie header that scripts and other sites cannot use."""
    cookie = SimpleCookie({name: value})
    morsel = cookie[name]
    morsel["path"] = request.scope["root_path"] or "/"
    morsel["httponly"] = True
    morsel["samesite"] = "Strict"
    if request.url.scheme == "https":
        morsel["secure"] = True
    if seconds is not None:
        morsel["max-age"] = seconds
    return morsel.OutputString()


class Credentials:
    """Authorizes by a token or by user and password: what `delayline dashboard` works with.

    Args:
        token: A secret; a browser gets a page to enter it, other clients send `Authorization: Bearer`.
        users: Passwords by user name, for HTTP basic authentication.
        may_act: Whether users with a password may change messages.
        clock: What sign-ins end by; the machine's if left out.

    Raises:
        ConfigurationError: A secret is short enough to be guessed.
    """

    def __init__(
        self,
        *,
        token: str | None,
        users: Mapping[str, str],
        may_act: bool,
        clock: Clock | None = None,
    ) -> None:
        if token is not None and len(token) < SHORTEST_TOKEN:
            raise ConfigurationError(
                f"the token has {len(token)} characters: use {SHORTEST_TOKEN} or more, such as the output of "
                "python -c 'import secrets; print(secrets.token_urlsafe())'"
            )
        for name, password in users.items():
            if len(password) < SHORTEST_PASSWORD:
                raise ConfigurationError(
                    f"the password of {name!r} has {len(password)} characters: use {SHORTEST_PASSWORD} or more"
                )
        self._token = None if token is None else _digest(token)
        self._users = {name: _digest(password) for name, password in users.items()}
        self._may_act = may_act
        self._secret = secrets.token_bytes(32)
        self._clock = clock or SystemClock()
        self._limits = SignInLimits(self._clock)
        self._right_headers: OrderedDict[bytes, str] = OrderedDict()
        """The names by digests of headers that were right: guesses from the same address do not hold them up."""

    def __repr__(self) -> str:
        return f"Credentials(users={len(self._users)}, token={'set' if self._token else 'not set'})"

    def __call__(self, request: Request) -> Actor | Response:
        """Return the actor, or the answer that asks for credentials."""
        header = request.headers.get("authorization", "")
        name = self._right_headers.get(_digest(header)) or self._from_cookie(request)
        if name is not None:
            return Actor(name, may_act=self._may_act)
        given = request.state.form.get("token") if self._token is not None else None
        address = request.client.host if request.client else "an unknown address"
        if (header or given is not None) and (seconds := self._limits.wait(address)):
            text = f"Too many wrong tokens or passwords were given. Try again in {seconds} s."
            refused = plain_page(request, "Wait", text, status=429)
            refused.headers["Retry-After"] = str(seconds)
            return refused
        name = self._from_header(header)
        if name is not None:
            self._right_headers[_digest(header)] = name
            if len(self._right_headers) > MOST_HEADERS:
                self._right_headers.popitem(last=False)
            self._log_signed_in(name, address)
            return Actor(name, may_act=self._may_act)
        if self._token is not None and given is not None:
            if _same(given, self._token):
                self._log_signed_in("token", address)
                return self._signed_in(request)
            return self._ask(request, "This is not the token.", address)
        return self._ask(request, None, address if header else None)

    @staticmethod
    def _log_signed_in(name: str, address: str) -> None:
        emit(logger, logging.INFO, Event.DASHBOARD_SIGNED_IN, "%s signed in from %s", name, address, user=name)

    def _from_header(self, header: str) -> str | None:
        scheme, _, value = header.partition(" ")
        if scheme.lower() == "bearer" and self._token is not None and _same(value.strip(), self._token):
            return "token"
        if scheme.lower() != "basic":
            return None
        try:
            name, _, password = base64.b64decode(value, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return None
        # Unknown names are compared as well: the time taken does not depend on which names exist.
        right = _same(password, self._users.get(name, _NO_PASSWORD))
        return name if right and name in self._users else None

    def _from_cookie(self, request: Request) -> str | None:
        expires, _, signature = request.cookies.get(SESSION_COOKIE, "").partition(".")
        if self._token is None or not hmac.compare_digest(signature.encode(), self._sign(expires).encode()):
            return None
        return "token" if int(expires) > self._clock.now().timestamp() else None

    def _sign(self, expires: str) -> str:
        return hmac.new(self._secret, f"session:{expires}".encode(), hashlib.sha256).hexdigest()

    def _signed_in(self, request: Request) -> Response:
        expires = str(int(self._clock.now().timestamp()) + SESSION_SECONDS)
        response = RedirectResponse(request.url.path, status_code=303)
        value = f"{expires}.{self._sign(expires)}"
        response.headers.append("Set-Cookie", set_cookie(request, SESSION_COOKIE, value, SESSION_SECONDS))
        return response

    def _ask(self, request: Request, text: str | None, wrong_from: str | None = None) -> Response:
        """Return the answer that asks for credentials; `wrong_from` is the address that gave wrong ones."""
        if wrong_from is not None:
            self._limits.failed(wrong_from)
            log_text = "wrong credentials from %s"
            emit(logger, logging.WARNING, Event.DASHBOARD_SIGN_IN_FAILED, log_text, wrong_from)
        if self._token is None:
            response: Response = PlainTextResponse("a user name and a password are needed\n", 401)
        else:
            response = plain_page(request, "Sign in", text, status=401, sign_in=True)
        if self._users:
            response.headers["WWW-Authenticate"] = 'Basic realm="delayline", charset="UTF-8"'
        return response


_NO_PASSWORD: Final = b"\0" * 32


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _same(given: str, expected: bytes) -> bool:
    """Compare in a time that does not depend on where they differ, nor on their lengths."""
    return hmac.compare_digest(_digest(given), expected)
