"""Measures one call at a time of Python's HTTP clients, directly to Triton and through the gateway.

The clients are used as people use them, over one connection that is kept alive. JSON is at hand as
text and responses are read but not parsed, except by tritonclient, which writes and parses itself.
"""

from __future__ import annotations

import asyncio
import http.client
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from benchmarks.harness.client import HOST, BenchmarkError, NotInstalledError
from benchmarks.harness.environment import Environment, Job, medians, start_offload, time_jobs
from benchmarks.harness.processes import running_gateway
from benchmarks.harness.requests import (
    Request,
    Values,
    binary,
    json_of_doubles,
    json_of_shortest,
    normal,
)
from benchmarks.harness.rounds import Ratio, difference
from benchmarks.measurements.conversion.json_speed import IMAGE_COUNT
from benchmarks.report import Bound, Row, at_least, at_most

_MODEL = "identity_fp32"
_PATH = f"/v2/models/{_MODEL}/infer"
_JSON, _DECIMALS, _BINARY = "JSON", "JSON of 5 decimals", "binary"
_SHORTEST = "JSON of the shortest digits"
_TIMEOUT = 120.0
_IN_A_ROW = 5
"""Calls in a row on each path, as a client makes them; each path evicts the other's caches."""
_MIN_ROUNDS, _MAX_ROUNDS = 8, 100
_NUMBERS_IN_ROUNDS = 1_000_000
"""Larger bodies go fewer rounds, so that all rounds of a size hold about as many numbers."""

_SIZES = (16, 1_000, 20_000, IMAGE_COUNT)
_AROUND_BREAK_EVEN = (250, 500, 1_000)
_AROUND_STEP = (12_000, 15_000, 17_000, 20_000)
"""Two sizes on either side of 64 KiB of tensors and of 128 KiB of JSON with 5 decimals.

These are the chunks in which the streaming path moves and converts larger bodies.
"""

_BREAK_EVEN = 500
"""Numbers from which on JSON must be no slower through the gateway."""
_MAX_ADDED_BELOW = 0.15e-3  # seconds
_MAX_ADDED_BINARY = 0.2e-3
_MAX_STEP = 0.1e-3
_MIN_GAIN = 6.0
"""How many times sooner an image must be there than without the gateway."""

_Times = Mapping[str, Sequence[float]]


def rows(env: Environment) -> list[Row]:
    """Measure each client in each form, then around the break-even and around a step."""
    with running_gateway(env.triton_port, access_log=True) as gateway:
        start_offload(gateway)
        ports = {"direct": env.triton_port, "gateway": gateway.port}
        clients = [_Client(library, _JSON, ports) for library in _LIBRARIES]
        plain, tritonclient = clients[0], _Client("tritonclient", _BINARY, ports)
        return [
            *(_measured(client, _SIZES, env) for client in (*clients, tritonclient)),
            _measured(plain, _AROUND_BREAK_EVEN, env),
            *(_step(_Client(plain.library, form, ports), env) for form in (_DECIMALS, _BINARY)),
        ]


def image(env: Environment) -> list[Row]:
    """Measure as many FP32 values as an image has, by how much sooner the response is there."""
    with running_gateway(env.triton_port, access_log=True) as gateway:
        start_offload(gateway)
        ports = {"direct": env.triton_port, "gateway": gateway.port}
        return [
            _sooner(_Client(library, form, ports), minimum, env)
            for library, minimum in (("http.client", _MIN_GAIN), ("aiohttp", None))
            for form in (_JSON, _SHORTEST)
        ]


def _sooner(client: _Client, minimum: float | None, env: Environment) -> Row:
    times = client.times([IMAGE_COUNT], env)
    ratio = Ratio.of(times[IMAGE_COUNT]["direct"], times[IMAGE_COUNT]["gateway"])
    bound = None if minimum is None else at_least(ratio.median, minimum, f"{minimum:g} ×")
    return _row(client, times, ratio.shown(1, "sooner"), bound)


