"""An infer exchange: the request into the server's form, the answer into the client's."""

from __future__ import annotations

from gateway.codec.v2.json_request import JsonRequest
from gateway.protocol.dialects import Dialect
from gateway.protocol.model_name import named_by
from gateway.protocol.operations import Endpoint
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.headers import HEADER_LENGTH, with_body
from gateway.proxy.infer.cloud_content_types import in_ordinary_form
from gateway.proxy.infer.convert_request import Converted, convert
from gateway.proxy.infer.convert_response import relay_answer
from gateway.proxy.infer.json_upstream import json_body, passes_as_it_is, relay_json_answer
from gateway.proxy.infer.upstream_guards import check_infer
from gateway.proxy.interfaces import ClientAnswer, ClientRequest, Route
from gateway.proxy.retry import Attempts
from gateway.upstream.transport import UpstreamRequest


async def infer(
    request: ClientRequest,
    answer: ClientAnswer,
    asked: Endpoint,
    route: Route,
    deadline: Deadline,
) -> None:
    """Answer an infer request of any form: JSON, binary, mixed or raw binary."""
    answer = in_ordinary_form(request, answer)
    with route.held.holding() as holding:
        converted = await convert(request, asked, route, deadline, holding)
        holding.is_now(converted.held)
        await send_converted(request, answer, asked, converted, route, deadline)


async def send_converted(
    request: ClientRequest,
    answer: ClientAnswer,
    asked: Endpoint,
    converted: Converted,
    route: Route,
    deadline: Deadline,
) -> None:
    """Have a server answer a request that was converted; ``request`` gives its head.

    Raises GatewayError (400), before any server sees it, as ``check_infer`` does.
    """
    await check_infer(converted.facts, asked, route, deadline)
    dialect = route.upstream.dialect
    if dialect.binary:
        upstream_request, relay = _binary_request(request, converted, dialect), relay_answer
    else:
        upstream_request, relay = _json_request(request, converted, route), relay_json_answer
    async with Attempts(route, upstream_request, deadline, model=named_by(asked)) as attempt:
        response = attempt.response
        if response.status != 200 and (converted.by_metadata or dialect.lists_outputs):
            # The header may have been made from metadata that is no longer true.
            route.upstream.metadata.drop(asked.model or "")
        await relay(response, answer, converted.answer, route, attempt.url, deadline)


def _binary_request(
    request: ClientRequest, converted: Converted, dialect: Dialect
) -> UpstreamRequest:
    changed = {
        "Content-Type": "application/octet-stream",
        "Content-Length": str(converted.size),
        HEADER_LENGTH: str(converted.header_size),
    }
    headers = with_body(request.headers, changed)
    if not (converted.answer.all_binary and dialect.answers_as_asked):
        # The answer has to be read here.
        headers.popall("Accept-Encoding", None)
    return UpstreamRequest(request.method, request.target, headers, converted.body)


def _json_request(request: ClientRequest, converted: Converted, route: Route) -> UpstreamRequest:
    """Make the request for a server that takes JSON only."""

    def writer() -> JsonRequest:
        written_as, as_base64 = converted.written_as, converted.answer.as_base64
        return JsonRequest(converted.header_size, route.policies, written_as, as_base64)

    headers = with_body(request.headers, {"Content-Type": "application/json"})
    if not passes_as_it_is(converted.answer, route):
        # The answer has to be read here.
        headers.popall("Accept-Encoding", None)
    body = json_body(converted.body, converted.size, writer, route.turns)
    return UpstreamRequest(request.method, request.target, headers, body)
