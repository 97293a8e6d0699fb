"""The demo in front of a server of the user's own."""

from __future__ import annotations

import asyncio
import io

import pytest

from gateway.demo.server.server import DemoServer
from gateway.demo.walkthrough.client import ShowError
from gateway.demo.walkthrough.own_server import compare_ways
from tests.support.addresses import free_address


def _compare(url: str, model: str) -> str:
    out = io.StringIO()
    compare_ways(url, model, (free_address(), free_address()), out, color=False)
    return out.getvalue()


async def test_ways_to_a_server_that_shares_no_memory_are_two(server: DemoServer) -> None:
    text = await asyncio.to_thread(_compare, server.url, "add")
    assert "shared memory     the server returned 404" in text
    assert text.count("server alone") == text.count("  gateway ") == 2
    assert "with shared memory" not in text


@pytest.mark.parametrize(
    ("model", "error"),
    [("upper", "input INPUT0 is of BYTES, not of numbers"), ("none", "models/none: status 404")],
)
async def test_model_that_cannot_be_called_is_named(
    server: DemoServer, model: str, error: str
) -> None:
    with pytest.raises(ShowError, match=error):
        await asyncio.to_thread(_compare, server.url, model)


def test_server_that_does_not_listen_is_named() -> None:
    url = f"http://{free_address()}"
    with pytest.raises(ShowError, match=f"GET {url}/v2/models/add: .*refused"):
        _compare(url, "add")
