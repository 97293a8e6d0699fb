"""All filters of bodies, in order: both paths go by this list.

The streaming path has each filter change the calls that it applies to. The fast path serves no call
that a filter applies to. Filters that look at heads alone are where heads are handled, which is
once for both paths: authentication.py, forwarded_headers.py. A mirror changes nothing, and copies
bodies on either path: mirror.py.
"""

from __future__ import annotations

from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.memory_budget import Reservation
from gateway.proxy.filters.body_filter import FilteredHead
from gateway.proxy.filters.cloud_content_types import CLOUD_CONTENT_TYPES
from gateway.proxy.filters.compression import COMPRESSION
from gateway.proxy.filters.decompression import DECOMPRESSION
from gateway.proxy.interfaces import Call, ClientResponse

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
