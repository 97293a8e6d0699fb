"""A minimal gateway for the tests of the show: it converts between JSON and binary tensors."""

import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from gateway.demo.server import tensors
from gateway.demo.server.models import MODELS
from gateway.demo.server.tensors import DTYPES
from gateway.demo.server.wire import HEADER_LENGTH


@asynccontextmanager
async def serve(
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[str]:
    """Run a server with one handler for all requests; yield its URL."""
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def fake_gateway(server_url: str) -> AsyncIterator[str]:
    """Run the gateway in front of `server_url`; yield its URL."""
    async with aiohttp.ClientSession() as session:

        async def handle(request: web.Request) -> web.Response:
            return await _forward(session, server_url, request)

        async with serve(handle) as url:
            yield url


async def _forward(
    session: aiohttp.ClientSession, server_url: str, request: web.Request
) -> web.Response:
    path, body, headers, raw = request.path, await request.read(), dict[str, str](), False
    if path.endswith("/trace"):
        path += "/setting"
    if path.endswith("/infer"):
        raw = request.headers.get(HEADER_LENGTH) == "0"
        model = path.split("/")[3]
        header, binary = _raw_to_binary(model, body) if raw else _json_to_binary(body)
        body = header + binary
        headers = {HEADER_LENGTH: str(len(header)), "Content-Type": "application/octet-stream"}
    async with session.request(
        request.method, server_url + path, data=io.BytesIO(body) if body else None, headers=headers
    ) as response:
        content = await response.read()
        length = response.headers.get(HEADER_LENGTH)
        if length is None or raw:
            kept = {
                k: v for k, v in response.headers.items() if k in ("Content-Type", HEADER_LENGTH)
            }
            return web.Response(status=response.status, body=content, headers=kept)
        return web.json_response(_binary_to_json(content, int(length)))


def _json_to_binary(body: bytes) -> tuple[bytes, bytes]:
    request = json.loads(body)
    chunks = []
    for entry in request["inputs"]:
        data = np.array(entry.pop("data"), DTYPES[entry["datatype"]])
        chunks.append(data.tobytes())
        entry["parameters"] = {"binary_data_size": len(chunks[-1])}
    request["parameters"] = {"binary_data_output": True}
    return json.dumps(request).encode(), b"".join(chunks)


def _raw_to_binary(model: str, body: bytes) -> tuple[bytes, bytes]:
    (spec,) = MODELS[model].inputs
    entry: dict[str, Any] = {
        "name": spec.name,
        "datatype": spec.datatype,
        "shape": [1, *spec.shape],
        "parameters": {"binary_data_size": len(body)},
    }
    request = {"inputs": [entry], "parameters": {"binary_data_output": True}}
    return json.dumps(request).encode(), body


def _binary_to_json(content: bytes, length: int) -> Any:
    response, at = json.loads(content[:length]), length
    for entry in response["outputs"]:
        end = at + entry.pop("parameters")["binary_data_size"]
        data = content[at:end]
        tensor = tensors.from_binary(entry["name"], entry["datatype"], entry["shape"], data)
        entry["data"] = tensor.array.ravel().tolist()
        at = end
    return response
