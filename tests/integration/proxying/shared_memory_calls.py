"""Calls of a Triton whose tensors go through shared memory, each with a pattern of its own.

A byte of another call's would be seen: every response is compared with what was sent.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from tests.integration.support.client import HEADER_LENGTH, Client, Response
from tests.integration.support.gateway import TENSORGATE, Gateway, gateway_with_settings
from tests.integration.triton.models import Model, Tensor
from tests.integration.triton.server import HOST, SHARED_MEMORY, TritonServer
from tests.support.checks.nothing_left_in_process import fetch_status

IMAGE = "image"
"""A model that returns what it gets; all but the batch is certain from its metadata."""
SHAPE = (1, 3, 224, 224)
SIZE = 4 * 3 * 224 * 224
"""Bytes of one image."""
SLOW_IMAGE = Model(
    "slow_image",
    "slow",
    (Tensor("INPUT0", "FP32", SHAPE[1:]),),
    (Tensor("OUTPUT0", "FP32", SHAPE[1:]),),
    max_batch_size=1,
)
"""It returns an image after as many seconds as its first element says, one after the other."""
PREFIX = "tensorgate-"
REGIONS = "/v2/systemsharedmemory/status"
SETTING = {"size": "16MiB", "min_bytes": "128KiB"}
_LANES = re.compile(
    r'^tensorgate_shared_memory_calls_total\{.*lane="(\w+)",reason="(\w*)",tensors="(\w+)".* (\d+)',
    re.MULTILINE,
)
_PATIENCE = 80
_UNUSED = {"in_use": 0, "quarantined": 0}
_SHORT_DEAD_INTERVAL = (
    "from functools import partial",
    "from gateway.app.build import upstreams",
    "upstreams.SharedMemoryPolicy = partial(upstreams.SharedMemoryPolicy, dead_interval=0.5)",
)
"""What makes a gateway free the memory of dead ones after half a second, instead of 30."""


@contextmanager
def gateway_before(
    folder: Path,
    server: TritonServer,
    *,
    command: Sequence[str] = (str(TENSORGATE),),
    settings: Mapping[str, Any] | None = None,
    **upstream: Any,
) -> Iterator[Gateway]:
    """Run a gateway that shares memory with a server, once it does.

    ``settings`` replace those of the same name. Fails unless in the end, if it still runs, no call
    and no server uses a slice, and a client is served.
    """
    folder.mkdir(exist_ok=True)
    endpoint = {"endpoints": [server.http_url], "shared_memory": SETTING, **upstream}
    all_settings = {
        "listen": f"{HOST}:0",
        "upstreams": {"server": {"dialect": "triton", **endpoint}},
        "routes": [{"upstream": "server"}],
        **(settings or {}),
    }
    with gateway_with_settings(folder, all_settings, command) as gateway:
        until(lambda: "shared memory" in gateway.log)
        yield gateway
        if gateway.is_alive():
            check_unharmed(gateway, server)


def tensorgate_after(*statements: str) -> tuple[str, ...]:
    """Return the command `tensorgate` that runs some Python before."""
    program = "; ".join([*statements, "from gateway.cli import main", "main()"])
    return (sys.executable, "-c", program)


def cleaning_soon() -> tuple[str, ...]:
    """Return the command of a gateway that frees the memory of dead ones soon."""
    return tensorgate_after(*_SHORT_DEAD_INTERVAL)


def check_unharmed(gateway: Gateway, server: TritonServer) -> None:
    """Fail unless both live, no slice is used or in quarantine, and a client is served."""
    until(lambda: memory_of(gateway).items() >= _UNUSED.items())
    with Client(gateway.host, gateway.port) as client:
        assert client.get("/v2/health/ready").status == 200
        assert call(client, pattern(2**31)) in (200, 404)  # 404 if it has no such model
    assert server.is_alive()
    assert "Traceback" not in gateway.log


def memory_of(gateway: Gateway) -> dict[str, Any]:
    """Return what a gateway tells of the memory that it shares with its server."""
    assert gateway.admin is not None
    # In a thread, since the test's own may run an event loop.
    with ThreadPoolExecutor(1) as other:
        status = other.submit(asyncio.run, fetch_status(gateway.admin)).result()
    (endpoint,) = status["upstreams"]["server"]["endpoints"]
    memory: dict[str, Any] = endpoint["shared_memory"]
    return memory


def calls_by_lane(gateway: Gateway) -> Counter[tuple[str, str]]:
    """Return how many calls had inputs, or outputs, in shared memory, or why they had not."""
    assert gateway.admin is not None
    host, _, port = gateway.admin.removeprefix("http://").partition(":")
    with Client(host, int(port)) as client:
        text = client.get("/metrics").body.decode()
    found = _LANES.findall(text)
    return Counter({(tensors, why or lane): int(count) for lane, why, tensors, count in found})


def until(holds: Callable[[], object], interval: float = 0.1) -> None:
    """Wait until something holds that tells nobody when it does."""
    end = time.monotonic() + _PATIENCE
    while not holds():
        if time.monotonic() > end:
            pytest.fail(f"it did not become so within {_PATIENCE} s")
        Event().wait(interval)


def files_of(region: str) -> set[str]:
    """Return the kinds of files that the owner of a region has: other gateways have theirs."""
    token = region.removeprefix(PREFIX).partition("-")[0]
    return {path.suffix for path in SHARED_MEMORY.glob(f"{PREFIX}{token}*")}


def our_regions(server: TritonServer) -> set[str]:
    """Return the names of the gateways' regions that a server has."""
    with Client(HOST, server.http_port) as client:
        names = [each["name"] for each in json.loads(client.get(REGIONS).body)]
    return {name for name in names if name.startswith(PREFIX)}


