"""Clients get nothing of the gateway's own shared memory, in which other clients' tensors are."""

from __future__ import annotations

import asyncio
import json
import mmap
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from gateway.protocol.grpc.framing import frame
from tests.support.gateway import RunningGateway, gateway_before, running_gateway, served, until
from tests.support.grpc.client import SERVICE, GrpcClient, grpc_client
from tests.support.grpc.proto_file import ModelInferRequest, message_class
from tests.support.http2_client import connect_http2
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import (
    FLOATS,
    INFER,
    binary_part,
    binary_response,
    infer_binary,
    infer_json,
    infer_raw,
    metadata,
)
from tests.support.servers.grpc_server import GrpcServer, grpc_server
from tests.support.servers.grpc_shared_memory import GrpcSharedMemoryModel
from tests.support.servers.model_scripts import model_script
from tests.support.servers.scripted_server import Connection, ScriptedServer
from tests.support.servers.shared_memory_server import SharedMemoryModel

OWN = "tensorgate-x-1"
SHARED: dict[str, Any] = {"shared_memory": {"size": "1MiB"}}
LARGE = 200_000
DATA: dict[str, Any] = {"name": "IN", "datatype": "FP32", "shape": [3], "data": FLOATS.tolist()}
BINARY = {**binary_part(12), "name": "IN"}


def _entry(region: str) -> dict[str, Any]:
    return {"shared_memory_region": region, "shared_memory_byte_size": 12}


def _json(name: str, region: str, **fields: Any) -> bytes:
    """Write an infer request with an input or an output in a region."""
    tensor: dict[str, Any] = {"name": name, "parameters": _entry(region)}
    if name == "IN":
        tensor |= {"datatype": "FP32", "shape": [3]}
        return json.dumps({"inputs": [tensor], **fields}).encode()
    return json.dumps({"inputs": [BINARY], "outputs": [tensor], **fields}).encode()


def _in_json(region: str) -> bytes:
    return infer_json(_json("IN", region))


def _output_in_json(region: str) -> bytes:
    return infer_json(_json("OUT", region, inputs=[DATA]))


def _escaped(region: str) -> bytes:
    return infer_json(_json("IN", region).replace(b"tensorgate-", b"\\u0074ensorgate\\u002d"))


def _binary(region: str) -> bytes:
    return infer_binary(_json("OUT", region), FLOATS.tobytes())


def _large_binary(region: str) -> bytes:
    tensor = {**binary_part(LARGE), "name": "IN"}
    return infer_binary(_json("OUT", region, inputs=[tensor]), bytes(LARGE))


def _passed_on(region: str) -> bytes:
    """Its header goes to the server as it came."""
    return infer_binary(_json("IN", region, parameters={"binary_data_output": True}), b"")


def _twice(region: str) -> bytes:
    """Servers take the first of two members, and JSON parsers the last."""
    text = _json("IN", "mine", parameters={"binary_data_output": True})
    first = json.dumps({"shared_memory_region": region})[1:-1].encode()
    return infer_binary(
        text.replace(b'"parameters": {', b'"parameters": {' + first + b", ", 1), b""
    )


INPUT = f"input 'IN': shared memory region '{OWN}' is the gateway's own"
OUTPUT = f"output 'OUT': shared memory region '{OWN}' is the gateway's own"
FORMS: dict[Callable[[str], bytes], str] = {
    _in_json: INPUT,
    _output_in_json: OUTPUT,
    _escaped: INPUT,
    _binary: OUTPUT,
    _large_binary: OUTPUT,
    _passed_on: INPUT,
    _twice: "the request's JSON names a shared memory region that is the gateway's own",
}


UNGUARDED: dict[str, dict[str, Any]] = {
    "off": {"upstream": {"shared_memory": None}},
    "elsewhere": {"host": "0.0.0.0"},  # leads here, but is no loopback address
    "without the extension": {"upstream": {"dialect": "kserve", "inference_protocol": "http"}},
}


