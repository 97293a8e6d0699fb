"""Heads that servers of a dialect do not accept."""

import pytest
from multidict import CIMultiDict

from gateway.errors import GatewayError
from gateway.protocol.dialects import KSERVE, TRITON
from gateway.upstream.transport import UpstreamRequest, check_lengths

LONGEST = TRITON.max_head_part or 0


def _received(target: str = "/v2", **headers: str) -> UpstreamRequest:
    return UpstreamRequest("GET", target, CIMultiDict({"Host": "x", **headers}))


@pytest.mark.parametrize(
    "request_",
    [
        _received(),
        _received("/" * LONGEST),
        _received(a="x" * LONGEST),
        _received(**{"a" * 999: ""}),
    ],
)
def test_head_within_the_limit_of_a_server_passes(request_: UpstreamRequest) -> None:
    check_lengths(request_, TRITON)


@pytest.mark.parametrize(
    ("request_", "part"),
    [
        (_received("/" * (LONGEST + 1)), "the path and query has 8177 bytes"),
        (_received(a="x" * (LONGEST + 1)), "header a has 8177 bytes"),
        (_received(**{"a" * 9000: ""}), "the name of a header has 9000 bytes"),
    ],
)
def test_head_beyond_the_limit_of_a_server_is_refused(request_: UpstreamRequest, part: str) -> None:
    with pytest.raises(GatewayError) as caught:
        check_lengths(request_, TRITON)
    assert caught.value.kind.value.status == 400
    assert caught.value.message == f"{part}; the server takes at most {LONGEST}"
    check_lengths(request_, KSERVE)
