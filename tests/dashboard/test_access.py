"""Who gets in and what is refused, through the ASGI application without a browser."""

from __future__ import annotations

import asyncio
import logging
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient
from tests.dashboard.pages import client_of, csrf_of

from delayline import ConfigurationError, Endpoint, MemoryTransport
from delayline.dashboard import Actor, app
from delayline.dashboard.security import HEADERS, LARGEST_FORM, Credentials, host_name
from delayline.dashboard.sign_in import MOST_ADDRESSES, SignInLimits
from delayline.testing import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = "a-token-of-enough-characters"  # noqa: S105 - not one
PASSWORD = "correct horse"  # noqa: S105 - likewise
ANA = Actor("ana", may_act=True)


def endpoint() -> Endpoint:
    return Endpoint("sales", transport=MemoryTransport())


@pytest.fixture
def acting() -> Iterator[TestClient]:
    with client_of(endpoint(), read_only=False, authorize=lambda _: ANA) as client:
        yield client


def with_credentials(**settings: Any) -> TestClient:  # noqa: ANN401 - those of Credentials
    chosen = {"token": TOKEN, "users": {"ana": PASSWORD}, "may_act": True, **settings}
    return client_of(endpoint(), read_only=False, authorize=Credentials(**chosen))


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "[::2]", "", "127.0.0.1@evil"])
def test_another_host_name_is_refused_with_how_to_allow_it(host: str) -> None:
    with client_of(endpoint()) as client:
        answer = client.get("/doctor", headers={"host": host})
    assert answer.status_code == 400
    assert "allowed_hosts" in answer.text


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "[::1]:8080"])
def test_loopback_names_are_answered(host: str) -> None:
    with client_of(endpoint()) as client:
        assert client.get("/static/dashboard.css", headers={"host": host}).status_code == 200


def test_the_port_is_no_part_of_a_host_name() -> None:
    assert [host_name(one) for one in ("a:80", "[::1]:80", "[::1]", "A")] == ["a", "[::1]", "[::1]", "a"]


@pytest.mark.parametrize("path", ["/", "/static/dashboard.css", "/nothing", "/errors"])
def test_every_answer_has_the_security_headers(path: str) -> None:
    with client_of(endpoint()) as client:
        answer = client.get(path)
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "script-src 'self'" in policy


def test_pages_have_no_inline_script_style_or_handler() -> None:
    with client_of(endpoint()) as client:
        for path in ("/", "/forecast", "/lateness", "/find", "/waiting", "/errors", "/life", "/jobs", "/doctor"):
            text = client.get(path).text
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! src=)|javascript:", text), path


def test_a_dashboard_is_read_only_by_default() -> None:
    with client_of(endpoint(), authorize=lambda _: ANA) as client:
        answer = client.post("/errors/purge", data={"csrf": csrf_of(client)})
    assert answer.status_code == 403
    assert "read-only" in answer.text


def test_actions_without_authorization_are_refused_when_the_application_is_made() -> None:
    with pytest.raises(ConfigurationError, match="authorize="):
        app([endpoint()], read_only=False)


def test_an_actor_who_may_only_look_cannot_act() -> None:
    with client_of(endpoint(), read_only=False, authorize=lambda _: Actor("bo")) as client:
        answer = client.post("/errors/purge", data={"csrf": csrf_of(client)})
    assert answer.status_code == 403
    assert "bo may only look" in answer.text


@pytest.mark.parametrize("token", ["", "0" * 64, "é" * 64])
def test_an_action_without_the_pages_token_is_refused(acting: TestClient, token: str) -> None:
    csrf_of(acting)
    answer = acting.post("/errors/purge", data={"csrf": token})
    assert answer.status_code == 403
    assert "load it again" in answer.text


def test_another_actors_token_does_not_work() -> None:
    actors = iter([Actor("bo", may_act=True), ANA])
    with client_of(endpoint(), read_only=False, authorize=lambda _: next(actors)) as client:
        answer = client.post("/errors/purge", data={"csrf": csrf_of(client)})
    assert answer.status_code == 403


