"""Measures JSON requests directly to KServe, which uses Python lists, and through the gateway."""

from __future__ import annotations

from functools import partial

from benchmarks.harness.client import Connection
from benchmarks.harness.environment import Environment, Job, medians, start_offload, time_jobs
from benchmarks.harness.processes import running_gateway
from benchmarks.harness.requests import normal
from benchmarks.harness.rounds import Ratio
from benchmarks.measurements.json_speed import DIGITS, IMAGE_COUNT, check
from benchmarks.report import Row, at_least, milliseconds
from tests.integration.kserve.server import KServe

_MIN_SPEEDUP = 2.5
_MODEL = "identity_fp32"


def image(env: Environment) -> list[Row]:
    """Measure as many FP32 values as an image has."""
    values = normal(IMAGE_COUNT)
    requests = {digits.name: digits.request(_MODEL, values) for digits in DIGITS}
    with (
        KServe() as server,
        running_gateway(server.http_port, dialect="kserve") as gateway,
        Connection(server.http_port) as to_server,
        Connection(gateway.port) as to_gateway,
    ):
        start_offload(gateway)
        jobs: dict[str, Job] = {}
        for name, request in requests.items():
            check(to_server, request, values)
            check(to_gateway, request, values)
            jobs[f"direct, {name}"] = partial(to_server.time, request)
            jobs[f"gateway, {name}"] = partial(to_gateway.time, request)
        times = time_jobs(env.rounds(15), jobs)
    return [_row(name, times) for name in requests]


def _row(digits: str, times: dict[str, list[float]]) -> Row:
    direct, to_gateway = f"direct, {digits}", f"gateway, {digits}"
    ratio, took = Ratio.of(times[direct], times[to_gateway]), medians(times)
    return Row(
        f"KServe: JSON {IMAGE_COUNT:,} FP32, {digits}",
        milliseconds(took[direct]),
        milliseconds(took[to_gateway]),
        ratio.shown(1, "sooner"),
        at_least(ratio.median, _MIN_SPEEDUP, f"{_MIN_SPEEDUP} ×"),
    )
