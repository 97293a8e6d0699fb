"""Scripts of servers that have a model."""

from __future__ import annotations

import json

from tests.support.http_messages import http_response
from tests.support.inference_messages import FLOATS, HEADER_LENGTH, INFER, binary_response, metadata
from tests.support.servers.scripted_server import Connection, ReceivedRequest, Script, never_respond


async def read_heads_only(connection: Connection) -> None:
    """Answer for the metadata; of other requests leave the body where it is, and wait."""
    while (await connection.head()).target in ("/v2/models/m", "/v2/models/m/config"):
        await connection.send(http_response(metadata(-1)))
    await never_respond(connection)


def model_script(
    infer: bytes = binary_response(FLOATS.tobytes()),
    described: bytes = http_response(metadata(-1)),
    other: bytes | None = None,
) -> Script:
    """Make the script of a server with a model.

    It responds to inference, to requests for the model's metadata and its config, and to all others
    with these; to others as to those for the metadata if nothing is given.
    """

    async def script(connection: Connection) -> None:
        while True:
            target = (await connection.request()).head.target.partition("?")[0]
            parts = target.split("/")
            is_model = parts[1:3] == ["v2", "models"] and parts[-2] in ("models", "versions")
            if target.endswith("/infer"):
                await connection.send(infer)
            elif other is None or is_model or target.endswith("/config"):
                await connection.send(described)
            else:
                await connection.send(other)

    return script


infer_floats = model_script()


def echoed(received: ReceivedRequest) -> bytes:
    """Write the binary response that returns the inputs of a binary request as outputs."""
    size = int(received.head.get(HEADER_LENGTH) or 0)
    fields = json.loads(received.body[:size])
    outputs = [{**each, "name": each["name"].replace("IN", "OUT")} for each in fields["inputs"]]
    told = {name: fields[name] for name in ("id",) if name in fields}
    told |= {"model_name": "m", "model_version": "1", "outputs": outputs}
    header = json.dumps(told).encode()
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(header))}
    return http_response(header + received.body[size:], headers)


async def echo_tensors(connection: Connection) -> None:
    """Respond to each binary request with its tensors."""
    while True:
        await connection.send(echoed(await connection.request()))


async def echo_json(connection: Connection) -> None:
    """Respond to infer requests with their inputs, as MLServer writes those; else with metadata."""
    while True:
        received = await connection.request()
        if received.head.target != INFER:
            await connection.send(http_response(metadata(-1)))
            continue
        assert received.head.all("Content-Type") == ["application/json"]
        assert received.head.get(HEADER_LENGTH) is None
        outputs = [
            {
                **each,
                "name": each["name"].replace("IN", "OUT"),
                "parameters": {"content_type": "np", **each.get("parameters", {})},
            }
            for each in json.loads(received.body)["inputs"]
        ]
        fields = {"model_name": "m", "model_version": None, "id": "made-up", "parameters": None}
        await connection.send(http_response(json.dumps({**fields, "outputs": outputs}).encode()))
