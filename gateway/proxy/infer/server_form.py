"""The form in which a server gets an infer request: binary, or JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from gateway.codec.v2.binary_request import write_binary_header
from gateway.protocol.operations import Operation
from gateway.protocol.response_header import reads_response
from gateway.proxy.body_io import prepend
from gateway.proxy.destination import Destination
from gateway.proxy.infer.convert_buffered_request import ReceivedRequest
from gateway.proxy.infer.json_upstream import json_body
from gateway.proxy.infer.response_plan import policies_for
from gateway.upstream.transport import Body

_UNRELATED_STATUSES: Final = frozenset((401, 403, 408, 413, 429, 502, 503, 504))
"""Errors whose reason is not the model's metadata."""


class ServerForm:
    """What the headers of a request say that a server gets.

    ``header_size`` is the size of the JSON before binary tensors, None for JSON alone. ``size`` is
    that of the whole body, None if it is not known. The client's Accept-Encoding stays unless the
    gateway ``reads_response``.
    """

    def __init__(
        self, content_type: str, size: int | None, header_size: int | None, reads_response: bool
    ) -> None:
        self.content_type: Final = content_type
        self.size: Final = size
        self.header_size: Final = header_size
        self.reads_response: Final = reads_response
        self.name: Final = "json" if header_size is None else "binary"

    def is_converted(self, from_json: bool) -> bool:
        """Tell whether tensors change between JSON, as the client sends them or not, and binary."""
        return from_json != (self.name == "json")


def write_for_server(
    received: ReceivedRequest, unlisted: tuple[str, ...], destination: Destination
) -> tuple[ServerForm, Body]:
    """Write a request in the form that the server takes: binary, or JSON.

    ``unlisted`` are outputs to list in it. Raises GatewayError (400) for what JSON cannot hold.
    """
    dialect, request = destination.upstream.dialect, received.request
    encoding = request.head.output_encoding
    is_read = reads_response(dialect, encoding, policies_for(encoding, destination).any_base64)
    if not dialect.binary:
        text = json_body(received.body, request, destination)
        text_size = sum(map(len, text)) if isinstance(text, list) else None
        return ServerForm("application/json", text_size, None, is_read), text
    header = write_binary_header(request, unlisted)
    size = len(header) + request.data_size
    form = ServerForm("application/octet-stream", size, len(header), is_read)
    if isinstance(received.body, AsyncIterator):
        return form, prepend([header], received.body)
    return form, [header, *received.body]


def check_metadata(
    status: int, operation: Operation, destination: Destination, received: ReceivedRequest
) -> None:
    """Recheck cached metadata after an error: the request may have been made from outdated ones.

    Statuses of overload, of a proxy and of a client too slow or a body too large say nothing of it.
    """
    upstream = destination.upstream
    if status < 400 or status in _UNRELATED_STATUSES:
        return
    if received.uses_metadata or upstream.dialect.binary_only_if_listed:
        upstream.metadata.recheck(operation.model or "", operation.version)
