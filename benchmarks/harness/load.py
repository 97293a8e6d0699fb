"""Generates load: each connection sends the same request again after each response."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.client import HOST, BenchmarkError, Connection
from benchmarks.harness.processes import Cores, run
from benchmarks.harness.requests import Request
from benchmarks.servers.proxies import installed

_RATE = re.compile(r"^Requests/sec: +([0-9.]+)$", re.MULTILINE)
_FAILURES = re.compile(r"^ *(Non-2xx .*|Socket errors: .*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Responses per second, and the share of a core that the client took."""

    rate: float
    client_share: float


LoadGenerator = Callable[[int, Request, int, int], LoadResult]
"""Puts load on a port: takes the port, the request, and the number of connections and seconds."""


def wrk_load(cores: Cores) -> LoadGenerator:
    """Return a load generator that runs wrk on these cores, for small requests.

    Raises NotInstalledError.
    """
    program = installed("wrk", "apt install wrk")

    def load(port: int, request: Request, connections: int, seconds: int) -> LoadResult:
        target, fields = _head(request)
        with tempfile.TemporaryDirectory(prefix="tensorgate-bench-") as name:
            body, script = Path(name, "body"), Path(name, "request.lua")
            body.write_bytes(request.body)
            script.write_text(_script(body, fields))
            command = [program, "-t", "1", "-c", str(connections), "-d", f"{seconds}s"]
            done = run([*command, "-s", str(script), f"http://{HOST}:{port}{target}"], cores)
        rate, failures = _RATE.search(done.output), _FAILURES.search(done.output)
        if rate is None or failures is not None:
            raise BenchmarkError(f"wrk did not get its responses:\n{done.output}")
        return LoadResult(float(rate[1]), done.cpu_time / seconds)

    return load


def thread_load(port: int, request: Request, connections: int, seconds: int) -> LoadResult:
    """Put load on a port from threads of this process.

    It is for large requests, as wrk reads only 8 KiB of a response at a time.
    """

    def call(connection: Connection) -> int:
        responses = 0
        while time.perf_counter() < until:
            connection.drop(request)
            responses += 1
        return responses

    with ExitStack() as stack:
        callers = [stack.enter_context(Connection(port)) for _ in range(connections)]
        cpu_time, began = time.process_time(), time.perf_counter()
        until = began + seconds
        with ThreadPoolExecutor(connections) as pool:
            count = sum(pool.map(call, callers))
        took = time.perf_counter() - began
        return LoadResult(count / took, (time.process_time() - cpu_time) / took)


def _head(request: Request) -> tuple[str, dict[str, str]]:
    """Split a request into target and header fields, without Content-Length, which wrk sends."""
    lines = bytes(request.wire[0]).partition(b"\r\n\r\n")[0].decode().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines[1:])
    del fields["Content-Length"]
    return lines[0].split(" ")[1], fields


def _script(body: Path, fields: dict[str, str]) -> str:
    # Plain ASCII is written in Lua as it is in JSON.
    lines = [f"wrk.headers[{json.dumps(name)}] = {json.dumps(fields[name])}" for name in fields]
    lines += [
        'wrk.method = "POST"',
        f'wrk.body = io.open({json.dumps(str(body))}, "rb"):read("*a")',
    ]
    return "\n".join(lines)
