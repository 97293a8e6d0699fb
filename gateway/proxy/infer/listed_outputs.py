"""Servers that answer in binary form with just the outputs that a request lists."""

from __future__ import annotations

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.operations import Endpoint
from gateway.protocol.request_header import AnswerForm, with_outputs
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.infer.metadata import model_metadata
from gateway.proxy.interfaces import Route
from gateway.upstream.metadata_cache import ServerRefusalError


async def listing_outputs(
    header: bytes, answer: AnswerForm, asked: Endpoint, route: Route, deadline: Deadline
) -> bytes:
    """Have a request's header list all outputs, where the server needs it and the client does not.

    It stays as it is where the server does not tell what outputs there are: then they come as JSON.
    """
    if not route.upstream.dialect.lists_outputs or answer.binary_by_output:
        return header
    try:
        outputs = (await model_metadata(asked, route, deadline)).outputs
    except ServerRefusalError:
        outputs = ()  # what is wrong, its answer to the request itself tells
    except GatewayError as error:
        if error.kind is not ErrorKind.BAD_ANSWER:
            raise
        outputs = ()
    names = [output.name for output in outputs]
    return with_outputs(header, names) if names else header
