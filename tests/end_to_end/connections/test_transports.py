"""JSON infer requests through a gateway to servers behind TLS, and behind a Unix socket."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.certificates import (
    authority,
    ca_file,
    certificate_files,
    server_certificate,
    server_context,
)
from tests.support.gateway import UPSTREAM, gateway_client
from tests.support.http_messages import with_long_head
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_response,
    infer_json,
    json_request,
)
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import ScriptedServer, always_respond


async def _infer_both_ways(client: RawClient, server: ScriptedServer, fast_path: list[str]) -> None:
    data = infer_json()
    for number, sent in enumerate((with_long_head(data), data)):
        assert fast_path == []
        reply = await client.ask(sent)
        assert reply.status == 200
        assert np.array(reply.json["outputs"][0]["data"], "<f4").tolist() == FLOATS.tolist()
        received = server.requests[number]
        assert received.body.endswith(FLOATS.tobytes())
        assert received.head.get(HEADER_LENGTH) is not None
    assert fast_path == [INFER]
    assert len(server.connections) == 1


async def _infer_large(client: RawClient, server: ScriptedServer) -> None:
    """Send a request that neither arrives nor leaves in one piece."""
    values = np.arange(100_000, dtype="<f4")
    reply = await client.ask(infer_json(json_request(*values.tolist())))
    assert reply.status == 200
    assert server.requests[-1].body.endswith(values.tobytes())


async def test_json_infer_over_https(tmp_path: Path, fast_path_requests: list[str]) -> None:
    certificate = server_certificate("triton.example")
    context = server_context(certificate, clients=authority())
    files = dict(zip(("certificate", "key"), certificate_files(tmp_path), strict=True))
    async with ScriptedServer(
        always_respond(binary_response(FLOATS.tobytes())), ssl=context
    ) as server:
        tls = {"ca": ca_file(tmp_path), "server_name": "triton.example", **files}
        async with gateway_client(server.url, upstream={"tls": tls}) as client:
            await _infer_both_ways(client, server, fast_path_requests)
            await _infer_large(client, server)
        # Without TLS settings, the certificates of the system are trusted.
        async with gateway_client(server.url) as client:
            reply = await client.ask(infer_json())
            assert reply.status == 503
            error = f"cannot connect to {UPSTREAM}: its certificate is not trusted ("
            assert reply.error.startswith(error)


async def test_json_infer_over_a_unix_socket(tmp_path: Path, fast_path_requests: list[str]) -> None:
    path = str(tmp_path / "server")
    async with (
        ScriptedServer(always_respond(binary_response(FLOATS.tobytes())), path=path) as server,
        gateway_client(f"unix:{path}") as client,
    ):
        await _infer_both_ways(client, server, fast_path_requests)
        await _infer_large(client, server)
    async with gateway_client(f"unix:{path}s") as client:
        reply = await client.ask(infer_json())
        assert reply.status == 503
        assert reply.error == f"cannot connect to {UPSTREAM}: No such file or directory"


async def test_certificates_are_not_verified_if_switched_off() -> None:
    context = server_context(server_certificate("triton.example"))
    async with (
        ScriptedServer(always_respond(binary_response(FLOATS.tobytes())), ssl=context) as server,
        gateway_client(server.url, upstream={"tls": {"verify": False}}) as client,
    ):
        assert (await client.ask(infer_json())).status == 200
