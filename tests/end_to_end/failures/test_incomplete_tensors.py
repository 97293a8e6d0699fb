"""A response that does not hold all of its tensors is no success, whatever its head says."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from gateway.errors import ErrorKind
from gateway.observe.call_record import CallRecord
from tests.end_to_end.failures.inferring_server import (
    FORMS,
    InferringServer,
    on_both_paths,
    serving,
)
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import UPSTREAM, RunningGateway
from tests.support.grpc.client import grpc_client
from tests.support.grpc.infer_messages import infer_request
from tests.support.http2_client import connect_http2
from tests.support.http_messages import chunk, http_response, message, read_body
from tests.support.inference_messages import FLOATS, HEADER_LENGTH, binary_response_header

# On one loop only: transports make no difference here.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])


HEADER = binary_response_header(12)
TENSORS = FLOATS.tobytes()


def _response(length: int | str, body: bytes, *, sized: bool = True) -> bytes:
    """Write a response with this size of its JSON."""
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(length)}
    if sized:
        return http_response(body, headers)
    headers["Transfer-Encoding"] = "chunked"
    return message("HTTP/1.1 200 OK", headers, chunk(body) + chunk(b""))


FALSE: dict[str, bytes] = {
    "JSON larger than the body": _response(10**6, HEADER + TENSORS),
    "JSON one byte larger than the body": _response(len(HEADER + TENSORS) + 1, HEADER + TENSORS),
    "JSON larger than the chunks": _response(10**6, HEADER + TENSORS, sized=False),
    "JSON of a negative size": _response(-1, HEADER + TENSORS),
    "JSON of size 0": _response(0, HEADER + TENSORS),
    "JSON that ends after its size": _response(len(HEADER) - 1, HEADER + TENSORS),
    "short tensors": _response(len(HEADER), HEADER + TENSORS[1:]),
    "long tensors": _response(len(HEADER), HEADER + TENSORS + b"x"),
    "short tensors in chunks": _response(len(HEADER), HEADER + TENSORS[1:], sized=False),
    "JSON of a size that is not UTF-8": _response("#", HEADER + TENSORS).replace(b"#", b"\xff"),
    "two sizes of JSON": _response(5, HEADER + TENSORS).replace(
        b"Content-Type: application/octet-stream", f"{HEADER_LENGTH}: 5".encode()
    ),
    "tensors of another shape": _response(len(HEADER), HEADER.replace(b"[3]", b"[4]") + TENSORS),
    "page": _response(len(HEADER), b"<html>".ljust(200)),
}
REFUSED = [
    *(pytest.param("JSON", response, id=name) for name, response in FALSE.items()),
    *(
        pytest.param(form, FALSE[name], id=f"{name} for {form}")
        for form in ("binary", "binary to KServe", "raw", "V1")
        for name in ("JSON larger than the chunks", "tensors of another shape")
    ),
]


def _check_counted(gateway: RunningGateway) -> None:
    (state,) = gateway.pool.snapshot()
    assert state.consecutive_failures == 1
    assert state.last_error is not None
    assert state.last_error.startswith(f"{state.url}: ")


@on_both_paths
@pytest.mark.parametrize(("name", "response"), REFUSED)
async def test_false_binary_response_is_a_502(
    name: str, response: bytes, path: type[bytes]
) -> None:
    form = FORMS[name]
    server = InferringServer(form.good, response, form.good)
    async with serving(server, form.dialect) as gateway, gateway.client() as client:
        data = path(form.write())
        assert (await client.ask(data)).status == 200
        refused = await client.ask(data)
        assert refused.status == 502
        assert UPSTREAM in refused.error
        _check_counted(gateway)
        assert (await client.ask(data)).status == 200


@pytest.mark.parametrize("name", ["JSON larger than the body", "short tensors in chunks", "page"])
async def test_false_binary_response_is_unavailable_over_grpc(name: str) -> None:
    server = InferringServer(FALSE[name], FORMS["binary"].good)
    async with serving(server) as gateway, grpc_client(gateway.url) as client:
        refused = await client.call("ModelInfer", infer_request())
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        assert UPSTREAM in refused.text
        assert (await client.call("ModelInfer", infer_request())).message


# ------------------------------------------------------------------------------- large responses

LARGE = 200_000
LARGE_HEADER = binary_response_header(LARGE)
_LARGE_JSON = b'{"outputs":[{"name":"o","datatype":"INT8","shape":[90000],"data":[' + b"1," * 89_999
BROKEN: dict[str, tuple[str, dict[str, str], bytes]] = {
    "short tensors": (
        "binary",
        {HEADER_LENGTH: str(len(LARGE_HEADER))},
        LARGE_HEADER + bytes(LARGE - 1),
    ),
    "JSON larger than the body": ("binary", {HEADER_LENGTH: "1000000"}, b'{"a":"' + b"x" * LARGE),
    "JSON": ("JSON to a JSON server", {}, _LARGE_JSON + b"1"),
    "JSON of Triton": ("JSON", {}, _LARGE_JSON + b"1"),
    "V1": ("V1 to a V1 server", {}, b'{"predictions":[' + b"1," * 90_000 + b"1"),
    "generate": ("generate", {}, b'{"text_output":"' + b"x" * LARGE),
}
_CASES = pytest.mark.parametrize(("name", "headers", "body"), BROKEN.values(), ids=BROKEN)


def _cut(headers: dict[str, str], body: bytes, *, sized: bool) -> tuple[bytes, bytes]:
    """Write a response in two parts, the second of which the server sends later."""
    fields = {"Content-Type": "application/json", **headers}
    fields |= {"Content-Length": str(len(body))} if sized else {"Transfer-Encoding": "chunked"}
    start, rest = body[:100_000], body[100_000:]
    if not sized:
        start, rest = chunk(start), chunk(rest) + chunk(b"")
    return message("HTTP/1.1 200 OK", fields, start), rest


def _check_broken_off(record: CallRecord, caplog: pytest.LogCaptureFixture) -> None:
    """Check that operators see a response that broke off."""
    assert record.error_kind is ErrorKind.BAD_RESPONSE
    assert any("response aborted" in each.getMessage() for each in caplog.records)


def _is_refused_at_once(name: str, headers: dict[str, str], *, sized: bool) -> bool:
    """Whether its start and its size tell, or the gateway has to read the whole."""
    return name == "JSON" or (sized and HEADER_LENGTH in headers)


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "chunked"])
@on_both_paths
@_CASES
async def test_large_response_that_is_not_complete_never_ends_well(
    name: str,
    headers: dict[str, str],
    body: bytes,
    path: type[bytes],
    sized: bool,
    call_records: list[CallRecord],
    caplog: pytest.LogCaptureFixture,
) -> None:
    form = FORMS[name]
    server = InferringServer(_cut(headers, body, sized=sized), inputs=form.inputs)
    async with serving(server, form.dialect) as gateway, gateway.client() as client:
        await client.send(path(form.write()))
        if _is_refused_at_once(name, headers, sized=sized):
            server.going_on.set()
            assert (await client.read_response()).status == 502
            return
        head = await client.head()
        assert head.status == 200
        server.going_on.set()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await read_body(client.reader, head)
    _check_broken_off(call_records[-1], caplog)


async def test_large_response_that_is_not_complete_is_reset_over_http2() -> None:
    form = FORMS["binary"]
    _, headers, body = BROKEN["short tensors"]
    server = InferringServer(_cut(headers, body, sized=False))
    async with serving(server, form.dialect) as gateway, connect_http2(gateway.url) as client:
        stream = await client.start("POST", form.target, form.body, form.http2_fields())
        await client.until(lambda: client.replies[stream].body)
        server.going_on.set()
        reply = await client.response(stream)
        assert (reply.status, reply.ended) == (200, False)
        assert reply.reset is not None
