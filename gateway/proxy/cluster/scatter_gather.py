"""Sends one request to several servers in parallel, and collects the responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import orjson
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import (
    Audience,
    ErrorKind,
    GatewayError,
    ServerName,
    bad_response,
    describe_error,
    read_server_error,
    shorten,
    strip_tracebacks,
    upstream_name,
)
from gateway.observe.call_record import CallRecord
from gateway.protocol.operations import QUERIES, parse_operation
from gateway.proxy.admission.concurrency_limit import ConcurrencyLimit, acquire_all, release_all
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.attempts.attempt import Attempt
from gateway.proxy.attempts.retry import UpstreamCall, send_attempt
from gateway.proxy.body_chunks import ResponseChunks
from gateway.proxy.body_io import buffer_chunks, write
from gateway.proxy.destination import Destination, Upstream
from gateway.proxy.headers import end_to_end
from gateway.proxy.interfaces import Call, ClientRequest
from gateway.sizes import MAX_MODEL_DOCUMENT, QUOTED_TEXT
from gateway.upstream.content_decoding import decode_response
from gateway.upstream.pool.pool import Lease
from gateway.upstream.transport import UpstreamRequest, UpstreamResponse, check_lengths

_T = TypeVar("_T")

FAILED_ENDPOINTS = "Tensorgate-Failed-Endpoints"
"""The response header that names endpoints whose part is missing."""


@dataclass(frozen=True, slots=True)
class BufferedResponse:
    """A server's response, fully buffered."""

    status: int
    reason: str
    headers: CIMultiDictProxy[str]
    body: bytes


@dataclass(frozen=True, slots=True)
class SubResponse:
    """The result of a request at one server.

    ``server`` is an endpoint, or the upstream if any of its endpoints could respond.
    """

    upstream: str
    server: ServerName
    result: BufferedResponse | GatewayError

    @property
    def success(self) -> BufferedResponse | None:
        """Return the response if it is no error."""
        if isinstance(self.result, BufferedResponse) and 200 <= self.result.status < 300:
            return self.result
        return None

    def failure(self, audience: Audience) -> str:
        """Describe an error, with the name of the server."""
        name = self.server.name_for(audience)
        if isinstance(self.result, GatewayError):
            message = self.result.message_for(audience)
            return message if name in message else f"{name}: {message}"
        text = read_server_error(self.result.body)
        return f"{name} returned {describe_error(self.result.status, text, QUOTED_TEXT)}"

    def parse(self, read: Callable[[Any], _T], what: str) -> _T:
        """Return what ``read`` makes of the JSON document of a success.

        Raises GatewayError (502) that says that the server sent no ``what``, if ``read`` fails as
        a document of another form makes it fail.
        """
        assert self.success is not None
        try:
            return read(orjson.loads(self.success.body))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise bad_response(f"{self.server.url} sent no {what}", self.server) from None


def count_endpoints(upstreams: Iterable[Upstream]) -> int:
    """Count the endpoints of upstreams."""
    return sum(len(upstream.pool.endpoints) for upstream in upstreams)


def make_sub_request(
    request: ClientRequest,
    target: str,
    body: Sequence[bytes | memoryview] | None = None,
    method: str | None = None,
) -> UpstreamRequest:
    """Return the request for servers, with the client's method unless another is given.

    The client's own body is left out without ``body``.
    """
    headers = end_to_end(request.headers)
    headers.popall("Accept-Encoding", None)  # the gateway reads the responses
    if body is None:
        headers.popall("Content-Length", None)
    else:
        # Bodies for several servers are JSON, and some servers require its type.
        headers.setdefault("Content-Type", "application/json")
        headers["Content-Length"] = str(sum(map(len, body)))
    method = method or request.method
    is_query = parse_operation(method, target).kind in QUERIES
    return UpstreamRequest(method, target, headers, body, is_idempotent=is_query)


