"""JSON requests: directly to KServe, which works on lists of Python, and through the gateway."""

from __future__ import annotations

from functools import partial

from benchmarks.harness.client import Connection
from benchmarks.harness.environment import Job, Lab, in_rounds, medians, start_helper
from benchmarks.harness.processes import running_gateway
from benchmarks.harness.ratio import Ratio
from benchmarks.harness.requests import normal
from benchmarks.measurements.json_speed import DIGITS, IMAGE_COUNT, check
from benchmarks.report import Row, at_least, milliseconds
from tests.integration.kserve.server import KServe

_SOONER = 2.5
_MODEL = "identity_fp32"


def image(lab: Lab) -> list[Row]:
    """Measure as many FP32 values as an image has."""
    values = normal(IMAGE_COUNT)
    requests = {digits.name: digits.request(_MODEL, values) for digits in DIGITS}
    with (
        KServe() as server,
        running_gateway(server.http_port, dialect="kserve") as gateway,
        Connection(server.http_port) as directly,
        Connection(gateway.port) as through,
    ):
        start_helper(gateway)
        jobs: dict[str, Job] = {}
        for name, request in requests.items():
            check(directly, request, values)
            check(through, request, values)
            jobs[f"direct, {name}"] = partial(directly.time, request)
            jobs[f"gateway, {name}"] = partial(through.time, request)
        times = in_rounds(lab.rounds(15), jobs)
    return [_row(name, times) for name in requests]


def _row(digits: str, times: dict[str, list[float]]) -> Row:
    direct, through = f"direct, {digits}", f"gateway, {digits}"
    ratio, took = Ratio.of(times[direct], times[through]), medians(times)
    return Row(
        f"KServe: JSON {IMAGE_COUNT:,} FP32, {digits}",
        milliseconds(took[direct]),
        milliseconds(took[through]),
        ratio.shown(1, "sooner"),
        at_least(ratio.median, _SOONER, f"{_SOONER} ×"),
    )
