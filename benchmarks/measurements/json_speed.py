"""JSON requests: directly to Triton, which parses JSON itself, and through the gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import orjson
import simdjson

from benchmarks.harness.client import Answer, BenchmarkError, Connection
from benchmarks.harness.environment import Job, Lab, in_rounds, medians
from benchmarks.harness.ratio import Ratio
from benchmarks.harness.requests import (
    Request,
    Values,
    binary,
    json_of_doubles,
    json_of_shortest,
    normal,
    with_nan,
)
from benchmarks.report import Row, at_least, at_most, milliseconds
from gateway.codec.policies import JsonPolicies
from gateway.codec.v2.request import InferRequestConverter
from gateway.codec.v2.response import JsonResponseConverter
from gateway.sizes import CONVERT_CHUNK

_IMAGE = (1, 3, 224, 224)
IMAGE_COUNT = 150_528
NAN_SHARE = 0.004
"""As much as NVIDIA's perf_analyzer puts into its random data."""
_NAN_COSTS_AT_MOST = 2.0
_NESTING_COSTS_AT_MOST = 1.3
_IN_A_ROW = 5
"""Exchanges one after the other, as a client has them: one takes most caches from the next kind."""
_HEADER_CAP, _DEPTH_CAP = 2**20, 64
_PARSER = simdjson.Parser()  # kept, as its memory is most of what a new one costs


@dataclass(frozen=True, slots=True)
class Digits:
    """A way in which clients print float32 values."""

    name: str
    request: Callable[[str, Values], Request]


DIGITS = (
    Digits("17 digits", json_of_doubles),
    Digits("shortest digits", json_of_shortest),
)


def image(lab: Lab) -> list[Row]:
    """Measure as many FP32 values as an image has."""
    return _json_to_json(lab, IMAGE_COUNT, lab.rounds(20), sooner=5)


def million(lab: Lab) -> list[Row]:
    """Measure a million FP32 values."""
    return _json_to_json(lab, 1_000_000, lab.rounds(6), sooner=5)


def nested(lab: Lab) -> list[Row]:
    """Compare data nested as its shape says with flat data."""
    values = normal(IMAGE_COUNT).reshape(_IMAGE)
    deep = json_of_doubles("image", values)
    flat = json_of_doubles("image", values, flat=True)
    jobs: dict[str, Job] = {
        "direct": lambda: lab.directly.time(deep),
        "deep": lambda: lab.through.time(deep),
        "flat": lambda: lab.through.time(flat),
    }
    check(lab.through, deep, values)
    times = in_rounds(lab.rounds(20), jobs)
    ratio, took = Ratio.of(times["deep"], times["flat"]), medians(times)
    return [
        Row(
            f"JSON {list(_IMAGE)} FP32, nested, 17 digits",
            milliseconds(took["direct"]),
            milliseconds(took["deep"]),
            ratio.shown(2, f"flat, which takes {milliseconds(took['flat'])}"),
            at_most(ratio.median, _NESTING_COSTS_AT_MOST, f"{_NESTING_COSTS_AT_MOST} ×"),
        )
    ]


def nonfinite(lab: Lab) -> list[Row]:
    """Compare data in which there are bare NaN tokens with data in which there are none."""
    values = normal(IMAGE_COUNT)
    some_nan = with_nan(values, NAN_SHARE)
    clean = json_of_doubles("identity_fp32", values)
    dirty = json_of_doubles("identity_fp32", some_nan)
    check(lab.through, dirty, some_nan)
    times = in_rounds(
        lab.rounds(20),
        {
            "direct": lambda: lab.directly.time(dirty),
            "dirty": lambda: lab.through.time(dirty),
            "clean": lambda: lab.through.time(clean),
        },
    )
    ratio, took = Ratio.of(times["dirty"], times["clean"]), medians(times)
    return [
        Row(
            f"JSON {IMAGE_COUNT:,} FP32, {NAN_SHARE:.1%} NaN, 17 digits",
            milliseconds(took["direct"]),
            milliseconds(took["dirty"]),
            ratio.shown(2, f"without NaN, which takes {milliseconds(took['clean'])}"),
            at_most(ratio.median, _NAN_COSTS_AT_MOST, f"{_NAN_COSTS_AT_MOST} ×"),
        )
    ]


def half(lab: Lab) -> list[Row]:
    """Measure FP16, which has no JSON form in Triton."""
    values = normal(IMAGE_COUNT).astype(np.float16)
    request = json_of_doubles("identity_fp16", values)
    check(lab.through, request, values)
    times = in_rounds(lab.rounds(20), {"gateway": lambda: lab.through.time(request)})
    direct = _directly(lab.triton_port, request)
    return [
        Row(
            f"JSON {IMAGE_COUNT:,} FP16, 17 digits", direct, milliseconds(medians(times)["gateway"])
        )
    ]


def _directly(port: int, request: Request) -> str:
    with Connection(port) as connection:
        try:
            return milliseconds(connection.time(request).total)
        except BenchmarkError:
            return "refused"


