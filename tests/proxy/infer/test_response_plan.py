from dataclasses import replace

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.policies import BytesEncoding, JsonPolicies
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.dialects import JSON, KSERVE, TRITON, Dialect
from gateway.protocol.messages import ALL_BINARY, ALL_JSON, OutputEncoding
from gateway.proxy.infer.response_plan import ResponseAction, plan_response, reads_response
from tests.support.doubles.streaming import LIMITS, make_destination
from tests.support.inference_messages import HEADER_LENGTH

UNTOUCHED, FILL, WRITE_JSON = (
    ResponseAction.UNTOUCHED,
    ResponseAction.FILL,
    ResponseAction.WRITE_JSON,
)
ENCODE, UNLESS_FITTING = ResponseAction.ENCODE, ResponseAction.ENCODE_UNLESS_FITTING

MIXED = OutputEncoding(False, {"A": True, "B": False})
BASE64_A = OutputEncoding(False, {}, frozenset(("A",)))
BASE64 = JsonPolicies(bytes_encoding=BytesEncoding.BASE64)
LARGE = LIMITS.max_inference_header_bytes + 1


def plan(
    dialect: Dialect,
    encoding: OutputEncoding,
    header_size: object = None,
    *,
    status: int = 200,
    policies: JsonPolicies | None = None,
    coding: str | None = None,
) -> tuple[ResponseAction, int | None]:
    headers = {} if header_size is None else {HEADER_LENGTH: str(header_size)}
    if coding is not None:
        headers["Content-Encoding"] = coding
    made = plan_response(
        status,
        CIMultiDictProxy(CIMultiDict(headers)),
        encoding,
        make_destination(dialect=dialect, policies=policies),
    )
    return made.action, made.header_size


@pytest.mark.parametrize(
    ("dialect", "encoding", "header_size", "action"),
    [
        (TRITON, ALL_BINARY, 5, UNTOUCHED),
        (TRITON, ALL_BINARY, None, FILL),
        (TRITON, ALL_JSON, 5, WRITE_JSON),
        (TRITON, ALL_JSON, None, FILL),
        (TRITON, MIXED, 5, ENCODE),
        (TRITON, MIXED, None, FILL),
        (KSERVE, ALL_BINARY, 5, UNLESS_FITTING),
        (KSERVE, ALL_BINARY, LARGE, ENCODE),
        (KSERVE, ALL_BINARY, None, ENCODE),
        (KSERVE, ALL_JSON, 5, WRITE_JSON),
        (KSERVE, ALL_JSON, 0, WRITE_JSON),
        (KSERVE, ALL_JSON, LARGE, ENCODE),
        (KSERVE, ALL_JSON, None, FILL),
        (KSERVE, BASE64_A, None, ENCODE),
        (KSERVE, MIXED, 5, UNLESS_FITTING),
        (JSON, ALL_JSON, None, UNTOUCHED),
        (JSON, BASE64_A, None, ENCODE),
        (JSON, ALL_BINARY, None, ENCODE),
        (JSON, MIXED, None, ENCODE),
    ],
)
def test_plan_depends_on_dialect_encoding_and_header_length(
    dialect: Dialect, encoding: OutputEncoding, header_size: int | None, action: ResponseAction
) -> None:
    made, size = plan(dialect, encoding, header_size)
    assert made is action
    assert size == (None if action is UNTOUCHED else header_size)
    assert plan(dialect, encoding, header_size, status=400) == (UNTOUCHED, None)


@pytest.mark.parametrize("dialect", [TRITON, KSERVE, JSON])
@pytest.mark.parametrize("encoding", [ALL_BINARY, ALL_JSON, MIXED, BASE64_A])
def test_response_is_untouched_or_checked_unless_the_gateway_reads_it(
    dialect: Dialect, encoding: OutputEncoding
) -> None:
    if not reads_response(encoding, make_destination(dialect=dialect)):
        assert plan(dialect, encoding, 5) == (UNTOUCHED, None)
        assert plan(dialect, encoding, coding="gzip") == (UNTOUCHED, None)
    else:
        assert plan(dialect, encoding, 5)[0] is not UNTOUCHED


def test_requested_base64_is_added_to_the_policies_of_the_route() -> None:
    destination = make_destination(dialect=JSON)
    made = plan_response(200, CIMultiDictProxy(CIMultiDict()), BASE64_A, destination)
    assert made.policies == replace(destination.policies, as_base64=frozenset(("A",)))
    assert plan(JSON, ALL_JSON, policies=BASE64) == (ENCODE, None)


@pytest.mark.parametrize("size", ["x", "-1", "", "1" * 20, LARGE])
def test_invalid_or_too_large_header_length_is_a_502(size: object) -> None:
    with pytest.raises(GatewayError) as caught:
        plan(TRITON, ALL_JSON, size)
    assert caught.value.kind is ErrorKind.BAD_RESPONSE
    assert plan(TRITON, ALL_BINARY, size) == (UNTOUCHED, None)
