"""Scripts of servers that have a model."""

from __future__ import annotations

from tests.support.http_messages import answer
from tests.support.inference_messages import metadata
from tests.support.servers.scripted_server import Connection, hang


async def reads_heads_alone(connection: Connection) -> None:
    """Answer for the metadata; of other requests leave the body where it is, and wait."""
    while (await connection.head()).target in ("/v2/models/m", "/v2/models/m/config"):
        await connection.send(answer(metadata(-1)))
    await hang(connection)
