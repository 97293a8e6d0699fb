"""All filters of bodies: compression, decompression, and clouds' content types.

The streaming path has each filter change the calls that it applies to. The fast path serves no call
that a filter applies to. Filters that look at heads alone are where heads are handled, which is
once for both paths: authentication.py, forwarded_headers.py. A mirror changes nothing, and copies
bodies on either path: mirror.py.
"""

from __future__ import annotations

from dataclasses import replace

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.protocol.cloud_types import (
    Cloud,
    format_cloud_type,
    is_cloud_type,
    parse_cloud_type,
    resolve_header_size,
)
from gateway.protocol.operations import OperationKind
from gateway.protocol.request_header import HEADER_LENGTH, header_length
from gateway.protocol.response_header import is_success
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.filters.compression import COMPRESSION, DECOMPRESSION
from gateway.proxy.filters.interfaces import BodyFilter, FilteredHead, WrappedResponse
from gateway.proxy.interfaces import Call, ClientResponse


def _has_cloud_type(head: FilteredHead) -> bool:
    """Tell whether the Content-Type may state a header length."""
    content_types = head.headers.getall("Content-Type", ())
    return head.operation.kind is OperationKind.INFER and any(map(is_cloud_type, content_types))


async def _translate(call: Call, _: Reservation) -> Call:
    """Move the header length of a request from its Content-Type to the header.

    The response has its header length in the Content-Type if the cloud expects that. Raises
    GatewayError (400) for a type that is invalid, or repeated, and for a length that is invalid,
    larger than the body, or not the one of Inference-Header-Content-Length.
    """
    request, headers = call.request, call.request.headers
    cloud_type = parse_cloud_type(", ".join(headers.getall("Content-Type")))
    assert cloud_type is not None
    stated = header_length(headers)
    size = resolve_header_size(cloud_type, stated, request.content_length)
    translated = CIMultiDict(headers)
    translated["Content-Type"] = "application/json" if size is None else "application/octet-stream"
    if size is not None:
        translated[HEADER_LENGTH] = str(size)
    request.headers = CIMultiDictProxy(translated)
    cloud = cloud_type.cloud
    if not cloud.length_in_response_type:
        return call
    return replace(call, response=_CloudTypedResponse(call.response, cloud))


CLOUD_CONTENT_TYPES = BodyFilter(
    frozenset(("content-type",)), _has_cloud_type, change_call=_translate
)
"""Reads header lengths from the Content-Type of requests, and writes them there in responses."""


class _CloudTypedResponse(WrappedResponse):
    """Moves the header length of a response into its Content-Type."""

    def __init__(self, response: ClientResponse, cloud: Cloud) -> None:
        super().__init__(response)
        self._cloud = cloud

    def change_head(self, status: int, headers: CIMultiDict[str], size: int | None) -> None:
        """Change the Content-Type of a response with a header length."""
        header_size = headers.get(HEADER_LENGTH, "")
        if is_success(status) and header_size.isascii() and header_size.isdigit():
            del headers[HEADER_LENGTH]
            headers["Content-Type"] = format_cloud_type(self._cloud, header_size)


BODY_FILTERS = (COMPRESSION, DECOMPRESSION, CLOUD_CONTENT_TYPES)

FILTERED_HEADERS = frozenset(name for each in BODY_FILTERS for name in each.header_names)
"""Headers, in lower case, that decide which filters apply."""


def any_filter_applies(head: FilteredHead) -> bool:
    """Tell whether a call must be streamed, because a filter needs its body."""
    return any(each.applies(head) for each in BODY_FILTERS)


def filter_response(
    response: ClientResponse, head: FilteredHead, scheduler: ConversionScheduler
) -> ClientResponse:
    """Return the response as the filters want it, before anything else happens to the call."""
    for each in BODY_FILTERS:
        if each.wrap_response is not None and each.applies(head):
            response = each.wrap_response(response, head, scheduler)
    return response


async def filter_call(call: Call, reservation: Reservation) -> Call:
    """Return the call as the filters want it, when it is admitted.

    ``reservation`` counts the buffered bytes while the request is used. Raises GatewayError: 400
    for a request that a filter cannot read, 415 for an unknown content coding.
    """
    for each in BODY_FILTERS:
        if each.change_call is not None:
            request = call.request
            if each.applies(FilteredHead(request.method, request.headers, call.operation)):
                call = await each.change_call(call, reservation)
    return call
