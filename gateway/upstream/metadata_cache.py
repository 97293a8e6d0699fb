"""What the models of an upstream take, asked for once and kept for a while."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.errors import ErrorKind, GatewayError, bad_response, strip_tracebacks
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.operations import model_path
from gateway.protocol.tensors import ModelMetadata, TensorSpec
from gateway.sizes import MAX_MODEL_DOCUMENT, QUOTED_TEXT
from gateway.upstream.control_client import send_control_request
from gateway.upstream.transport import UpstreamEndpoint

Key = tuple[str, str | None, bool]


class UpstreamResponseError(Exception):
    """The server's own answer to a question of the gateway's: the client shall see it."""

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.content_type = content_type
        self.body = body


@dataclass(frozen=True, slots=True)
class _Entry:
    metadata: ModelMetadata
    expires: float


class MetadataCache:
    """Keeps the metadata of at most ``size`` models, each for ``time_to_live`` seconds.

    ``clock`` gives seconds. One fetch at a time is made per model and version, of at most
    ``fetch_time`` seconds; others wait for it.
    """

    def __init__(
        self, time_to_live: float, size: int, fetch_time: float, clock: Callable[[], float]
    ) -> None:
        self._fetch_time = fetch_time
        self._time_to_live = time_to_live
        self._size = size
        self._clock = clock
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._fetches: dict[Key, asyncio.Task[ModelMetadata]] = {}
        self._tasks: set[asyncio.Task[ModelMetadata]] = set()

    async def get(
        self,
        model: str,
        version: str | None,
        endpoint: UpstreamEndpoint,
        batches: bool = True,
    ) -> ModelMetadata:
        """Give a model's metadata, asking the endpoint where it is not known.

        ``batches`` tells whether its config is asked for, too: not every server has one.
        Raises UpstreamResponseError where the server does not give it (an unknown model, say), and
        GatewayError (502, 503) where it fails or makes no sense.
        """
        key = (model, version, batches)
        entry = self._entries.get(key)
        if entry is not None and entry.expires > self._clock():
            self._entries.move_to_end(key)
            return entry.metadata
        fetch = self._fetches.get(key)
        if fetch is None:
            fetch = self._fetches[key] = asyncio.create_task(self._fetch(key, endpoint))
            self._tasks.add(fetch)
            fetch.add_done_callback(lambda done: self._end_fetch(key, done))
        # One client that leaves must not take the answer from the others.
        return await asyncio.shield(fetch)

    def invalidate(self, model: str) -> None:
        """Forget all versions of a model; a fetch under way does not count any more."""
        for key in [key for key in self._entries if key[0] == model]:
            del self._entries[key]
        for key in [key for key in self._fetches if key[0] == model]:
            del self._fetches[key]

    async def close(self) -> None:
        """Cancel the fetches under way."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, key: Key, endpoint: UpstreamEndpoint) -> ModelMetadata:
        try:
            async with asyncio.timeout(self._fetch_time):
                model, version, batches = key
                metadata = await fetch_metadata(model, version, endpoint, batches)
        except TimeoutError:
            raise GatewayError(
                ErrorKind.SERVER_TIMEOUT,
                f"{endpoint.url} gave no metadata of model '{key[0]}' in {self._fetch_time:g} s",
            ) from None
        if self._fetches.get(key) is asyncio.current_task():
            self._entries[key] = _Entry(metadata, self._clock() + self._time_to_live)
            self._entries.move_to_end(key)
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)
        return metadata

    def _end_fetch(self, key: Key, fetch: asyncio.Task[ModelMetadata]) -> None:
        self._tasks.discard(fetch)
        if self._fetches.get(key) is fetch:
            del self._fetches[key]
        if not fetch.cancelled() and (error := fetch.exception()) is not None:
            strip_tracebacks(error)  # every client that waited may have left


async def fetch_metadata(
    model: str, version: str | None, endpoint: UpstreamEndpoint, batches: bool = True
) -> ModelMetadata:
    """Ask a server what a model takes: its metadata, and whether it batches from its config.

    Without ``batches`` the config is not asked for. Raises UpstreamResponseError where the server
    does
    not give it, and GatewayError (502) that says what of it makes no sense.
    """
    path = model_path(model, version)
    status, content_type, body = await _get(endpoint, path)
    if status != 200:
        raise UpstreamResponseError(status, content_type, body)
    largest = await fetch_max_batch_size(model, version, endpoint) if batches else None
    batching = None if largest is None else largest > 0
    try:
        fields = orjson.loads(body)
        entries = list(fields.get("inputs") or ())
    except (ValueError, TypeError, AttributeError):
        raise bad_response(f"{endpoint.url} gave no metadata of model '{model}'") from None
    try:
        inputs = tuple(map(_tensor, entries))
    except (ValueError, KeyError, TypeError):
        shown = orjson.dumps(entries).decode()
        raise bad_response(
            f"{endpoint.url} gave metadata of model '{model}' whose inputs make no sense: "
            f"{shown[:QUOTED_TEXT]}"
        ) from None
    return ModelMetadata(model, inputs, batching, _outputs(fields))


async def fetch_max_batch_size(
    model: str, version: str | None, endpoint: UpstreamEndpoint
) -> int | None:
    """Ask a server for a model's largest batch, 0 for one that does not batch; None if unsaid."""
    status, content_type, body = await _get(endpoint, model_path(model, version) + "/config")
    if status >= 500 and status != 501:
        # Without the config the batch dimension would be guessed, and guessed wrong.
        raise UpstreamResponseError(status, content_type, body)
    return max(0, _max_batch_size(body)) if status == 200 else None


def _outputs(fields: dict[str, Any]) -> tuple[TensorSpec, ...]:
    """Read the outputs; none where they make no sense, as most requests do well without."""
    try:
        return tuple(_tensor(entry) for entry in fields["outputs"])
    except (ValueError, KeyError, TypeError):
        return ()


def _tensor(entry: dict[str, Any]) -> TensorSpec:
    return TensorSpec(entry["name"], DATATYPES[entry["datatype"]], tuple(map(int, entry["shape"])))


def _max_batch_size(config: bytes) -> int:
    try:
        return int(orjson.loads(config).get("max_batch_size", 0))
    except (ValueError, TypeError, AttributeError):
        return 0


async def _get(endpoint: UpstreamEndpoint, path: str) -> tuple[int, str, bytes]:
    document = await send_control_request(endpoint, "GET", path, MAX_MODEL_DOCUMENT)
    return document.status, document.content_type, document.body
