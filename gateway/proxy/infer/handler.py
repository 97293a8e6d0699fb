"""An infer exchange: the request into the server's form, the answer into the client's."""

from __future__ import annotations

from gateway.codec.v2.json_request import JsonRequestConverter
from gateway.protocol.dialects import Dialect
from gateway.protocol.operations import Operation, model_name_of
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.headers import HEADER_LENGTH, with_body
from gateway.proxy.infer.cloud_content_types import in_ordinary_form
from gateway.proxy.infer.convert_request import Converted, convert
from gateway.proxy.infer.convert_response import relay_answer
from gateway.proxy.infer.json_upstream import json_body, passes_as_it_is, relay_json_answer
from gateway.proxy.infer.upstream_guards import check_infer
from gateway.proxy.interfaces import ClientRequest, ClientResponse, Route
from gateway.proxy.retry import UpstreamCall
from gateway.upstream.transport import UpstreamRequest


async def infer(
    request: ClientRequest,
    answer: ClientResponse,
    asked: Operation,
    route: Route,
    deadline: Deadline,
) -> None:
    """Answer an infer request of any form: JSON, binary, mixed or raw binary."""
    answer = in_ordinary_form(request, answer)
    with route.held.reserve() as holding:
        converted = await convert(request, asked, route, deadline, holding)
        holding.resize(converted.held)
        await send_converted(request, answer, asked, converted, route, deadline)


async def send_converted(
    request: ClientRequest,
    answer: ClientResponse,
    asked: Operation,
    converted: Converted,
    route: Route,
    deadline: Deadline,
) -> None:
    """Have a server answer a request that was converted; ``request`` gives its head.

    Raises GatewayError (400), before any server sees it, as ``check_infer`` does.
    """
    await check_infer(converted.features, asked, route, deadline)
    dialect = route.upstream.dialect
    if dialect.binary:
        upstream_request, relay = _binary_request(request, converted, dialect), relay_answer
    else:
        upstream_request, relay = _json_request(request, converted, route), relay_json_answer
    async with UpstreamCall(
        route, upstream_request, deadline, model=model_name_of(asked)
    ) as attempt:
        response = attempt.response
        if response.status != 200 and (converted.by_metadata or dialect.binary_only_if_listed):
            # The header may have been made from metadata that is no longer true.
            route.upstream.metadata.invalidate(asked.model or "")
        await relay(response, answer, converted.output_encoding, route, attempt.url, deadline)


def _binary_request(
    request: ClientRequest, converted: Converted, dialect: Dialect
) -> UpstreamRequest:
    changed = {
        "Content-Type": "application/octet-stream",
        "Content-Length": str(converted.size),
        HEADER_LENGTH: str(converted.header_size),
    }
    headers = with_body(request.headers, changed)
    if not (converted.output_encoding.all_binary and dialect.honors_output_encoding):
        # The answer has to be read here.
        headers.popall("Accept-Encoding", None)
    return UpstreamRequest(request.method, request.target, headers, converted.body)


def _json_request(request: ClientRequest, converted: Converted, route: Route) -> UpstreamRequest:
    """Make the request for a server that takes JSON only."""

    def writer() -> JsonRequestConverter:
        input_encodings, as_base64 = converted.input_encodings, converted.output_encoding.as_base64
        return JsonRequestConverter(
            converted.header_size, route.policies, input_encodings, as_base64
        )

    headers = with_body(request.headers, {"Content-Type": "application/json"})
    if not passes_as_it_is(converted.output_encoding, route):
        # The answer has to be read here.
        headers.popall("Accept-Encoding", None)
    body = json_body(converted.body, converted.size, writer, route.scheduler)
    return UpstreamRequest(request.method, request.target, headers, body)
