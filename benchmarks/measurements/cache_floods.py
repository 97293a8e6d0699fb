"""Measures what a client that sends ever new heads, models or requests costs the other clients.

The caches that plans are kept in have room for some hundred of them. One client sends 1,000
requests that all differ, as it may in a fifth of a second, or sends 500 of them twice. Then each of
the others sends one request on its own connection, and the gateway's CPU time for it counts. That
is compared with the same after 1,000 requests that are all alike.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import orjson

from benchmarks.harness.client import HOST, BenchmarkError
from benchmarks.harness.cores import pinned_to, split_cores
from benchmarks.harness.environment import Environment
from benchmarks.harness.processes import running_gateway, server
from benchmarks.harness.requests import HEADER_LENGTH
from benchmarks.report import Row, below

_FLOOD = 1_000
_TIMES = {"once": 1, "twice": 2, "three times": 3}
"""How often each of the requests is sent, one after the other."""
_PIPELINED = 50
_MAX_RISE = 0.15
_SETTLED = 0.0005  # seconds in which the gateway does nothing more for a call

_MODEL = "static_16"
_JSON, _BINARY = "application/json", "application/octet-stream"


def _request(path: str, body: bytes, host: str = "h", length: int | None = None) -> bytes:
    kind = _JSON if length is None else _BINARY
    more = "" if length is None else f"{HEADER_LENGTH}: {length}\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _infer(name: str = "INPUT0", model: str = _MODEL, host: str = "h") -> bytes:
    tensor = {"name": name, "shape": [16], "datatype": "FP32", "data": [0.5] * 16}
    body = orjson.dumps({"id": "1", "inputs": [tensor]})
    return _request(f"/v2/models/{model}/infer", body, host)


def _binary(name: str = "INPUT0") -> bytes:
    size = {"binary_data_size": 64}
    tensor = {"name": name, "shape": [16], "datatype": "FP32", "parameters": size}
    header = orjson.dumps({"id": "1", "inputs": [tensor]})
    return _request(f"/v2/models/{_MODEL}/infer", header + bytes(64), length=len(header))


def _raw(count: int = 16) -> bytes:
    return _request(f"/v2/models/{_MODEL}/infer", bytes(4 * count), length=0)


def _predict(count: int = 16) -> bytes:
    body = orjson.dumps({"instances": [0.5] * count})
    return _request(f"/v1/models/{_MODEL}:predict", body)


_OTHERS: Mapping[str, bytes] = {
    "JSON": _infer(),
    "binary": _binary(),
    "raw binary": _raw(),
    "V1": _predict(),
}
_FLOODS: Mapping[str, Callable[[int], bytes]] = {
    "heads": lambda number: _infer(host=f"h{number}"),
    "models": lambda number: _infer(model=f"m{number}"),
    "JSON requests": lambda number: _infer(f"I{number}"),
    "binary requests": lambda number: _binary(f"I{number}"),
    "raw binary sizes": lambda number: _raw(1 + number % _FLOOD),
    "V1 shapes": lambda number: _predict(1 + number % _FLOOD),
}


def rows(env: Environment) -> list[Row]:
    """Measure the CPU time of the others' calls, for each kind of flood."""
    cores = split_cores()
    with (
        server("static_server", cores.others) as static,
        running_gateway(static.ports[1], cores=cores.measured) as gateway,
        pinned_to(cores.others),
    ):
        return [
            row
            for name, make in _FLOODS.items()
            for times in _TIMES
            for row in _measure(env.rounds(15), gateway.pid, gateway.port, name, make, times)
        ]


def _measure(
    rounds: int, pid: int, port: int, name: str, make: Callable[[int], bytes], times: str
) -> list[Row]:
    alone: dict[str, list[float]] = {each: [] for each in _OTHERS}
    beside: dict[str, list[float]] = {each: [] for each in _OTHERS}
    clients = {each: _Client(port) for each in _OTHERS}
    flooding = _Client(port)
    for client, request in zip(clients.values(), _OTHERS.values(), strict=True):
        for _ in range(3):
            client.exchange([request])
    for number in range(rounds):
        start = 1 + number * _FLOOD
        for seconds, requests in (
            (alone, [make(0)] * _FLOOD),
            (beside, [make(start + offset // _TIMES[times]) for offset in range(_FLOOD)]),
        ):
            for at in range(0, _FLOOD, _PIPELINED):
                flooding.exchange(requests[at : at + _PIPELINED])
            for each, request in _OTHERS.items():
                before = _settled_cpu_time(pid)
                clients[each].exchange([request])
                seconds[each].append(_settled_cpu_time(pid) - before)
    for client in (*clients.values(), flooding):
        client.close()
    flood = f"{name}, each {times}"
    return [_row(flood, each, alone[each], beside[each]) for each in _OTHERS]


def _row(flood: str, what: str, alone: Sequence[float], beside: Sequence[float]) -> Row:
    # What disturbs the machine only adds to the time.
    usual, flooded = (statistics.quantiles(times, n=4)[0] for times in (alone, beside))
    rise = flooded / usual - 1
    return Row(
        f"{what}, CPU per call while another client sends ever new {flood}",
        "",
        f"{flooded * 1e6:.0f} us, else {usual * 1e6:.0f} us",
        f"{rise:+.0%}",
        below(rise, _MAX_RISE, f"{_MAX_RISE:+.0%}"),
    )


class _Client:
    """A connection whose requests may be pipelined, and whose responses are only counted."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port), 60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, requests: Sequence[bytes]) -> None:
        """Send requests, and read their responses."""
        self._socket.sendall(b"".join(requests))
        received = b""
        left = len(requests)
        while left:
            received += self._read()
            while (end := received.find(b"\r\n\r\n")) >= 0:
                head = received[:end].lower()
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                while len(received) < end + 4 + length:
                    received += self._read()
                received = received[end + 4 + length :]
                left -= 1

    def _read(self) -> bytes:
        data = self._socket.recv(1024 * 1024)
        if not data:
            raise BenchmarkError("the gateway closed a connection")
        return data

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def _settled_cpu_time(pid: int) -> float:
    """Return the CPU seconds of the process' event loop, once it waits: proc(5), schedstat."""
    path = Path(f"/proc/{pid}/schedstat")
    now = path.read_text()
    while True:
        time.sleep(_SETTLED)
        before, now = now, path.read_text()
        if before == now:
            return int(now.split()[0]) / 1e9