@pytest.mark.parametrize(
    "headers", [{"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}]
)
def test_a_form_of_another_site_is_refused_even_with_the_token(acting: TestClient, headers: dict[str, str]) -> None:
    answer = acting.post("/errors/purge", data={"csrf": csrf_of(acting)}, headers=headers)
    assert answer.status_code == 403
    assert "another site" in answer.text


def test_a_large_form_is_refused_before_it_is_read(acting: TestClient) -> None:
    token = csrf_of(acting)
    answer = acting.post("/errors/purge", data={"csrf": token, "body": "x" * LARGEST_FORM})
    assert answer.status_code == 413

    def chunks() -> Iterator[bytes]:
        for _ in range(20):
            yield b"x" * (LARGEST_FORM // 10)

    answer = acting.post(
        "/errors/purge", content=chunks(), headers={"content-type": "application/x-www-form-urlencoded"}
    )
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("application/x-www-form-urlencoded", b"&".join(b"a=1" for _ in range(1000)), 400),
        ("application/x-www-form-urlencoded", b"a=%ff", 400),
        ("application/x-www-form-urlencoded", b"\xff", 400),
    ],
)
def test_a_damaged_form_is_refused(acting: TestClient, kind: str, body: bytes, status: int) -> None:
    answer = acting.post("/errors/purge", content=body, headers={"content-type": kind})
    assert answer.status_code == status


def test_the_hook_may_refuse_or_redirect() -> None:
    from starlette.responses import RedirectResponse

    with client_of(endpoint(), authorize=lambda _: None) as client:
        assert client.get("/").status_code == 403
    with client_of(endpoint(), authorize=lambda _: RedirectResponse("/sign-in")) as client:
        assert client.get("/", follow_redirects=False).headers["location"] == "/sign-in"


def test_the_hook_may_be_a_coroutine() -> None:
    async def authorize(_: object) -> Actor:
        return ANA

    with client_of(endpoint(), authorize=authorize) as client:
        assert "ana" in client.get("/jobs").text


def test_a_bearer_token_or_a_user_and_password_let_in() -> None:
    with with_credentials() as client:
        assert client.get("/jobs").status_code == 401
        assert client.get("/jobs", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert "ana" in client.get("/jobs", auth=("ana", PASSWORD)).text


@pytest.mark.parametrize(
    "header",
    ["Bearer wrong", "Bearer", "Basic", "Basic !!", "Basic YW5h", "Basic Ym86Y29ycmVjdCBob3JzZQ==", "Digest a"],
)
def test_wrong_credentials_are_refused_and_logged_without_them(header: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "delayline")
    with with_credentials() as client:
        answer = client.get("/jobs", headers={"authorization": header})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic")
    assert [record.event for record in caplog.records] == ["dashboard.sign_in_failed"]  # type: ignore[attr-defined]
    assert "wrong credentials from" in caplog.text
    assert PASSWORD not in caplog.text


def test_a_browser_enters_the_token_on_a_page_and_stays_signed_in() -> None:
    with with_credentials(users={}) as client:
        assert "Sign in" in client.get("/jobs").text
        assert "not the token" in client.post("/jobs", data={"token": "wrong"}).text
        answer = client.post("/jobs", data={"token": TOKEN}, follow_redirects=False)
        assert answer.status_code == 303
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert TOKEN not in cookie
        assert client.get("/jobs").status_code == 200
        client.cookies.set("delayline_session", "9999999999.forged", domain="localhost.local")
    with with_credentials(users={}) as other:
        other.cookies.set("delayline_session", "9999999999." + "0" * 64)
        assert other.get("/jobs").status_code == 401


def test_secrets_that_can_be_guessed_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="5 characters"):
        Credentials(token="short", users={}, may_act=False)  # noqa: S106 - not one
    with pytest.raises(ConfigurationError, match="'ana' has 3 characters") as refused:
        Credentials(token=None, users={"ana": "abc"}, may_act=False)
    assert "abc" not in str(refused.value)
    assert TOKEN not in repr(Credentials(token=TOKEN, users={"ana": PASSWORD}, may_act=False))


def test_guesses_are_slowed_down_and_hold_up_nobody_who_was_let_in() -> None:
    """Given somebody who was let in, when guesses come from the same address, then only the guesses wait."""
    # Given
    clock = ManualClock()
    right = {"authorization": f"Bearer {TOKEN}"}
    with with_credentials(clock=clock) as client:
        assert client.get("/jobs", headers=right).status_code == 200
        # When
        answers = [client.get("/jobs", headers={"authorization": f"Bearer {number}"}) for number in range(12)]
        # Then
        assert [answer.status_code for answer in answers] == [401] * 10 + [429] * 2
        assert answers[-1].headers["retry-after"] == "6"
        assert client.get("/jobs", headers=right).status_code == 200
        assert client.get("/jobs").status_code == 401  # the page to sign in
        assert client.get("/jobs", auth=("ana", PASSWORD)).status_code == 429
        asyncio.run(clock.advance(timedelta(seconds=6)))
        assert client.get("/jobs", auth=("ana", PASSWORD)).status_code == 200


def test_guesses_from_many_addresses_are_slowed_down_together_in_bounded_memory() -> None:
    clock = ManualClock()
    limits = SignInLimits(clock)
    for number in range(99):
        limits.failed(f"10.0.0.{number}")
    assert limits.wait("192.0.2.1") == 0
    limits.failed("10.0.0.100")
    assert limits.wait("192.0.2.1") == 1
    for number in range(3 * MOST_ADDRESSES):
        limits.failed(f"10.1.{number // 256}.{number % 256}")
    assert len(limits._by_address) == MOST_ADDRESSES
    asyncio.run(clock.advance(timedelta(days=1)))
    assert limits.wait("10.1.0.1") == 0


def test_an_ipv6_client_is_known_by_its_network() -> None:
    limits = SignInLimits(ManualClock())
    for number in range(10):
        limits.failed(f"2001:db8::{number}")
    assert limits.wait("2001:db8::ffff") == 6
    assert limits.wait("2001:db8:0:1::1") == 0
