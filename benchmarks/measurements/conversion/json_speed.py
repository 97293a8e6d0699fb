"""Measures JSON requests directly to Triton, which parses JSON itself, and through the gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.harness.client import BenchmarkError, Connection, Response
from benchmarks.harness.environment import Environment, Job, medians, time_jobs
from benchmarks.harness.requests import (
    Request,
    Values,
    binary,
    json_of_doubles,
    json_of_shortest,
    normal,
    with_nan,
)
from benchmarks.harness.rounds import Ratio
from benchmarks.report import Row, at_least, at_most, milliseconds
from gateway.codec.policies import JsonPolicies
from gateway.codec.v2.request import InferRequestReader
from gateway.codec.v2.response import json_converter
from gateway.sizes import CONVERT_CHUNK

_IMAGE = (1, 3, 224, 224)
IMAGE_COUNT = 150_528
NAN_SHARE = 0.004
"""The share that NVIDIA's perf_analyzer has in its random data."""
_NAN_COSTS_AT_MOST = 2.0
_NESTING_COSTS_AT_MOST = 1.3
_IN_A_ROW = 5
"""Requests of one kind in a row, as a client sends them; each kind evicts the caches of others."""
_HEADER_CAP, _DEPTH_CAP = 2**20, 64
_MOST_OF_BINARY = 3.5


@dataclass(frozen=True, slots=True)
class Digits:
    """How a client writes float32 values in JSON."""

    name: str
    request: Callable[[str, Values], Request]


DIGITS = (
    Digits("17 digits", json_of_doubles),
    Digits("shortest digits", json_of_shortest),
)


def image(env: Environment) -> list[Row]:
    """Measure as many FP32 values as an image has."""
    return _json_to_json(env, IMAGE_COUNT, env.rounds(20), min_speedup=8)


def million(env: Environment) -> list[Row]:
    """Measure a million FP32 values."""
    return _json_to_json(env, 1_000_000, env.rounds(6), min_speedup=10)


def nested(env: Environment) -> list[Row]:
    """Compare data nested as its shape says with flat data."""
    values = normal(IMAGE_COUNT).reshape(_IMAGE)
    deep = json_of_doubles("image", values)
    flat = json_of_doubles("image", values, flat=True)
    jobs: dict[str, Job] = {
        "direct": lambda: env.to_server.time(deep),
        "deep": lambda: env.to_gateway.time(deep),
        "flat": lambda: env.to_gateway.time(flat),
    }
    check(env.to_gateway, deep, values)
    times = time_jobs(env.rounds(20), jobs)
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


def nonfinite(env: Environment) -> list[Row]:
    """Compare data with bare NaN tokens to data without."""
    values = normal(IMAGE_COUNT)
    some_nan = with_nan(values, NAN_SHARE)
    clean = json_of_doubles("identity_fp32", values)
    dirty = json_of_doubles("identity_fp32", some_nan)
    check(env.to_gateway, dirty, some_nan)
    times = time_jobs(
        env.rounds(20),
        {
            "direct": lambda: env.to_server.time(dirty),
            "dirty": lambda: env.to_gateway.time(dirty),
            "clean": lambda: env.to_gateway.time(clean),
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


def half(env: Environment) -> list[Row]:
    """Measure FP16, which has no JSON form in Triton."""
    values = normal(IMAGE_COUNT).astype(np.float16)
    request = json_of_doubles("identity_fp16", values)
    check(env.to_gateway, request, values)
    times = time_jobs(env.rounds(20), {"gateway": lambda: env.to_gateway.time(request)})
    direct = _directly(env.triton_port, request)
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


def small(env: Environment) -> list[Row]:
    """Measure the latency that the gateway adds to a small request."""
    values = normal(16)
    request = json_of_doubles("identity_fp32", values)
    check(env.to_gateway, request, values)
    times = time_jobs(
        env.rounds(1000),
        {
            "direct": lambda: env.to_server.time(request),
            "gateway": lambda: env.to_gateway.time(request),
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


def _json_to_json(env: Environment, count: int, rounds: int, min_speedup: int) -> list[Row]:
    values = normal(count)
    asked_binary = binary("identity_fp32", values)
    response = env.to_server.fetch(asked_binary)
    calls: dict[str, Job] = {"server": lambda: env.to_server.time(asked_binary)}
    parts: dict[str, Job] = {
        "response": lambda: _convert_response(response),
    }
    for digits in DIGITS:
        request = digits.request("identity_fp32", values)
        check(env.to_server, request, values)
        check(env.to_gateway, request, values)
        calls |= _calls(env, digits, request)
        parts |= _parts(digits, request)
    # Apart: what this process does itself takes the caches, and the core, from the calls.
    times = time_jobs(rounds, calls, _IN_A_ROW) | time_jobs(rounds, parts)
    return [row for digits in DIGITS for row in _rows(count, digits, times, min_speedup)]


def _calls(env: Environment, digits: Digits, request: Request) -> dict[str, Job]:
    return {
        f"direct, {digits.name}": lambda: env.to_server.time(request),
        f"gateway, {digits.name}": lambda: env.to_gateway.time(request),
    }


def _parts(digits: Digits, request: Request) -> dict[str, Job]:
    return {
        f"request, {digits.name}": lambda: _convert_request(request.body),
    }


def _rows(count: int, digits: Digits, times: dict[str, list[float]], min_speedup: int) -> list[Row]:
    took = medians(times)
    direct, to_gateway = f"direct, {digits.name}", f"gateway, {digits.name}"
    ratio = Ratio.of(times[direct], times[to_gateway])
    request, server, response = took[f"request, {digits.name}"], took["server"], took["response"]
    to_binary = Ratio.of(times[to_gateway], times["server"])
    rest = took[to_gateway] - request - server - response
    return [
        Row(
            f"JSON {count:,} FP32, {digits.name}",
            milliseconds(took[direct]),
            milliseconds(took[to_gateway]),
            ratio.shown(1, "sooner"),
            at_least(ratio.median, min_speedup, f"{min_speedup} ×"),
        ),
        Row(
            "… beside the binary call",
            milliseconds(server),
            milliseconds(took[to_gateway]),
            to_binary.shown(1, "the server's binary call"),
            at_most(to_binary.median, _MOST_OF_BINARY, f"{_MOST_OF_BINARY} ×"),
        ),
        Row(
            "… where its time goes",
            "",
            f"request {milliseconds(request)}, server {milliseconds(server)}, response "
            f"{milliseconds(response)}, the rest less what offloading saves {milliseconds(rest)}",
        ),
    ]


def _convert_request(body: bytes) -> None:
    """Convert a request body as the gateway does."""
    codec = InferRequestReader(_HEADER_CAP, _DEPTH_CAP)
    for start in range(0, len(body), CONVERT_CHUNK):
        codec.feed(body[start : start + CONVERT_CHUNK])
    codec.feed(b"", last=True)
    codec.finish()


def _convert_response(response: Response) -> None:
    """Convert a binary response body as the gateway does."""
    assert response.json_length is not None
    codec = json_converter(response.json_length, JsonPolicies(), 1 << 24, 1 << 24)
    for start in range(0, len(response.body), CONVERT_CHUNK):
        codec.text(response.body[start : start + CONVERT_CHUNK])
    codec.finish()


def check(connection: Connection, request: Request, values: Values) -> None:
    """Raise BenchmarkError unless the response has the values that were sent."""
    data = json.loads(connection.fetch(request).body)["outputs"][0]["data"]
    if not np.array_equal(np.array(data, values.dtype), values.ravel(), equal_nan=True):
        raise BenchmarkError("the response does not hold the values that were sent")
