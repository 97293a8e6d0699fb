"""The JSON that once cost most CPU time per byte stays within a bound.

Times are CPU times, as multiples of what plain floats of the same size cost at the same moment. A
body that exceeds its bound is measured again and again, each time between two measurements of
floats, so that noise cannot fail a test.
"""

from __future__ import annotations

import random
import time
from contextlib import suppress
from dataclasses import dataclass

import orjson
import pytest

from gateway.codec.policies import JsonPolicies
from gateway.codec.v1.request import PredictRequestReader
from gateway.codec.v2.request import InferRequestReader
from gateway.codec.v2.response import ResponseEncoder
from gateway.errors import GatewayError
from gateway.protocol.messages import OutputEncoding
from gateway.protocol.tensors import MAX_TENSORS
from tests.codec.strategies_v1 import model

SIZE = 256 * 1024
PIECE = 128 * 1024
HEADER_CAP = 1 << 20

MOST_OF_NUMBERS = 34.0
"""The bound for numbers, in multiples of plain floats; the worst found was 26."""
MOST = 130.0
"""The bound for strings, objects and other members; the worst found was 98."""
TENSOR = 64 * 1024
"""Each tensor may cost as much as so many bytes of floats; limits.max_tensors caps the tensors."""

V1 = ("instances", "rows", "inputs")
Codec = InferRequestReader | ResponseEncoder | PredictRequestReader


@dataclass(frozen=True)
class Plan:
    """The composition of a body: ``elements`` repeated, or ``others`` beside one of them."""

    form: str
    datatype: str
    elements: tuple[str, ...]
    bound: float = MOST
    depth: int = 1
    tensors: int = 1
    others: str = ""

    def body(self) -> bytes:
        """Write the body of about SIZE bytes, padded with spaces."""
        around = "".join(
            ["," + self.others] * (SIZE // (len(self.others) + 1)) if self.others else ""
        )
        elements = self.elements
        if self.form == "rows":
            elements = tuple(f'{{"x":{element},"y":{element}}}' for element in elements)
        unit = ",".join(elements)
        size = 1 if self.others else SIZE // self.tensors
        data = ",".join([unit] * (size // (len(unit) + 1) + 1))
        array = "[" * self.depth + data + "]" * self.depth
        if self.form in V1:
            key = "inputs" if self.form == "inputs" else "instances"
            return f'{{"{key}":{array}{around}}}'.encode().ljust(SIZE)
        tensor = f'{{"name":"x","datatype":"{self.datatype}","shape":[1],"data":{array}}}'
        key = "outputs" if self.form == "json" else "inputs"
        return f'{{"{key}":[{",".join([tensor] * self.tensors)}]}}'.encode().ljust(SIZE)


def convert(form: str, datatype: str, body: bytes) -> None:
    """Convert a body, or have it refused."""
    codec = codec_of(form, datatype)
    with suppress(GatewayError):
        for start in range(0, len(body), PIECE):
            codec.feed(body[start : start + PIECE])
            while codec.step():
                pass
        codec.feed(b"", last=True)
        while codec.step():
            pass
        if isinstance(codec, PredictRequestReader):
            codec.finish("")
        else:
            codec.finish()


def codec_of(form: str, datatype: str) -> Codec:
    if form in V1:
        names = "xy" if form == "rows" else "x"
        return PredictRequestReader(model(dict.fromkeys(names, (datatype, [-1]))), HEADER_CAP, 64)
    if form == "json":
        encoding = OutputEncoding(False, {})
        return ResponseEncoder(None, encoding, JsonPolicies(), HEADER_CAP, 1 << 30)
    return InferRequestReader(HEADER_CAP, 64)


_DATA = orjson.dumps([random.Random(number).random() for number in range(13_500)])
_FLOATS = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[13500],"data":%b}]}' % _DATA


def seconds(form: str, datatype: str, body: bytes) -> float:
    start = time.process_time()
    convert(form, datatype, body)
    return (time.process_time() - start) / len(body)


def floats() -> float:
    """Measure plain floats, thirty times in a row: the clock may count whole milliseconds."""
    start = time.process_time()
    for _ in range(30):
        convert("infer", "FP32", _FLOATS)
    return (time.process_time() - start) / (30 * len(_FLOATS))


def times(plan: Plan) -> float:
    """Return how many times more CPU a body costs per byte than floats."""
    return seconds(plan.form, plan.datatype, plan.body()) / floats()


def least_cost(plan: Plan, bound: float) -> float:
    """Return the least of several measurements of a body that seems to exceed its bound."""
    least = times(plan)
    for _ in range(8):
        if least <= bound:
            break
        before = floats()
        took = seconds(plan.form, plan.datatype, plan.body())
        least = min(least, took / max(before, floats()))
    return least


# The worst bodies of the past, with what they cost before they were fixed.
WORST = {
    "tiny arrays of strings (460)": Plan("infer", "BYTES", ('"a"',), tensors=MAX_TENSORS),
    "members of V1 that are no tensors (70000)": Plan("inputs", "FP32", ("1",), others='"x":[]'),
    "V1 strings with a brace (1000)": Plan("instances", "BYTES", ('"{"',)),
    "V1 strings and base64 (500)": Plan("instances", "BYTES", ('"a"', '{"b64":"QQ=="}')),
    "V1 rows of infinities and long integers (2600)": Plan(
        "rows", "FP32", ("[100000000000000000000]", "[-Infinity]")
    ),
    "V1 empty arrays of strings (133)": Plan("inputs", "BYTES", ("[[[[]]]]",), depth=2),
    "ties that do not fit (115)": Plan("inputs", "FP16", ("1e5",), MOST_OF_NUMBERS),
    "base64 of V1 (270)": Plan("instances", "BYTES", ('{"b64":"QQ=="}',)),
    "numbers that do not fit, in a response": Plan("json", "INT8", ("1.5", "[1]"), MOST_OF_NUMBERS),
    "numbers beyond 64 bits": Plan("infer", "BF16", ("100000000000000000000",), MOST_OF_NUMBERS),
}


@pytest.mark.parametrize("name", WORST)
def test_worst_known_json_stays_within_its_bound(name: str) -> None:
    plan = WORST[name]
    bound = plan.bound + plan.tensors * TENSOR / SIZE
    assert len(plan.body()) >= SIZE
    assert least_cost(plan, bound) <= bound