@dataclass(frozen=True, slots=True)
class _Client:
    """A library with the form that it sends, and the ports of the server and of the gateway."""

    library: str
    form: str
    ports: Mapping[str, int]

    def times(self, sizes: Sequence[int], env: Environment) -> dict[int, _Times]:
        """Return the seconds of each size on each path; every round has all of them."""
        call = _LIBRARIES[self.library]
        with ExitStack() as stack:
            jobs = {
                f"{path} {count}": call(stack, port, normal(count), self.form)
                for count in sizes
                for path, port in self.ports.items()
            }
            rounds = max(_MIN_ROUNDS, min(_MAX_ROUNDS, _NUMBERS_IN_ROUNDS // max(sizes)))
            times = time_jobs(env.rounds(rounds), jobs, _IN_A_ROW)
        return {count: {path: times[f"{path} {count}"] for path in self.ports} for count in sizes}


def _measured(client: _Client, sizes: Sequence[int], env: Environment) -> Row:
    try:
        times = {count: client.times([count], env)[count] for count in sizes}
    except NotInstalledError as error:
        return Row(_what(client, sizes), result=f"not measured: {error}")
    added = [difference(each["gateway"], each["direct"]) for each in times.values()]
    limits = [_max_added(client.form, count) for count in sizes]
    kept = all(each <= limit for each, limit in zip(added, limits, strict=True))
    bound = Bound(f"≤ {_shown(limits, signed=True)}", kept)
    return _row(client, times, f"{_shown(added, signed=True)} added", bound)


def _step(client: _Client, env: Environment) -> Row:
    """Compare the growth between the two middle sizes with that on either side."""
    times = client.times(_AROUND_STEP, env)
    a, b, c, d = _AROUND_STEP
    share = (c - b) / (b - a + d - c)
    rounds = zip(*(each["gateway"] for each in times.values()), strict=True)
    step = statistics.median(
        third - second - share * (second - first + fourth - third)
        for first, second, third, fourth in rounds
    )
    bound = at_most(step, _MAX_STEP, f"{_shown([_MAX_STEP])}")
    return _row(client, times, f"a step of {_shown([step])}", bound)


def _max_added(form: str, count: int) -> float:
    if form == _BINARY:
        return _MAX_ADDED_BINARY
    return 0.0 if count >= _BREAK_EVEN else _MAX_ADDED_BELOW


def _row(client: _Client, times: Mapping[int, _Times], result: str, bound: Bound | None) -> Row:
    took = [medians(each) for each in times.values()]
    directly, through = (_shown([each[path] for each in took]) for path in client.ports)
    return Row(_what(client, list(times)), directly, through, result, bound)


def _what(client: _Client, sizes: Sequence[int]) -> str:
    return f"{client.library}: {client.form} {' · '.join(f'{count:,}' for count in sizes)} FP32"


def _shown(seconds: Sequence[float], *, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return f"{' · '.join(f'{each * 1e3:{sign}.2f}' for each in seconds)} ms"


def _http_client(stack: ExitStack, port: int, values: Values, form: str) -> Job:
    connection = http.client.HTTPConnection(HOST, port, timeout=_TIMEOUT)
    stack.enter_context(closing(connection))
    headers, body = _content(values, form)

    def call() -> None:
        connection.request("POST", _PATH, body, headers)
        response = connection.getresponse()
        _check(response.status, response.read())

    return call


def _requests(stack: ExitStack, port: int, values: Values, form: str) -> Job:
    session = stack.enter_context(_library("requests").Session())
    headers, body = _content(values, form)

    def call() -> None:
        response = session.post(f"http://{HOST}:{port}{_PATH}", data=body, headers=headers)
        _check(response.status_code, response.content)

    return call


def _httpx(stack: ExitStack, port: int, values: Values, form: str) -> Job:
    client = stack.enter_context(_library("httpx").Client(timeout=_TIMEOUT))
    headers, body = _content(values, form)

    def call() -> None:
        response = client.post(f"http://{HOST}:{port}{_PATH}", content=body, headers=headers)
        _check(response.status_code, response.content)

    return call


def _aiohttp(stack: ExitStack, port: int, values: Values, form: str) -> Job:
    runner = stack.enter_context(asyncio.Runner())
    headers, body = _content(values, form)

    async def open_session() -> Any:
        return _library("aiohttp").ClientSession()

    async def call() -> None:
        url = f"http://{HOST}:{port}{_PATH}"
        async with session.post(url, data=body, headers=headers) as response:
            _check(response.status, await response.read())

    session = runner.run(open_session())
    stack.callback(lambda: runner.run(session.close()))
    return lambda: runner.run(call())


def _tritonclient(stack: ExitStack, port: int, values: Values, form: str) -> Job:
    library = _library("tritonclient.http")
    client = stack.enter_context(closing(library.InferenceServerClient(f"{HOST}:{port}")))
    in_binary = form == _BINARY

    def call() -> None:
        tensor = library.InferInput("INPUT0", list(values.shape), "FP32")
        tensor.set_data_from_numpy(values, binary_data=in_binary)
        output = library.InferRequestedOutput("OUTPUT0", binary_data=in_binary)
        result = client.infer(_MODEL, [tensor], outputs=[output]).as_numpy("OUTPUT0")
        if result.size != values.size:
            raise BenchmarkError("tritonclient got a tensor of another size")

    return call


_LIBRARIES: dict[str, Callable[[ExitStack, int, Values, str], Job]] = {
    "http.client": _http_client,
    "requests": _requests,
    "httpx": _httpx,
    "aiohttp": _aiohttp,
    "tritonclient": _tritonclient,
}


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        install = ".venv/bin/pip install --editable '.[bench]'"
        raise NotInstalledError(f"{name} is not installed ({install})") from error


def _json_of_decimals(model: str, values: Values) -> Request:
    return json_of_shortest(model, values.round(5))


_REQUESTS = {
    _JSON: json_of_doubles,
    _DECIMALS: _json_of_decimals,
    _SHORTEST: json_of_shortest,
    _BINARY: binary,
}


def _content(values: Values, form: str) -> tuple[dict[str, str], bytes]:
    """Return the headers, without those that each client adds, and the body."""
    request = _REQUESTS[form](_MODEL, values)
    head, _, body = b"".join(request.wire).partition(b"\r\n\r\n")
    headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    del headers["Host"], headers["Content-Length"]
    return headers, body


def _check(status: int, body: bytes) -> None:
    if status != 200:
        raise BenchmarkError(f"{status}: {body[:500]!r}")
