"""A page, or anything else without tensors, is no success of a request that infers.

Login pages and ingresses that lead elsewhere respond with 200 and HTML to any request.
"""

from __future__ import annotations

import logging

import grpc
import pytest
from tritonclient.grpc import service_pb2

from gateway.errors import ErrorKind
from gateway.observe.call_record import CallRecord
from tests.end_to_end.failures.inferring_server import (
    EVENTS,
    FORMS,
    OUTPUTS,
    TENSORS,
    Form,
    InferringServer,
    on_both_paths,
    serving,
)
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import UPSTREAM, RunningGateway, running_gateway
from tests.support.grpc.client import GrpcResponse, grpc_client
from tests.support.grpc.infer_messages import infer_request
from tests.support.http_messages import chunk, http_response, message, request
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_response_header,
    json_request,
)
from tests.support.servers.http2_server import Http2Peer, http2_script
from tests.support.servers.scripted_server import ScriptedServer

# On one loop only: transports make no difference here.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

PAGE = b"<!doctype html>\n<title>Sign in</title>"
HTML = {"Content-Type": "text/html; charset=utf-8"}
BYTES = {"Content-Type": "application/octet-stream"}
CHUNKED = {**HTML, "Transfer-Encoding": "chunked"}

# The response, what its error says of its kind, and how it begins. test_tensor_check.py has more.
NO_TENSORS: dict[str, tuple[bytes, str, str]] = {
    "page": (http_response(PAGE, HTML), "text/html; charset=utf-8", "Sign in"),
    "large page": (http_response(PAGE.ljust(300_000), HTML), HTML["Content-Type"], "Sign in"),
    "page without an end": (
        message("HTTP/1.1 200 OK", CHUNKED, chunk(PAGE)),
        HTML["Content-Type"],
        "Sign in",
    ),
    "head of a page alone": (
        message("HTTP/1.1 200 OK", {**HTML, "Content-Length": "1000"}),
        HTML["Content-Type"],
        "",
    ),
    "204": (message("HTTP/1.1 204 No Content"), "status 204", "an empty body"),
    "no chunks": (
        message("HTTP/1.1 200 OK", {"Transfer-Encoding": "chunked"}, chunk(b"")),
        "no Content-Type",
        "an empty body",
    ),
    "page as bytes": (http_response(PAGE, BYTES), BYTES["Content-Type"], "Sign in"),
    "other JSON": (http_response(b'{"login":"please"}'), "application/json", "please"),
}
# Servers of V1, and generate, are free in what their JSON holds.
CASES = [
    pytest.param(FORMS[form], *NO_TENSORS[name], id=f"{form}: {name}")
    for form, names in {
        "JSON": [name for name in NO_TENSORS if name != "page as bytes"],
        "generate": ["page", "204", "page as bytes"],
        "generate_stream": ["page", "page as bytes"],
        "V1 to a V1 server": ["page"],
        "JSON to a JSON server": ["page", "other JSON"],
        "JSON to KServe": ["page", "other JSON"],
        "binary": ["page", "other JSON"],
        "raw": ["page", "other JSON"],
        "V1": ["page", "other JSON"],
    }.items()
    for name in names
]


def _check_counted(gateway: RunningGateway, words: str) -> None:
    """Check that operators see what the endpoint did: it is the error that is logged, too."""
    (state,) = gateway.pool.snapshot()
    assert state.last_error is not None
    assert state.last_error.startswith(f"{state.url}: the server's response of status 20")
    assert words in state.last_error
    assert state.last_error.isprintable()


@on_both_paths
@pytest.mark.parametrize(("form", "response", "kind", "words"), CASES)
async def test_response_without_tensors_is_a_502(
    form: Form, response: bytes, kind: str, words: str, path: type[bytes]
) -> None:
    server = InferringServer(form.good, response, form.good, inputs=form.inputs)
    async with serving(server, form.dialect) as gateway, gateway.client() as client:
        data = path(form.write())
        assert (await client.ask(data)).status == 200
        refused = await client.ask(data)
        assert refused.status == 502
        assert gateway.pool.snapshot()[0].consecutive_failures == 1
        assert UPSTREAM in refused.error
        assert kind in refused.error
        assert "127.0.0.1" not in refused.error
        _check_counted(gateway, words)
        # Nothing of the page comes before the next response, and nothing was sent again.
        assert (await client.ask(data)).status == 200
        assert server.asked == 3


