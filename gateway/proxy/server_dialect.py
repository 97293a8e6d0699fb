"""Waits for the server's dialect and adapts headers to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError, upstream_name
from gateway.protocol.operations import OPERATION_KINDS, OperationKind, strip_version
from gateway.protocol.request_header import HEADER_LENGTH
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.destination import Upstream
from gateway.proxy.interfaces import Call, ClientRequest
from gateway.upstream.pool.member import Outcome

_FORM_TYPE = "application/x-www-form-urlencoded"


async def prepare_dialect(call: Call) -> None:
    """Wait until the dialect is known, if the operation depends on it.

    Raises GatewayError: 501 for a version at a server without versions, and as
    ``wait_for_dialects``.
    """
    operation, upstream = call.operation, call.destination.upstream
    is_converted = operation.kind in OPERATION_KINDS["infer"] or (
        operation.kind is OperationKind.GENERATE and upstream.speaks_grpc
    )
    if is_converted or operation.version is not None:
        await wait_for_dialects([upstream], call.deadline)
    if operation.version is not None and not upstream.dialect.versioned_paths:
        is_grpc = call.response.is_grpc
        if is_grpc and upstream.speaks_grpc:
            return  # it passes untouched, and the server ignores the version
        instead = "leave it out" if is_grpc else f"use {strip_version(call.request.target)}"
        raise GatewayError(
            ErrorKind.UNSUPPORTED,
            f"{upstream_name(upstream.name)} ({upstream.dialect.name}) does not support model "
            f"versions; {instead}",
        )


async def wait_for_dialects(upstreams: Iterable[Upstream], deadline: Deadline) -> None:
    """Wait until the dialects of all upstreams are known; servers are queried if need be.

    Raises GatewayError as a call does whose server is unreachable (503), is late (504) or sends an
    invalid response (502).
    """
    for upstream in upstreams:
        if upstream.dialect_state.dialect is None:
            await _detect(upstream, deadline)
            deadline.expect_client()


async def _detect(upstream: Upstream, deadline: Deadline) -> None:
    """Wait for the detection of a dialect; its failure counts as a failed call of an endpoint."""
    lease = upstream.pool.lease()
    deadline.expect_server(lease.acquire().name)
    try:
        await upstream.dialect_state.wait_until_known()
    except BaseException as error:
        lease.finish(error)
        raise
    lease.release(Outcome.UNKNOWN)  # the dialect may come from another endpoint


def has_content_type(target: str, headers: Mapping[str, str]) -> bool:
    """Tell whether the headers of a request to ``target`` state the type of its body.

    A form is no body of either protocol: curl calls every body a form unless told otherwise.
    """
    content_type = headers.get("Content-Type")
    is_inference_path = target.startswith(("/v1/", "/v2/"))
    return content_type is not None and not (
        is_inference_path and content_type.startswith(_FORM_TYPE)
    )


async def headers_with_type(
    request: ClientRequest, upstream: Upstream, deadline: Deadline
) -> CIMultiDict[str]:
    """Return the headers of a request that passes through.

    A Content-Type is added if the request has none and the dialect requires one.
    """
    headers = CIMultiDict(request.headers)
    if request.content_length == 0 or has_content_type(request.target, request.headers):
        return headers
    await wait_for_dialects([upstream], deadline)
    if upstream.dialect.requires_json_type:
        is_binary = HEADER_LENGTH in headers
        headers["Content-Type"] = "application/octet-stream" if is_binary else "application/json"
    return headers
