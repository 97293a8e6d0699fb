from itertools import product

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.protocol.dialects import JSON, KSERVE, TRITON, Dialect
from gateway.protocol.messages import ALL_BINARY, ALL_JSON, OutputEncoding
from gateway.protocol.request_header import HEADER_LENGTH
from gateway.protocol.response_header import ResponseAction, choose_response_action, reads_response

UNTOUCHED, FILL, WRITE_JSON = (
    ResponseAction.UNTOUCHED,
    ResponseAction.FILL,
    ResponseAction.WRITE_JSON,
)
ENCODE, UNLESS_FITTING = ResponseAction.ENCODE, ResponseAction.ENCODE_UNLESS_FITTING

MIXED = OutputEncoding(False, {"A": True, "B": False})
CAP = 10_000
LARGE = CAP + 1


def choose(
    dialect: Dialect,
    encoding: OutputEncoding,
    header_size: object = None,
    *,
    status: int = 200,
    any_base64: bool = False,
    coding: str | None = None,
) -> tuple[ResponseAction, int | None]:
    headers = {} if header_size is None else {HEADER_LENGTH: str(header_size)}
    if coding is not None:
        headers["Content-Encoding"] = coding
    made = CIMultiDictProxy(CIMultiDict(headers))
    return choose_response_action(status, made, dialect, encoding, any_base64, CAP)


@pytest.mark.parametrize(
    ("dialect", "encoding", "header_size", "action"),
    [
        (TRITON, ALL_BINARY, 5, UNTOUCHED),
        (TRITON, ALL_BINARY, None, FILL),
        (TRITON, ALL_JSON, 5, WRITE_JSON),
        (TRITON, ALL_JSON, None, FILL),
        (TRITON, MIXED, 5, ENCODE),
        (KSERVE, ALL_BINARY, 5, UNLESS_FITTING),
        (KSERVE, ALL_BINARY, LARGE, ENCODE),
        (KSERVE, ALL_JSON, 5, WRITE_JSON),
        (KSERVE, ALL_JSON, LARGE, ENCODE),
        (KSERVE, MIXED, 5, UNLESS_FITTING),
        (JSON, ALL_JSON, None, UNTOUCHED),
        (JSON, ALL_BINARY, None, ENCODE),
    ],
)
def test_action_depends_on_dialect_encoding_and_header_length(
    dialect: Dialect, encoding: OutputEncoding, header_size: int | None, action: ResponseAction
) -> None:
    size = None if action is UNTOUCHED else header_size
    assert choose(dialect, encoding, header_size) == (action, size)
    assert choose(dialect, encoding, header_size, status=400) == (UNTOUCHED, None)


@pytest.mark.parametrize("dialect", [KSERVE, JSON])
def test_json_is_read_if_its_text_becomes_base64(dialect: Dialect) -> None:
    assert choose(dialect, ALL_JSON, any_base64=True) == (ENCODE, None)


@pytest.mark.parametrize("dialect", [TRITON, KSERVE, JSON])
def test_response_is_touched_only_if_the_gateway_reads_it(dialect: Dialect) -> None:
    for encoding, any_base64 in product((ALL_BINARY, ALL_JSON, MIXED), (False, True)):
        untouched = not reads_response(dialect, encoding, any_base64)
        found, _ = choose(dialect, encoding, 5, any_base64=any_base64)
        assert (found is UNTOUCHED) is untouched
        if untouched:
            coded = choose(dialect, encoding, any_base64=any_base64, coding="gzip")
            assert coded == (UNTOUCHED, None)
