"""From which size on JSON is faster through the gateway: python -m benchmarks.break_even [--quick].

The client is http.client, as behind many Python clients: the JSON is at hand as text, and the
response is read but not parsed. The servers are a real Triton and a real KServe.
"""

from __future__ import annotations

import argparse
import http.client
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

from benchmarks.harness.client import HOST, BenchmarkError
from benchmarks.harness.environment import Lab, in_rounds, medians, start_helper
from benchmarks.harness.processes import running_gateway
from benchmarks.harness.ratio import Ratio
from benchmarks.harness.requests import Request, json_of_doubles, normal
from benchmarks.measurements.json_speed import IMAGE_COUNT
from benchmarks.report import machine, milliseconds
from tests.integration.kserve.server import KServe

MODEL = "identity_fp32"
SIZES = (16, 64, 256, 1_024, 2_048, 4_096, 8_192, 16_384, 50_176, IMAGE_COUNT)
_ROUNDS = 40
_IN_A_ROW = 5
_PATIENCE = 120.0
_COLUMNS = ("server", "FP32 elements", "JSON", "directly", "through the gateway", "result")


def rows(server: str, server_port: int, gateway_port: int, rounds: int) -> Iterator[str]:
    """Yield the lines of the table for one server."""
    with (
        closing(http.client.HTTPConnection(HOST, server_port, _PATIENCE)) as directly,
        closing(http.client.HTTPConnection(HOST, gateway_port, _PATIENCE)) as through,
    ):
        for size in SIZES:
            request = json_of_doubles(MODEL, normal(size))
            jobs: dict[str, Callable[[], object]] = {
                "direct": partial(_post, directly, request),
                "gateway": partial(_post, through, request),
            }
            times = in_rounds(rounds, jobs, _IN_A_ROW)
            yield _row(server, size, len(request.body), times)


def _post(connection: http.client.HTTPConnection, request: Request) -> None:
    headers = {"Content-Type": "application/json"}
    connection.request("POST", f"/v2/models/{MODEL}/infer", request.body, headers)
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise BenchmarkError(f"{response.status}: {body[:500]!r}")


def _row(server: str, size: int, text_size: int, times: dict[str, list[float]]) -> str:
    took = medians(times)
    ratio = Ratio.of(times["direct"], times["gateway"])
    cells = (
        server,
        f"{size:,}",
        f"{text_size / 1000:,.1f} kB",
        milliseconds(took["direct"]),
        milliseconds(took["gateway"]),
        ratio.shown(2, "as fast"),
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.break_even")
    parser.add_argument("--quick", action="store_true", help="go fewer rounds")
    with Lab(parser.parse_args().quick) as lab:
        rounds = lab.rounds(_ROUNDS)
        lines = [*rows("Triton", lab.triton_port, lab.gateway.port, rounds)]
        with KServe() as kserve, running_gateway(kserve.http_port, dialect="kserve") as gateway:
            start_helper(gateway)
            lines += rows("KServe", kserve.http_port, gateway.port, rounds)
        print(machine(lab.triton_version), "", sep="\n")
    print(f"| {' | '.join(_COLUMNS)} |", "|---|---:|---:|---:|---:|---:|", *lines, sep="\n")


if __name__ == "__main__":
    main()
