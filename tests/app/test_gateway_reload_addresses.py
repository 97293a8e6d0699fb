"""Reloads that change the addresses, the certificate, or cannot be applied."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from gateway.app.build.listen import ListenError
from gateway.app.build.tls import UpstreamTlsError
from tests.app.reloading import running_gateway, server_named, settings_for
from tests.support.addresses import free_address
from tests.support.certificates import certificate_files, server_certificate
from tests.support.http_messages import request
from tests.support.raw_client import connect


async def test_reload_adds_and_removes_addresses(tmp_path: Path) -> None:
    unix = f"unix:{tmp_path / 's'}"
    first, second = free_address(), free_address()
    async with (
        server_named("x") as server,
        running_gateway(settings_for(server.url, listen=[first, unix])) as (gateway, url),
    ):
        sockets = {each.address: each.sockets for each in gateway._doors.bound}
        async with connect(url) as on_first:
            await gateway.reload(settings_for(server.url, listen=[unix, second]))
            assert gateway.addresses == [unix, f"http://{second}"]
            with pytest.raises(ConnectionRefusedError):
                async with connect(url):
                    pass
            assert gateway._doors.bound[0].sockets == sockets[gateway._doors.bound[0].address]
            for address in gateway.addresses:
                async with connect(address) as client:
                    assert (await client.call("GET", "/v2/x")).status == 200
            assert (await on_first.call("GET", "/v2/x")).status == 200
            await gateway.reload(settings_for(server.url, listen=[first, unix]))
            async with connect(url) as client:
                assert (await client.call("GET", "/v2/x")).status == 200
            assert (await on_first.call("GET", "/v2/x")).status == 200


async def _is_for_operators(address: str) -> bool:
    async with connect(address) as client:
        statuses = [(await client.call("GET", path)).status for path in ("/live", "/v2/x")]
    assert statuses in ([200, 404], [503, 503])
    return statuses == [200, 404]


async def test_reload_swaps_addresses_of_clients_and_operators(tmp_path: Path) -> None:
    first, second, unix = free_address(), free_address(), f"unix:{tmp_path / 's'}"
    everywhere = (f"http://{first}", f"http://{second}", unix)
    async with running_gateway(settings_for(listen=[first, unix], admin=second)) as (gateway, _):
        for operators, clients in ((first, [second, unix]), (unix, [first]), (second, [first])):
            await gateway.reload(settings_for(listen=clients, admin=operators))
            for address in everywhere:
                if address.removeprefix("http://") in (operators, *clients):
                    for_operators = await _is_for_operators(address)
                    assert for_operators is (address.removeprefix("http://") == operators)
        await gateway.reload(settings_for(listen=[first, second]))
        assert not await _is_for_operators(everywhere[1])


async def test_client_in_the_queue_of_a_swapped_address_is_served() -> None:
    first, second = free_address(), free_address()
    host, _, port = second.rpartition(":")
    async with running_gateway(settings_for(listen=first, admin=second)) as (gateway, _):
        await gateway.operators_served()
        kept, admin = gateway._doors.bound
        waiting = admin.sockets[0].dup()
        assert gateway._doors.admin is not None
        gateway._doors.admin.sockets.close_sockets(admin.sockets)  # none is accepted meanwhile
        gateway._doors = gateway._doors._replace(bound=(kept, admin._replace(sockets=(waiting,))))
        with waiting, socket.create_connection((host, int(port))) as client:
            client.sendall(request("GET", "/v2/x", None, {"Connection": "close"}))
            await gateway.reload(settings_for(listen=[first, second]))
            client.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=client.dup())
            async with asyncio.timeout(5):
                assert b" 503 " in await reader.readline()
            writer.close()


async def test_client_in_the_queue_of_a_removed_address_is_served() -> None:
    """A client is connected before its connection is accepted."""
    first, second = free_address(), free_address()
    async with (
        server_named("x") as server,
        running_gateway(settings_for(server.url, listen=first)) as (gateway, _),
    ):
        with socket.create_connection(first.split(":")) as waiting:  # type: ignore[arg-type]
            waiting.sendall(request("GET", "/v2/x", None, {"Connection": "close"}))
            listening = gateway._doors.bound
            await gateway.listener.sockets.stop_listening(listening[0].sockets)
            waiting.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=waiting)
            async with asyncio.timeout(5):
                assert b"200 OK" in await reader.read()
            writer.close()
            gateway._doors = gateway._doors._replace(bound=())
            await gateway.reload(settings_for(server.url, listen=second))


async def test_reload_with_unusable_files_changes_nothing(tmp_path: Path) -> None:
    none = str(tmp_path / "none")
    servers = {"u": {"endpoints": ["https://127.0.0.1:1"], "tls": {"ca": none}}}
    async with server_named("one") as one, running_gateway(settings_for(one.url)) as (gateway, url):
        with pytest.raises(UpstreamTlsError, match=r"upstreams\.u\.tls\.ca: cannot read"):
            await gateway.reload(settings_for(upstreams=servers, listen=free_address()))
        with pytest.raises(ListenError, match=r"tls\.certificate: cannot read"):
            await gateway.reload(settings_for(tls={"certificate": none, "key": none}))
        assert gateway.addresses == [url]
        async with connect(url) as client:
            assert (await client.call("GET", "/v2/x")).body == b"one"


async def test_reload_adds_and_removes_tls_on_an_address(tmp_path: Path) -> None:
    certificate, key = certificate_files(tmp_path, server_certificate())
    os.chmod(key, 0o600)
    tls = {"certificate": certificate, "key": key}
    listen = free_address()
    async with (
        server_named("x") as server,
        running_gateway(settings_for(server.url, listen=listen)) as (gateway, url),
        connect(url) as plain,
    ):
        await gateway.reload(settings_for(server.url, listen=listen, tls=tls))
        assert gateway.addresses == [f"https://{listen}"]
        async with connect(gateway.addresses[0]) as spoken:
            for client in (plain, spoken):
                assert (await client.call("GET", "/v2/x")).status == 200
            await gateway.reload(settings_for(server.url, listen=listen))
            async with connect(url) as client:
                assert (await client.call("GET", "/v2/x")).status == 200
            for client in (plain, spoken):
                assert (await client.call("GET", "/v2/x")).status == 200


async def test_unchanged_tls_is_not_loaded_again(tmp_path: Path) -> None:
    certificate, key = certificate_files(tmp_path, server_certificate())
    os.chmod(key, 0o600)
    settings = settings_for(listen=free_address(), tls={"certificate": certificate, "key": key})
    async with running_gateway(settings) as (gateway, url):
        os.unlink(key)  # which only the file watch notices
        assert await gateway.reload(settings) == "no setting that applies now has changed"
        async with connect(url) as client:
            assert (await client.call("GET", "/v2/x")).status == 503
