"""Measures how fast large bodies pass, and how much of them the gateway buffers.

The server is the raw one, which is never the bottleneck. Before the timed rounds each body passes
once while the other side pauses: a gateway without backpressure would buffer all of it.
"""

from __future__ import annotations

from benchmarks.harness.client import Connection
from benchmarks.harness.environment import Environment, medians, time_jobs
from benchmarks.harness.proc_stats import PeakMemory
from benchmarks.harness.processes import running_gateway
from benchmarks.harness.requests import Request, binary, binary_of_blocks, json_of_shortest, normal
from benchmarks.report import Row, at_least, below, mebibytes, milliseconds
from benchmarks.servers.raw_server import PAUSE, model_responding

_MIB = 2**20
_PASSED = 1024 * _MIB
_PASS_RATE = 1.0  # GB/s
_MAX_BUFFERED = 64 * _MIB

_TEXT = 100_000_000
_TEXT_PER_VALUE = 10.9  # bytes of a normal FP32 value in its shortest digits, with its comma
_HELD_PER_BINARY_SIZE = 1.3

_RESPONSE_SIZE = 512 * _MIB
_FIRST_BYTE_WITHIN = 0.05  # of the time of the whole response


def pass_through(env: Environment) -> list[Row]:
    """Measure tensors of a gibibyte that stay binary."""
    block = normal(_MIB // 4).tobytes()
    shape, blocks = [_PASSED // 4], [block] * (_PASSED // _MIB)
    large_request = binary_of_blocks(model_responding(4), shape, blocks)
    refused_a_while = binary_of_blocks(model_responding(4, pausing=True), shape, blocks)
    large_response = binary(model_responding(_PASSED), normal(16))
    return [
        *_pass(env, "request", refused_a_while, large_request, 0.0),
        *_pass(env, "answer", large_response, large_response, PAUSE),
    ]


def _pass(env: Environment, what: str, first: Request, request: Request, pause: float) -> list[Row]:
    with (
        running_gateway(env.raw_port) as gateway,
        Connection(gateway.port) as to_gateway,
        Connection(env.raw_port) as to_server,
    ):
        _warm_up(to_gateway)
        memory = PeakMemory(gateway.process.pid)
        to_gateway.time(first, pause)
        times = time_jobs(
            env.rounds(5),
            {
                "direct": lambda: to_server.time(request),
                "gateway": lambda: to_gateway.time(request),
            },
        )
        growth = memory.growth()
    rates = {name: _PASSED / seconds / 1e9 for name, seconds in medians(times).items()}
    name = f"binary {what} of 1 GiB"
    return [
        Row(
            name,
            f"{rates['direct']:.2f} GB/s",
            f"{rates['gateway']:.2f} GB/s",
            bound=at_least(rates["gateway"], _PASS_RATE, f"{_PASS_RATE} GB/s"),
        ),
        _growth_row(name, growth, _MAX_BUFFERED),
    ]


def text(env: Environment) -> list[Row]:
    """Measure a JSON request of 100 MB, which the gateway buffers in binary form."""
    values = normal(int(_TEXT / _TEXT_PER_VALUE))
    request = json_of_shortest(model_responding(4), values)
    with running_gateway(env.raw_port) as gateway, Connection(gateway.port) as to_gateway:
        _warm_up(to_gateway)
        memory = PeakMemory(gateway.process.pid)
        took = to_gateway.time(request).total
        growth = memory.growth()
    name = f"JSON request of {len(request.body) / 1e6:.0f} MB ({mebibytes(values.nbytes)} binary)"
    bound = _HELD_PER_BINARY_SIZE * values.nbytes + _MAX_BUFFERED
    share = f"{growth / values.nbytes:.2f} × the binary size"
    return [Row(name, "", milliseconds(took)), _growth_row(name, growth, bound, share)]


def response(env: Environment) -> list[Row]:
    """Measure a binary response of 512 MiB that becomes JSON."""
    request = json_of_shortest(model_responding(_RESPONSE_SIZE), normal(16))
    with running_gateway(env.raw_port) as gateway, Connection(gateway.port) as to_gateway:
        _warm_up(to_gateway)
        memory = PeakMemory(gateway.process.pid)
        timing = to_gateway.time(request, PAUSE)
        growth = memory.growth()
    name = f"response of {mebibytes(_RESPONSE_SIZE)} as JSON"
    share = timing.first_byte / timing.total
    return [
        Row(
            f"{name}: first byte",
            "",
            milliseconds(timing.first_byte),
            f"{share:.2%} of {timing.total:.1f} s",
            below(share, _FIRST_BYTE_WITHIN, f"{_FIRST_BYTE_WITHIN:.0%}"),
        ),
        _growth_row(name, growth, _MAX_BUFFERED),
    ]


def _growth_row(name: str, growth: int, maximum: float, result: str = "") -> Row:
    bound = below(growth, maximum, mebibytes(maximum))
    return Row(f"{name}: memory growth", "", mebibytes(growth), result, bound)


def _warm_up(connection: Connection) -> None:
    """Send one request, so that code loaded by it does not count as growth."""
    for ask in (json_of_shortest, binary):
        connection.time(ask(model_responding(64), normal(16)))
