"""Compressed requests and responses between NVIDIA's own client and a real server."""

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton_http

from tests.integration.support.client import HEADER_LENGTH, Client
from tests.integration.support.gateway import Gateway, running_gateway
from tests.integration.support.tap import Tap

pytestmark = pytest.mark.triton

ARRAY = np.arange(3000, dtype=np.float32)
TEXT = json.dumps(
    {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [3000], "data": ARRAY.tolist()}]}
).encode()


@pytest.fixture(scope="module")
def compressing(tap: Tap, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that compresses answers."""
    route = {"compression": ["gzip", "deflate"]}
    with running_gateway(tmp_path_factory.mktemp("gateway"), tap.url, route=route) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def through_it(compressing: Gateway) -> Iterator[Client]:
    """A connection to it."""
    with Client(compressing.host, compressing.port) as client:
        yield client


@pytest.fixture(scope="module")
def triton_client(compressing: Gateway) -> Iterator[Any]:
    """NVIDIA's client, connected to it."""
    client = triton_http.InferenceServerClient(compressing.address)
    yield client
    client.close()


@pytest.mark.parametrize(
    ("request_coding", "answer_coding", "sent", "back"),
    [
        (None, "gzip", True, False),
        ("gzip", "deflate", False, True),
        ("deflate", None, True, True),
        ("gzip", "gzip", False, False),
    ],
)
def test_both_ways(
    triton_client: Any,
    request_coding: str | None,
    answer_coding: str | None,
    sent: bool,
    back: bool,
) -> None:
    array = triton_http.InferInput("INPUT0", [len(ARRAY)], "FP32")
    array.set_data_from_numpy(ARRAY, binary_data=sent)
    result = triton_client.infer(
        "identity_fp32",
        [array],
        outputs=[triton_http.InferRequestedOutput("OUTPUT0", binary_data=back)],
        request_compression_algorithm=request_coding,
        response_compression_algorithm=answer_coding,
    )
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), ARRAY)


@pytest.mark.parametrize("wanted", [{}, {"parameters": {"binary_data_output": True}}])
def test_what_the_client_gets(through_it: Client, wanted: dict[str, Any]) -> None:
    body = json.dumps({**json.loads(TEXT), **wanted}).encode()
    like = through_it.infer("identity_fp32", body)
    assert like.headers["Vary"] == "Accept-Encoding"
    for coding, unpack in (("gzip", gzip.decompress), ("deflate", zlib.decompress)):
        response = through_it.infer("identity_fp32", body, {"Accept-Encoding": coding})
        assert response.headers["Content-Encoding"] == coding
        assert response.headers[HEADER_LENGTH] == like.headers[HEADER_LENGTH]
        assert unpack(response.body) == like.body
        assert len(response.body) < len(like.body)


def test_what_the_server_gets(through_it: Client, tap: Tap) -> None:
    """The same as of a client that compresses nothing."""
    headers = {"Content-Encoding": "gzip", "Accept-Encoding": "gzip"}
    seen = []
    for data, extra in ((TEXT, {}), (gzip.compress(TEXT), headers)):
        tap.forget()
        assert through_it.infer("identity_fp32", data, extra).status == 200
        head, _, body = tap.sent.partition(b"\r\n\r\n")
        assert b"encoding" not in head.lower()
        seen.append(body)
    assert seen[0] == seen[1]