@asynccontextmanager
async def _gateway(
    host: str = "127.0.0.1",
    **settings: Any,
) -> AsyncIterator[tuple[ScriptedServer, GrpcServer, RunningGateway]]:
    """Run a gateway before a server that has one model, and regions, over HTTP and over gRPC."""
    calls = {f"SystemSharedMemory{each}": _nothing for each in ("Status", "Register", "Unregister")}
    with grpc_server(unary={**calls, "CudaSharedMemoryUnregister": _nothing}) as over_grpc:
        async with ScriptedServer(_serve) as server:
            urls = {"http": server.url, "grpc": over_grpc.url}
            endpoint = {name: url.replace("127.0.0.1", host) for name, url in urls.items()}
            upstream = {**SHARED, "endpoints": [endpoint], **settings.pop("upstream", {})}
            async with running_gateway(upstream=upstream, **settings) as gateway:
                yield server, over_grpc, gateway


async def _serve(connection: Connection) -> None:
    responses = {
        INFER: binary_response(FLOATS.tobytes()),
        "/v2/models/m": http_response(metadata(-1)),
    }
    regions = http_response(json.dumps(REGIONS).encode())
    while True:
        target = (await connection.request()).head.target
        other = regions if target.endswith("/status") else http_response(b"")
        await connection.send(responses.get(target, other))


def _nothing(_: bytes, __: grpc.ServicerContext) -> bytes:
    return b""


REGIONS = [
    {"name": name, "key": f"/{name}", "offset": 0, "byte_size": 12}
    for name in ("mine", OWN, "tensorgate")
]


def _targets(server: ScriptedServer, start: str) -> list[str]:
    """Return the targets of requests that are not about the gateway's own regions."""
    targets = [each.head.target for each in server.requests]
    return [each for each in targets if each.startswith(start) and "tensorgate-" not in each]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
async def test_http_request_that_names_a_region_of_the_gateway_is_refused(
    form: Callable[[str], bytes], path: Callable[[bytes], bytes]
) -> None:
    async with _gateway() as (server, _, gateway), gateway.client() as client:
        for _ in range(2):
            reply = await client.ask(path(form(OWN)))
            assert (reply.status, reply.error) == (400, FORMS[form])
            assert (await client.ask(path(form("mine")))).status == 200
        assert _targets(server, INFER) == [INFER] * 2


@pytest.mark.parametrize("settings", UNGUARDED, ids=UNGUARDED)
async def test_all_names_pass_where_no_server_can_have_a_region_of_a_gateway(settings: str) -> None:
    async with _gateway(**UNGUARDED[settings]) as (_, _, gateway), gateway.client() as client:
        for form in FORMS:
            assert (await client.ask(form(OWN))).status == 200


@pytest.mark.parametrize("shared", [SHARED, {"shared_memory": "auto"}], ids=["sizes", "auto"])
async def test_regions_are_guarded_where_this_gateway_has_none(shared: dict[str, Any]) -> None:
    """Another gateway may have some."""
    async with (
        _gateway(upstream={**shared, "retry_stale": "safe"}) as (server, _, gateway),
        gateway.client() as client,
        grpc_client(gateway.url) as grpc_peer,
    ):
        assert (await client.ask(_in_json(OWN))).error == INPUT
        assert await _error(grpc_peer, "ModelInfer", _message(OWN), None) == INPUT
        assert not server.requests


async def test_raw_binary_request_passes() -> None:
    async with _gateway() as (_, _, gateway), gateway.client() as client:
        assert (await client.ask(infer_raw(FLOATS.tobytes()))).status == 200


# -------------------------------------------------------------------------------------------- gRPC


