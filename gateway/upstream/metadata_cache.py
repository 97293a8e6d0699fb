"""Fetches the metadata of models from servers, and caches it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson

from gateway.errors import (
    ErrorKind,
    GatewayError,
    bad_response,
    read_server_error,
    strip_tracebacks,
)
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.operations import model_path
from gateway.protocol.tensors import ModelMetadata, TensorSpec
from gateway.sizes import MAX_MODEL_DOCUMENT, QUOTED_TEXT
from gateway.upstream.control_client import send_control_request
from gateway.upstream.transport import UpstreamEndpoint

RECHECK_INTERVAL: Final = 5.0
"""Seconds between two times that a model's metadata is fetched again as requests do not fit it."""

_Key = tuple[str, str | None, bool]
"""Model, version, and whether the config counts."""


class UpstreamResponseError(Exception):
    """A server's error response to a request of the gateway; the client gets it as it is."""

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.content_type = content_type
        self.body = body

    @property
    def message(self) -> str:
        """Return the message in the body."""
        return read_server_error(self.body)


@dataclass(frozen=True, slots=True)
class _Entry:
    metadata: ModelMetadata
    fetched: float


class MetadataCache:
    """Caches the metadata of at most ``max_entries`` models, each for ``ttl`` seconds.

    Calls for the same model and version share one fetch, which may take ``fetch_timeout`` seconds.
    ``clock`` gives seconds.
    """

    def __init__(
        self, ttl: float, max_entries: int, fetch_timeout: float, clock: Callable[[], float]
    ) -> None:
        self._fetch_timeout = fetch_timeout
        self._ttl = ttl
        self._max_entries = max_entries
        self._clock = clock
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._rechecked: dict[tuple[str, str | None], float] = {}
        """When metadata was fetched again, by model and version."""
        self._fetches: dict[_Key, asyncio.Task[ModelMetadata]] = {}
        self._tasks: set[asyncio.Task[ModelMetadata]] = set()

    async def get(
        self, model: str, version: str | None, endpoint: UpstreamEndpoint, has_config: bool = True
    ) -> ModelMetadata:
        """Return a model's metadata, from the cache or from the endpoint.

        Without ``has_config`` the server's config is not asked for. Raises UpstreamResponseError
        for a server's error such as an unknown model, and GatewayError (502, 503) for metadata that
        makes no sense.
        """
        if (metadata := self.cached(model, version, has_config)) is not None:
            return metadata
        key = (model, version, has_config)
        fetch = self._fetches.get(key)
        if fetch is None:
            fetch = self._fetches[key] = asyncio.create_task(self._fetch(key, endpoint))
            self._tasks.add(fetch)
            fetch.add_done_callback(lambda done: self._end_fetch(key, done))
        # A client that leaves must not cancel the fetch of the others.
        return await asyncio.shield(fetch)

    def cached(
        self, model: str, version: str | None, has_config: bool = True
    ) -> ModelMetadata | None:
        """Return a model's metadata if the cache has it; parameters as in ``get``."""
        key = (model, version, has_config)
        entry = self._entries.get(key)
        if entry is None or entry.fetched + self._ttl <= self._clock():
            return None
        self._entries.move_to_end(key)
        return entry.metadata

    def invalidate(self, model: str) -> None:
        """Drop all versions of a model that was loaded, also the result of a fetch in flight."""
        for key in [key for key in self._entries if key[0] == model]:
            del self._entries[key]
        for key in [key for key in self._fetches if key[0] == model]:
            del self._fetches[key]
        for name in [name for name in self._rechecked if name[0] == model]:
            del self._rechecked[name]

    def recheck(self, model: str, version: str | None) -> None:
        """Have the next call fetch metadata again, as a request or its server disagrees with it.

        Clients cause this, so it happens once in ``RECHECK_INTERVAL`` for each model and version. A
        fetch in flight goes on.
        """
        name, now = (model, version), self._clock()
        if name in self._rechecked and now - self._rechecked[name] < RECHECK_INTERVAL:
            return
        dropped = [self._entries.pop((*name, has_config), None) for has_config in (False, True)]
        if any(dropped):
            self._rechecked.pop(name, None)
            self._rechecked[name] = now
            if len(self._rechecked) > self._max_entries:
                del self._rechecked[next(iter(self._rechecked))]

    async def close(self) -> None:
        """Cancel the fetches in flight."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, key: _Key, endpoint: UpstreamEndpoint) -> ModelMetadata:
        try:
            async with asyncio.timeout(self._fetch_timeout):
                model, version, has_config = key
                metadata = await fetch_metadata(model, version, endpoint, has_config)
        except TimeoutError:
            raise GatewayError(
                ErrorKind.SERVER_TIMEOUT,
                f"{endpoint.url} returned no metadata of model '{key[0]}' "
                f"in {self._fetch_timeout:g} s",
                server=endpoint.name,
            ) from None
        if self._fetches.get(key) is asyncio.current_task():
            self._entries[key] = _Entry(metadata, self._clock())
            self._entries.move_to_end(key)
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
        return metadata

    def _end_fetch(self, key: _Key, fetch: asyncio.Task[ModelMetadata]) -> None:
        self._tasks.discard(fetch)
        if self._fetches.get(key) is fetch:
            del self._fetches[key]
        if not fetch.cancelled() and (error := fetch.exception()) is not None:
            strip_tracebacks(error)  # every client that waited may have left


async def fetch_metadata(
    model: str, version: str | None, endpoint: UpstreamEndpoint, has_config: bool = True
) -> ModelMetadata:
    """Fetch a model's metadata from a server, and from its config whether the model batches.

    Without ``has_config`` the config is not asked for. Raises UpstreamResponseError for an error
    response, and GatewayError (502) that names the invalid part.
    """
    path = model_path(model, version)
    status, content_type, body = await _get(endpoint, path)
    if status != 200:
        raise UpstreamResponseError(status, content_type, body)
    max_batch_size = await fetch_max_batch_size(model, version, endpoint) if has_config else None
    batching = None if max_batch_size is None else max_batch_size > 0
    try:
        fields = orjson.loads(body)
        entries = list(fields.get("inputs") or ())
    except (ValueError, TypeError, AttributeError):
        message = f"{endpoint.url} returned no metadata of model '{model}'"
        raise bad_response(message, endpoint.name) from None
    try:
        inputs = tuple(map(_tensor, entries))
    except (ValueError, KeyError, TypeError):
        text = orjson.dumps(entries).decode()
        raise bad_response(
            f"{endpoint.url} returned invalid inputs in the metadata of model '{model}': "
            f"{text[:QUOTED_TEXT]}",
            endpoint.name,
        ) from None
    return ModelMetadata(model, inputs, batching, _outputs(fields))


async def fetch_max_batch_size(
    model: str, version: str | None, endpoint: UpstreamEndpoint
) -> int | None:
    """Fetch a model's maximal batch size: 0 without batching, None if the server has no config."""
    status, content_type, body = await _get(endpoint, model_path(model, version) + "/config")
    if status >= 500 and status != 501:
        # To guess the batch dimension is to guess it wrong.
        raise UpstreamResponseError(status, content_type, body)
    return max(0, _max_batch_size(body)) if status == 200 else None


def _outputs(fields: dict[str, Any]) -> tuple[TensorSpec, ...]:
    """Read the outputs; none if they make no sense, as most requests do not need them."""
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
    response = await send_control_request(endpoint, "GET", path, MAX_MODEL_DOCUMENT)
    return response.status, response.content_type, response.body
