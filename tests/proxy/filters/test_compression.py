"""Responses that are compressed for clients that accept it, and those that are not."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from gateway.errors import bad_response
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.filters.body_filters import MIN_SIZE, CompressedResponse
from tests.support.checks.time_slices import others
from tests.support.doubles.cluster import one_upstream
from tests.support.doubles.streaming import (
    BodyStep,
    EventLog,
    ScriptedClientResponse,
    ScriptedUpstreamResponse,
)
from tests.support.inference_messages import HEADER_LENGTH

BOTH = ("gzip", "deflate")
TEXT = json.dumps({"models": [{"name": f"m{number}"} for number in range(200)]}).encode()
NOISE = random.Random(7).randbytes(300_000)
ACCEPT = {"Accept-Encoding": "gzip, deflate"}


def unpacked(coding: str | None, body: bytes) -> bytes:
    """Decompress what a client got, which must be complete."""
    if coding is None:
        return body
    return gzip.decompress(body) if coding == "gzip" else zlib.decompress(body)


class Scene:
    """A client of a route with compression, and its server."""

    def __init__(
        self, step: ScriptedUpstreamResponse | BaseException, compress: tuple[str, ...] = BOTH
    ) -> None:
        self.cluster = one_upstream(codings=compress, a=step)
        self.log = self.cluster.log

    async def ask(
        self,
        method: str = "GET",
        target: str = "/v2/models/m",
        *body: BodyStep,
        headers: dict[str, str] | None = None,
    ) -> ScriptedClientResponse:
        return await self.cluster.ask(method, target, *body, headers=ACCEPT | (headers or {}))


def sized(body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> Scene:
    made = {"Content-Length": str(len(body)), **(headers or {})}
    return Scene(ScriptedUpstreamResponse(status, made, [body]))


# ------------------------------------------------------------------------------- what is compressed


@pytest.mark.parametrize("status", [200, 404])
@pytest.mark.parametrize("length", [{"Content-Length": str(len(TEXT))}, {}])
async def test_response_body_is_compressed(status: int, length: dict[str, str]) -> None:
    scene = Scene(
        ScriptedUpstreamResponse(status, {"X-A": "1", **length}, [TEXT[:100], TEXT[100:]])
    )
    response = await scene.ask()
    assert response.status == status
    assert dict(response.headers) == {
        "X-A": "1",
        "Vary": "Accept-Encoding",
        "Content-Encoding": "gzip",
    }
    assert gzip.decompress(response.body) == TEXT
    assert len(response.body) < len(TEXT) / 2


@pytest.mark.parametrize(
    ("accepted", "offered", "coding"),
    [
        ("gzip, deflate", BOTH, "gzip"),
        ("gzip, deflate", ("deflate", "gzip"), "deflate"),
        ("gzip;q=0.1, deflate", BOTH, "deflate"),
        ("*", BOTH, "gzip"),
        ("br", BOTH, None),
        ("", BOTH, None),
    ],
)
async def test_coding_is_one_that_the_client_accepts(
    accepted: str, offered: tuple[str, ...], coding: str | None
) -> None:
    scene = Scene(
        ScriptedUpstreamResponse(200, {"Content-Length": str(len(TEXT))}, [TEXT]), offered
    )
    response = await scene.ask(headers={"Accept-Encoding": accepted})
    assert response.headers.get("Content-Encoding") == coding
    assert response.headers["Vary"] == "Accept-Encoding"
    assert unpacked(coding, response.body) == TEXT
    if coding is None:
        assert response.headers["Content-Length"] == str(len(TEXT))


AS_THEY_ARE: dict[str, tuple[int, dict[str, str], bytes]] = {
    "small": (200, {}, TEXT[: MIN_SIZE - 1]),
    "without a body": (204, {}, b""),
    "a part that says another status": (200, {"Content-Range": "bytes 0-9/99"}, TEXT),
    "encoded": (200, {"Content-Encoding": "br"}, TEXT),
    "not to be transformed": (200, {"Cache-Control": "public, No-Transform"}, TEXT),
    "events": (200, {"Content-Type": "Text/Event-Stream ; charset=utf-8"}, TEXT),
}


@pytest.mark.parametrize(("status", "headers", "body"), AS_THEY_ARE.values(), ids=AS_THEY_ARE)
async def test_response_that_must_not_be_transformed_is_not_compressed(
    status: int, headers: dict[str, str], body: bytes
) -> None:
    response = await sized(body, headers, status).ask()
    assert response.body == body
    assert dict(response.headers) == {
        "Content-Length": str(len(body)),
        **headers,
        "Vary": "Accept-Encoding",
    }


async def test_body_of_the_minimum_size_is_compressed() -> None:
    body = TEXT[:MIN_SIZE]
    response = await sized(body, {"Content-Encoding": "identity"}).ask()
    assert response.headers.getall("Content-Encoding") == ["gzip"]
    assert gzip.decompress(response.body) == body


async def test_head_response_is_that_of_the_server() -> None:
    response = await sized(TEXT).ask("HEAD")
    assert dict(response.headers) == {"Content-Length": str(len(TEXT)), "Vary": "Accept-Encoding"}


@pytest.mark.parametrize(("etag", "weak"), [('"x"', 'W/"x"'), ('W/"x"', 'W/"x"')])
async def test_strong_etag_becomes_weak(etag: str, weak: str) -> None:
    assert (await sized(TEXT, {"ETag": etag}).ask()).headers["ETag"] == weak


async def test_error_of_the_gateway_is_compressed() -> None:
    scene = Scene(bad_response("it fell over" * 200))
    response = await scene.ask()
    assert response.status == 502
    assert response.headers["Content-Length"] == str(len(response.body))
    assert "it fell over" in json.loads(gzip.decompress(response.body))["error"]
    response = await Scene(bad_response("it fell over")).ask()
    assert response.body == b'{"error":"it fell over"}'
    assert response.headers["Vary"] == "Accept-Encoding"


# ----------------------------------------------------------------------------- how it is compressed


@given(st.data())
def test_body_is_the_same_however_it_is_written(data: st.DataObject) -> None:
    runs = st.tuples(st.binary(min_size=1, max_size=40), st.integers(1, 2000))
    writes = [run * times for run, times in data.draw(st.lists(runs, max_size=6))]
    coding = data.draw(st.sampled_from(BOTH))
    headers: CIMultiDict[str] = CIMultiDict()
    if data.draw(st.booleans()):
        headers["Content-Length"] = str(MIN_SIZE + sum(map(len, writes)))
    if data.draw(st.booleans()):
        headers[HEADER_LENGTH] = "1"

    async def run() -> bytes:
        inner = ScriptedClientResponse(EventLog())
        response = CompressedResponse(inner, coding, ConversionScheduler())
        await response.start(200, "", headers)
        for each in writes:
            await response.write(memoryview(each) if data.draw(st.booleans()) else each)
        await response.finish()
        return inner.body

    assert unpacked(coding, asyncio.run(run())) == b"".join(writes)


@pytest.mark.parametrize("coding", BOTH)
async def test_chunk_of_a_response_without_length_goes_out_at_once(coding: str) -> None:
    inner = ScriptedClientResponse(EventLog())
    response = CompressedResponse(inner, coding, ConversionScheduler())
    await response.start(200, "", CIMultiDict({"Content-Type": "application/x-ndjson"}))
    for number in range(5):
        await response.write(b'{"token": %d}\n' % number)
        unpack = zlib.decompressobj(47)  # of either coding
        assert unpack.decompress(inner.body).endswith(b" %d}\n" % number)
    await response.finish()
    assert unpacked(coding, inner.body).count(b"\n") == 5


async def test_large_response_is_compressed_in_bounded_steps() -> None:
    with others() as waiting:
        inner = ScriptedClientResponse(log := EventLog())
        response = CompressedResponse(inner, "gzip", ConversionScheduler())
        await response.start(200, "", CIMultiDict({"Content-Length": str(len(NOISE))}))
        await response.write(NOISE)
        await response.finish()
    assert gzip.decompress(inner.body) == NOISE
    written = [int(entry.rpartition(" ")[2]) for entry in log if entry.startswith("client gets ")]
    assert max(written[1:]) <= 64 * 1024
    assert waiting.turns >= len(NOISE) // (16 * 1024)
