"""A float is rounded once from its text, whatever form the text comes in."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.codec.elements.decode import decode_plainly
from gateway.codec.elements.rounding import MAX_EXACT_LENGTH
from gateway.codec.v2.request import read_json_fast
from gateway.protocol.datatypes import DATATYPES
from tests.codec import strategies
from tests.codec.exact_rounding import beside_middles, middle_above, nearest, packed
from tests.codec.reference_v1 import Declared
from tests.codec.v1.predict_requests import convert as convert_v1
from tests.codec.v2.conversions import Converted, convert_response, converted
from tests.support.scale import scaled


def of_request(texts: list[str], datatype: str) -> bytes:
    body = _body("inputs", texts, datatype)
    (tensor,) = converted(body).tensors
    assert isinstance(tensor, bytes)
    small = read_json_fast(body, 64)
    assert small is None or b"".join(small.chunks) == tensor
    return tensor


def of_json_response(texts: list[str], datatype: str) -> bytes:
    found = convert_response([_body("outputs", texts, datatype)])
    assert isinstance(found, Converted)
    return found.tensors


def of_v1_columns(texts: list[str], datatype: str) -> bytes:
    return _of_v1(f'{{"inputs":{{"x":[{",".join(texts)}]}}}}', datatype)


def of_v1_rows(texts: list[str], datatype: str) -> bytes:
    rows = ",".join(f'{{"x":{text}}}' for text in texts)
    return _of_v1(f'{{"instances":[{rows}]}}', datatype)


def of_plain_way(texts: list[str], datatype: str) -> bytes:
    return decode_plainly(f"[{','.join(texts)}]".encode(), DATATYPES[datatype]) or b""


def _body(kind: str, texts: list[str], datatype: str) -> bytes:
    entry = json.dumps({"name": "x", "datatype": datatype, "shape": [len(texts)]})[:-1]
    return f'{{"{kind}":[{entry},"data":[{",".join(texts)}]}}]}}'.encode()


def _of_v1(body: str, datatype: str) -> bytes:
    declared: Declared = {"x": (datatype, [-1])}
    request, _ = convert_v1([body.encode()], declared)
    return b"".join(request.chunks)


FORMS = [of_request, of_json_response, of_v1_columns, of_v1_rows, of_plain_way]


@pytest.mark.parametrize("form", FORMS)
@settings(strategies.LAW, max_examples=scaled(100))
@given(
    beside_middles(longest=60, datatypes=("FP16", "BF16", "FP32")), st.sampled_from([1, 1, 1, 300])
)
@example(("FP16", "2049.0000000000000000001"), 300)  # rounded twice, each of these goes down
@example(("BF16", "257.00000000000000000001"), 300)
@example(("FP32", "2785021513700485228e-19"), 300)
def test_any_number_near_a_tie_is_rounded_once(
    form: object, case: tuple[str, str], count: int
) -> None:
    assert callable(form)
    datatype, text = case
    expected = nearest(text, datatype)
    if expected is not None:
        half = nearest("0.5", datatype) or b""
        assert form(["0.5", text] * count, datatype) == (half + expected) * count


def test_short_numbers_are_no_longer_than_the_proof_allows() -> None:
    most_decimals = MAX_EXACT_LENGTH - len("0.")
    assert 5**most_decimals < 2**52 // 2**25
    assert 10**MAX_EXACT_LENGTH < 2**52


@pytest.mark.parametrize(("last", "bits"), [("0", 0), ("1", 1)])
def test_tie_of_the_least_doubles_is_decided_by_its_last_digit(last: str, bits: int) -> None:
    """With more than 768 digits, orjson 3.13 takes the odd one although the tie is exact."""
    _, digits, exponent = middle_above(0, "FP64").as_tuple()
    assert isinstance(exponent, int)
    text = "".join(map(str, digits)) + "0" * 60 + last
    number = f"{text[0]}.{text[1:]}e{exponent + len(digits) - 1}"
    assert of_plain_way(["1", number], "FP64")[8:] == packed(bits, "FP64")
