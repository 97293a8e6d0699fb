"""A small inference server process, which fails as configured.

    python -m tests.resilience.server HOST PORT

It answers an infer request in binary form with its own tensors, any request without a body with the
metadata of its model, and names itself by its port. What it is told with PUT /behave holds from
then on.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from tests.support.http_messages import HEADER_LENGTH, Head, http_response, read_body, read_head


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The behaviour of a server; by default it works."""

    unavailable: bool = False
    """It answers 503."""
    delay: float = 0.0
    """Seconds before each response."""
    cut: bool = False
    """It closes the connection in the middle of a response's body."""
    keep_alive: float | None = None
    """Seconds after which it closes a kept connection without a request."""
    closes_unanswered: bool = False
    """It closes a kept connection when the next request is there, and does not answer it."""
    fails: bool = False
    """It answers 500."""

    @property
    def text(self) -> bytes:
        """Return it in the form in which a server is told."""
        return json.dumps(asdict(self)).encode()


class Server:
    """Serves connections, each as the behaviour of the moment has it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._behaviour = Behaviour()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection."""
        with suppress(asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            kept = False
            while await self._answer(reader, writer, kept):
                kept = True
        writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bool
    ) -> bool:
        """Answer one request; return whether another one may follow."""
        async with asyncio.timeout(self._behaviour.keep_alive if kept else None):
            head = await read_head(reader)
        body = await read_body(reader, head)
        if head.first.startswith("PUT /behave "):
            self._behaviour = Behaviour(**json.loads(body))
            writer.write(http_response())
            return True
        behaviour = self._behaviour
        if kept and behaviour.closes_unanswered:
            return False
        await asyncio.sleep(behaviour.delay)
        data = self._request(head, body)
        writer.write(data[: -len(body) // 2] if behaviour.cut else data)
        await writer.drain()
        return not behaviour.cut

    def _request(self, head: Head, body: bytes) -> bytes:
        headers = {"Server": self._name}
        if self._behaviour.unavailable:
            error = json.dumps({"error": f"{self._name} is unavailable"}).encode()
            return http_response(error, headers, "503 Service Unavailable")
        if self._behaviour.fails:
            error = json.dumps({"error": "CUDA out of memory on device 0"}).encode()
            return http_response(error, headers, "500 Internal Server Error")
        if not body:
            return http_response(_METADATA, headers)
        size = int(head.get(HEADER_LENGTH) or len(body))
        try:
            fields = json.dumps(_echo(json.loads(body[:size]))).encode()
        except (ValueError, KeyError):
            return http_response(b'{"error":"malformed"}', headers, "400 Bad Request")
        headers[HEADER_LENGTH] = str(len(fields))
        headers["Content-Type"] = "application/octet-stream"
        return http_response(fields + body[size:], headers)


_TENSOR = {"name": "N", "datatype": "INT32", "shape": [-1]}
_METADATA = json.dumps(
    {"name": "echo", "versions": ["1"], "inputs": [_TENSOR], "outputs": [_TENSOR]}
).encode()


def _echo(asked: dict[str, Any]) -> dict[str, Any]:
    fields = {"model_name": "echo", "model_version": "1", "outputs": asked["inputs"]}
    return fields | ({"id": asked["id"]} if "id" in asked else {})


async def _main(host: str, port: str) -> None:
    server = await asyncio.start_server(Server(port).serve, host, int(port), backlog=1024)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