@on_both_paths
async def test_access_log_quotes_the_page(
    path: type[bytes], call_records: list[CallRecord]
) -> None:
    form = FORMS["JSON"]
    async with (
        serving(InferringServer(http_response(PAGE, HTML))) as gateway,
        gateway.client() as client,
    ):
        assert (await client.ask(path(form.write()))).status == 502
        url = gateway.pool.snapshot()[0].url
    (record,) = call_records
    assert record.status == 502
    assert record.error_kind is ErrorKind.BAD_RESPONSE
    assert record.error == (
        f"{url}: the server's response of status 200 holds no tensors; it has the Content-Type "
        "'text/html; charset=utf-8' and begins with '<!doctype html> <title>Sign in</title>'"
    )


# --------------------------------------------------------------------------------------------- gRPC


OVER_GRPC = ("page", "no chunks", "other JSON")


@pytest.mark.parametrize("name", OVER_GRPC)
async def test_response_without_tensors_is_an_error_over_grpc(name: str) -> None:
    response, kind, words = NO_TENSORS[name]
    server = InferringServer(response, TENSORS, response, TENSORS)
    async with serving(server) as gateway, grpc_client(gateway.url) as client:
        refused = await client.call("ModelInfer", infer_request())
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        _check_counted(gateway, words)
        assert (await client.call("ModelInfer", infer_request())).message

        streamed = await client.call("ModelStreamInfer", infer_request(), infer_request())
        assert streamed.code is grpc.StatusCode.OK
        first, second = map(service_pb2.ModelStreamInferResponse.FromString, streamed.messages)
        for text in (refused.text, first.error_message):
            assert UPSTREAM in text
            assert kind in text
        assert second.infer_response.outputs


async def _grpc_page(peer: Http2Peer) -> None:
    """Respond to each request with a page."""
    responded = 0
    while True:
        for stream in peer.streams[responded:]:
            responded += 1
            await peer.respond(stream, PAGE, [("content-type", "text/html")])
        await peer.receive()


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_page_of_a_grpc_server_is_unavailable(method: str) -> None:
    async with (
        ScriptedServer(http2_script(_grpc_page)) as server,
        running_gateway(server.url.replace("http:", "grpc:")) as gateway,
        grpc_client(gateway.url) as client,
    ):
        for _ in range(2):  # the second one may take the fast path
            refused: GrpcResponse = await client.call(method, infer_request())
            assert refused.code is grpc.StatusCode.UNAVAILABLE
            assert not refused.messages
            assert f"{UPSTREAM} did not respond in gRPC" in refused.text
            assert "text/html" in refused.text
        (state,) = gateway.pool.snapshot()
        assert state.consecutive_failures == 2
        assert state.last_error == refused.text.replace(UPSTREAM, state.url)


async def test_page_of_a_grpc_server_is_a_502() -> None:
    async with (
        ScriptedServer(http2_script(_grpc_page)) as server,
        running_gateway(server.url.replace("http:", "grpc:")) as gateway,
        gateway.client() as client,
    ):
        refused = await client.ask(request("POST", INFER, json_request()))
        assert refused.status == 502
        assert f"{UPSTREAM} did not respond in gRPC" in refused.error
        assert "text/html" in refused.error


# -------------------------------------------------------------------------- what servers respond

BINARY_BODY = binary_response_header(12) + FLOATS.tobytes()
LENGTH = {HEADER_LENGTH: str(len(binary_response_header(12)))}


def _typed(body: bytes, content_type: str | None, headers: dict[str, str] | None = None) -> bytes:
    made = {"Content-Length": str(len(body))}
    if content_type is not None:
        made["Content-Type"] = content_type
    return message("HTTP/1.1 200 OK", {**made, **(headers or {})}, body)


def _streamed(body: bytes, headers: dict[str, str]) -> bytes:
    fields = {"Transfer-Encoding": "chunked", **headers}
    return message("HTTP/1.1 200 OK", fields, chunk(body) + chunk(b""))


