"""Traffic for the operator's page after the show: some calls a second, of every form."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Final

import aiohttp

_PAUSE: Final = 0.25  # seconds between two calls
_ROUND: Final = 8  # calls between two that fail


@dataclass(frozen=True, slots=True)
class _Call:
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


def _json(path: str, document: object) -> _Call:
    return _Call(path, json.dumps(document).encode(), {"Content-Type": "application/json"})


def _input(name: str, datatype: str, data: Sequence[object]) -> dict[str, object]:
    return {"name": name, "datatype": datatype, "shape": [len(data)], "data": data}


_ADD: Final = {"inputs": [_input(name, "FP32", [1.5, 2, 3]) for name in ("INPUT0", "INPUT1")]}
_HALF: Final = {"inputs": [_input("INPUT0", "FP16", [1, 2.5, -3])]}
_RAW: Final = {
    "Content-Type": "application/octet-stream",
    "Inference-Header-Content-Length": "0",
}
_GOOD: Final = (
    _json("/v2/models/add/infer", _ADD),
    _json("/v2/models/half/infer", _HALF),
    _Call("/v2/models/upper/infer", b"hello", _RAW),
    _json("/v2/models/upper/generate", {"INPUT0": "word by word"}),
)
_BAD: Final = (
    _json("/v2/models/add/infer", {"inputs": [_input("INPUT0", "FP32", ["not a number"])]}),
    _json("/v2/models/missing/infer", _ADD),
)


async def make_traffic(gateway_url: str) -> None:
    """Make calls until cancelled; now and then one that the gateway or the server refuses."""
    good, bad, url = cycle(_GOOD), cycle(_BAD), gateway_url.rstrip("/")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as session:
        while True:
            for call in (*[next(good) for _ in range(_ROUND - 1)], next(bad)):
                try:
                    async with session.post(
                        url + call.path, data=call.body, headers=call.headers
                    ) as response:
                        await response.read()
                except (aiohttp.ClientError, TimeoutError):
                    await asyncio.sleep(1)  # the gateway stops
                await asyncio.sleep(_PAUSE)
