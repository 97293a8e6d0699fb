"""Servers that answer in binary form with just the outputs that a request lists."""

from __future__ import annotations

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.operations import Operation
from gateway.protocol.request_header import OutputEncoding, list_outputs
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.infer.metadata import model_metadata
from gateway.proxy.interfaces import Route
from gateway.upstream.metadata_cache import UpstreamResponseError


async def listing_outputs(
    header: bytes, answer: OutputEncoding, asked: Operation, route: Route, deadline: Deadline
) -> bytes:
    """Have a request's header list all outputs, where the server needs it and the client does not.

    It stays as it is where the server does not tell what outputs there are: then they come as JSON.
    """
    if not route.upstream.dialect.binary_only_if_listed or answer.binary_by_output:
        return header
    try:
        outputs = (await model_metadata(asked, route, deadline)).outputs
    except UpstreamResponseError:
        outputs = ()  # what is wrong, its answer to the request itself tells
    except GatewayError as error:
        if error.kind is not ErrorKind.BAD_RESPONSE:
            raise
        outputs = ()
    names = [output.name for output in outputs]
    return list_outputs(header, names) if names else header
