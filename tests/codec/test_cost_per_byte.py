"""A search for the JSON that costs most CPU time per byte.

A hill climbing search with a fixed seed composes bodies of building blocks. Times are CPU times, as
multiples of what plain floats of the same size cost at the same moment. A body that exceeds its
bound is measured again and again, each time between two measurements of floats, so that noise
cannot fail a test. TENSORGATE_FUZZ_SECONDS in the environment sets the duration.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import orjson
import pytest

from gateway.codec.policies import JsonPolicies
from gateway.codec.v1.request import PredictRequestReader
from gateway.codec.v2.buffered_request import read_json_fast
from gateway.codec.v2.request import InferRequestReader
from gateway.codec.v2.response import ResponseConverter, encoded_converter
from gateway.errors import GatewayError
from gateway.protocol.messages import OutputEncoding
from gateway.protocol.tensors import MAX_TENSORS
from tests.codec.strategies_v1 import model
from tests.support.scale import fuzz_seconds

SECONDS = fuzz_seconds(8)
SIZE = 256 * 1024
PIECE = 128 * 1024
HEADER_CAP = 1 << 20

MOST_OF_NUMBERS = 34.0
"""The bound for numbers, in multiples of plain floats.

The worst found was 26, for numbers invalid for their datatype in a response that stays JSON. For
those beyond 64 bits it was 15.
"""
MOST = 130.0
"""The bound for all else: escaped strings, objects, V1 rows, and what
limits.max_inference_header_bytes caps.

The worst found was 98.
"""
TENSOR = 64 * 1024
"""Each tensor may cost as much as so many bytes of floats; limits.max_tensors caps the tensors.

