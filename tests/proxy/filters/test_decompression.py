"""Compressed requests, which become uncompressed ones."""

from __future__ import annotations

import asyncio
import gzip
import random
import zlib
from collections.abc import AsyncIterable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from gateway.codec.decompress import _STATE, FREE_MEMBERS, FREE_OUTPUT_BYTES, MAX_MEMBERS_PER_STEP
from gateway.protocol.operations import parse_operation
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.body_io import ClientBody
from gateway.proxy.destination import Limits
from gateway.proxy.filters.compression import DecompressedRequest, decompress_request
from gateway.proxy.interfaces import Call
from gateway.sizes import CONVERT_CHUNK
from tests.support.checks.time_slices import cancelled_after, others
from tests.support.doubles.cluster import Cluster, one_upstream
from tests.support.doubles.streaming import (
    LIMITS,
    BodyStep,
    EventLog,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedRequest,
    ScriptedUpstreamResponse,
    make_destination,
)
from tests.support.inference_messages import (
    FLOATS,
    HEADER_LENGTH,
    INFER,
    binary_header,
    json_request,
    metadata,
)

GENERATE = "/v2/models/m/generate"
OK = ScriptedUpstreamResponse(200, {}, [b'{"outputs":[]}'])
METADATA = ScriptedUpstreamResponse(200, {}, [metadata(-1)])
NO_CONFIG = ScriptedUpstreamResponse(404)
CHUNKED = {"Transfer-Encoding": "chunked"}
NOISE = random.Random(7).randbytes(200_000)
HEAD = binary_header(FLOATS.nbytes)
LARGE_HEAD = binary_header(len(NOISE))
LARGE = replace(LIMITS, max_buffered_body_bytes=10**6)


def bare(data: bytes) -> bytes:
    pack = zlib.compressobj(wbits=-15)
    return pack.compress(data) + pack.flush()


CODINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "bare deflate": ("Deflate", bare),
}


def _scene(*steps: ScriptedUpstreamResponse, servers: int = 1, limits: Limits = LARGE) -> Cluster:
    turns: dict[str, Any] = dict.fromkeys("abc"[:servers], steps or (OK,))
    return one_upstream(limits=limits, **turns)


# ---------------------------------------------------------------------------- decompressed requests

FORMS: dict[str, tuple[dict[str, str], bytes]] = {
    "large JSON": ({}, json_request(*range(50_000))),
    "binary": ({HEADER_LENGTH: str(len(HEAD))}, HEAD + FLOATS.tobytes()),
    "large binary": ({HEADER_LENGTH: str(len(LARGE_HEAD))}, LARGE_HEAD + NOISE),
    "nothing": ({}, b""),
}


async def _seen(headers: dict[str, str], *body: bytes) -> tuple[Any, ...]:
    """Return what a client and its server see of an infer request."""
    scene = _scene()
    response = await scene.ask("POST", INFER, *body, headers={"X-A": "1", **headers})
    asked = [dict(request.headers) for request in scene.endpoints[0].requests]
    return response.status, response.body, asked, scene.endpoints[0].bodies


