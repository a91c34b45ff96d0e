"""The broker's management API over HTTP, for counts and policies that AMQP does not offer."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Self, TypeVar, cast
from urllib.parse import quote

import httpx

from delayline.errors import BackendUnavailable, BackendUnusable
from delayline.rabbitmq.infrastructure import Binding

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence

    from delayline.rabbitmq.address import BrokerAddress, ManagementPlace

TOTALS: Final = {"disable_stats": "true", "enable_queue_totals": "true"}
"""Counts without the statistics, at a tenth of the cost. Those of quorum queues are up to 5 s old, as statistics are:
`quorum_tick_interval`."""
VERSION: Final = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class ExchangeFacts:
    """An exchange as it is on the broker."""

    name: str
    type: str
    durable: bool
    auto_delete: bool
    internal: bool
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """A queue on the broker and its counts, which are None while the broker has not determined them."""

    name: str
    type: str
    durable: bool
    auto_delete: bool
    exclusive: bool
    arguments: Mapping[str, Any]
    messages: int | None
    ready: int | None
    unacknowledged: int | None
    policy: str | None = None
    """The name of the policy that is in force."""
    lost_nodes: frozenset[str] = frozenset()
    """The nodes with a replica of a quorum queue that do not run."""

    @property
    def undeliverable(self) -> int:
        """How many are due and have nowhere to go: neither ready nor taken."""
        if self.messages is None:
            return 0
        return max(0, self.messages - (self.ready or 0) - (self.unacknowledged or 0))


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings for all queues or exchanges whose name matches."""

    name: str
    pattern: str
    definition: Mapping[str, Any]
    apply_to: str = "exchanges"
    priority: int = 0

    def reaches(self, name: str, kind: str) -> bool:
        """Return whether it applies to the exchange or queue of that name; `kind` is exchanges, or a queue's type."""
        wanted = {"all", "exchanges"} if kind == "exchanges" else {"all", "queues", f"{kind}_queues"}
        try:
            return self.apply_to in wanted and re.search(self.pattern, name) is not None
        except re.error:  # Erlang's regular expressions have more syntax than Python's
            return False


Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def _understood(
    ask: Callable[Arguments, Coroutine[Any, Any, Answer]],
) -> Callable[Arguments, Coroutine[Any, Any, Answer]]:
    """Have the method raise BackendUnusable for JSON that is not a management API's, as of another server's."""

    @functools.wraps(ask)
    async def asked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        try:
            return await ask(*args, **kwargs)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise cast("ManagementApi", args[0]).not_understood() from error

    return asked


