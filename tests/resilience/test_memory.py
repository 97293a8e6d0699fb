"""Clients cannot make the metrics or the memory grow, whatever they send.

The memory of a gateway under hostile traffic stays within what docs/memory.md says.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from gateway.errors import ErrorKind
from gateway.observe.call_metrics import MAX_MODELS
from gateway.protocol.operations import OPERATION_KINDS
from tests.resilience.hostile_traffic import ATTACKS, BUFFERED, MIB, running_gateway
from tests.support.gateway import until
from tests.support.http_messages import http_response, message
from tests.support.operator import OperatedGateway, operated_gateway
from tests.support.raw_client import connect
from tests.support.scale import scaled
from tests.support.servers.scripted_server import Connection, Script, ScriptedServer

MANY = scaled(10_000)
CONNECTIONS = 10
UNKNOWN = "no-such-model"
MAX_GROWTH = 64 * MIB
"""Bytes by which memory may grow: caches of heads and plans, and freed memory."""
MAX_SIZE = 6 * MIB
"""Bytes of the metrics: for each of 100 models, a histogram for each of six operations."""
MAX_NEW = 5
"""Series of calls that a flood may add: those of requests that fail, or that have no model."""


async def _models(connection: Connection) -> None:
    """Answer 200 for each model but those whose names say that there is none."""
    while True:
        request = await connection.request()
        connection.requests.clear()
        known = UNKNOWN not in request.head.target
        await connection.send(http_response(status="200 OK" if known else "404 Not Found"))


@asynccontextmanager
async def _gateway(folder: Path) -> AsyncIterator[OperatedGateway]:
    async with ScriptedServer(_models) as server:
        settings = (
            f"offload: 0\nlog: {{access: {{path: {folder / 'access.log'}}}}}\n"
            f"upstreams: {{one: {{endpoints: [{server.url}], dialect: triton}}}}\n"
        )
        async with operated_gateway(folder, settings) as gateway:
            yield gateway


async def _send(gateway: OperatedGateway, requests: Iterable[bytes]) -> Counter[int]:
    """Send requests over several connections, anew if one was closed; count the statuses."""
    statuses: Counter[int] = Counter()
    left = iter(requests)

    async def client() -> None:
        for first in left:
            async with connect(gateway.url) as connection:
                data: bytes | None = first
                while data is not None:
                    response = await connection.ask(data)
                    statuses[response.status] += 1
                    data = next(left, None) if response.head.get("Connection") != "close" else None

    await asyncio.gather(*(client() for _ in range(CONNECTIONS)))
    return statuses


@dataclass(frozen=True, slots=True)
class _Metrics:
    size: int
    """In bytes."""
    calls: Counter[str]
    """The series of calls by model."""
    values: dict[str, set[str]]
    """The values of each label."""


async def _metrics(gateway: OperatedGateway) -> _Metrics:
    calls: Counter[str] = Counter()
    values: defaultdict[str, set[str]] = defaultdict(set)
    for sample in await gateway.operator.samples():
        if sample.name == "tensorgate_requests_total":
            calls[sample.labels["model"]] += 1
        for label, value in sample.labels.items():
            values[label].add(value)
    return _Metrics(len(await gateway.operator.text("/metrics")), calls, values)


_PRINTABLE = [chr(code) for code in range(33, 127)]


def _text(length: int, source: random.Random) -> str:
    return "".join(source.choices(_PRINTABLE, k=length))


def _known_models(number: int, source: random.Random) -> bytes:
    """Ask for one of the first models again, or for another one."""
    number = source.choice([number, source.randrange(200)])
    name = f"model-{number}-" + "n" * (number % 300)
    suffix = source.choice(["", "/ready", "/config", "/stats", "/versions/1", "/trace/setting"])
    return _request(f"/v2/models/{name}{suffix}")


def _unknown_models(number: int, source: random.Random) -> bytes:
    return _request(f"/v2/models/{UNKNOWN}-{number}/versions/{source.randrange(10**9)}/ready")


def _request(target: str, method: str = "GET", **headers: str) -> bytes:
    return message(f"{method} {target} HTTP/1.1", {"Host": "gateway", **headers})


_HEADERS = (
    *("X-Request-Id", "traceparent", "User-Agent", "Accept", "Host", "Cookie", "Authorization"),
    *("X-Forwarded-For", "Forwarded", "Content-Type", "Accept-Encoding", "Via", "Origin"),
)


def _anything_else(number: int, source: random.Random) -> bytes:
    """Make up a method, a path, and the value of a header."""
    method = "".join(source.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=10))
    known = source.choice(["DELETE", "OPTIONS", "PATCH", "GET", "PUT", "REPORT"])
    path = quote(_text(source.randrange(500), source), safe="/%:@!$&'()*+,;=-._~")
    name = source.choice([*_HEADERS, f"X-{number}"])
    headers = {"Host": "gateway", name: f"{number}-{_text(source.randrange(500), source)}"}
    target = source.choice([f"/{UNKNOWN}/{number}/{path}?{number}", "/v2/models/model-1/ready"])
    return message(f"{source.choice([method, known])} {target} HTTP/1.1", headers)


FLOODS: dict[str, Callable[[int, random.Random], bytes]] = {
    "models that respond": _known_models,
    "models that are not there": _unknown_models,
    "anything else": _anything_else,
}


async def test_metrics_and_memory_stay_bounded_under_names_of_a_hostile_client(
    tmp_path: Path,
) -> None:
    source = random.Random(1)
    async with _gateway(tmp_path) as gateway:
        await _send(gateway, (_request("/v2/models/model-0/ready") for _ in range(100)))
        start = gateway.memory("VmRSS")
        before: Counter[str] = Counter()
        for name, flood in FLOODS.items():
            statuses = await _send(gateway, (flood(number, source) for number in range(MANY)))
            assert sum(statuses.values()) == MANY
            metrics = await _metrics(gateway)
            assert metrics.size < MAX_SIZE, name
            _check_labels(metrics)
            if flood is _known_models:
                assert len(metrics.values["model"]) > MAX_MODELS // 2, "the first ones"
            else:
                new = {each: number - before[each] for each, number in metrics.calls.items()}
                assert sum(new.values()) <= MAX_NEW, (name, new)
            before = metrics.calls
        assert gateway.memory("VmRSS") < start + MAX_GROWTH


def _check_labels(metrics: _Metrics) -> None:
    """Check that each label has values of the gateway's own, or of the models that it knows."""
    values = metrics.values
    assert len(values["model"]) <= MAX_MODELS + 2, "those, other, and none"
    assert values["operation"] <= {*OPERATION_KINDS, ""}
    assert values["form"] <= {"json", "binary", "raw", "v1", ""}
    assert values["status"] <= {"2xx", "3xx", "4xx", "5xx", "aborted"}
    assert values["route"] <= {"1", ""}
    assert values["upstream"] <= {"one", ""}
    assert values["kind"] <= {*(kind.name.lower() for kind in ErrorKind), "aborted"}
    assert len(values["endpoint"]) == 1


BASELINE = 160 * MIB
FRAGMENTATION = 1.25
MANY_CONNECTIONS, PER_CONNECTION = 1500, 4096
CALLS, PER_CALL = 400, 20 * 1024
MAX_GROWTH_OF_TRAFFIC = (
    BASELINE + FRAGMENTATION * BUFFERED + MANY_CONNECTIONS * PER_CONNECTION + CALLS * PER_CALL
)

MAX_REMAINING = 64 * MIB
"""Bytes by which memory may have grown once all calls have ended."""


@pytest.mark.parametrize("script", ATTACKS)
async def test_memory_under_hostile_traffic_stays_within_the_formula(
    script: Script, tmp_path: Path
) -> None:
    async with running_gateway(script, tmp_path) as gateway:
        start = gateway.memory("VmRSS")
        for attack in ATTACKS[script]:
            await attack(gateway)
            await gateway.until_idle()
            assert gateway.memory("VmHWM") < MAX_GROWTH_OF_TRAFFIC, attack.__name__
        # What is free goes back to the system within ten quiet seconds.
        await until(lambda: gateway.memory("VmRSS") < start + MAX_REMAINING, 25)
