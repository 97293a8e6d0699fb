"""JSON requests: directly to KServe, which works on lists of Python, and through the gateway."""

from __future__ import annotations

from functools import partial

from benchmarks.client import Connection
from benchmarks.lab import Job, Lab, medians, start_helper
from benchmarks.processes import gateway_before
from benchmarks.report import Row, at_least, milliseconds
from benchmarks.speed import DIGITS, IMAGE_COUNT, check
from benchmarks.wire import normal
from tests.integration.kserve.server import KServe

_SOONER = 2.5
_MODEL = "identity_fp32"


def image(lab: Lab) -> list[Row]:
    """Measure as many FP32 values as an image has."""
    values = normal(IMAGE_COUNT)
    requests = {digits.name: digits.request(_MODEL, values) for digits in DIGITS}
    with (
        KServe() as server,
        gateway_before(server.http_port, dialect="kserve") as gateway,
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
        took = medians(lab.rounds(15), jobs)
    return [_row(name, took) for name in requests]


def _row(digits: str, took: dict[str, float]) -> Row:
    direct, through = took[f"direct, {digits}"], took[f"gateway, {digits}"]
    ratio = direct / through
    return Row(
        f"KServe: JSON {IMAGE_COUNT:,} FP32, {digits}",
        milliseconds(direct),
        milliseconds(through),
        f"{ratio:.1f} × sooner",
        at_least(ratio, _SOONER, f"{_SOONER} ×"),
    )