async def query_servers(
    call: Call,
    request_for: Callable[[Upstream], UpstreamRequest],
    reservation: Reservation,
    model: str | None = None,
    queries_all: Callable[[Upstream], bool] = lambda _: True,
) -> list[SubResponse]:
    """Query the servers of upstreams in parallel; a server that is late does not end the others.

    All endpoints are queried, ejected ones too; an endpoint of two upstreams is queried once. Where
    ``queries_all`` is false, one endpoint of the upstream is queried, and another one if it is
    unreachable. Under model discovery only endpoints that have ``model``, or do not list their
    models, are queried; all if none is left. ``reservation`` counts the buffered responses. Raises
    GatewayError before any server is queried: 503 for overload, 400 for a head that an upstream
    does not accept.
    """
    queries: dict[Upstream | str, _Query] = {}
    for upstream in call.upstreams:
        request = request_for(upstream)
        # The slots of all servers are taken already.
        destination = replace(call.destination, upstream=upstream, concurrency_limits=())
        query = _Query(destination, request, reservation, model)
        if not queries_all(upstream):
            queries[upstream] = query
            continue
        check_lengths(request, upstream.dialect_state.dialect)
        for lease in upstream.pool.lease_all():
            queries.setdefault(lease.endpoint.url, replace(query, lease=lease))
    results = await _run_all(call, queries.values())
    if results or model is None:
        return results
    return await query_servers(call, request_for, reservation, None, queries_all)


def merge_responses(
    request: ClientRequest, sub_responses: Sequence[SubResponse]
) -> BufferedResponse:
    """Return the first response if all succeeded, or if all failed with the same status.

    Else raises GatewayError (502) that names the servers that succeeded, those that failed and why.
    If no server responded and all failed alike, the error is of that kind (503, 504).
    """
    results = [each.result for each in sub_responses]
    responses = [each for each in results if isinstance(each, BufferedResponse)]
    all_succeeded = all(each.success for each in sub_responses)
    if len(responses) == len(sub_responses):
        is_same_status = len({response.status for response in responses}) == 1
        if is_same_status or all_succeeded:
            return responses[0]
    errors = [each for each in results if isinstance(each, GatewayError)]
    kind, retry_after = ErrorKind.BAD_RESPONSE, None
    if not responses and len({error.kind for error in errors}) == 1:
        kind, retry_after = errors[0].kind, errors[0].retry_after
    what = f"{request.method} {shorten(request.target.partition('?')[0], QUOTED_TEXT)}"
    message, public_message = (
        f"{what} {_describe_results(sub_responses, each)}"
        for each in (Audience.OPERATORS, Audience.CLIENTS)
    )
    raise GatewayError(kind, message, retry_after, public_message=public_message)


def _describe_results(sub_responses: Iterable[SubResponse], audience: Audience) -> str:
    # Endpoints of an upstream have the same name for clients.
    succeeded: dict[str, None] = {}
    failed: dict[str, None] = {}
    for each in sub_responses:
        if each.success:
            succeeded[each.server.name_for(audience)] = None
        else:
            failed[each.failure(audience)] = None
    result = f"succeeded at {', '.join(succeeded)}; failed" if succeeded else "failed"
    return f"{result}: {'; '.join(failed)}"


def server_names(header: str, servers: Iterable[SubResponse], audience: Audience) -> dict[str, str]:
    """Return the response header that names servers; nothing without any."""
    names = ", ".join(dict.fromkeys(each.server.name_for(audience) for each in servers))
    return {header: names} if names else {}


async def send_merged(call: Call, sub_responses: Sequence[SubResponse]) -> None:
    """Send the response that all servers agree on; raises GatewayError as ``merge_responses``."""
    await send_buffered(call, merge_responses(call.request, sub_responses))


async def send_buffered(
    call: Call, buffered: BufferedResponse, added_headers: Mapping[str, str] | None = None
) -> None:
    """Send a server's buffered response to the client, with ``added_headers``."""
    headers = end_to_end(buffered.headers)
    headers.update(added_headers or {})
    call.deadline.expect_client()
    await call.response.start(buffered.status, buffered.reason, headers)
    await write(call.response, buffered.body, call.deadline)
    await call.response.finish()