def small(lab: Lab) -> list[Row]:
    """Measure what the gateway adds to a request so small that nothing can be gained."""
    values = normal(16)
    request = json_of_doubles("identity_fp32", values)
    check(lab.through, request, values)
    times = in_rounds(
        lab.rounds(1000),
        {
            "direct": lambda: lab.directly.time(request),
            "gateway": lambda: lab.through.time(request),
        },
    )
    took = medians(times)
    return [
        Row(
            "JSON 16 FP32",
            milliseconds(took["direct"]),
            milliseconds(took["gateway"]),
            f"{milliseconds(took['gateway'] - took['direct'])} added",
        )
    ]


def _json_to_json(lab: Lab, count: int, rounds: int, sooner: int) -> list[Row]:
    values = normal(count)
    asked_binary = binary("identity_fp32", values)
    answer = lab.directly.fetch(asked_binary)
    exchanges: dict[str, Job] = {"server": lambda: lab.directly.time(asked_binary)}
    parts: dict[str, Job] = {
        "print": lambda: orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY),
        "answer": lambda: _convert_answer(answer),
    }
    for digits in DIGITS:
        request = digits.request("identity_fp32", values)
        check(lab.directly, request, values)
        check(lab.through, request, values)
        exchanges |= _exchanges(lab, digits, request)
        parts |= _parts(digits, request)
    # Apart: what this process does itself takes the caches, and the core, from the exchanges.
    times = in_rounds(rounds, exchanges, _IN_A_ROW) | in_rounds(rounds, parts)
    return [row for digits in DIGITS for row in _rows(count, digits, times, sooner)]


def _exchanges(lab: Lab, digits: Digits, request: Request) -> dict[str, Job]:
    return {
        f"direct, {digits.name}": lambda: lab.directly.time(request),
        f"gateway, {digits.name}": lambda: lab.through.time(request),
    }


def _parts(digits: Digits, request: Request) -> dict[str, Job]:
    return {
        f"parse, {digits.name}": lambda: _parse(request.body),
        f"request, {digits.name}": lambda: _convert_request(request.body),
    }


def _rows(count: int, digits: Digits, times: dict[str, list[float]], sooner: int) -> list[Row]:
    took = medians(times)
    direct, through = f"direct, {digits.name}", f"gateway, {digits.name}"
    ratio = Ratio.of(times[direct], times[through])
    parse, request = took[f"parse, {digits.name}"], took[f"request, {digits.name}"]
    server, print_, answer = took["server"], took["print"], took["answer"]
    floor = parse + server + print_
    rest = took[through] - request - server - answer
    return [
        Row(
            f"JSON {count:,} FP32, {digits.name}",
            milliseconds(took[direct]),
            milliseconds(took[through]),
            ratio.shown(1, "sooner"),
            at_least(ratio.median, sooner, f"{sooner} ×"),
        ),
        Row(
            "… the floor",
            f"simdjson {milliseconds(parse)}, binary exchange {milliseconds(server)}, "
            f"orjson {milliseconds(print_)}: {milliseconds(floor)}",
            "",
            f"{took[through] / floor:.2f} × the floor",
        ),
        Row(
            "… where its time goes",
            "",
            f"request {milliseconds(request)}, server {milliseconds(server)}, answer "
            f"{milliseconds(answer)}, the rest less what the helper saves {milliseconds(rest)}",
        ),
    ]


def _parse(body: bytes) -> Values:
    """Take the text in one go, with all of it at hand."""
    document = _PARSER.parse(body)
    assert isinstance(document, simdjson.Object)
    data = document.at_pointer("/inputs/0/data")
    assert isinstance(data, simdjson.Array)
    return np.frombuffer(data.as_buffer(of_type="d"), np.float64).astype(np.float32)


def _convert_request(body: bytes) -> None:
    """Do what the gateway does with a request's body, and nothing else."""
    codec = InferRequestConverter(_HEADER_CAP, _DEPTH_CAP)
    for start in range(0, len(body), CONVERT_CHUNK):
        codec.feed(body[start : start + CONVERT_CHUNK])
    codec.feed(b"", last=True)
    codec.finish()


def _convert_answer(answer: Answer) -> None:
    """Do what the gateway does with a binary answer's body, and nothing else."""
    assert answer.json_length is not None
    codec = JsonResponseConverter(answer.json_length, JsonPolicies())
    for start in range(0, len(answer.body), CONVERT_CHUNK):
        codec.feed(answer.body[start : start + CONVERT_CHUNK])
    codec.finish()


def check(connection: Connection, request: Request, values: Values) -> None:
    """See to it that nobody is quick by being wrong."""
    data = json.loads(connection.fetch(request).body)["outputs"][0]["data"]
    if not np.array_equal(np.array(data, values.dtype), values.ravel(), equal_nan=True):
        raise BenchmarkError("the answer does not hold the values that were sent")
