"""From which size on JSON is faster through the gateway: python -m benchmarks.break_even [--quick].

The client is http.client, as behind many Python clients: the JSON is at hand as text, and the
response is read but not parsed. The servers are a real Triton and a real KServe.
"""

from __future__ import annotations

import argparse
import http.client
from collections.abc import Callable
from contextlib import closing
from functools import partial

from benchmarks.harness.client import HOST, BenchmarkError
from benchmarks.harness.environment import Environment, medians, start_offload, time_jobs
from benchmarks.harness.processes import running_gateway
from benchmarks.harness.requests import Request, json_of_doubles, normal
from benchmarks.harness.rounds import Ratio
from benchmarks.measurements.json_speed import IMAGE_COUNT
from benchmarks.report import machine, milliseconds
from tests.integration.kserve.server import KServe

MODEL = "identity_fp32"
SIZES = (16, 64, 256, 1_024, 2_048, 4_096, 8_192, 16_384, 50_176, IMAGE_COUNT)
_ROUNDS = 40
_IN_A_ROW = 5
_TIMEOUT = 120.0
_HEADER = """\
| FP32 elements | JSON | Triton directly | through the gateway | | KServe directly | \
through the gateway | |
|---:|---:|---:|---:|---|---:|---:|---|"""


def measure(server_port: int, gateway_port: int, rounds: int) -> list[str]:
    """Return the cells of one server, for each size: directly, through the gateway, the ratio."""
    with (
        closing(http.client.HTTPConnection(HOST, server_port, timeout=_TIMEOUT)) as to_server,
        closing(http.client.HTTPConnection(HOST, gateway_port, timeout=_TIMEOUT)) as to_gateway,
    ):
        return [_compare(to_server, to_gateway, size, rounds) for size in SIZES]


def _compare(
    to_server: http.client.HTTPConnection,
    to_gateway: http.client.HTTPConnection,
    size: int,
    rounds: int,
) -> str:
    request = _request(size)
    jobs: dict[str, Callable[[], object]] = {
        "direct": partial(_post, to_server, request),
        "gateway": partial(_post, to_gateway, request),
    }
    times = time_jobs(rounds, jobs, _IN_A_ROW)
    took = medians(times)
    ratio = Ratio.of(times["direct"], times["gateway"])
    shown = f"{ratio.median:.2f} × ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{milliseconds(took['direct'])} | {milliseconds(took['gateway'])} | {shown}"


def _request(size: int) -> Request:
    return json_of_doubles(MODEL, normal(size))


def _post(connection: http.client.HTTPConnection, request: Request) -> None:
    headers = {"Content-Type": "application/json"}
    connection.request("POST", f"/v2/models/{MODEL}/infer", request.body, headers)
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise BenchmarkError(f"{response.status}: {body[:500]!r}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.break_even")
    parser.add_argument("--quick", action="store_true", help="go fewer rounds")
    with Environment(parser.parse_args().quick) as env:
        rounds = env.rounds(_ROUNDS)
        triton = measure(env.triton_port, env.gateway.port, rounds)
        with KServe() as server, running_gateway(server.http_port, dialect="kserve") as gateway:
            start_offload(gateway)
            kserve = measure(server.http_port, gateway.port, rounds)
        print(machine(env.triton_version), "", _HEADER, sep="\n")
    for size, of_triton, of_kserve in zip(SIZES, triton, kserve, strict=True):
        text = f"{len(_request(size).body) / 1000:,.1f} kB"
        print(f"| {size:,} | {text} | {of_triton} | {of_kserve} |")


if __name__ == "__main__":
    main()