@pytest.mark.parametrize(("headers", "plain"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("coding", "pack"), CODINGS.values(), ids=CODINGS)
async def test_compressed_infer_request_of_every_form_is_decoded(
    headers: dict[str, str], plain: bytes, coding: str, pack: Callable[[bytes], bytes]
) -> None:
    # A small decompressed body has a length, as others have.
    like = await _seen(headers if len(plain) <= CONVERT_CHUNK else {**headers, **CHUNKED}, plain)
    body = pack(plain)
    headers = {**headers, "Content-Encoding": coding}
    assert await _seen(headers, body) == like
    assert await _seen({**headers, **CHUNKED}, body[:5], body[5:]) == like


async def test_compressed_body_may_be_split_anywhere() -> None:
    body = gzip.compress(json_request())
    _, _, _, plain = await _seen({}, json_request())
    for cut in range(1, len(body)):
        status, _, _, bodies = await _seen({"Content-Encoding": "gzip"}, body[:cut], body[cut:])
        assert (status, bodies) == (200, plain), cut


TARGETS = [GENERATE, "/v2/repository/index", "/v2/logging"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("servers", [1, 3])
async def test_compressed_request_of_another_operation_is_decoded(
    target: str, servers: int
) -> None:
    """Triton accepts no coding here, and for infer none that the gateway does not support."""
    scene = _scene(ScriptedUpstreamResponse(200, {}, [b"[]"]), servers=servers)
    headers = {"Content-Encoding": "gzip", "X-A": "1"}
    assert (
        await scene.ask("POST", target, gzip.compress(b'{"a": 1}'), headers=headers)
    ).status == 200
    for server in scene.endpoints:
        for request in server.requests:
            assert "Content-Encoding" not in request.headers
            assert request.headers["Content-Length"] == "8"
            assert request.headers["X-A"] == "1"
        assert set(server.bodies) <= {b'{"a": 1}'}
    assert scene.log.count_of("server is asked")


async def test_large_compressed_body_streams() -> None:
    scene = _scene()
    body = gzip.compress(NOISE)
    steps = [body[at : at + 10_000] for at in range(0, len(body), 10_000)]
    assert (
        await scene.ask("POST", GENERATE, *steps, headers={"Content-Encoding": "gzip"})
    ).status == 200
    (request,) = scene.endpoints[0].requests
    assert isinstance(request.body, AsyncIterable)
    assert "Content-Length" not in request.headers
    assert scene.endpoints[0].bodies == [NOISE]
    sent = scene.log.index("server is asked POST " + GENERATE)
    assert sent < scene.log.index("client has sent all")


# ------------------------------------------------------------------------------- untouched requests


@pytest.mark.parametrize("coding", ["gzip", "br"])
async def test_request_without_a_body_is_not_decoded(coding: str) -> None:
    scene = _scene()
    await scene.ask("GET", "/v2/models/m", headers={"Content-Encoding": coding})
    assert scene.endpoints[0].requests[0].headers["Content-Encoding"] == coding


@pytest.mark.parametrize("coding", ["", " , ", " Identity "])
@pytest.mark.parametrize("target", [INFER, GENERATE, "/v2/repository/index"])
async def test_identity_coding_is_dropped_from_the_headers(target: str, coding: str) -> None:
    """Triton responds with 501 to an empty Content-Encoding."""
    steps = [OK if target == INFER else ScriptedUpstreamResponse(200, {}, [b"[]"])]
    body = json_request()
    seen = []
    for headers in ({}, {"Content-Encoding": coding}):
        scene = _scene(*steps)
        response = await scene.ask("POST", target, body, headers={"X-A": "1", **headers})
        asked = [dict(request.headers) for request in scene.endpoints[0].requests]
        seen.append((response.status, response.body, asked, scene.endpoints[0].bodies))
    assert seen[0] == seen[1]
    assert seen[0][0] == 200


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "identity, gzip"])
@pytest.mark.parametrize("target", [INFER, GENERATE, "/v2/repository/index"])
async def test_unknown_content_coding_is_refused(target: str, coding: str) -> None:
    scene = _scene()
    response = await scene.ask("POST", target, b"packed", headers={"Content-Encoding": coding})
    assert response.status == 415
    assert response.headers["Accept-Encoding"] == "gzip, deflate"
    assert repr(coding).encode() in response.body
    assert not scene.endpoints[0].requests
    assert not scene.log.count_of("client sends")


BAD: dict[str, tuple[bytes, int, str]] = {
    "no gzip": (b"{}", 400, "not valid gzip"),
    "nothing": (b"", 400, "ends before its gzip data does"),
    "cut short": (gzip.compress(NOISE)[:-1], 400, "ends before its gzip data does"),
    "followed by something": (gzip.compress(NOISE) + b"x", 400, "has data after its gzip data"),
    "too large when decoded": (
        gzip.compress(NOISE * 4 + bytes(300_000)),
        413,
        "larger than 1000000 bytes",
    ),
}


