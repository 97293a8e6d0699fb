"""Compares the ways to a server of the user's own: directly, through a gateway, in shared memory.

The gateway is a process of its own, as a sidecar is. The client is Python's ``http.client``.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final, TextIO
from urllib.parse import urlsplit

import numpy as np

from gateway.demo.server.tensors import DTYPES, Array
from gateway.demo.server.wire import HEADER_LENGTH, encode
from gateway.demo.walkthrough.client import ShowError
from gateway.demo.walkthrough.page import Page

ROUNDS: Final = 40
"""Calls of each kind; they are made in turn."""
_UNTIMED: Final = 3
"""Calls of each kind before these: a first one has metadata fetched, and threads started."""
VARIABLE: Final = 150_528
"""Elements of the first dimension without a size, if it is the only one; else it is 1."""

_TIMEOUT: Final = 60.0
_PATIENCE: Final = 20.0
"""Seconds in which the gateway has to start, and to share memory."""
_SHARED: Final = {"size": "256MiB"}
"""That of auto; asked for, so that the gateway says why there is none."""
_WAY: Final = "x-demo-way"
_DIRECT, _SOCKET, _MEMORY = "server alone", "gateway", "with shared memory"
_Call = Callable[[str, bytes, Mapping[str, str]], tuple[float, bytes]]


def compare_ways(
    server_url: str, model: str, addresses: tuple[str, str], out: TextIO, *, color: bool
) -> None:
    """Print the times of calls to a model, in binary form and in JSON, by each way.

    ``addresses`` are free ones, HOST:PORT, for the gateway and its admin. Raises ShowError.
    """
    page = Page(out, color=color)
    with _running(server_url, addresses) as why_not, ExitStack() as stack:
        page.row("server", server_url)
        page.row("shared memory", why_not or "yes", "yellow" if why_not else "green")
        ways = {_DIRECT: server_url, _SOCKET: f"http://{addresses[0]}"}
        if not why_not:
            ways[_MEMORY] = ways[_SOCKET]
        calls = {name: stack.enter_context(_caller(url, name)) for name, url in ways.items()}
        inputs = _inputs(calls[_DIRECT], model)
        path = f"/v2/models/{model}/infer"
        for title, (body, headers) in (
            ("Binary form", _binary(inputs)),
            ("JSON", _json(inputs)),
        ):
            page.title(f"{title}: {len(body):,} bytes", f"POST {path}")
            page.bars("time", _times(calls, path, body, headers))
        page.details([f"the medians of {ROUNDS} calls each, made in turn by http.client"])


def _times(
    calls: Mapping[str, _Call], path: str, body: bytes, headers: dict[str, str]
) -> dict[str, float]:
    for call in calls.values():
        for _ in range(_UNTIMED):
            call(path, body, headers)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            taken[name].append(call(path, body, headers)[0])
    return {name: median(seconds) for name, seconds in taken.items()}


@contextmanager
def _caller(url: str, way: str) -> Iterator[_Call]:
    """Yield what makes calls over one connection."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT)

    def call(path: str, body: bytes, headers: Mapping[str, str]) -> tuple[float, bytes]:
        began = time.perf_counter()
        method = "POST" if body else "GET"
        try:
            connection.request(method, path, body or None, {**headers, _WAY: way})
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ShowError(f"{method} {url}{path}: {error}") from error
        seconds = time.perf_counter() - began
        if response.status != 200:
            text = content[:300].decode(errors="replace")
            raise ShowError(f"{method} {url}{path}: status {response.status}, {text}")
        return seconds, content

    with closing(connection):
        yield call


def _inputs(call: _Call, model: str) -> list[tuple[dict[str, Any], Array]]:
    """Make values for the inputs of a model, as its metadata say."""
    metadata = json.loads(call(f"/v2/models/{model}", b"", {})[1])
    inputs = []
    for entry in metadata["inputs"]:
        datatype, shape = entry["datatype"], [int(size) for size in entry["shape"]]
        dtype = DTYPES.get(datatype)
        if dtype is None or datatype in ("BYTES", "BF16"):
            raise ShowError(
                f"model {model}: input {entry['name']} is of {datatype}, not of numbers"
            )
        shape = [VARIABLE] if shape == [-1] else [1 if size < 0 else size for size in shape]
        numbers = np.random.default_rng(1).random(shape)
        values = numbers.astype(dtype) if dtype.kind == "f" else (numbers * 2).astype(dtype)
        inputs.append(({"name": entry["name"], "shape": shape, "datatype": datatype}, values))
    return inputs


def _binary(inputs: list[tuple[dict[str, Any], Array]]) -> tuple[bytes, dict[str, str]]:
    specs = [{**spec, "parameters": {"binary_data_size": values.nbytes}} for spec, values in inputs]
    header = encode({"inputs": specs, "parameters": {"binary_data_output": True}})
    data = b"".join(values.tobytes() for _, values in inputs)
    return header + data, {HEADER_LENGTH: str(len(header))}


def _json(inputs: list[tuple[dict[str, Any], Array]]) -> tuple[bytes, dict[str, str]]:
    return encode({"inputs": [{**s, "data": v.ravel().tolist()} for s, v in inputs]}), {}


@contextmanager
def _running(server_url: str, addresses: tuple[str, str]) -> Iterator[str]:
    """Run a gateway; yield why it shares no memory with the server, empty if it does."""
    upstream = {"endpoints": [server_url], "dialect": "triton"}
    settings = {
        "listen": addresses[0],
        "admin": addresses[1],
        "upstreams": {"socket": upstream, "memory": {**upstream, "shared_memory": _SHARED}},
        "routes": [
            {"match": {"headers": {_WAY: _MEMORY}}, "upstream": "memory"},
            {"upstream": "socket"},
        ],
        "log": {"access": False, "level": "error"},
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = folder / "demo.yaml"
        file.write_bytes(encode(settings))
        command = [sys.executable, "-m", "gateway", "serve", str(file)]
        process = stack.enter_context(subprocess.Popen(command))  # noqa: S603 (our own)
        stack.callback(process.terminate)
        yield _why_not_shared(process, addresses[1])


def _why_not_shared(process: subprocess.Popen[bytes], admin: str) -> str:
    """Wait until the gateway has tried to share memory; say why it does not."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        with closing(http.client.HTTPConnection(admin, timeout=1)) as connection:
            try:
                connection.request("GET", "/status")
                status = json.loads(connection.getresponse().read())
            except (OSError, http.client.HTTPException, ValueError):
                time.sleep(0.05)  # nothing tells that it listens
                continue
        (endpoint,) = status["upstreams"]["memory"]["endpoints"]
        memory = endpoint["shared_memory"]
        if memory["size"] or "not registered yet" not in memory["why_not"]:
            return str(memory["why_not"])
        time.sleep(0.05)
    raise ShowError("the gateway has not started")