def _message(region: str, what: str = "input", *, data: int = 4, typed: bool = False) -> bytes:
    """Write a message with an input of data, and an input or an output in a region."""
    message = ModelInferRequest(model_name="m")
    tensor = message.inputs.add(name="IN", datatype="UINT8", shape=[data])
    if typed:
        tensor.contents.uint_contents.extend([200] * data)
    else:
        message.raw_input_contents.append(bytes(data))
    if what == "input":
        named = message.inputs.add(name="IN", datatype="FP32", shape=[3])
    else:
        named = message.outputs.add(name="OUT")
    named.parameters["shared_memory_byte_size"].int64_param = 12
    named.parameters["shared_memory_region"].string_param = region
    return bytes(message.SerializeToString())


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
@pytest.mark.parametrize("typed", [False, True], ids=["raw", "typed"])
@pytest.mark.parametrize("size", [4, LARGE])
async def test_message_that_names_a_region_of_the_gateway_is_refused(
    size: int, typed: bool, compression: grpc.Compression | None, protocol: str
) -> None:
    async with _gateway() as (server, over_grpc, both):
        settings = {**SHARED, "endpoints": [server.url]}
        async with (
            running_gateway(upstream=settings) as over_http,
            grpc_client((both if protocol == "grpc" else over_http).url) as client,
        ):
            for method in ("ModelInfer", "ModelStreamInfer"):
                for what, error in (("input", INPUT), ("output", OUTPUT)):
                    message = _message(OWN, what, data=size, typed=typed)
                    assert await _error(client, method, message, compression) == error
                    innocent = _message("mine", what, data=size, typed=typed)
                    assert await _error(client, method, innocent, compression) == ""
        assert bool(_targets(server, INFER)) == (protocol == "http")
        assert not [each for each in over_grpc.requests if OWN.encode() in each]


async def _error(
    client: GrpcClient, method: str, message: bytes, compression: grpc.Compression | None
) -> str:
    """Return the error of a call, which may be a message of its stream."""
    response = await client.call(method, message, compression=compression)
    if response.code is not grpc.StatusCode.OK:
        assert response.code is grpc.StatusCode.INVALID_ARGUMENT
        return response.text
    if method == "ModelInfer":
        return ""
    read = message_class("ModelStreamInferResponse").FromString(response.messages[0])
    return str(read.error_message)


async def test_later_message_of_a_stream_is_refused() -> None:
    """Also if it comes with others, and if the stream is copied for a mirror."""
    bodies = [_message("mine"), _message("mine"), _message(OWN), _message("mine")]
    with grpc_server() as copy:
        others = {"copies": {"endpoints": [copy.url], "dialect": "triton"}}
        mirrored = {"mirror": {"upstream": "copies", "percent": 100}}
        for route in ({}, mirrored, {"rewrite": {"model": "new"}}):
            async with (
                _gateway(route=route, others=others) as (_, over_grpc, gateway),
                connect_http2(gateway.url) as client,
            ):
                headers = [("content-type", "application/grpc"), ("te", "trailers")]
                seen: list[bytes] = []
                over_grpc.streams["ModelStreamInfer"] = _collecting(seen)
                path = f"/{SERVICE}/ModelStreamInfer"
                stream = client.send_headers("POST", path, headers, flush=False)
                await client.send_data(stream, b"".join(frame(len(m)) + m for m in bodies))
                reply = await client.response(stream)
                assert dict(reply.headers + reply.trailers)["grpc-status"] == "3"
                assert not [each for each in seen if OWN.encode() in each]


