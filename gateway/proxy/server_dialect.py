"""What an exchange has to know of how its server speaks, before it begins."""

from __future__ import annotations

from collections.abc import Iterable

from multidict import CIMultiDict

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.operations import OPERATION_KINDS, Operation, strip_version
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.headers import HEADER_LENGTH
from gateway.proxy.interfaces import ClientRequest, Upstream
from gateway.upstream.pool.member import Outcome

_OF_FORMS = "application/x-www-form-urlencoded"


async def understand(
    request: ClientRequest, asked: Operation, upstream: Upstream, deadline: Deadline
) -> None:
    """Wait until it is known how a server is spoken to, where that matters to the request.

    Raises GatewayError: 501 for a version where the server knows none, and as ``until_known``.
    """
    if asked.kind in OPERATION_KINDS["infer"] or asked.version is not None:
        await until_known([upstream], deadline)
    if asked.version is not None and not upstream.dialect.versioned_paths:
        raise GatewayError(
            ErrorKind.UNSUPPORTED,
            f"upstream '{upstream.name}' ({upstream.dialect.name}) has no versions of models; "
            f"without one, this is {strip_version(request.target)}",
        )


async def until_known(upstreams: Iterable[Upstream], deadline: Deadline) -> None:
    """Wait until it is known how the servers of upstreams speak; they are asked if need be.

    Raises GatewayError as an exchange does whose server cannot be reached (503), does not answer
    in time (504), or answers what makes no sense (502).
    """
    for upstream in upstreams:
        if upstream.dialect_state.dialect is None:
            await _ask(upstream, deadline)
            deadline.expect_client()


async def _ask(upstream: Upstream, deadline: Deadline) -> None:
    """Wait until the dialect is known; a call that fails for it counts as one of an endpoint."""
    loan = upstream.pool.lease()
    deadline.expect_server(loan.acquire().url)
    try:
        await upstream.dialect_state.wait_until_known()
    except BaseException as error:
        loan.finish(error)
        raise
    loan.release(Outcome.UNKNOWN)  # another endpoint may have told it


def _says_type(request: ClientRequest) -> bool:
    """Tell whether a request says of what type its body is.

    Nothing of either protocol is a form: so curl calls whatever it is not told the type of.
    """
    said = request.headers.get("Content-Type")
    is_ours = request.target.startswith(("/v1/", "/v2/"))
    return said is not None and not (is_ours and said.startswith(_OF_FORMS))


async def typed(request: ClientRequest, upstream: Upstream, deadline: Deadline) -> CIMultiDict[str]:
    """Give the headers of a request that passes as it is.

    Where it does not say of what type its body is, servers are told that want to be.
    """
    headers = CIMultiDict(request.headers)
    if request.content_length == 0 or _says_type(request):
        return headers
    await until_known([upstream], deadline)
    if upstream.dialect.requires_json_type:
        binary = HEADER_LENGTH in headers
        headers["Content-Type"] = "application/octet-stream" if binary else "application/json"
    return headers
