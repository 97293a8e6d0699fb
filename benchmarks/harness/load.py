"""Generates load: each connection sends the next request after each response."""

from __future__ import annotations

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
from benchmarks.harness.requests import ID_PLACE, Request
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
        with tempfile.TemporaryDirectory(prefix="tensorgate-bench-") as name:
            script = Path(name, "request.lua")
            script.write_text(_script(request, Path(name)))
            command = [program, "-t", "1", "-c", str(connections), "-d", f"{seconds}s"]
            done = run([*command, "-s", str(script), f"http://{HOST}:{port}"], cores)
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


_SAME = """\
local text = io.open("{folder}/0", "rb"):read("*a")
function request()
  return text
end
"""

# A number of its own makes the ids of each request. Runs begin with different ones.
_VARIED = """\
local variants = {{}}
for variant = 0, {count} - 1 do
  local text = io.open("{folder}/" .. variant, "rb"):read("*a")
  local before, between, after = text:match("^(.-){place}(.-){place}(.*)$")
  variants[variant] = {{before, between, after}}
end
local number = os.time() % 65536 * 65536
function request()
  number = number + 1
  local id, parts = ("%08x"):format(number), variants[number % {count}]
  return parts[1] .. id .. parts[2] .. id .. parts[3]
end
"""


def _script(request: Request, folder: Path) -> str:
    """Write the request into a folder, and return the script that has wrk send it."""
    variants = request.variants or [request]
    for number, variant in enumerate(variants):
        (folder / str(number)).write_bytes(b"".join(variant.wire))
    script = _VARIED if request.variants else _SAME
    return script.format(folder=folder, count=len(variants), place=ID_PLACE)