def _collecting(seen: list[bytes]) -> Callable[..., Iterator[bytes]]:
    def serve(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        for each in requests:
            seen.append(each)
            yield b""

    return serve


async def test_text_of_a_tensor_may_be_the_name_of_such_a_region() -> None:
    message = ModelInferRequest(model_name="m", id=OWN)
    tensor = message.inputs.add(name=OWN, datatype="BYTES", shape=[2])
    tensor.contents.bytes_contents.extend([OWN.encode(), bytes(LARGE) + OWN.encode()])
    tensor.parameters["mine"].string_param = OWN
    async with _gateway() as (_, over_grpc, gateway), grpc_client(gateway.url) as client:
        for method in ("ModelInfer", "ModelStreamInfer"):
            assert await _error(client, method, message.SerializeToString(), None) == ""
        assert over_grpc.requests == [message.SerializeToString()]


# -------------------------------------------------------------------------------------- operations

REGION = "/v2/systemsharedmemory/region"
ALL = "/v2/systemsharedmemory"
FOREIGN = "shared memory regions whose names begin with 'tensorgate-' are the gateway's own"
NAMELESS = "'region name' is necessary to register system shared memory region"
UNKNOWN = f"Unable to find system shared memory region: '{OWN}'"
REFUSED = [
    ("POST", f"{REGION}/{OWN}/register", 403, FOREIGN),
    ("POST", f"{REGION}/{OWN}/unregister?x", 403, FOREIGN),
    ("POST", f"{REGION}/%74ensorgate-x-1/unregister", 403, FOREIGN),
    ("PUT", f"{ALL}/unregister", 405, "Method Not Allowed"),
    ("POST", f"{ALL}/register", 400, NAMELESS),
    ("GET", f"{REGION}/{OWN}/status", 404, UNKNOWN),
]
PASSED = [
    ("POST", f"{REGION}/mine/register"),
    ("POST", f"{REGION}/mine%20x/unregister"),
    ("GET", f"{REGION}/mine/status"),
    ("POST", "/v2/cudasharedmemory/unregister"),
    ("POST", "/v2/cudasharedmemory/region/tensorgate-x/unregister"),
]


@pytest.mark.parametrize("route", [{}, {"rewrite": {"model": "new"}}], ids=["plain", "rewrite"])
async def test_regions_of_the_gateway_are_none_for_http_clients(route: dict[str, Any]) -> None:
    body = b'{"key": "/mine", "offset": 0, "byte_size": 12}'
    async with _gateway(route=route) as (server, _, gateway), gateway.client() as client:
        for method, target, status, error in REFUSED:
            reply = await client.call(method, target, body if method == "POST" else b"")
            assert (reply.status, reply.error) == (status, error)
            assert (await client.ask(request("GET", f"{ALL}/status"))).status == 200
        for method, target in PASSED:
            assert (await client.ask(request(method, target))).status == 200
        listed = await client.ask(request("GET", f"{ALL}/status"))
        assert json.loads(listed.body) == [REGIONS[0], REGIONS[2]]
        seen = [each.head.target for each in server.requests]
        assert {target for _, target in PASSED} <= set(seen)
        assert not {target for _, target, *_ in REFUSED} & set(seen)


@pytest.mark.parametrize("settings", UNGUARDED, ids=UNGUARDED)
async def test_all_operations_pass_where_no_server_can_have_a_region_of_a_gateway(
    settings: str,
) -> None:
    running = _gateway(**UNGUARDED[settings])
    async with running as (_, over_grpc, gateway), gateway.client() as client:
        for method, target, *_ in REFUSED:
            assert (await client.ask(request(method, target))).status == 200
        assert (await client.ask(request("POST", f"{ALL}/unregister"))).status == 200
        listed = await client.ask(request("GET", f"{ALL}/status"))
        assert json.loads(listed.body) == REGIONS
        async with grpc_client(gateway.url) as grpc_peer:
            for rpc, name, *_ in (*REFUSED_RPCS, (UNREGISTER, "")):
                message = _region_message(rpc, name)
                assert (await grpc_peer.call(rpc, message)).code is grpc.StatusCode.OK
                assert over_grpc.requests.pop() == message


def _region_message(rpc: str, name: str) -> bytes:
    return bytes(message_class(f"{rpc}Request")(name=name).SerializeToString())


STATUS, REGISTER, UNREGISTER = (
    f"SystemSharedMemory{each}" for each in ("Status", "Register", "Unregister")
)
REFUSED_RPCS = [
    (REGISTER, OWN, grpc.StatusCode.PERMISSION_DENIED, FOREIGN),
    (UNREGISTER, OWN, grpc.StatusCode.PERMISSION_DENIED, FOREIGN),
    (STATUS, OWN, grpc.StatusCode.NOT_FOUND, UNKNOWN),
    (REGISTER, "", grpc.StatusCode.INVALID_ARGUMENT, NAMELESS),
]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
async def test_regions_of_the_gateway_are_none_for_grpc_clients(
    compression: grpc.Compression | None, protocol: str
) -> None:
    async with _gateway() as (server, over_grpc, both):
        async with (
            running_gateway(upstream={**SHARED, "endpoints": [server.url]}) as over_http,
            grpc_client((both if protocol == "grpc" else over_http).url) as client,
        ):
            for rpc, name, code, error in REFUSED_RPCS:
                message = _region_message(rpc, name)
                response = await client.call(rpc, message, compression=compression)
                assert (response.code, response.text) == (code, error)
                innocent = _region_message(rpc, "mine")
                response = await client.call(rpc, innocent, compression=compression)
                assert response.code is grpc.StatusCode.OK, response.text
            response = await client.call(STATUS, b"", compression=compression)
        told = message_class(f"{STATUS}Response").FromString(response.message)
        assert sorted(told.regions) == ["mine", "tensorgate"]
        innocents = [_region_message(rpc, "mine") for rpc, *_ in REFUSED_RPCS]
        assert over_grpc.requests == (innocents if protocol == "grpc" else [])
        assert bool(_targets(server, f"{REGION}/mine/")) == (protocol == "http")


@pytest.mark.parametrize("protocol", ["http", "grpc", "both"])
@pytest.mark.parametrize("client", ["http", "grpc"])
async def test_clients_unregister_all_regions_but_those_of_gateways(
    client: str, protocol: str
) -> None:
    over_http, over_grpc = SharedMemoryModel(1), GrpcSharedMemoryModel(1)
    model = over_grpc if protocol == "grpc" else over_http
    model.regions = {each: mmap.mmap(-1, 1) for each in ("mine", "my%20own", OWN)}
    if protocol == "grpc":
        model.regions["a/b %"] = mmap.mmap(-1, 1)
    async with ScriptedServer(*[over_http] * 30) as server:
        with grpc_server(unary=over_grpc.unary) as other:
            both = {"http": server.url, "grpc": other.url}
            endpoints = [both.get(protocol, both)]
            async with running_gateway(upstream={**SHARED, "endpoints": endpoints}) as gateway:
                (memory,) = [each.shared_memory for each in gateway.pool.endpoints]
                await until(lambda: memory is not None and memory.size)
                (own,) = model.regions.keys() - {"mine", "my%20own", OWN, "a/b %"}
                await _unregister_all(gateway, client)
                assert set(model.regions) == {OWN, own}
                await _unregister_all(gateway, client)
                assert set(model.regions) == {OWN, own}


async def _unregister_all(gateway: RunningGateway, client: str) -> None:
    if client == "http":
        async with gateway.client() as http_client:
            for body in (b"{}", b""):  # the connection stays usable
                reply = await http_client.ask(request("POST", f"{ALL}/unregister", body))
                assert (reply.status, reply.body) == (200, b"")
    else:
        async with grpc_client(gateway.url) as grpc_peer:
            response = await grpc_peer.call(UNREGISTER, b"")
            assert (response.code, response.message) == (grpc.StatusCode.OK, b"")


async def test_server_that_closes_before_it_responds_is_told_of() -> None:
    model = SharedMemoryModel(1)
    model.cut_after = "unregister"
    async with served(*[model] * 30, upstream=SHARED) as (_, gateway, client):
        await until(lambda: model.regions)
        (own,) = model.regions
        model.regions |= {each: mmap.mmap(-1, 1) for each in ("a", "b")}
        reply = await client.ask(request("POST", f"{ALL}/unregister"))
        assert (reply.status, "closed the connection" in reply.error) == (502, True)
        assert set(model.regions) == {own}  # the others are not left for it
        await _unregister_all(gateway, "http")


async def test_client_that_leaves_while_regions_are_unregistered_leaves_nothing() -> None:
    asked = asyncio.Event()

    async def hang(connection: Connection) -> None:
        target = (await connection.request()).head.target
        while not target.endswith("/mine/unregister"):
            body = json.dumps(REGIONS).encode() if target.endswith("/status") else b""
            await connection.send(http_response(body))
            target = (await connection.request()).head.target
        asked.set()
        await connection.wait_for_close()

    async with gateway_before(*[hang] * 30, upstream=SHARED) as (_, gateway):
        async with gateway.client() as client:
            await client.send(request("POST", f"{ALL}/unregister"))
            await asyncio.wait_for(asked.wait(), 5)
            assert gateway.outstanding == 1
        await gateway.until_idle()


async def test_time_for_all_regions_is_that_of_one_call() -> None:
    names = [f"r{i}" for i in range(100)]
    listed = http_response(json.dumps([{"name": each} for each in names]).encode())

    async def hang(connection: Connection) -> None:
        while not (await connection.request()).head.target.endswith("/unregister"):
            await connection.send(listed)
        await connection.wait_for_close()

    running = served(*[hang] * 300, upstream=SHARED, request_timeout="0.2s")
    async with running as (server, _, client):
        reply = await client.ask(request("POST", f"{ALL}/unregister"))
        assert (reply.status, "not done in 0.2 s" in reply.error) == (504, True)
        assert _targets(server, REGION) == [f"{REGION}/r0/unregister"]


async def test_large_responses_about_regions_are_buffered_one_at_a_time() -> None:
    names = [f"r{i}" for i in range(50)]
    listed = http_response(json.dumps([{"name": each} for each in names]).encode())

    async def serve(connection: Connection) -> None:
        while True:
            is_status = (await connection.request()).head.target.endswith("/status")
            await connection.send(listed if is_status else http_response(bytes(2**20)))

    running = served(*[serve] * 60, upstream=SHARED, max_buffered_bytes="16MiB")
    async with running as (server, _, client):
        assert (await client.ask(request("POST", f"{ALL}/unregister"))).status == 200
        assert len(_targets(server, REGION)) == len(names)


async def test_server_without_the_operation_says_so() -> None:
    not_found = http_response(b'{"detail":"Not Found"}', status="404 Not Found")
    async with served(model_script(other=not_found), upstream=SHARED) as (_, gateway, client):
        reply = await client.ask(request("POST", f"{ALL}/unregister"))
        assert (reply.status, reply.body) == (404, b'{"detail":"Not Found"}')
        async with grpc_client(gateway.url) as grpc_peer:
            response = await grpc_peer.call(UNREGISTER, b"")
            assert (response.code, response.text) == (grpc.StatusCode.NOT_FOUND, "Not Found")


async def test_name_that_fits_into_no_path_passes_over_grpc() -> None:
    async with _gateway() as (_, over_grpc, gateway), grpc_client(gateway.url) as client:
        for rpc in (REGISTER, UNREGISTER, STATUS, "CudaSharedMemoryUnregister"):
            message = _region_message(rpc, "a/b %")
            assert (await client.call(rpc, message)).code is grpc.StatusCode.OK
            assert over_grpc.requests.pop() == message


async def test_list_of_regions_that_is_none_is_not_passed_on() -> None:
    for body, status, expected in ((b'{"a":1}', 200, 502), (b"[1]", 200, 502), (b"no", 501, 501)):
        response = http_response(body, status=f"{status} X")
        async with served(model_script(other=response), upstream=SHARED) as (_, _, client):
            reply = await client.ask(request("GET", f"{ALL}/status"))
        assert reply.status == expected
