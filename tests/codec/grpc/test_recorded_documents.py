"""The same operations of real servers, over HTTP and over gRPC.

Each line of recorded_documents.jsonl has a response as JSON over HTTP, or null for an empty body,
and as the bytes of its message over gRPC. Of the repository indexes some models were left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.codec.grpc.documents import read_response, write_response
from gateway.protocol.grpc.rpcs import RPCS
from tests.support.grpc.proto_file import message_class

RECORDED = [
    json.loads(line)
    for line in Path(__file__).with_name("recorded_documents.jsonl").read_text().splitlines()
]


def without(name: str) -> Callable[[Any], Any]:
    return lambda http: {key: value for key, value in http.items() if key != name}


HEALTH = {
    "ServerLive": {"live": True},
    "ServerReady": {"ready": True},
    "ModelReady": {"ready": True},
}


def instead(document: Any) -> Callable[[Any], Any]:
    return lambda _: document


DIFFERENCES: dict[tuple[str, str], Callable[[Any], Any]] = {
    # An empty body over HTTP, a status alone.
    **{("mlserver 1.7.1", rpc): instead(document) for rpc, document in HEALTH.items()},
    ("triton 2.51.0", "RepositoryModelLoad"): instead({}),
    ("triton 2.51.0", "RepositoryModelUnload"): instead({}),
    # Its message has no name.
    ("kserve 0.21.0", "ModelReady"): without("name"),
    # Null over HTTP; protobuf has no null, so this is an empty array, as of other servers.
    ("kserve 0.21.0", "ModelMetadata"): lambda http: {**http, "versions": []},
    # An empty object and an empty text over HTTP, which other servers leave out.
    ("mlserver 1.7.1", "ModelMetadata"): without("parameters"),
    ("mlserver 1.7.1", "RepositoryIndex"): lambda http: [*map(without("reason"), http)],
}
"""What JSON made of messages has instead, by server and RPC."""


def names() -> list[str]:
    return [f"{each['server']} {each['rpc']} {each['path']}" for each in RECORDED]


@pytest.mark.parametrize("recorded", RECORDED, ids=names())
def test_message_over_grpc_becomes_the_json_over_http(recorded: dict[str, Any]) -> None:
    found = read_response(recorded["rpc"], bytes.fromhex(recorded["grpc"]))
    change = DIFFERENCES.get((recorded["server"], recorded["rpc"]), lambda http: http)
    assert found == change(recorded["http"])


@pytest.mark.parametrize("recorded", RECORDED, ids=names())
def test_json_over_http_becomes_the_message_over_grpc(recorded: dict[str, Any]) -> None:
    make = message_class(f"{recorded['rpc']}Response")
    document = recorded["http"]
    if recorded["server"] == "mlserver 1.7.1" and recorded["rpc"] in HEALTH:
        document = HEALTH[recorded["rpc"]]  # the status tells
    found = make.FromString(write_response(recorded["rpc"], document))
    message = make.FromString(bytes.fromhex(recorded["grpc"]))
    if recorded["rpc"] == "RepositoryIndex":
        for model in message.models:
            model.state = model.state.removeprefix("State.")  # MLServer's
    assert found == message


def order(document: Any, name: str = "") -> Any:
    """Return the names of members in their order, which the keys of a map do not have."""
    if isinstance(document, list):
        return [*map(order, document)]
    if not isinstance(document, dict):
        return None
    is_map = name == "parameters" or all(map(str.isdecimal, document))
    names = sorted(document) if is_map else document
    return [(name, order(document[name], name)) for name in names]


@pytest.mark.parametrize("rpc", ["ModelConfig", "ModelStatistics", "ModelMetadata"])
def test_members_stand_in_the_order_of_tritons_json(rpc: str) -> None:
    for recorded in RECORDED:
        if (recorded["server"], recorded["rpc"]) == ("triton 2.51.0", rpc):
            found = read_response(rpc, bytes.fromhex(recorded["grpc"]))
            assert order(found) == order(recorded["http"])


def test_every_rpc_of_responses_with_content_was_recorded() -> None:
    recorded = {each["rpc"] for each in RECORDED}
    registrations = {
        f"{memory}SharedMemory{verb}"
        for memory in ("System", "Cuda")
        for verb in ("Register", "Unregister")
    }
    assert recorded == RPCS - registrations