RIGHT: dict[str, bytes] = {
    "JSON in capitals": _typed(OUTPUTS, "Application/JSON;charset=UTF-8"),
    "JSON without a type": _typed(OUTPUTS, None),
    "JSON without a type, in chunks": _streamed(b"\n " + OUTPUTS, {}),
    "JSON as octet-stream": _typed(OUTPUTS, "application/octet-stream"),
    "no outputs": _typed(b'{"outputs":[]}', "application/json"),
    "large JSON": _typed(OUTPUTS.ljust(200_000), "application/json"),
    "binary of KServe": _streamed(BINARY_BODY, LENGTH),
    "binary of OpenVINO": _typed(BINARY_BODY, "application/json", LENGTH),
    "binary as a page": _typed(BINARY_BODY, "text/html", LENGTH),
}


PASSED = [
    *(pytest.param("JSON", response, id=name) for name, response in RIGHT.items()),
    ("JSON to KServe", RIGHT["binary of KServe"]),
    ("binary", RIGHT["binary as a page"]),
    ("raw", RIGHT["JSON without a type"]),
    ("V1", RIGHT["binary of OpenVINO"]),
    ("binary to a JSON server", RIGHT["JSON in capitals"]),
    ("V1 to a V1 server", _typed(b'{"predictions":[7]}', "application/json")),
    ("generate", _typed(b'{"text_output":"x"}', None)),
    ("generate_stream", _streamed(b"data: {}\n\n", {})),
    ("generate_stream", _typed(b"", EVENTS["Content-Type"])),  # no events
]


@on_both_paths
@pytest.mark.parametrize(("name", "response"), PASSED)
async def test_tensors_pass_with_any_content_type_of_servers(
    name: str, response: bytes, path: type[bytes]
) -> None:
    form = FORMS[name]
    server = InferringServer(response, inputs=form.inputs)
    async with serving(server, form.dialect) as gateway, gateway.client() as client:
        for _ in range(2):
            assert (await client.ask(path(form.write()))).status == 200
        assert gateway.pool.snapshot()[0].consecutive_failures == 0


@pytest.mark.parametrize(
    ("name", "status"), [("JSON", "401 No"), *((name, "302 Found") for name in FORMS)]
)
async def test_redirects_and_errors_pass_with_their_page(name: str, status: str) -> None:
    form = FORMS[name]
    page = http_response(PAGE, {**HTML, "Location": "/login"}, status)
    server = InferringServer(form.good, page, inputs=form.inputs)
    async with serving(server, form.dialect) as gateway, gateway.client() as client:
        assert (await client.ask(form.write())).status == 200
        passed = await client.ask(form.write())
        assert passed.status == int(status[:3])
        assert passed.head.get("Location") == "/login"
        assert b"Sign in" in passed.body


async def test_mirror_counts_a_page_as_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    form = FORMS["JSON"]
    async with (
        ScriptedServer(InferringServer(form.good)) as server,
        ScriptedServer(InferringServer(http_response(PAGE, HTML))) as shadow,
        running_gateway(
            server.url,
            route={"mirror": {"upstream": "shadow"}},
            others={"shadow": {"endpoints": [shadow.url], "dialect": "triton"}},
        ) as gateway,
        gateway.client() as client,
    ):
        assert (await client.ask(form.write())).status == 200
    assert "1 of 1 requests failed" in caplog.text
    assert "Sign in" in caplog.text


# ------------------------------------------------------------------------ successes beside 200

ACCEPTED = (b"200 OK", b"203 Non-Authoritative Information")


@on_both_paths
@pytest.mark.parametrize("name", ["JSON", "JSON to a JSON server", "binary to a JSON server", "V1"])
async def test_tensors_of_any_success_are_converted(name: str, path: type[bytes]) -> None:
    form = FORMS[name]
    server = InferringServer(form.good, form.good.replace(*ACCEPTED), inputs=form.inputs)
    async with serving(server, form.dialect) as gateway, gateway.client() as client:
        data = path(form.write())
        usual = await client.ask(data)
        accepted = await client.ask(data)
    assert (usual.status, accepted.status) == (200, 203)
    assert accepted.body == usual.body
    assert accepted.head.get(HEADER_LENGTH) == usual.head.get(HEADER_LENGTH)


async def test_tensors_of_any_success_are_converted_for_grpc_clients() -> None:
    server = InferringServer(TENSORS.replace(*ACCEPTED))
    async with serving(server) as gateway, grpc_client(gateway.url) as client:
        response = await client.call("ModelInfer", infer_request())
    assert response.code is grpc.StatusCode.OK
    assert response.message
