"""Load: the same request again and again over some connections, as soon as the answer is there."""

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
from benchmarks.harness.requests import Request
from benchmarks.harness.subprocesses import Cores, run
from benchmarks.servers.proxies import installed

_RATE = re.compile(r"^Requests/sec: +([0-9.]+)$", re.MULTILINE)
_FAILURES = re.compile(r"^ *(Non-2xx .*|Socket errors: .*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Load:
    """How many answers there were in a second, and the share of a core that the client took."""

    rate: float
    client_share: float


Loader = Callable[[int, Request, int, int], Load]
"""What puts load on a port: the request, how many connections, how many seconds."""


def wrk_on(cores: Cores) -> Loader:
    """Give a loader that runs wrk on these cores: the one for small requests.

    Raises NotInstalledError.
    """
    program = installed("wrk", "apt install wrk")

    def load(port: int, request: Request, connections: int, seconds: int) -> Load:
        target, fields = _head(request)
        with tempfile.TemporaryDirectory(prefix="tensorgate-bench-") as name:
            body, script = Path(name, "body"), Path(name, "request.lua")
            body.write_bytes(request.body)
            script.write_text(_script(body, fields))
            command = [program, "-t", "1", "-c", str(connections), "-d", f"{seconds}s"]
            done = run([*command, "-s", str(script), f"http://{HOST}:{port}{target}"], cores)
        rate, failures = _RATE.search(done.output), _FAILURES.search(done.output)
        if rate is None or failures is not None:
            raise BenchmarkError(f"wrk did not get its answers:\n{done.output}")
        return Load(float(rate[1]), done.cpu_time / seconds)

    return load


def threads(port: int, request: Request, connections: int, seconds: int) -> Load:
    """Put load on a port from threads of this process.

    For large requests: wrk takes 8 KiB at a time of their answers, and so is the slower one.
    """

    def call(connection: Connection) -> int:
        answers = 0
        while time.perf_counter() < until:
            connection.drop(request)
            answers += 1
        return answers

    with ExitStack() as stack:
        callers = [stack.enter_context(Connection(port)) for _ in range(connections)]
        cpu_time, began = time.process_time(), time.perf_counter()
        until = began + seconds
        with ThreadPoolExecutor(connections) as pool:
            count = sum(pool.map(call, callers))
        took = time.perf_counter() - began
        return Load(count / took, (time.process_time() - cpu_time) / took)


def _head(request: Request) -> tuple[str, dict[str, str]]:
    """Take a request's target and header fields from its text; wrk itself sends the length."""
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