The worst found was 53 KiB, for BF16 with null and integers beyond 64 bits.
"""

NUMBERS = (
    *("1", "-1", "0", "1.5", "1e5", "-1E-5", "0.1234567890123456789012345", "true", "false"),
    *("NaN", "-Infinity", "100000000000000000000", "9" * 400, "null", "1e400", "[1]", "[]", "1 "),
    *("[[[[]]]]", "[[1],[2]]", "-0", "01", "+1", "1.", "\n1", "x"),
)
TEXTS = (
    *('""', '"a"', '"abcdefghijklmnop"', r'"\n"', r'"\u0041"', r'"\\"', r'"\""', r'"\ud83d\ude00"'),
    *('"]"', '","', '"{"', '["a"]', '"é"', '"😀"', '"QQ=="', '" "', '"a" ', r'"\ud800"'),
    *('"' + "x" * 40_000 + '"', '"' + r"\u0041" * 9000 + '"', '"data"', r'"\"data\":["', '"NaN"'),
)
OBJECTS = (
    *('{"b64":"QQ=="}', '{"b64":""}', '{"x":1}', '{"x":[1]}', '{"x":"a"}', '{"x":NaN}', "{}"),
    *(
        '{"x":1,"x":1}',
        '{"\\u0078":1}',
        '{"x":{"b64":"QQ"}}',
        '{"x":["a"]}',
        '{"x":-0}',
        '{"a":{}}',
    ),
    *('{"data":1}', '{"data":[1]}', '{"x":1.5}', '{"x":[]}', '{"x":true}', '{"x":9e99}'),
)
OTHERS = (
    *('"data":1', '"data"', '"x":[]', '"a":{"data":"b"}', '"id":"' + "a" * 999 + '"', '"k":"["'),
    *('"parameters":{}', '"shape":[1]', '"outputs":[]', '"datatype":"INT8"', " ", '"":""', '"x":1'),
)
DATATYPES = ("FP32", "FP16", "FP64", "BF16", "INT8", "UINT64", "BOOL", "BYTES")
BASE64 = '"parameters":{"content_type":"base64"}'

Pool = tuple[str, ...]
Codec = InferRequestReader | ResponseConverter[Any] | PredictRequestReader


@dataclass(frozen=True)
class Plan:
    """The composition of a body."""

    form: str
    datatype: str
    elements: tuple[str, ...]
    depth: int
    """Brackets around all elements."""
    tensors: int
    others: tuple[str, ...]
    """Members beside the tensors: repeated, they fill a tenth of the body, or all of it."""
    mostly_others: bool
    base64: bool
    end: str
    """What replaces the last element."""

    def body(self) -> bytes:
        """Write the body of about SIZE bytes, padded with spaces."""
        return self._text().encode().ljust(SIZE)

    def _text(self) -> str:
        around = self._repeated(self.others, SIZE if self.mostly_others else SIZE // 10)
        size = 1 if self.mostly_others and self.others else SIZE // self._count
        elements = self.elements
        if self.form == "rows":
            elements = tuple(f'{{"x":{element},"y":{element}}}' for element in elements)
        data = self._repeated(elements, size) + ("," + self.end if self.end else "")
        array = "[" * self.depth + data + "]" * self.depth
        if self.form in V1:
            key = "inputs" if self.form == "inputs" else "instances"
            return f'{{"{key}":{array}{"," + around if self.others else ""}}}'
        encoded = BASE64 + "," if self.base64 else ""
        tensor = f'{{"name":"x","datatype":"{self.datatype}","shape":[1],{encoded}"data":{array}}}'
        key = "outputs" if self.form in ANSWERS else "inputs"
        tensors = ",".join([tensor] * self._count)
        if self.others and self.form == "infer in front":
            return f'{{"{key}":[{{{around},{tensor[1:]}]}}'
        return f'{{"{key}":[{tensors}]{"," + around if self.others else ""}}}'

    @property
    def _count(self) -> int:
        return 1 if self.form in V1 else self.tensors

    @staticmethod
    def _repeated(parts: tuple[str, ...], size: int) -> str:
        unit = ",".join(parts)
        return ",".join([unit] * (size // (len(unit.encode()) + 1) + 1)) if parts else ""

    @property
    def bound(self) -> float:
        """Return the multiple of plain floats that the body may cost."""
        parts = (*self.elements, *self.others, self.end or "1")
        pure = self.datatype != "BYTES" and all(part in NUMBERS for part in parts)
        pure = pure and self.form != "rows"  # each is an object
        return (MOST_OF_NUMBERS if pure else MOST) + self._count * TENSOR / SIZE


def changed(plan: Plan, rng: random.Random, pool: Pool) -> Plan:
    """Change one or two things."""
    elements = tuple(rng.choice(pool) for _ in range(rng.choice((1, 1, 2, 3))))
    changes: list[Callable[[Plan], Plan]] = [
        lambda plan: replace(plan, form=rng.choice(FORMS)),
        lambda plan: replace(plan, datatype=rng.choice(DATATYPES)),
        lambda plan: replace(plan, elements=elements),
        lambda plan: replace(plan, elements=(*plan.elements[-3:], rng.choice(pool))),
        lambda plan: replace(plan, depth=rng.choice((1, 1, 2, 3, 60))),
        lambda plan: replace(plan, tensors=rng.choice((1, 1, 2, 30, MAX_TENSORS))),
        lambda plan: replace(plan, base64=not plan.base64),
        lambda plan: replace(plan, end=rng.choice(("", rng.choice(pool)))),
    ]
    if pool is not NUMBERS:
        others = tuple(rng.choice(OTHERS) for _ in range(rng.randrange(3)))
        changes.append(lambda plan: replace(plan, others=others, mostly_others=rng.random() < 0.4))
    for change in rng.sample(changes, rng.choice((1, 1, 2, 3))):
        plan = change(plan)
    return plan


V1 = ("instances", "rows", "inputs")
ANSWERS = ("binary", "json", "base64", "mixed")
FORMS = ("infer", "infer in front", "small", *V1, *ANSWERS)


def convert(form: str, datatype: str, body: bytes) -> None:
    """Convert a body, or have it refused."""
    if form == "small":
        read_json_fast(body, 64)
        return
    codec = codec_of(form, datatype, len(body))
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


def codec_of(form: str, datatype: str, size: int) -> Codec:
    if form in V1:
        names = "xy" if form == "rows" else "x"
        return PredictRequestReader(model(dict.fromkeys(names, (datatype, [-1]))), HEADER_CAP, 64)
    if form == "mixed":
        return encoded_converter(
            size, OutputEncoding(False, {}), JsonPolicies(), HEADER_CAP, 1 << 30
        )
    if form in ANSWERS:
        policies = JsonPolicies(as_base64=frozenset("x" if form == "base64" else ""))
        encoding = OutputEncoding(form == "binary", {})
        return encoded_converter(None, encoding, policies, HEADER_CAP, 1 << 30)
    return InferRequestReader(HEADER_CAP, 64)


_FLOATS = orjson.dumps(
    {
        "inputs": [
            {
                "name": "x",
                "datatype": "FP32",
                "shape": [13_500],
                "data": [random.Random(number).random() for number in range(13_500)],
            }
        ]
    }
)


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


def exceeds(plan: Plan) -> float:
    """Return the least of several measurements of a body that seems to exceed its bound."""
    least = times(plan)
    for _ in range(8):
        if least <= plan.bound:
            break
        before = floats()
        took = seconds(plan.form, plan.datatype, plan.body())
        least = min(least, took / max(before, floats()))
    return least


def search(rng: random.Random, pool: Pool, until: float) -> None:
    """Climb from random bodies to ever more costly ones; none may exceed its bound."""
    start = Plan("infer", "FP32", (pool[0],), 1, 1, (), False, False, "")
    best, most, misses = start, 0.0, 0
    while time.monotonic() < until:
        plan = changed(best, rng, pool)
        found = times(plan) / plan.bound
        if found > 1:
            least = exceeds(plan)
            assert least <= plan.bound, f"{least:.0f} times the CPU of floats: {plan}"
        misses += 1
        if found > most:
            best, most, misses = plan, found, 0
        elif misses > 40:
            best, most, misses = start, 0.0, 0
            for _ in range(4):
                best = changed(best, rng, pool)


@pytest.mark.parametrize(
    ("pool", "share"),
    [(NUMBERS, 0.3), ((*NUMBERS, *TEXTS), 0.3), ((*NUMBERS, *TEXTS, *OBJECTS), 0.4)],
    ids=["numbers", "strings", "objects"],
)
def test_no_json_takes_much_more_cpu_than_floats(pool: Pool, share: float) -> None:
    search(random.Random(11), pool, time.monotonic() + share * SECONDS)


# The worst bodies of the past, with what they cost before they were fixed.
WORST = {
    "tiny arrays of strings (460)": Plan(
        "infer", "BYTES", ('"a"',), 1, MAX_TENSORS, (), False, False, ""
    ),
    "members of V1 that are no tensors (70000)": Plan(
        "inputs", "FP32", ("1",), 1, 1, ('"x":[]',), True, False, ""
    ),
    "V1 strings with a brace (1000)": Plan(
        "instances", "BYTES", ('"{"',), 1, 1, (), False, False, ""
    ),
    "V1 strings and base64 (500)": Plan(
        "instances", "BYTES", ('"a"', '{"b64":"QQ=="}'), 1, 1, (), False, False, ""
    ),
    "V1 rows of infinities and long integers (2600)": Plan(
        "rows", "FP32", ("[100000000000000000000]", "[-Infinity]"), 1, 1, (), False, False, ""
    ),
    "V1 empty arrays of strings (133)": Plan(
        "inputs", "BYTES", ("[[[[]]]]",), 2, 1, (), False, False, ""
    ),
    "ties that do not fit (115)": Plan("inputs", "FP16", ("1e5",), 1, 1, (), False, False, ""),
    "base64 of V1 (270)": Plan(
        "instances", "BYTES", ('{"b64":"QQ=="}',), 1, 1, (), False, False, ""
    ),
}


@pytest.mark.parametrize("name", WORST)
def test_worst_known_json_stays_within_its_bound(name: str) -> None:
    plan = WORST[name]
    assert len(plan.body()) >= SIZE
    assert exceeds(plan) <= plan.bound
