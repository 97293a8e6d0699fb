"""Generated calls in every client form get from a gateway what the server answers itself.

A full run makes 5,000 of them; TENSORGATE_TEST_SCALE=10 makes 50,000.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec.reference import FLOATS
from tests.integration.support.client import Client
from tests.integration.support.client_forms import (
    FORMS,
    InferCall,
    Outcome,
    Target,
    open_channel,
    send_binary,
    send_grpc_raw,
    send_json,
    stub_of,
)
from tests.integration.support.gateway import running_gateway
from tests.integration.support.generated_infer_calls import Scene, infer_calls
from tests.integration.support.infer_messages import DTYPES, Array, Output, Tensor
from tests.integration.support.real_server import HOST, RealServer
from tests.support.scale import scaled

CALLS = 5000
PROTOCOLS = ("http", "grpc")
OVER_GRPC = ("gRPC raw", "gRPC typed")

# GRPC.md, "Status codes": of gRPC for HTTP clients, and of servers over HTTP for gRPC clients.
CODES = grpc.StatusCode
TO_HTTP = {
    CODES.INVALID_ARGUMENT: 400,
    CODES.FAILED_PRECONDITION: 400,
    CODES.OUT_OF_RANGE: 400,
    CODES.NOT_FOUND: 404,
    CODES.UNKNOWN: 500,
    CODES.INTERNAL: 500,
    CODES.UNIMPLEMENTED: 501,
    CODES.UNAVAILABLE: 503,
}
TO_GRPC = {
    400: CODES.INVALID_ARGUMENT,
    404: CODES.NOT_FOUND,
    422: CODES.UNKNOWN,
    500: CODES.INTERNAL,
    501: CODES.UNIMPLEMENTED,
    503: CODES.UNAVAILABLE,
}


@pytest.fixture(scope="module", params=PROTOCOLS)
def protocol(request: pytest.FixtureRequest) -> str:
    """Each protocol to the server in turn."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def direct(real_server: RealServer) -> Iterator[Target]:
    """Each of the servers in turn."""
    with (
        Client(HOST, real_server.http_port) as client,
        open_channel(f"{HOST}:{real_server.grpc_port}") as channel,
    ):
        yield Target(client, stub_of(channel), closes=True)


@pytest.fixture(scope="module")
def via_gateway(
    real_server: RealServer, protocol: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    """A gateway in front of the server, with a connection of each protocol."""
    url = real_server.grpc_url if protocol == "grpc" else real_server.http_url
    with (
        running_gateway(tmp_path_factory.mktemp("gateway"), url, dialect="auto") as gateway,
        Client(gateway.host, gateway.port) as client,
        open_channel(gateway.address) as channel,
    ):
        yield Target(client, stub_of(channel))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=scaled(round(CALLS / 36)))
@given(data=st.data())
def test_outcome_is_that_of_the_server(
    direct: Target,
    via_gateway: Target,
    real_server: RealServer,
    protocol: str,
    form: str,
    data: st.DataObject,
) -> None:
    scene = Scene(real_server.name, protocol, form)
    call = data.draw(infer_calls(scene))
    reference = ask_server(direct, scene, call)
    outcome = FORMS[form](via_gateway, call)
    status = declared_status(scene, call)
    if status is not None:
        assert outcome.status == status, (outcome, reference)
    elif reference.succeeded:
        check_outputs(outcome, reference, scene, call)
    else:
        assert outcome.status == expected_status(scene, reference), (outcome, reference)
        assert has_same_text(scene, outcome, reference), (outcome, reference)


def ask_server(direct: Target, scene: Scene, call: InferCall) -> Outcome:
    """Send the call to the server itself, in the widest form that it has."""
    call = replace(call, pieces=0)
    if scene.protocol == "grpc":
        return send_grpc_raw(direct, call)
    if scene.server != "mlserver":
        return send_binary(direct, call)
    # It counts the lists of nested BYTES.
    flat = [replace(each, data=each.data or list_of(each)) for each in call.inputs]
    return send_json(direct, replace(call, inputs=tuple(flat)))


def list_of(tensor: Tensor) -> Any:
    return replace(tensor, shape=(-1,)).values()


