"""Generated calls get the same whether or not their tensors go through shared memory.

A full run makes 20,000 of them; TENSORGATE_TEST_SCALE=2.5 makes 50,000.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integration.proxying.shared_memory_calls import (
    IMAGE,
    calls_by_lane,
    gateway_before,
    memory_of,
    until,
    with_header,
)
from tests.integration.support.client import Client
from tests.integration.support.client_forms import (
    FORMS,
    InferCall,
    Outcome,
    Target,
    open_channel,
    stub_of,
)
from tests.integration.support.gateway import Gateway, running_gateway
from tests.integration.support.generated_infer_calls import Scene, infer_calls
from tests.integration.support.infer_messages import DTYPES
from tests.integration.support.infer_messages import Tensor as SentTensor
from tests.integration.triton.models import MODELS, Model, Tensor
from tests.integration.triton.server import TritonServer
from tests.support.http_messages import request
from tests.support.scale import scaled

pytestmark = pytest.mark.triton

CALLS = 20_000
ROW = 256
"""Elements of a row."""
DATATYPES = ("FP32", "INT64", "UINT8", "FP16", "BOOL", "BYTES")
MEMORY = 2**20
FREE = 96 * 1024
"""What a client that never ends its upload leaves of the memory for others."""
FEW = (1, 2, 3, 4, 5, 6)
"""Rows around the threshold of 4 KiB, which 4 of FP32 have."""
MANY = (24, 25, 47, 48, 49)
"""Rows around what is free: 48 of FP32, or 24 of INT64, fill it as inputs and as outputs."""

EDGES = (3, 4, 48, 49)


def _rows(name: str, datatype: str, elements: int, max_batch_size: int = 0) -> Model:
    tensors = (Tensor(each, datatype, (elements,)) for each in ("INPUT0", "OUTPUT0"))
    inputs, outputs = tensors
    return Model(name, "identity", (inputs,), (outputs,), max_batch_size)


BATCHED = [_rows(f"rows_{each.lower()}", each, ROW, max(MANY)) for each in DATATYPES]
# A raw request has one row at most.
SINGLE = [_rows(f"fixed_{count}", "FP32", count * ROW) for count in EDGES]


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    models = [each for each in MODELS if each.name != IMAGE]
    with TritonServer((*models, *BATCHED, *SINGLE)) as running:
        yield running


@pytest.fixture(scope="module")
def plain(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A gateway that shares no memory."""
    with (
        running_gateway(tmp_path_factory.mktemp("gateway"), server.http_url) as gateway,
        _connected(gateway) as target,
    ):
        yield target


@pytest.fixture(scope="module", params=[1, 4096])
def shared(
    request: pytest.FixtureRequest, server: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A gateway that shares memory, of which little is free, for tensors of a size and more."""
    with (
        gateway_before(
            tmp_path_factory.mktemp("gateway"),
            server,
            shared_memory={"size": MEMORY, "min_bytes": request.param},
            settings={"limits": {"min_body_rate": 0, "idle_timeout": "24h"}},
        ) as gateway,
        socket.create_connection((gateway.host, gateway.port)) as holding,
    ):
        holding.sendall(_endless_upload())
        until(lambda: memory_of(gateway)["in_use"] == MEMORY - FREE)
        yield gateway


@contextmanager
def _connected(gateway: Gateway) -> Iterator[Target]:
    with (
        Client(gateway.host, gateway.port) as client,
        open_channel(gateway.address) as channel,
    ):
        yield Target(client, stub_of(channel))


@pytest.fixture(scope="module")
def via_memory(shared: Gateway) -> Iterator[Target]:
    with _connected(shared) as target:
        yield target


def _endless_upload() -> bytes:
    # Its header lies in a page before the tensor.
    size = MEMORY - FREE - 4096
    body, headers = with_header(np.zeros(size // 4, np.float32), size)
    whole = request("POST", "/v2/models/identity_fp32/infer", body, headers)
    return whole[: len(whole) - MEMORY // 2]


@st.composite
def row_calls(draw: st.DrawFn, scene: Scene) -> InferCall:
    """Make calls whose outputs have a size that is known in advance, but for those of BYTES."""
    # Text takes long to write and to read.
    many = not scene.in_text and scene.form != "gRPC typed"
    if scene.form == "raw":
        model = draw(st.sampled_from(SINGLE))
        shape = model.inputs[0].dims
    else:
        model = draw(st.sampled_from([m for m in BATCHED if scene.can_say(m.inputs[0].datatype)]))
        is_many = draw(st.integers(0, 9)) < (5 if many else 2)
        shape = (draw(st.sampled_from(MANY if is_many else FEW)), ROW)
    elements = _elements(model.inputs[0].datatype, int(np.prod(shape)), draw(st.integers(0, 999)))
    tensor = SentTensor("INPUT0", model.inputs[0].datatype, elements, shape)
    call = InferCall(model.name, (tensor,), pieces=draw(st.sampled_from([0, 0, 5000])))
    if scene.form == "V1":
        return replace(call, in_rows=draw(st.booleans()))
    if scene.has_header and draw(st.booleans()):
        return replace(call, outputs=(("OUTPUT0", 0),))
    return call


def edge_calls(scene: Scene) -> list[InferCall]:
    """Make calls around the threshold, and around what is free."""
    calls = []
    for count in EDGES:
        is_raw = scene.form == "raw"
        name = f"fixed_{count}" if is_raw else "rows_fp32"
        shape = (count * ROW,) if is_raw else (count, ROW)
        elements = _elements("FP32", count * ROW, count)
        calls.append(InferCall(name, (SentTensor("INPUT0", "FP32", elements, shape),)))
    return calls


def _elements(datatype: str, count: int, seed: int) -> Any:
    chance = np.random.default_rng(seed)
    if datatype in ("FP32", "FP16"):
        return chance.standard_normal(count).astype(DTYPES[datatype])
    numbers = chance.integers(0, 2 if datatype == "BOOL" else 256, count)
    if datatype == "BYTES":
        return np.array([b"%d" % number for number in numbers], object)
    return numbers.astype(DTYPES[datatype])


@pytest.mark.parametrize("form", FORMS)
def test_calls_get_the_same_through_shared_memory(
    plain: Target, shared: Gateway, via_memory: Target, form: str
) -> None:
    scene, send = Scene("triton", "http", form), FORMS[form]
    before = calls_by_lane(shared)

    def check(call: InferCall) -> None:
        outcome, like = send(via_memory, call), send(plain, call)
        if outcome != like:
            assert _comparable(outcome) == _comparable(like)

    edges = edge_calls(scene)
    # The gateway knows the sizes of outputs from a model's second call on.
    for call in (edges if form == "raw" else edges[:1]) + edges:
        check(call)
    settings(max_examples=scaled(CALLS // 12))(
        given(infer_calls(scene) | row_calls(scene))(check)
    )()
    counts = calls_by_lane(shared) - before
    assert counts["inputs", "shared_memory"] > 0
    assert counts["outputs", "shared_memory"] > 0
    assert counts["outputs", "full"] > 0


def _comparable(outcome: Outcome) -> Outcome:
    """Return what is the same if all that a client sees is the same, NaN included."""
    return replace(outcome, outputs={name: repr(each) for name, each in outcome.outputs.items()})
