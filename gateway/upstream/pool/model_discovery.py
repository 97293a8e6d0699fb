"""Endpoints are asked which models they have ready, every so often."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable

import orjson

from gateway.errors import GatewayError, bad_response
from gateway.protocol.model_name import ModelName
from gateway.protocol.v1 import MODELS_PATH
from gateway.routing.intervals import pauses
from gateway.sizes import MAX_MODEL_DOCUMENT
from gateway.upstream.control_client import send_control_request
from gateway.upstream.pool.member import Member, MemberTask
from gateway.upstream.pool.ready_models import ANY_MODEL, ReadyModels, listed
from gateway.upstream.transport import UpstreamEndpoint

_INDEX = "/v2/repository/index"

_TIME = 5.0
"""Seconds within which the list must be there."""

# A list is not served, or not to everybody; what is meant to pass, as 429 and 503 are, is not here.
_NOT_SERVED = frozenset((400, 401, 403, 404, 405, 501))

_log = logging.getLogger("tensorgate.upstream")


class ModelDiscovery(MemberTask):
    """Asks for the models that are ready every so many seconds, and when it may have changed.

    ``random`` gives numbers in [0, 1).
    """

    def __init__(self, every: float, random: Callable[[], float] = random.random) -> None:
        self._every = every
        self._random = random
        self._changes = 0
        self._change = asyncio.Event()

    def refresh_models(self) -> None:
        """Ask all endpoints at once: a model was loaded or unloaded."""
        self._changes += 1
        self._change.set()
        self._change.clear()

    async def attend(self, member: Member, changed: Callable[[], None]) -> None:
        """Keep up with an endpoint's models until cancelled."""
        told = ""
        for pause in pauses(self._every, self._random()):
            changes = self._changes
            fault = await _learn(member)
            if fault and fault != told:
                _log.warning("%s", fault)
            told = fault
            if changes == self._changes:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._change.wait()


async def _learn(member: Member) -> str:
    """Ask an endpoint for its models; give what is wrong with the answer, nothing if it is fine."""
    url = member.endpoint.url
    try:
        async with asyncio.timeout(_TIME):
            member.models = await ready_models(member.endpoint)
    except TimeoutError:
        return f"{url} does not say which models it has: no answer within {_TIME:g} s"
    except GatewayError as error:
        return f"{url} does not say which models it has: {error.message}"
    if member.models is ANY_MODEL:
        return f"{url} serves no repository index, nor a list as KServe's: any model may be there"
    return ""


async def may_have_model(endpoint: UpstreamEndpoint, model: str) -> bool:
    """Ask a server whether a model is ready there now; it may be, where no answer says it is not.

    What was heard before is too old to tell whom a change of the model is for.
    """
    try:
        async with asyncio.timeout(_TIME):
            return (await ready_models(endpoint)).have(ModelName(model))
    except (TimeoutError, GatewayError):
        return True


async def ready_models(endpoint: UpstreamEndpoint) -> ReadyModels:
    """Ask a server which models are ready there; every one, if it serves no list of them.

    KServe has no repository index, but a V1 list, of all its models. Raises GatewayError (502, 503)
    where there is no answer that makes sense.
    """
    index = await _list(endpoint, "POST", _INDEX, b'{"ready":true}')
    if index is not None:
        models = _models(index)
        if models is None:
            raise bad_response(f"{endpoint.url}{_INDEX} is no index of models")
        return models
    v1_list = await _list(endpoint, "GET", MODELS_PATH)
    # What is there need not be of V1: servers of OpenAI's API have a list of another form.
    models = None if v1_list is None else _models(v1_list)
    return ANY_MODEL if models is None else models


async def _list(
    endpoint: UpstreamEndpoint, method: str, path: str, body: bytes | None = None
) -> bytes | None:
    """Ask for a list; None where it is not served. Raises GatewayError as ``ready_models``."""
    answer = await send_control_request(endpoint, method, path, MAX_MODEL_DOCUMENT, body)
    if answer.status in _NOT_SERVED:
        return None
    if answer.status != 200:
        raise bad_response(f"{endpoint.url}{path} answered {answer.status}")
    return answer.body


def _models(document: bytes) -> ReadyModels | None:
    try:
        return listed(orjson.loads(document))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