class ManagementApi:
    """A virtual host, seen through the management API of the first node that answers; use it with `async with`.

    Every method raises BackendUnavailable without an answer, and BackendUnusable if the user lacks the right.
    """

    def __init__(self, address: BrokerAddress, url: str | None = None) -> None:
        self._address = address if url is None else replace(address, management=url)
        self.vhost: str = address.vhost
        self._places = list(self._address.management_places)
        self._vhost = quote(address.vhost, safe="")
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(2 * address.server_timeout, connect=address.connection_timeout / len(self._places)),
            verify=address.tls.context() if address.tls else True,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close connections. Idempotent."""
        await self._http.aclose()

    @_understood
    async def version(self) -> str:
        """Return the broker's version, as `3.10.8`."""
        return str((await self._get("overview")).get("rabbitmq_version", "unknown"))

    @_understood
    async def alarms(self) -> Sequence[str]:
        """Return the alarms that the nodes have raised, as `disk of rabbit@host`; none if none has."""
        answer = await self._ask("GET", "health/checks/alarms", accepted=httpx.codes.SERVICE_UNAVAILABLE)
        if answer.is_success:
            return []
        return [f"{alarm['resource']} of {alarm['node']}" for alarm in self._json(answer)["alarms"]]

    @_understood
    async def feature_flags(self) -> Mapping[str, str]:
        """Return the state of each feature flag: enabled, disabled or unavailable."""
        return {flag["name"]: flag["state"] for flag in await self._get("feature-flags")}

    @_understood
    async def exchanges(self) -> Mapping[str, ExchangeFacts]:
        """Return the virtual host's exchanges by name."""
        answer = await self._get(f"exchanges/{self._vhost}", disable_stats="true")
        return {exchange["name"]: _exchange(exchange) for exchange in answer}

    @_understood
    async def exchange(self, name: str) -> ExchangeFacts | None:
        """Return an exchange; None if there is no such exchange."""
        path = f"exchanges/{self._vhost}/{quote(name, safe='')}"
        answer = await self._get_if_there(path)
        return None if answer is None else _exchange(answer)

    @_understood
    async def queues(self) -> Mapping[str, QueueFacts]:
        """Return the virtual host's queues by name, with their counts."""
        return {queue["name"]: _queue(queue) for queue in await self._get(f"queues/{self._vhost}", **TOTALS)}

    @_understood
    async def queue(self, name: str) -> QueueFacts | None:
        """Return the queue of that name; None if there is none."""
        # A list has the policy in force, which before version 4 the answer for a single queue has seconds later only.
        only = {"name": f"^{re.escape(name)}$", "use_regex": "true", "page": "1", "page_size": "1"}
        answer = await self._get(f"queues/{self._vhost}", **TOTALS, **only)
        return next((_queue(queue) for queue in answer["items"]), None)

    @_understood
    async def bindings(self) -> Sequence[Binding]:
        """Return the virtual host's bindings, without the default exchange's."""
        return [_binding(binding) for binding in await self._get(f"bindings/{self._vhost}") if binding["source"]]

    @_understood
    async def bindings_from(self, exchange: str) -> Sequence[Binding]:
        """Return the bindings of an exchange to queues and other exchanges; none if there is no such exchange."""
        path = f"exchanges/{self._vhost}/{quote(exchange, safe='')}/bindings/source"
        return [_binding(binding) for binding in await self._get_if_there(path) or ()]

    @_understood
    async def policies(self, *, of_operators: bool = False) -> Sequence[Policy]:
        """Return the virtual host's policies, or the policies that its operators lay over them."""
        kind = "operator-policies" if of_operators else "policies"
        return [
            Policy(policy["name"], policy["pattern"], policy["definition"], policy["apply-to"], policy["priority"])
            for policy in await self._get(f"{kind}/{self._vhost}")
        ]

    async def set_policy(self, policy: Policy) -> None:
        """Create or replace a policy. Idempotent."""
        content = {
            "pattern": policy.pattern,
            "definition": dict(policy.definition),
            "apply-to": policy.apply_to,
            "priority": policy.priority,
        }
        await self._ask("PUT", f"policies/{self._vhost}/{quote(policy.name, safe='')}", json=content)

    async def delete_policy(self, name: str) -> bool:
        """Delete a policy; False when there was none."""
        answer = await self._ask(
            "DELETE", f"policies/{self._vhost}/{quote(name, safe='')}", accepted=httpx.codes.NOT_FOUND
        )
        return answer.status_code != httpx.codes.NOT_FOUND

    async def _get(self, path: str, **parameters: str) -> Any:  # noqa: ANN401 - JSON has no narrower type
        return self._json(await self._ask("GET", path, params=parameters))

    async def _get_if_there(self, path: str, **parameters: str) -> Any:  # noqa: ANN401 - JSON has no narrower type
        answer = await self._ask("GET", path, accepted=httpx.codes.NOT_FOUND, params=parameters)
        return None if answer.status_code == httpx.codes.NOT_FOUND else self._json(answer)

    def _json(self, answer: httpx.Response) -> Any:  # noqa: ANN401 - JSON has no narrower type
        try:
            return answer.json()
        except (ValueError, RecursionError):
            raise self.not_understood() from None

    def not_understood(self) -> BackendUnusable:
        """Return the error for an answer that is not a management API's."""
        return BackendUnusable(f"{self._places[0].url} is not a RabbitMQ management API: {PLUGIN_HINT}")

    async def _ask(self, method: str, path: str, *, accepted: int | None = None, **content: Any) -> httpx.Response:  # noqa: ANN401 - httpx's
        """Ask the node that answered last, and the others in turn where it is unavailable; each call is idempotent.

        `accepted`: a status that is an answer too.
        """
        errors = []
        for management in list(self._places):
            try:
                return await self._ask_at(management, method, path, accepted=accepted, **content)
            except BackendUnavailable as error:
                errors.append(error)
                self._places.append(self._places.pop(0))
        if len(errors) == 1:
            raise errors[0]
        raise BackendUnavailable("; ".join(map(str, errors)))

    async def _ask_at(
        self,
        management: ManagementPlace,
        method: str,
        path: str,
        *,
        accepted: int | None,
        **content: Any,  # noqa: ANN401 - httpx's
    ) -> httpx.Response:
        try:
            login = httpx.BasicAuth(management.user, management.password)
            answer = await self._http.request(method, f"{management.url}/api/{path}", auth=login, **content)
        except (httpx.RequestError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise BackendUnavailable(f"no management API at {management.url}: {reason}. {PLUGIN_HINT}") from error
        if answer.is_success or answer.status_code == accepted:
            return answer
        raise self._refused(management, answer)

    def _refused(self, management: ManagementPlace, answer: httpx.Response) -> BackendUnavailable | BackendUnusable:
        user, vhost, url = management.user, self._address.vhost, management.url
        match answer.status_code:
            case httpx.codes.UNAUTHORIZED | httpx.codes.FORBIDDEN:
                return BackendUnusable(
                    f"the management API at {url} refuses user {user!r}, by name, password or rights on virtual "
                    f"host {vhost!r}: it needs the tag management, to set policies policymaker: "
                    f"rabbitmqctl set_user_tags {user} policymaker"
                )
            case httpx.codes.NOT_FOUND:
                return BackendUnusable(
                    f"{url} has no virtual host {vhost!r}, or is not a management API: {PLUGIN_HINT}"
                )
            case code if code >= httpx.codes.INTERNAL_SERVER_ERROR:
                return BackendUnavailable(f"the management API at {url} fails: {code} {answer.text[:200]}")
            case code:
                return BackendUnusable(f"the management API at {url} refuses: {code} {answer.text[:200]}")


PLUGIN_HINT: Final = (
    "Switch it on with: rabbitmq-plugins enable rabbitmq_management; where it is elsewhere, add ?management=URL"
)


def _exchange(facts: Mapping[str, Any]) -> ExchangeFacts:
    return ExchangeFacts(
        facts["name"], facts["type"], facts["durable"], facts["auto_delete"], facts["internal"], facts["arguments"]
    )


def _binding(facts: Mapping[str, Any]) -> Binding:
    return Binding(
        facts["source"], facts["destination"], facts["routing_key"], to_queue=facts["destination_type"] == "queue"
    )


def _queue(facts: Mapping[str, Any]) -> QueueFacts:
    return QueueFacts(
        facts["name"],
        facts.get("type", facts.get("arguments", {}).get("x-queue-type", "classic")),
        bool(facts["durable"]),
        bool(facts["auto_delete"]),
        bool(facts.get("exclusive")),
        facts["arguments"],
        facts.get("messages"),
        facts.get("messages_ready"),
        facts.get("messages_unacknowledged"),
        facts.get("policy") or None,
        _lost_nodes(facts.get("members"), facts.get("online")),
    )


def _lost_nodes(members: Collection[str] | None, online: Collection[str] | None) -> frozenset[str]:
    """Return the members that are not online; empty for a classic queue, of which the broker lists neither."""
    return frozenset(members or ()) - frozenset(online) if online else frozenset()


def effective(policies: Iterable[Policy], name: str, kind: str) -> Policy | None:
    """Return the policy that counts for the exchange or queue: of those that reach it, the highest priority's."""
    return max(
        (policy for policy in policies if policy.reaches(name, kind)), key=lambda policy: policy.priority, default=None
    )


def version_of(text: str) -> tuple[int, int, int]:
    """Return a version's three numbers without a suffix; zeros for a text without numbers."""
    match = VERSION.match(text)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else (0, 0, 0)
