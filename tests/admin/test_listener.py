import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.admin.listener import Admin, Page
from gateway.listener.server import HttpListener
from gateway.proxy.interfaces import ClientRequest
from tests.support.raw_client import RawClient, connect


async def _healthy_page(_: ClientRequest) -> Page:
    return Page(b"fine\n")


async def _unhealthy_page(_: ClientRequest) -> Page:
    return Page(b'{"ill":true}', "application/json", 503)


async def _raising_page(_: ClientRequest) -> Page:
    raise ZeroDivisionError


@asynccontextmanager
async def _client() -> AsyncIterator[RawClient]:
    listener = HttpListener(
        Admin({"/fine": _healthy_page, "/ill": _unhealthy_page, "/broken": _raising_page}), ()
    )
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        listener.listen(bound.dup())
        async with connect("http://{}:{}".format(*bound.getsockname())) as client:
            yield client
    await listener.drain(0.1)


async def test_page_is_served() -> None:
    async with _client() as client:
        for target in ("/fine", "/fine?x=1"):
            reply = await client.call("GET", target)
            assert (reply.status, reply.body) == (200, b"fine\n")
            assert reply.head.get("Content-Type") == "text/plain; charset=utf-8"
            assert reply.head.get("Cache-Control") == "no-store"


async def test_page_has_a_status() -> None:
    async with _client() as client:
        reply = await client.call("GET", "/ill")
        assert (reply.status, reply.json) == (503, {"ill": True})


async def test_root_lists_the_pages() -> None:
    async with _client() as client:
        assert (await client.call("GET", "/")).body == b"/fine\n/ill\n/broken\n"


@pytest.mark.parametrize("target", ["/other", "/fine/", "/v2/health/live", "/%66ine"])
async def test_other_paths_are_404(target: str) -> None:
    async with _client() as client:
        reply = await client.call("GET", target)
        assert reply.status == 404
        assert reply.error == f"no page '{target}'; there are: /fine, /ill, /broken"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_other_methods_are_405(method: str) -> None:
    async with _client() as client:
        reply = await client.call(method, "/fine", b"")
        assert reply.status == 405
        assert reply.error == f"{method} /fine: pages are read with GET"


async def test_page_that_raises_is_500(caplog: pytest.LogCaptureFixture) -> None:
    async with _client() as client:
        assert (await client.call("GET", "/broken")).status == 500
    assert "ZeroDivisionError" in caplog.text
