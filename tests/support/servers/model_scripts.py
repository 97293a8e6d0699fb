"""Scripts of servers that have a model."""

from __future__ import annotations

from tests.support.http_messages import http_response
from tests.support.inference_messages import FLOATS, binary_response, metadata
from tests.support.servers.scripted_server import Connection, never_respond


async def read_heads_only(connection: Connection) -> None:
    """Answer for the metadata; of other requests leave the body where it is, and wait."""
    while (await connection.head()).target in ("/v2/models/m", "/v2/models/m/config"):
        await connection.send(http_response(metadata(-1)))
    await never_respond(connection)


async def infer_floats(connection: Connection) -> None:
    """Answer infer requests with FLOATS, and all others with the metadata of a model."""
    while True:
        target = (await connection.request()).head.target.partition("?")[0]
        is_infer = target.endswith("/infer")
        await connection.send(
            binary_response(FLOATS.tobytes()) if is_infer else http_response(metadata(-1))
        )