def pattern(number: int, batch: int = 1) -> Any:
    """Return images that only calls of this number have."""
    shape = (batch, *SHAPE[1:])
    return np.random.default_rng(number).standard_normal(shape, np.float32)


def slow_pattern(number: int, seconds: float) -> Any:
    """Return an image that the slow model returns so much later."""
    values = pattern(number)
    values[0, 0, 0, 0] = seconds
    return values


def binary_request(values: Any) -> tuple[bytes, dict[str, str]]:
    """Return the body of a request in the binary form, and its headers."""
    return with_header(values, values.nbytes)


def with_header(values: Any, size: int) -> tuple[bytes, dict[str, str]]:
    """Return a request in the binary form which says that its tensor has ``size`` bytes."""
    parameters = {"binary_data_size": size}
    spec = {"name": "INPUT0", "shape": list(values.shape), "datatype": "FP32"}
    inputs = [{**spec, "parameters": parameters}]
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return header + values.tobytes(), {HEADER_LENGTH: str(len(header))}


def json_request(values: Any) -> tuple[bytes, dict[str, str]]:
    """Return the body of a request in JSON, and its headers."""
    spec = {"name": "INPUT0", "shape": list(values.shape), "datatype": "FP32"}
    return json.dumps({"inputs": [{**spec, "data": values.ravel().tolist()}]}).encode(), {}


def raw_request(values: Any) -> tuple[bytes, dict[str, str]]:
    """Return the body of a request of raw bytes, and its headers."""
    return values.tobytes(), {HEADER_LENGTH: "0"}


def call(client: Client, values: Any, form: Any = binary_request, model: str = IMAGE) -> int:
    """Send a request; fail if a response of 200 has other values than were sent."""
    body, headers = form(values)
    response = client.send("POST", f"/v2/models/{model}/infer", body, headers)
    if response.status == 200:
        check_values(response, values)
    return response.status


def check_values(response: Response, values: Any) -> None:
    """Fail if a response of 200 has other values than were sent."""
    output = response.fields["outputs"][0]
    assert output["shape"] == list(values.shape)
    if response.header_length is None:
        returned = np.array(output["data"], np.float32).reshape(values.shape)
    else:
        data = response.body[response.header_length :]
        returned = np.frombuffer(data, np.float32).reshape(values.shape)
    assert (returned == values).all()


class Load:
    """Calls that go on until it is stopped, each with another pattern.

    A call fails the test if its values come back wrong. ``lost`` counts those without a response,
    ``statuses`` are those of the others, and ``count`` is how many have ended.
    """

    def __init__(self, gateway: Gateway, batch: int) -> None:
        self.statuses: set[int] = set()
        self.lost = 0
        self.count = 0
        self._gateway = gateway
        self._batch = batch
        self._stopped = Event()

    def stop(self) -> None:
        """Let the calls end."""
        self._stopped.set()

    def until_calls(self, count: int) -> None:
        """Wait until so many more calls have ended."""
        wanted = self.count + count
        until(lambda: self.count >= wanted, 0.005)

    def run(self, worker: int) -> None:
        """Call until it is stopped."""
        with Client(self._gateway.host, self._gateway.port) as client:
            number = worker * 1_000_000
            while not self._stopped.is_set():
                number += 1
                try:
                    self.statuses.add(call(client, pattern(number, self._batch)))
                except (OSError, http.client.HTTPException):
                    self.lost += 1
                self.count += 1


@contextmanager
def load_on(gateway: Gateway, clients: int = 4, batch: int = 1) -> Iterator[Load]:
    """Keep clients calling with so many images; fails if one of them has got a wrong byte."""
    load = Load(gateway, batch)
    with ThreadPoolExecutor(clients) as pool:
        running: list[Future[None]] = [pool.submit(load.run, each) for each in range(clients)]
        try:
            yield load
        finally:
            load.stop()
        for each in running:
            each.result()