# ------------------------------------------------------------------------------- errors


def declared_status(scene: Scene, call: InferCall) -> int | grpc.StatusCode | None:
    """Return the status where the gateway is not to do as the server does, None elsewhere."""
    # Servers fail: the gateway refuses it itself, but for a Triton that does so over gRPC.
    passes = (scene.server, scene.protocol) == ("triton", "grpc") and scene.form in OVER_GRPC
    refused = call.flaw == "another size" and not passes
    # Which KServe ignores over gRPC.
    refused |= call.flaw == "an unknown output" and returns_all_outputs(scene)
    if not refused:
        return None
    return CODES.INVALID_ARGUMENT if scene.form in OVER_GRPC else 400


def expected_status(scene: Scene, reference: Outcome) -> int | grpc.StatusCode:
    """Return how the client is told of the server's error."""
    status = reference.status
    if isinstance(status, grpc.StatusCode):
        return status if scene.form in OVER_GRPC else TO_HTTP[status]
    return TO_GRPC[status] if scene.form in OVER_GRPC else status


def has_same_text(scene: Scene, outcome: Outcome, reference: Outcome) -> bool:
    # MLServer tells where its JSON is not valid, which the gateway writes in its own way.
    is_about_json = "JSON decode error" in reference.error
    # A server that gets typed contents fails in other words than one that gets raw ones.
    passes_typed = scene.protocol == "grpc" and scene.form == "gRPC typed"
    return reference.error in outcome.error or is_about_json or passes_typed


# ------------------------------------------------------------------------------- outputs


def returns_all_outputs(scene: Scene) -> bool:
    """Return whether the server returns what is not listed, and the gateway leaves it out."""
    return (scene.server, scene.protocol) == ("kserve", "grpc")


def check_outputs(outcome: Outcome, reference: Outcome, scene: Scene, call: InferCall) -> None:
    assert outcome.succeeded, (outcome, reference)
    if scene.form == "V1":
        check_v1_outputs(outcome.outputs, reference.outputs)
        return
    listed = dict(call.outputs) if returns_all_outputs(scene) else {}
    assert list(outcome.outputs) == [
        name for name in reference.outputs if not listed or name in listed
    ]
    for name, output in outcome.outputs.items():
        like = reference.outputs[name]
        if call.model == "with_parameters":
            # In any order. Triton reads some numbers in JSON off by a unit in the last place.
            assert sorted_json(output) == sorted_json(like)
        else:
            check_output(output, like, has_one_nan=scene.form in ("JSON", "gRPC typed"))
    assert (outcome.model, outcome.version) == (reference.model, reference.version)
    # KServe makes ids up.
    assert outcome.id == (call.id or outcome.id)


def sorted_json(tensor: Output) -> str:
    return json.dumps(json.loads(tensor.elements[0]), sort_keys=True)


def check_output(output: Output, like: Output, *, has_one_nan: bool) -> None:
    assert (output.datatype, output.shape) == (like.datatype, like.shape)
    if has_one_nan and output.datatype in FLOATS:
        check_numbers(output.elements, like.elements)
    else:
        assert output.data == like.data


def check_numbers(values: Array, like: Array) -> None:
    """Check that all but NaN is the same bit by bit: text has one, Python's clients quiet it."""
    is_nan = np.isnan(like)
    assert np.isnan(values).tolist() == is_nan.tolist()
    assert values[~is_nan].tobytes() == like[~is_nan].tobytes()


def check_v1_outputs(values: Mapping[str, Any], like: Mapping[str, Output]) -> None:
    """Check the values of V1, where the name of a single output is not told."""
    named = dict(zip([""], like.values(), strict=True)) if "" in values else like
    assert list(values) == list(named)
    for name, tensor in named.items():
        if tensor.datatype == "BYTES":
            elements = np.array(values[name], object)
            texts = [text.encode() for text in elements.ravel()]
            assert texts == tensor.elements.tolist()
        else:
            elements = np.array(values[name], DTYPES[tensor.datatype])
            check_numbers(elements.ravel(), tensor.elements)
        assert elements.shape == tensor.shape
