"""Measures requests per second over many connections."""

from __future__ import annotations

import asyncio
import re
import socket

import uvloop

from benchmarks.harness.client import HOST, BenchmarkError
from benchmarks.harness.environment import Environment
from benchmarks.harness.requests import json_of_doubles, normal
from benchmarks.report import Row

_CONNECTIONS = 32
_SECONDS = 1.0
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


def rate(env: Environment) -> list[Row]:
    """Measure small JSON requests; each connection sends the next after each response."""
    request = b"".join(json_of_doubles("identity_fp32", normal(16)).wire)
    ports = {"direct": env.triton_port, "gateway": env.gateway.port}
    responses = dict.fromkeys(ports, 0)
    rounds = env.rounds(5)
    for _ in range(rounds):
        for name, port in ports.items():
            responses[name] += uvloop.run(_count(port, request))
    rates = {name: count / (rounds * _SECONDS) for name, count in responses.items()}
    return [
        Row(
            f"JSON 16 FP32, {_CONNECTIONS} connections, one gateway process",
            f"{rates['direct']:,.0f} /s",
            f"{rates['gateway']:,.0f} /s",
            f"{rates['gateway'] / rates['direct']:.2f} ×",
        )
    ]


async def _count(port: int, request: bytes) -> int:
    until = asyncio.get_running_loop().time() + _SECONDS
    callers = (_call(port, request, until) for _ in range(_CONNECTIONS))
    return sum(await asyncio.gather(*callers))


async def _call(port: int, request: bytes, until: float) -> int:
    """Send the same request repeatedly, and return the number of responses."""
    loop = asyncio.get_running_loop()
    responses = 0
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, (HOST, port))
        while loop.time() < until:
            await loop.sock_sendall(sock, request)
            received = b""
            while not _is_complete(received):
                received += await loop.sock_recv(sock, 65536)
            responses += 1
    return responses


def _is_complete(received: bytes) -> bool:
    head, mark, body = received.partition(b"\r\n\r\n")
    if not mark:
        return False
    length = _LENGTH.search(head)
    if length is None or not head.startswith(b"HTTP/1.1 200 "):
        raise BenchmarkError(head.decode("latin-1"))
    return len(body) >= int(length[1])
