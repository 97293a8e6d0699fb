"""Asks several servers the same at once, and tells what came of it at each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import orjson
from multidict import CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError, bad_response, shorten, strip_tracebacks
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit, enter, leave
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.body_io import response_chunks, write
from gateway.proxy.headers import check_lengths, end_to_end
from gateway.proxy.interfaces import ClientRequest, ClientResponse, Route, Upstream
from gateway.proxy.retry import UpstreamCall
from gateway.sizes import QUOTED_TEXT
from gateway.upstream.pool.lease import Lease
from gateway.upstream.transport import Body, UpstreamRequest, UpstreamResponse

LARGEST_REPLY = 4 * 1024 * 1024
"""Bytes that are held of one server's response."""

FAILED_ENDPOINTS = "Tensorgate-Failed-Endpoints"
"""The header of an answer that lacks what these endpoints would have said."""


@dataclass(frozen=True, slots=True)
class BufferedResponse:
    """A server's response, whole."""

    status: int
    reason: str
    headers: CIMultiDictProxy[str]
    body: bytes


@dataclass(frozen=True, slots=True)
class SubResponse:
    """One who was asked, and what came of it.

    ``name`` is an endpoint's URL, or says which upstream it is if any of its endpoints would do.
    """

    upstream: str
    name: str
    outcome: BufferedResponse | GatewayError

    @property
    def good(self) -> BufferedResponse | None:
        """Give the answer, if it tells of no error."""
        if isinstance(self.outcome, BufferedResponse) and 200 <= self.outcome.status < 300:
            return self.outcome
        return None

    @property
    def why(self) -> str:
        """Tell who failed, and why."""
        if isinstance(self.outcome, GatewayError):
            message = self.outcome.message
            return message if self.name in message else f"{self.name}: {message}"
        text = _error_text(self.outcome.body)
        return f"{self.name} answered {self.outcome.status}" + (f": {text}" if text else "")


def endpoints_of(upstreams: Iterable[Upstream]) -> int:
    """Count the endpoints of upstreams."""
    return sum(len(upstream.pool.endpoints) for upstream in upstreams)


def question(request: ClientRequest, target: str, body: Body = None) -> UpstreamRequest:
    """Make what servers are asked of a client's request; without ``body`` its own is left out."""
    headers = end_to_end(request.headers)
    headers.popall("Accept-Encoding", None)  # the answers have to be read here
    if body is None:
        headers.popall("Content-Length", None)
    else:
        # What several servers are told is JSON, and some of them want to be told that too.
        headers.setdefault("Content-Type", "application/json")
    return UpstreamRequest(request.method, target, headers, body)


async def ask_every_endpoint(
    route: Route,
    upstreams: Sequence[Upstream],
    question_to: Callable[[Upstream], UpstreamRequest],
    deadline: Deadline,
    holding: Reservation,
    model: str | None = None,
) -> list[SubResponse]:
    """Ask every endpoint, those that are left out too; one that is in two upstreams, once.

    Where endpoints differ in their models, those are asked that have ``model`` now, if any has, and
    those that do not say. ``route`` is the one that the request takes; ``holding`` counts what is
    held of the answers. Raises GatewayError, before anybody is asked: 503 where too much is under
    way, 400 for a head that an upstream does not take.
    """

    async def ask(having: str | None) -> list[SubResponse]:
        asks: dict[str, _Ask] = {}
        for upstream in upstreams:
            _add_every_endpoint(asks, upstream, question_to(upstream), holding, having)
        return await _all(asks.values(), _gates(route, upstreams), deadline)

    return await ask(model) or await ask(None)


async def ask_one_of_each(
    route: Route,
    upstreams: Sequence[Upstream],
    request: UpstreamRequest,
    deadline: Deadline,
    holding: Reservation,
) -> list[SubResponse]:
    """Ask one endpoint of each upstream: another one, where the first cannot be reached.

    The route tells where else. The rest is as with ``ask_every_endpoint``.
    """
    asks = [_ask_of_one(route, upstream, request, holding) for upstream in upstreams]
    return await _all(asks, _gates(route, upstreams), deadline)


async def ask_where_they_differ(
    route: Route,
    upstreams: Sequence[Upstream],
    question_to: Callable[[Upstream], UpstreamRequest],
    deadline: Deadline,
    holding: Reservation,
) -> list[SubResponse]:
    """Ask one endpoint of each upstream; of one whose endpoints differ in their models, every one.

    The rest is as with ``ask_one_of_each`` and ``ask_every_endpoint``.
    """
    asks: dict[str, _Ask] = {}
    for upstream in upstreams:
        request = question_to(upstream)
        if upstream.pool.discovers_models:
            _add_every_endpoint(asks, upstream, request, holding)
        else:
            asks[upstream.name] = _ask_of_one(route, upstream, request, holding)
    return await _all(asks.values(), _gates(route, upstreams), deadline)