async def send_json(
    call: Call,
    document: bytes,
    added_headers: Mapping[str, str] | None = None,
    status: int = 200,
    reason: str = "",
) -> None:
    """Send a document of the gateway's own to the client, with ``added_headers``."""
    headers = CIMultiDict({"Content-Type": "application/json", **(added_headers or {})})
    call.deadline.expect_client()
    await call.response.send(status, reason, headers, document)


async def read_response(
    call: UpstreamCall, deadline: Deadline, reservation: Reservation
) -> BufferedResponse:
    """Send a call, and read the whole response to it."""
    async with call:
        return await _buffer_response(call.response, call.server, deadline, reservation)


async def _buffer_response(
    response: UpstreamResponse, server: ServerName, deadline: Deadline, reservation: Reservation
) -> BufferedResponse:
    """Read a server's whole response; raises GatewayError: 502 over the cap, 503 for overload."""
    response = decode_response(response, server)
    chunks = await buffer_chunks(
        ResponseChunks(response, server, deadline),
        reservation,
        MAX_MODEL_DOCUMENT,
        lambda cap: bad_response(f"{server.url} returned more than {cap} bytes", server),
    )
    return BufferedResponse(response.status, response.reason, response.headers, b"".join(chunks))


@dataclass(frozen=True, slots=True)
class _Query:
    """A request for a leased endpoint, or without a ``lease`` for any of the upstream's."""

    destination: Destination
    request: UpstreamRequest
    reservation: Reservation
    model: str | None
    lease: Lease | None = None

    async def run(self, deadline: Deadline, record: CallRecord) -> SubResponse | None:
        """Query the server; None if it reports that it does not have the model."""
        upstream, lease = self.destination.upstream.name, self.lease
        any_endpoint = ServerName(upstream_name(upstream), upstream_name(upstream))
        server = any_endpoint if lease is None else lease.endpoint.name
        result: BufferedResponse | GatewayError | None
        try:
            if lease is None:
                with deadline:
                    call = UpstreamCall(self.destination, self.request, deadline, record)
                    result = await read_response(call, deadline, self.reservation)
            else:
                result = await self._query_endpoint(lease, deadline, record)
        except GatewayError as error:
            result = strip_tracebacks(error)
        return None if result is None else SubResponse(upstream, server, result)

    async def _query_endpoint(
        self, lease: Lease, deadline: Deadline, record: CallRecord
    ) -> BufferedResponse | None:
        server = lease.endpoint.name
        with Attempt(self.destination.upstream.name, lease, record) as attempt, deadline:
            deadline.expect_server(server)
            if self.model is not None and not await lease.may_have_model(self.model):
                return None
            deadline.expect_server(server)
            response = await send_attempt(attempt, self.request)
            try:
                return await _buffer_response(response, server, deadline, self.reservation)
            finally:
                lease.classify_status(response.status, response.error)
                attempt.close(response)


async def _run_all(call: Call, queries: Collection[_Query]) -> list[SubResponse]:
    record, deadline, upstreams = call.response.record, call.deadline, call.upstreams
    record.upstream = ",".join(upstream.name for upstream in upstreams)
    limits = _limits_of(call.destination, upstreams)
    parts = [record.part() for _ in queries]
    await acquire_all(limits, deadline)
    try:
        with deadline.suspended_for_parts():
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(query.run(deadline.part(), part))
                    for query, part in zip(queries, parts, strict=True)
                ]
    finally:
        release_all(limits)
        record.add_parts(parts)
    results = [task.result() for task in tasks]
    return [result for result in results if result is not None]


def _limits_of(destination: Destination, upstreams: Sequence[Upstream]) -> list[ConcurrencyLimit]:
    """Return the concurrency limits of a destination and of all upstreams, each once.

    The order is the same for all calls, so that no two calls wait for each other's slots. Those of
    upstreams come first, as with a destination's.
    """
    shared = [
        limit
        for limit in destination.concurrency_limits
        if limit is not destination.upstream.concurrency_limit
    ]
    by_name = sorted(upstreams, key=lambda upstream: upstream.name)
    own = [upstream.concurrency_limit for upstream in by_name]
    return [limit for limit in own if limit is not None] + shared