@pytest.mark.parametrize(("body", "status", "why"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("target", [INFER, GENERATE])
async def test_broken_compressed_body_never_reaches_a_server_whole(
    target: str, body: bytes, status: int, why: str
) -> None:
    scene = _scene(limits=replace(LIMITS, max_buffered_body_bytes=10**6))
    headers = {"Content-Encoding": "gzip", HEADER_LENGTH: "0", **CHUNKED}
    scene.endpoints[0]._turns[:0] = [METADATA, NO_CONFIG] if target == INFER else []
    steps = [body[at : at + 9999] for at in range(0, len(body), 9999)]
    response = await scene.ask("POST", target, *(steps or [b""]), headers=headers)
    assert response.status == status
    assert why in response.body.decode()
    assert not any(scene.endpoints[0].bodies)


@pytest.mark.parametrize("target", [INFER, GENERATE])
async def test_decompression_bomb_is_refused_early(target: str) -> None:
    bomb = gzip.compress(bytes(16 * FREE_OUTPUT_BYTES))
    limits = replace(LIMITS, max_request_bytes=32 * FREE_OUTPUT_BYTES)
    steps = [bomb[at : at + 1000] for at in range(0, len(bomb), 1000)]
    scene = _scene(limits=limits)
    response = await scene.ask(
        "POST", target, *steps, headers={"Content-Encoding": "gzip", HEADER_LENGTH: "9"}
    )
    assert response.status == (413 if target == GENERATE else 400)  # zeros are not JSON
    scene = _scene(limits=replace(limits, max_decompression_ratio=2000))
    await scene.ask("POST", GENERATE, *steps, headers={"Content-Encoding": "gzip"})
    assert scene.endpoints[0].bodies == [bytes(16 * FREE_OUTPUT_BYTES)]


# ------------------------------------------------------------------------------------------- limits


async def _decoded(
    deadline: Deadline,
    body: Sequence[BodyStep],
    limits: Limits = LARGE,
    make: type[ScriptedRequest] = ScriptedRequest,
) -> DecompressedRequest:
    request = make(EventLog(), "POST", GENERATE, {"Content-Encoding": "gzip"}, body)
    destination = make_destination(ScriptedEndpoint(EventLog()), limits=limits)
    reservation = destination.memory_budget.reserve()
    operation = parse_operation("POST", GENERATE)
    call = Call(request, ScriptedClientResponse(EventLog()), operation, destination, deadline)
    made = (await decompress_request(call, reservation)).request
    assert isinstance(made, DecompressedRequest)
    return made


async def test_minimum_body_rate_counts_compressed_bytes() -> None:
    body = gzip.compress(bytes(500_000))
    with Deadline(60, 60) as deadline:
        request = await _decoded(deadline, [body[at : at + 100] for at in range(0, len(body), 100)])
        plain = ClientBody(request, 10**6, deadline)
        assert sum([len(piece) async for piece in plain.read_rest()]) == 500_000
    assert deadline.received_bytes == len(body)


async def test_client_that_sends_input_without_output_is_not_idle() -> None:
    """A window must arrive before any of it is decompressed."""

    class Slow(ScriptedRequest):
        async def read(self) -> bytes:
            await asyncio.sleep(0.03)
            return await super().read()

    body = gzip.compress(NOISE[:1500])
    steps = [body[at : at + 150] for at in range(0, len(body), 150)]
    with Deadline(0.15, 60) as deadline:
        assert (await _decoded(deadline, steps, make=Slow)).content_length == 1500


async def test_at_most_two_chunks_of_a_bomb_are_buffered() -> None:
    bomb = gzip.compress(bytes(FREE_OUTPUT_BYTES))
    with Deadline(60, 60) as deadline:
        request = await _decoded(
            deadline, [bomb], replace(LIMITS, max_request_bytes=2 * FREE_OUTPUT_BYTES)
        )
        assert len(request._first) <= 2 * CONVERT_CHUNK
        assert request._decompressor.buffered_bytes <= len(bomb) + _STATE
        sizes = []
        while piece := await request.read():
            sizes.append(len(piece))
            assert request._decompressor.produced == sum(sizes)
    assert sum(sizes) == FREE_OUTPUT_BYTES
    assert max(sizes[1:]) <= CONVERT_CHUNK


async def test_decompression_yields_to_other_calls() -> None:
    with others() as waiting, Deadline(60, 60) as deadline:
        members = gzip.compress(b"") * FREE_MEMBERS + gzip.compress(bytes(FREE_OUTPUT_BYTES))
        request = await _decoded(deadline, [members])
        while await request.read():
            pass
    assert waiting.turns > FREE_MEMBERS / MAX_MEMBERS_PER_STEP + FREE_OUTPUT_BYTES / CONVERT_CHUNK


async def test_client_may_disconnect_at_any_time() -> None:
    body = gzip.compress(NOISE)
    for moment in range(200):
        scene = _scene()
        headers = {"Content-Encoding": "gzip"}
        asking = scene.ask("POST", GENERATE, body[:99], body[99:], headers=headers)
        if not await cancelled_after(moment, asking):
            break
        assert scene.log.count_of("server answers") == scene.log.count_of("server is let go")
        assert scene.destinations[0].upstream.pool.outstanding == [0]
    assert moment >= 8
