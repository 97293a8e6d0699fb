"""Which exchange a request becomes, and what its failure looks like to the client."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import orjson
from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError, escape_for_log, strip_tracebacks
from gateway.observe.failure_log import FAILURE_LOG
from gateway.protocol.operations import OPERATION_KINDS, Operation, OperationKind, model_name_of
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.cluster.aggregate import repository_index, statistics
from gateway.proxy.cluster.broadcast import load
from gateway.proxy.cluster.health import Readiness, live, ready
from gateway.proxy.cluster.server_metadata import server_metadata
from gateway.proxy.cluster.server_settings import log_setting
from gateway.proxy.cluster.trace import trace_setting
from gateway.proxy.cluster.v1_models import v1_models
from gateway.proxy.filters.authentication import UnauthenticatedError
from gateway.proxy.filters.compression import compressed
from gateway.proxy.filters.content_codings import CODINGS
from gateway.proxy.filters.decompression import decoded
from gateway.proxy.filters.forwarded_headers import REQUEST_ID
from gateway.proxy.headers import to_server
from gateway.proxy.infer.handler import infer
from gateway.proxy.infer.v1_predict import predict
from gateway.proxy.interfaces import ClientRequest, ClientResponse, HeaderLines, Route
from gateway.proxy.passthrough import forward
from gateway.proxy.router import RouteMatch, Router
from gateway.proxy.server_dialect import understand
from gateway.upstream.metadata_cache import UpstreamResponseError

_JSON: HeaderLines = (("Content-Type", "application/json"),)

INTERNAL_ERROR = GatewayError(ErrorKind.INTERNAL, "the gateway failed; its log says why")

_OF_ONE_SERVER = OPERATION_KINDS["infer"]
"""What one server answers, and yet is not forwarded as it is."""

_OF_THE_GATEWAY = OPERATION_KINDS["health"]
"""What is answered also where no memory is left: who asks would think the gateway dead."""

_log = logging.getLogger("tensorgate.exchange")


async def handle_request(request: ClientRequest, answer: ClientResponse, routes: Router) -> None:
    """Answer one request, with ``{"error": ...}`` where that fails."""
    try:
        found = routes.find(request.method, request.target, request.headers)
    except GatewayError as error:
        await send_error(answer, strip_tracebacks(error))
        return
    answer = compressed(answer, request, found)
    # From here on, it asks for what the server is asked for.
    request.target = found.target
    request.headers = to_server(request.headers, found.dropped_headers, request.added_headers)
    if found.mirror is None:
        await _answer(request, answer, found, routes.readiness)
        return
    with found.mirror.tee(request, found.asked) as copied:
        await _answer(copied, answer, found, routes.readiness)


async def _answer(
    request: ClientRequest, answer: ClientResponse, found: RouteMatch, readiness: Readiness
) -> None:
    route = found.choice.take()

    async def run(turns: Deadline) -> None:
        try:
            if found.asked.kind not in _OF_THE_GATEWAY:
                route.held.admit()
            if found.is_passthrough or found.asked.kind in _OF_ONE_SERVER:
                await proxy_call(request, answer, found.asked, route, turns)
            else:
                await _dispatch(request, answer, found, route, readiness, turns)
        except UpstreamResponseError as refusal:
            strip_tracebacks(refusal)
            turns.expect_client()
            headers = CIMultiDict({"Content-Type": refusal.content_type})
            await answer.send(refusal.status, "", headers, refusal.body)

    await run_with_deadline(run, answer, route.limits.deadline())


async def run_with_deadline(
    run: Callable[[Deadline], Awaitable[None]], answer: ClientResponse, deadline: Deadline
) -> None:
    """Answer a request by its deadline, with ``{"error": ...}`` where that fails.

    Where an answer has begun already, it is aborted so that the client sees that it is not whole.
    """
    try:
        with deadline:
            await run(deadline)
    except GatewayError as error:
        strip_tracebacks(error)
        if answer.started:
            why = escape_for_log(error.message)
            _log.warning("request %s: answer aborted: %s", answer.request_id or "-", why)
            answer.abort()
        else:
            await send_error(answer, error)


async def proxy_call(
    request: ClientRequest, answer: ClientResponse, asked: Operation, route: Route, turns: Deadline
) -> None:
    """Make the exchange of a request that one server answers.

    Raises GatewayError, and UpstreamResponseError with the answer to a question of the gateway's
    own.
    """
    await understand(request, asked, route.upstream, turns)
    with route.held.reserve() as holding:
        request = await decoded(request, asked, route, turns, holding)
        if asked.kind is OperationKind.INFER:
            await infer(request, answer, asked, route, turns)
        elif asked.kind is OperationKind.PREDICT:
            await predict(request, answer, asked, route, turns)
        else:
            await forward(request, answer, route, turns, model=model_name_of(asked))


async def _dispatch(
    request: ClientRequest,
    answer: ClientResponse,
    found: RouteMatch,
    route: Route,
    readiness: Readiness,
    turns: Deadline,
) -> None:
    with route.held.reserve() as holding:
        request = await decoded(request, found.asked, route, turns, holding)
        await _by_kind(request, answer, found, route, readiness, turns)


async def _by_kind(
    request: ClientRequest,
    answer: ClientResponse,
    found: RouteMatch,
    route: Route,
    readiness: Readiness,
    turns: Deadline,
) -> None:
    asked, upstreams = found.asked, found.upstreams
    match asked.kind:
        case OperationKind.LIVENESS:
            await live(answer)
        case OperationKind.READINESS:
            await ready(answer, readiness, turns)
        case OperationKind.SERVER_METADATA:
            await server_metadata(request, answer, route, upstreams, turns)
        case OperationKind.TRACE_SETTING:
            await trace_setting(request, answer, asked, route, upstreams, turns)
        case OperationKind.LOGGING:
            await log_setting(request, answer, route, upstreams, turns)
        case OperationKind.LOAD:
            await load(request, answer, asked, route, upstreams, turns)
        case OperationKind.INDEX:
            await repository_index(request, answer, route, upstreams, turns)
        case OperationKind.V1_MODEL | OperationKind.V1_MODELS:
            await v1_models(request, answer, asked, route, upstreams, turns)
        case OperationKind.ALL_STATISTICS:
            await statistics(request, answer, route, upstreams, turns)
        case _:
            raise AssertionError(f"{asked.kind} is neither forwarded nor known here")


async def send_error(answer: ClientResponse, error: GatewayError) -> None:
    """Answer with an error in the protocol's form."""
    FAILURE_LOG.write(error, answer.request_id)
    headers = CIMultiDict(error_headers(answer.request_id))
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, UnauthenticatedError):
        headers["WWW-Authenticate"] = error.challenge
    if error.kind is ErrorKind.UNSUPPORTED_ENCODING:
        headers["Accept-Encoding"] = ", ".join(CODINGS)  # RFC 9110, section 15.5.16
    await answer.send(error.kind.value.status, "", headers, error_body(error.message))


def error_headers(request_id: str) -> HeaderLines:
    """Give the headers of an error: with the id, a client can ask what the log says of it."""
    return (*_JSON, (REQUEST_ID, request_id)) if request_id else _JSON


def error_body(message: str) -> bytes:
    """Write an error in the protocol's form."""
    # What a message quotes of an HTTP header need not have been UTF-8.
    return orjson.dumps({"error": message.encode(errors="replace").decode()})
