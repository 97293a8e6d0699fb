"""Fetches the metadata of models from servers, and caches it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

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
from gateway.upstream.control_client import ControlResponse, send_control_request
from gateway.upstream.transport import UpstreamEndpoint

RECHECK_INTERVAL: Final = 5.0
"""Seconds between two times that a model's metadata is fetched again as requests do not fit it."""

_K = TypeVar("_K")
_V = TypeVar("_V")
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


@dataclass(eq=False)
class MetadataCache:
    """Caches the metadata of at most ``max_entries`` models, each for ``ttl`` seconds.

    Calls for the same model and version share one fetch, which may take ``fetch_timeout`` seconds.
    ``clock`` gives seconds.
    """

    ttl: float
    max_entries: int
    fetch_timeout: float
    clock: Callable[[], float]
    _entries: OrderedDict[_Key, tuple[ModelMetadata, float]] = field(default_factory=OrderedDict)
    """The metadata, and when it was fetched; what was used last stands last."""
    _rechecked: OrderedDict[tuple[str, str | None], float] = field(default_factory=OrderedDict)
    """When metadata was fetched again, by model and version."""
    _prefetched: OrderedDict[_Key, float] = field(default_factory=OrderedDict)
    """When metadata was fetched that nobody waited for."""
    _fetches: dict[_Key, asyncio.Task[ModelMetadata]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[ModelMetadata]] = field(default_factory=set)

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
        fetch = self._fetches.get(key) or self._start_fetch(key, endpoint)
        # A client that leaves must not cancel the fetch of the others.
        return await asyncio.shield(fetch)

    def prefetch(
        self, model: str, version: str | None, endpoint: UpstreamEndpoint, has_config: bool = True
    ) -> None:
        """Fetch a model's metadata for later calls, once in ``RECHECK_INTERVAL`` at most."""
        key, now = (model, version, has_config), self.clock()
        last = self._prefetched.get(key)
        if key in self._fetches or (last is not None and now - last < RECHECK_INTERVAL):
            return
        self._keep(self._prefetched, key, now)
        self._start_fetch(key, endpoint)

    def _start_fetch(self, key: _Key, endpoint: UpstreamEndpoint) -> asyncio.Task[ModelMetadata]:
        fetch = self._fetches[key] = asyncio.create_task(self._fetch(key, endpoint))
        self._tasks.add(fetch)
        fetch.add_done_callback(lambda done: self._end_fetch(key, done))
        return fetch

    def cached(
        self, model: str, version: str | None, has_config: bool = True
    ) -> ModelMetadata | None:
        """Return a model's metadata if the cache has it; parameters as in ``get``."""
        key = (model, version, has_config)
        metadata, fetched = self._entries.get(key, (None, 0.0))
        if metadata is None or fetched + self.ttl <= self.clock():
            return None
        self._entries.move_to_end(key)
        return metadata

    def invalidate(self, model: str) -> None:
        """Drop all versions of a model that was loaded, also the result of a fetch in flight."""
        kept: tuple[dict[Any, Any], ...] = (self._entries, self._fetches, self._rechecked)
        for each in kept:
            for key in [key for key in each if key[0] == model]:
                del each[key]

    def recheck(self, model: str, version: str | None) -> None:
        """Have the next call fetch metadata again, as a request or its server disagrees with it.

        Clients cause this, so it happens once in ``RECHECK_INTERVAL`` for each model and version. A
        fetch in flight goes on.
        """
        name, now = (model, version), self.clock()
        if name in self._rechecked and now - self._rechecked[name] < RECHECK_INTERVAL:
            return
        dropped = [self._entries.pop((*name, has_config), None) for has_config in (False, True)]
        if any(dropped):
            self._keep(self._rechecked, name, now)

    async def close(self) -> None:
        """Cancel the fetches in flight."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, key: _Key, endpoint: UpstreamEndpoint) -> ModelMetadata:
        try:
            async with asyncio.timeout(self.fetch_timeout):
                model, version, has_config = key
                metadata = await fetch_metadata(model, version, endpoint, has_config)
        except TimeoutError:
            raise GatewayError(
                ErrorKind.SERVER_TIMEOUT,
                f"{endpoint.url} returned no metadata of model '{key[0]}' "
                f"in {self.fetch_timeout:g} s",
                server=endpoint.name,
            ) from None
        if self._fetches.get(key) is asyncio.current_task():
            self._keep(self._entries, key, (metadata, self.clock()))
        return metadata

    def _keep(self, entries: OrderedDict[_K, _V], key: _K, value: _V) -> None:
        entries[key] = value
        entries.move_to_end(key)
        if len(entries) > self.max_entries:
            entries.popitem(last=False)

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
    response = await _get(endpoint, model_path(model, version))
    if response.status != 200:
        raise UpstreamResponseError(response.status, response.content_type, response.body)
    max_batch_size = await fetch_max_batch_size(model, version, endpoint) if has_config else None
    batching = None if max_batch_size is None else max_batch_size > 0
    try:
        fields = orjson.loads(response.body)
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
    response = await _get(endpoint, model_path(model, version) + "/config")
    if response.status >= 500 and response.status != 501:
        # To guess the batch dimension is to guess it wrong.
        raise UpstreamResponseError(response.status, response.content_type, response.body)
    return max(0, _max_batch_size(response.body)) if response.status == 200 else None


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


async def _get(endpoint: UpstreamEndpoint, path: str) -> ControlResponse:
    return await send_control_request(endpoint, path, MAX_MODEL_DOCUMENT)
