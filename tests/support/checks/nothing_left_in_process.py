"""The same question as ``nothing_left`` asks, of a gateway in processes of its own.

Its admin address tells what it counts, its standard error whether it failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.raw_client import connect

PATIENCE = 15.0
"""Seconds in which what the gateway held of its peers must be given back."""

_OF_GATEWAY = ("connections", "requests_in_progress", "bodies_in_transit", "buffered_bytes")


def admin_url(config: str) -> str | None:
    """Return the admin address of a settings file, if it has one whose port is known."""
    try:
        settings = yaml.safe_load(Path(config).read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None  # the test is about this
    address = settings.get("admin") if isinstance(settings, dict) else None
    if isinstance(address, dict):
        address = address.get("listen")
    if not isinstance(address, str) or address.endswith(":0"):
        return None
    return address if address.startswith("unix:") else f"http://{address}"


async def until_nothing_is_left(admin: str) -> None:
    """Wait until a gateway holds nothing of its peers; fails with what it holds."""
    end = asyncio.get_running_loop().time() + PATIENCE
    while left := find_left(await fetch_status(admin)):
        assert asyncio.get_running_loop().time() < end, f"the gateway still has: {left}"
        await asyncio.sleep(0.05)


async def fetch_status(admin: str) -> dict[str, Any]:
    """Return the status of a gateway."""
    async with connect(admin) as client:
        status: dict[str, Any] = (await client.call("GET", "/status")).json
    return status


def find_left(status: dict[str, Any]) -> dict[str, int]:
    """Return what a gateway holds of its peers by its status, without what is 0."""
    return {name: count for name, count in _numbers(status) if count}


def check_log(said: str) -> None:
    """Fail if a gateway has written a traceback."""
    start = said.find("Traceback (most recent call last)")
    assert start < 0, f"the gateway logs: {said[max(0, start - 500) :][:4000]}"


async def check_alive(url: str) -> None:
    """Fail unless a gateway serves the next client."""
    async with connect(url) as client:
        response = await client.call("GET", "/v2/health/live", headers={"Connection": "close"})
    assert response.status < 500, response


def _numbers(status: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for name in _OF_GATEWAY:
        yield name, status[name]
    yield from _slots("the gateway", status["concurrency"])
    for upstream, state in status["upstreams"].items():
        yield from _slots(f"upstream {upstream}", state["concurrency"])
        for endpoint in state["endpoints"]:
            yield f"leases of {endpoint['url']}", endpoint["requests_in_progress"]


def _slots(whose: str, concurrency: dict[str, int] | None) -> Iterator[tuple[str, int]]:
    if concurrency is not None:
        yield f"slots of {whose}", concurrency["active"]
        yield f"calls queued for {whose}", concurrency["queued"]
