"""Model discovery: asks endpoints which models they have ready."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.errors import GatewayError, bad_response
from gateway.protocol.operations import ModelName
from gateway.protocol.v1 import MODELS_PATH, ready_entries
from gateway.routing.intervals import jittered_intervals
from gateway.sizes import MAX_MODEL_DOCUMENT
from gateway.upstream.control_client import send_control_request
from gateway.upstream.pool.member import ANY_MODEL, Member, ReadyModels
from gateway.upstream.transport import UpstreamEndpoint

_INDEX = "/v2/repository/index"

_TIMEOUT = 5.0
"""Seconds for the whole list."""

# The server has no list, or not for everybody. Temporary errors such as 429 and 503 are not here.
_NOT_SERVED = frozenset((400, 401, 403, 404, 405, 501))

_log = logging.getLogger("tensorgate.upstream")


@dataclass(eq=False)
class ModelDiscovery:
    """Asks for ready models every ``interval`` seconds, and whenever they may have changed.

    ``random`` gives numbers in [0, 1).
    """

    interval: float
    random: Callable[[], float] = random.random
    _refreshes: int = 0
    _refresh: asyncio.Event = field(default_factory=asyncio.Event)

    def refresh_models(self) -> None:
        """Ask all endpoints at once, after a model was loaded or unloaded."""
        self._refreshes += 1
        self._refresh.set()
        self._refresh.clear()

    async def run(self, member: Member, changed: Callable[[], None]) -> None:
        """Keep the list of an endpoint's models up to date until cancelled."""
        logged = ""
        for pause in jittered_intervals(self.interval, self.random()):
            refreshes = self._refreshes
            error = await _update_models(member)
            if error and error != logged:
                _log.warning("%s", error)
            logged = error
            # A refresh that came during the request needs another request.
            if refreshes == self._refreshes:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._refresh.wait()


async def _update_models(member: Member) -> str:
    """Ask an endpoint for its models; return an error text, empty without an error."""
    url = member.endpoint.url
    try:
        async with asyncio.timeout(_TIMEOUT):
            member.models = await fetch_ready_models(member.endpoint)
    except TimeoutError:
        return f"{url} does not say which models it has: no response within {_TIMEOUT:g} s"
    except GatewayError as error:
        return f"{url} does not say which models it has: {error.message}"
    if member.models is ANY_MODEL:
        return f"{url} serves no repository index, nor a list as KServe's: any model may be there"
    return ""


async def may_have_model(endpoint: UpstreamEndpoint, model: str) -> bool:
    """Ask a server whether a model is ready there; without a clear answer it may be.

    The lists of discovery are too old to decide which servers a change of the model is for.
    """
    try:
        async with asyncio.timeout(_TIMEOUT):
            return (await fetch_ready_models(endpoint)).includes(ModelName(model))
    except (TimeoutError, GatewayError):
        return True


async def fetch_ready_models(endpoint: UpstreamEndpoint) -> ReadyModels:
    """Fetch a server's list of ready models; ``ANY_MODEL`` if it serves none.

    KServe has no repository index, only a V1 list of all its models. Raises GatewayError (502, 503)
    for no response or one that makes no sense.
    """
    index = await _fetch_list(endpoint, "POST", _INDEX, b'{"ready":true}')
    if index is not None:
        models = _parse(index)
        if models is None:
            raise bad_response(f"{endpoint.url}{_INDEX} is no index of models", endpoint.name)
        return models
    v1_list = await _fetch_list(endpoint, "GET", MODELS_PATH)
    # Servers of OpenAI's API serve another list at this path.
    models = None if v1_list is None else _parse(v1_list)
    return ANY_MODEL if models is None else models


async def _fetch_list(
    endpoint: UpstreamEndpoint, method: str, path: str, body: bytes | None = None
) -> bytes | None:
    """Fetch a list; None if it is not served. Raises GatewayError as ``fetch_ready_models``."""
    response = await send_control_request(endpoint, method, path, MAX_MODEL_DOCUMENT, body)
    if response.status in _NOT_SERVED:
        return None
    if response.status != 200:
        raise bad_response(f"{endpoint.url}{path} returned {response.status}", endpoint.name)
    return response.body


def _parse(document: bytes) -> ReadyModels | None:
    try:
        return parse_ready_models(orjson.loads(document))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def parse_ready_models(document: Any) -> ReadyModels:
    """Read a repository index, or KServe's list of models.

    KServe's list has no versions, nor has MLServer's index for a model without one. Raises
    TypeError, KeyError or AttributeError for anything else.
    """
    versions: dict[str, set[str]] = {}
    for entry in ready_entries(document):
        versions.setdefault(str(entry["name"]), set()).add(str(entry.get("version") or ""))
    return ReadyModels(
        {name: frozenset() if "" in each else frozenset(each) for name, each in versions.items()}
    )
