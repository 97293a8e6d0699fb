"""Measures JSON to JSON for each datatype: directly to Triton, and through the gateway.

The client is Python's http.client, which sends JSON that is at hand as text, and reads the response
without parsing it.
"""

from __future__ import annotations

import http.client
import json
import random
import string
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness.client import HOST, BenchmarkError
from benchmarks.harness.environment import Environment, medians, time_jobs
from benchmarks.harness.processes import running_gateway
from benchmarks.harness.rounds import Ratio
from benchmarks.report import Row, at_least, at_most, milliseconds
from gateway.codec.elements.rounding import read_numbers, round_to
from gateway.protocol.datatypes import DATATYPES
from tests.integration.triton.models import named
from tests.integration.triton.server import TritonServer

_COUNT = 100_000
_IN_A_ROW = 3
_FLOAT_GAIN, _INTEGER_GAIN, _BOOL_GAIN, _MOST_TIME = 6.0, 5.0, 7.0, 1.05


@dataclass(frozen=True, slots=True)
class _Case:
    """Elements of a datatype; ``gain`` is the bound, 0 for strings, None if Triton refuses them."""

    datatype: str
    data: list[Any]
    gain: float | None
    what: str = ""

    @property
    def body(self) -> bytes:
        tensor: dict[str, object] = {"name": "INPUT0", "datatype": self.datatype}
        tensor |= {"shape": [len(self.data)], "data": self.data}
        return json.dumps({"inputs": [tensor]}).encode()


def rows(env: Environment) -> list[Row]:
    """Measure each datatype of the protocol."""
    cases = _cases()
    models = sorted({_model(case) for case in cases})
    with ExitStack() as stack:
        triton = stack.enter_context(TritonServer(named(*models)))
        gateway = stack.enter_context(running_gateway(triton.http_port, access_log=True))
        return [_row(case, triton.http_port, gateway.port, env) for case in cases]


def _cases() -> list[_Case]:
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(_COUNT)

    def integers(least: int, most: int) -> list[Any]:
        return list(rng.integers(least, most, _COUNT, np.int64, endpoint=True).tolist())

    letters = random.Random(0)
    texts = [
        "".join(letters.choices(string.ascii_letters, k=letters.randint(3, 12)))
        for _ in range(_COUNT)
    ]
    return [
        _Case("FP32", normal.astype(np.float32).tolist(), _FLOAT_GAIN),
        _Case("FP64", normal.tolist(), _FLOAT_GAIN),
        _Case("INT64", integers(-(2**53), 2**53), _INTEGER_GAIN),
        _Case("INT32", integers(-(2**31), 2**31 - 1), _INTEGER_GAIN),
        _Case("UINT8", integers(0, 255), _INTEGER_GAIN),
        _Case("BOOL", (normal > 0).tolist(), _BOOL_GAIN),
        _Case("FP16", normal.astype(np.float16).tolist(), None),
        _Case("BF16", _as_bf16(normal), None),
        _Case("BYTES", texts, 0.0, ", short texts"),
        _Case("BYTES", ["x" * 10_000] * 100, 0.0, ", texts of 10 kB"),
    ]


def _model(case: _Case) -> str:
    return f"identity_{case.datatype.lower()}"


def _row(case: _Case, direct: int, gateway: int, env: Environment) -> Row:
    what = f"JSON {len(case.data):,} {case.datatype}{case.what}, http.client"
    with ExitStack() as stack:
        jobs = {
            path: _call(stack, port, case)
            for path, port in (("direct", direct), ("gateway", gateway))
            if case.gain is not None or path == "gateway"
        }
        _check(case, jobs["gateway"]())
        times = time_jobs(env.rounds(20), jobs, _IN_A_ROW)
    took = medians(times)
    through = milliseconds(took["gateway"])
    if case.gain is None:
        return Row(what, "refused", through)
    if not case.gain:
        ratio = Ratio.of(times["gateway"], times["direct"])
        bound = at_most(ratio.median, _MOST_TIME, f"{_MOST_TIME} ×")
        shown = ratio.shown(2, "the server's own time")
        return Row(what, milliseconds(took["direct"]), through, shown, bound)
    ratio = Ratio.of(times["direct"], times["gateway"])
    bound = at_least(ratio.median, case.gain, f"{case.gain:g} ×")
    return Row(what, milliseconds(took["direct"]), through, ratio.shown(1, "sooner"), bound)


def _call(stack: ExitStack, port: int, case: _Case) -> Callable[[], bytes]:
    connection = stack.enter_context(closing(http.client.HTTPConnection(HOST, port, timeout=120.0)))
    headers: Mapping[str, str] = {"Content-Type": "application/json"}
    request = partial(connection.request, "POST", f"/v2/models/{_model(case)}/infer")
    body = case.body

    def call() -> bytes:
        request(body, headers)
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise BenchmarkError(f"{response.status}: {text[:500]!r}")
        return text

    return call


def _check(case: _Case, response: bytes) -> None:
    """Check what came through the gateway; Triton itself reads doubles one unit off."""
    data, datatype = json.loads(response)["outputs"][0]["data"], DATATYPES[case.datatype]
    is_same = data == case.data
    if datatype.floats is not None:
        ones, others = (round_to(np.array(each), datatype) for each in (data, case.data))
        is_same = np.array_equal(ones, others)
    if not is_same:
        raise BenchmarkError(f"the response does not hold the {case.datatype} that were sent")


def _as_bf16(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[Any]:
    bits = round_to(values, DATATYPES["BF16"]).tobytes()
    return list(read_numbers(bits, DATATYPES["BF16"]).tolist())
