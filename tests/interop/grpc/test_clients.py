"""gRPC clients and proxies that others wrote, each on its own HTTP/2 and gRPC."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from benchmarks.servers.proxies import envoy_before, haproxy_grpc_before, nginx_grpc_before
from tests.interop.grpc import calls
from tests.interop.grpc.peer_server import calls_by_grpcio, peer_server
from tests.interop.programs import Proxy, before, go_program, installed_folder, program
from tests.support.gateway import running_gateway
from tests.support.gateway_process import run
from tests.support.grpc.proto_file import FOLDER

GHZ = "github.com/bojand/ghz/cmd/ghz@v0.121.0"
_ROOT = Path(__file__).parents[3]


async def _report(*command: str, **environ: str) -> Any:
    status, out, err = await run(*command, **environ)
    assert status == 0, out + err
    return json.loads(out)


async def test_grpc_js() -> None:
    node, packages = program("node"), installed_folder("node/node_modules")
    script = str(Path(__file__).with_name("client.js"))
    async with peer_server() as server, running_gateway(server.url) as gateway:
        address = urlsplit(gateway.url).netloc
        command = (node, script, address, str(FOLDER))
        await server.check(await _report(*command, NODE_PATH=str(packages)))


async def test_stubs_of_grpcio_tools(tmp_path: Path) -> None:
    packages = installed_folder("grpcio-tools")
    path = os.pathsep.join(map(str, (packages, tmp_path, _ROOT)))
    proto = (f"--proto_path={FOLDER}", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}")
    compiler = (sys.executable, "-m", "grpc_tools.protoc", *proto, "inference.proto")
    status, out, err = await run(*compiler, PYTHONPATH=path)
    assert status == 0, out + err
    async with peer_server() as server, running_gateway(server.url) as gateway:
        address = urlsplit(gateway.url).netloc
        command = (sys.executable, "-m", calls.__name__, address)
        await server.check(await _report(*command, PYTHONPATH=path))


def _typed(model: str, *values: float) -> dict[str, Any]:
    contents = {"fp32_contents": values}
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [len(values)], "contents": contents}
    return {"model_name": model, "inputs": [tensor]}


async def test_each_call_of_ghz_ends_as_it_should() -> None:
    unary = _typed("identity", 0.5)
    async with peer_server() as server, running_gateway(server.url) as gateway:
        assert await _ghz(gateway.url, "ModelInfer", unary) == {"OK": 64}
        assert await _ghz(gateway.url, "ModelStreamInfer", [unary] * 3) == {"OK": 64}
        slow = await _ghz(gateway.url, "ModelInfer", _typed("slow", 0.5), "300ms")
        assert slow == {"DeadlineExceeded": 64}


async def _ghz(url: str, method: str, data: object, limit: str = "20s") -> Any:
    """Make 64 calls, and return how many had which status; ghz learns messages by reflection."""
    load = ("--total=64", "--concurrency=16", "--connections=4", f"--timeout={limit}")
    call = (f"--call=inference.GRPCInferenceService.{method}", f"--data={json.dumps(data)}")
    command = (go_program(GHZ), "--insecure", "--format=json", *load, *call)
    report = await _report(*command, urlsplit(url).netloc)
    return report["statusCodeDistribution"]


# Proxies in front of the gateway, and between it and a server

ENVOY = partial(envoy_before, http2=True)
in_front_of_each_proxy = pytest.mark.parametrize(
    "proxy", [ENVOY, haproxy_grpc_before, nginx_grpc_before], ids=["envoy", "haproxy", "nginx"]
)


@in_front_of_each_proxy
async def test_clients_of_a_proxy_before_the_gateway(proxy: Proxy) -> None:
    async with peer_server() as server, running_gateway(server.url) as gateway:
        with before(proxy, gateway.url) as url:
            await server.check(await calls_by_grpcio(url))


@in_front_of_each_proxy
async def test_clients_of_the_gateway_before_a_proxy(proxy: Proxy) -> None:
    async with peer_server() as server:
        with before(proxy, server.url) as url:
            async with running_gateway(f"grpc://{urlsplit(url).netloc}") as gateway:
                await server.check(await calls_by_grpcio(gateway.url))