def agreed(request: ClientRequest, asked: Sequence[SubResponse]) -> BufferedResponse:
    """Give the first answer, if all went well, or all were answered with the same error.

    Else raises GatewayError (502) that tells where it went well, and who failed and why. Where all
    failed in the same way without an answer, it is of that kind (503, 504).
    """
    replies = [each.outcome for each in asked if isinstance(each.outcome, BufferedResponse)]
    done = [each.name for each in asked if each.good]
    if len(replies) == len(asked):
        alike = len({reply.status for reply in replies}) == 1
        if alike or len(done) == len(asked):
            return replies[0]
    errors = [each.outcome for each in asked if isinstance(each.outcome, GatewayError)]
    kind, again = ErrorKind.BAD_RESPONSE, None
    if not replies and len({error.kind for error in errors}) == 1:
        kind, again = errors[0].kind, errors[0].retry_after
    what = f"{request.method} {shorten(request.target.partition('?')[0], QUOTED_TEXT)}"
    well = f"went well at {', '.join(done)}, but failed" if done else "failed"
    whys = "; ".join(each.why for each in asked if not each.good)
    raise GatewayError(kind, f"{what} {well}: {whys}", again)


async def pass_on(
    reply: BufferedResponse,
    answer: ClientResponse,
    deadline: Deadline,
    added_headers: Mapping[str, str] | None = None,
) -> None:
    """Give the client a server's response as it is, but for the headers in ``added``."""
    headers = end_to_end(reply.headers)
    headers.update(added_headers or {})
    deadline.expect_client()
    await answer.start(reply.status, reply.reason, headers)
    await write(answer, reply.body, deadline)
    await answer.finish()


_Ask = Callable[[Deadline], Coroutine[None, None, SubResponse | None]]
"""Asks somebody; None where there was nothing to ask."""


def _add_every_endpoint(
    asks: dict[str, _Ask],
    upstream: Upstream,
    request: UpstreamRequest,
    holding: Reservation,
    model: str | None = None,
) -> None:
    check_lengths(request, upstream.dialect_state.dialect)
    for loan in upstream.pool.lease_all():
        ask = partial(_ask_endpoint, upstream.name, loan, request, holding, model)
        asks.setdefault(loan.endpoint.url, ask)


def _ask_of_one(
    route: Route, upstream: Upstream, request: UpstreamRequest, holding: Reservation
) -> _Ask:
    # The places of all who are asked are taken already.
    return partial(
        _ask_upstream, replace(route, upstream=upstream, concurrency_limits=()), request, holding
    )


async def _all(
    asks: Iterable[_Ask], concurrency_limits: Sequence[ConcurrencyLimit], deadline: Deadline
) -> list[SubResponse]:
    """Ask all at once; one who does not answer in time does not keep the others from it."""
    await enter(concurrency_limits, deadline)
    try:
        with deadline.suspended_for_parts():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(deadline.part())) for ask in asks]
    finally:
        leave(concurrency_limits)
    return [asked for task in tasks if (asked := task.result()) is not None]


def _gates(route: Route, upstreams: Sequence[Upstream]) -> list[ConcurrencyLimit]:
    """Give the gates of a route and of all upstreams, each once: all of it is one exchange.

    They are in the same order for all, so that no two exchanges wait for each other's places:
    those of upstreams come first, as with a route's.
    """
    common = [
        concurrency_limit
        for concurrency_limit in route.concurrency_limits
        if concurrency_limit is not route.upstream.concurrency_limit
    ]
    by_name = sorted(upstreams, key=lambda upstream: upstream.name)
    return [
        upstream.concurrency_limit for upstream in by_name if upstream.concurrency_limit is not None
    ] + common


async def _ask_endpoint(
    upstream: str,
    loan: Lease,
    request: UpstreamRequest,
    holding: Reservation,
    model: str | None,
    deadline: Deadline,
) -> SubResponse | None:
    """Ask an endpoint, unless it says that it does not have ``model``."""
    url = loan.endpoint.url
    try:
        with loan as endpoint, deadline:
            deadline.expect_server(url)
            if model is not None and not await loan.may_have_model(model):
                return None
            deadline.expect_server(url)
            response = await endpoint.send(request)
            loan.classify_status(response.status)
            try:
                return SubResponse(
                    upstream, url, await whole_reply(response, url, deadline, holding)
                )
            finally:
                response.close()
    except GatewayError as error:
        return SubResponse(upstream, url, strip_tracebacks(error))


async def _ask_upstream(
    route: Route, request: UpstreamRequest, holding: Reservation, deadline: Deadline
) -> SubResponse:
    upstream = route.upstream.name
    name = f"upstream {upstream}"
    try:
        with deadline:
            async with UpstreamCall(route, request, deadline) as attempt:
                reply = await whole_reply(attempt.response, attempt.url, deadline, holding)
                return SubResponse(upstream, name, reply)
    except GatewayError as error:
        return SubResponse(upstream, name, strip_tracebacks(error))


async def whole_reply(
    response: UpstreamResponse, url: str, deadline: Deadline, holding: Reservation
) -> BufferedResponse:
    """Read a server's response; raises GatewayError: 502 over the cap, 503 if too much is held."""
    body = bytearray()
    async for chunk in response_chunks(response, url, deadline):
        holding.more(len(chunk))
        body += chunk
        if len(body) > LARGEST_REPLY:
            raise bad_response(f"{url} answered more than {LARGEST_REPLY} bytes")
    return BufferedResponse(response.status, response.reason, response.headers, bytes(body))


def _error_text(body: bytes) -> str:
    """Give what a server's response says of its error, in short."""
    try:
        fields = orjson.loads(body)
    except ValueError:
        fields = None
    said = fields.get("error") or fields.get("detail") if isinstance(fields, dict) else None
    text = said if isinstance(said, str) else body[: 2 * QUOTED_TEXT].decode(errors="replace")
    return shorten(" ".join(text.split()), QUOTED_TEXT)
