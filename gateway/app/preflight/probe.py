"""``check --probe``: asks each server that routes lead to what it is, and for declared models."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import groupby

from gateway.app.build.routes import declared_models
from gateway.app.build.upstreams import UpstreamSpec, build_pool
from gateway.app.loaded_resources import LoadedResources
from gateway.errors import GatewayError
from gateway.protocol.declared_model import DeclaredModel, find_differences
from gateway.protocol.dialects import DIALECTS, Dialect
from gateway.routing.matcher import Pattern
from gateway.settings.routes import Route
from gateway.sizes import MAX_PROBE_RESPONSE, QUOTED_TEXT
from gateway.upstream.control_client import send_control_request
from gateway.upstream.metadata_cache import (
    UpstreamResponseError,
    fetch_max_batch_size,
    fetch_metadata,
)
from gateway.upstream.pool.dialect import detect_dialect
from gateway.upstream.transport import UpstreamEndpoint

EXIT_MISMATCH, EXIT_NOT_READY = 3, 4
"""Exit statuses: something is not as declared; a server is not ready, or does not answer."""

_TIMEOUT = 10.0
"""Seconds for a server to say whether it is ready, what it is, and again for each model."""
MAX_CONCURRENT = 100
"""Servers that are probed at a time: each takes a connection, and DNS takes threads."""
_READY = "/v2/health/ready"
_UNKNOWN_MODEL = (400, 404)
"""Triton answers one or the other for a model that it does not have, by the request."""


class Verdict(Enum):
    """The result of probing a server, or a model there."""

    AS_DECLARED = auto()
    MISMATCH = auto()
    NOT_READY = auto()
    """It answers, but it is not ready."""
    UNAVAILABLE = auto()
    """It does not answer, or with an error."""


_Found = tuple[Verdict, Sequence[str]]
"""A verdict, and its reasons."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of an endpoint, or of a model there."""

    upstream: str
    url: str
    verdict: Verdict
    messages: Sequence[str]


@dataclass(frozen=True, slots=True)
class Report:
    """The results of the servers, and of each declared model by name, in the settings' order.

    A model to which no route leads has no results.
    """

    servers: Sequence[ProbeResult]
    models: Mapping[str, Sequence[ProbeResult]]

    @property
    def exit_status(self) -> int:
        """Return the exit status: 3 if anything differs, else 4 if a server is not ready."""
        groups = (self.servers, *self.models.values())
        verdicts = {result.verdict for results in groups for result in results}
        if Verdict.MISMATCH in verdicts or not all(self.models.values()):
            return EXIT_MISMATCH
        return EXIT_NOT_READY if verdicts - {Verdict.AS_DECLARED} else 0

    def lines(self) -> Iterator[str]:
        """Yield the lines that an operator reads."""
        for upstream, results in groupby(self.servers, lambda result: result.upstream):
            yield f"upstream {upstream}:"
            for result in results:
                yield f"  {result.url}: {_text(result)}"
        for model, model_results in self.models.items():
            yield f"model {model}:" + ("" if model_results else " no route leads to it")
            for result in model_results:
                yield f"  {result.url} (upstream {result.upstream}): {_text(result)}"


def _text(result: ProbeResult) -> str:
    text = "; ".join(result.messages) or "as declared"
    # It quotes servers and goes to a terminal: no escape sequence may get there.
    return "".join(letter if letter.isprintable() else "�" for letter in text)


async def probe_servers(resources: LoadedResources, time_limit: float = _TIMEOUT) -> Report:
    """Probe every endpoint that routes or mirrors lead to; ``time_limit`` is for each request."""
    settings = resources.settings
    models = declared_models(settings.models)
    serving = {name: set(_upstreams_serving(name, settings.routes)) for name in models}
    used = {name for route in settings.routes for name in _upstreams_of(route)}
    slots = asyncio.Semaphore(MAX_CONCURRENT)
    tasks = []
    async with asyncio.TaskGroup() as group:
        for spec in resources.upstream_specs:
            if spec.name in used:
                wanted = [models[name] for name in models if spec.name in serving[name]]
                tasks += [
                    group.create_task(_probe_endpoint(spec, endpoint, wanted, time_limit, slots))
                    for endpoint in _endpoints(spec)
                ]
    results = [task.result() for task in tasks]
    return Report(
        [server for servers, _ in results for server in servers],
        {name: [found[name] for _, found in results if name in found] for name in models},
    )


def _upstreams_of(route: Route) -> Iterator[str]:
    """Yield the names of upstreams that get requests, or copies of them."""
    yield from (share.name for share in route.upstream if share.weight)
    if route.mirror is not None:
        yield route.mirror.upstream


def _upstreams_serving(model: str, routes: Sequence[Route]) -> Iterator[str]:
    """Yield the upstreams to which inference requests for a model may go, in order."""
    is_taken = False  # a route before takes all requests for the model
    for route in routes:
        match, rewrite = route.match, route.rewrite
        if match.operations is not None and "infer" not in match.operations:
            continue
        matches = match.model is None or Pattern.of(match.model).matches(model)
        if rewrite.model == model if rewrite is not None else matches and not is_taken:
            yield from _upstreams_of(route)
        is_taken = is_taken or (matches and match.version is None and not match.headers)


def _endpoints(spec: UpstreamSpec) -> Sequence[UpstreamEndpoint]:
    # Without DNS refresh an endpoint per name, whichever of its addresses responds.
    unsupervised = {"dns_refresh": None, "health_check": None, "model_discovery": False}
    declared = spec.declared.model_copy(update=unsupervised)
    return build_pool(replace(spec, declared=declared)).endpoints


async def _probe_endpoint(
    spec: UpstreamSpec,
    endpoint: UpstreamEndpoint,
    models: Sequence[DeclaredModel],
    time_limit: float,
    slots: asyncio.Semaphore,
) -> tuple[list[ProbeResult], dict[str, ProbeResult]]:
    """Probe the addresses of a server, and its models by name.

    After a first failure it gets no more requests.
    """

    def result(found: _Found, url: str = endpoint.url) -> ProbeResult:
        return ProbeResult(spec.name, url, *found)

    async with slots:
        try:
            server = await probe_server(endpoint, spec.declared.dialect, time_limit)
            servers = [result(server)]
            for address in endpoint.addresses[1:]:
                # That of gRPC; the dialect shows at the HTTP address.
                found = await _within(time_limit, _probe_readiness(address))
                servers.append(result(found, address.url))
            of_models = {}
            found = server
            for model in models:
                if found[0] is not Verdict.UNAVAILABLE:
                    found = await _within(time_limit, _probe_model(endpoint, model))
                of_models[model.metadata.name] = result(found)
        finally:
            await endpoint.close()
    return servers, of_models


async def _within(time_limit: float, probing: Awaitable[_Found], request: str = "") -> _Found:
    """Return what is found within ``time_limit`` seconds, or why there is no response."""
    try:
        async with asyncio.timeout(time_limit):
            return await probing
    except TimeoutError:
        return Verdict.UNAVAILABLE, (f"no response{request} within {time_limit:g} s",)
    except GatewayError as error:
        return Verdict.UNAVAILABLE, (error.message,)


async def probe_server(endpoint: UpstreamEndpoint, declared: str, time_limit: float) -> _Found:
    """Probe a server, with ``time_limit`` seconds for each request.

    ``declared`` is its dialect, or auto.
    """
    readiness, messages = await _within(time_limit, _probe_readiness(endpoint))
    if readiness is Verdict.UNAVAILABLE:
        return readiness, messages
    verdict, found = await _within(time_limit, _probe_dialect(endpoint, declared), " to GET /v2")
    if verdict is Verdict.UNAVAILABLE:
        verdict = Verdict.NOT_READY
    return readiness if verdict is Verdict.AS_DECLARED else verdict, (*messages, *found)


async def _probe_readiness(endpoint: UpstreamEndpoint) -> _Found:
    response = await send_control_request(endpoint, _READY, MAX_PROBE_RESPONSE)
    if response.status == 200:
        return Verdict.AS_DECLARED, ("ready",)
    asked = "ServerReady" if endpoint.speaks_grpc else f"GET {_READY}"
    quoted = f"{response.status} {_excerpt(response.body)}".rstrip()
    return Verdict.NOT_READY, (f"not ready: {asked} returned {quoted}",)


async def _probe_dialect(endpoint: UpstreamEndpoint, declared: str) -> _Found:
    """Compare a server's dialect with the declared one; it differs only if that is certain."""
    detected = await detect_dialect(endpoint)
    dialect, reason = detected.dialect, detected.reason
    known = DIALECTS.get(dialect.name)
    is_older = known is not None and known.binary and not dialect.binary
    name = f"{dialect.name} without the binary form" if is_older else dialect.name
    if declared == "auto":
        return Verdict.AS_DECLARED, (f"dialect {name}: it {reason}",)
    if detected.certain and _differs(dialect, DIALECTS[declared]):
        text = f"dialect {name}, but {declared} is declared: it {reason}"
        return Verdict.MISMATCH, (text,)
    if detected.certain and known is not None:
        return Verdict.AS_DECLARED, (f"dialect {declared}, as declared: it {reason}",)
    text = f"dialect {declared} is declared, but the server does not confirm it: it {reason}"
    return Verdict.AS_DECLARED, (text,)


def _differs(detected: Dialect, declared: Dialect) -> bool:
    if detected.binary is not declared.binary:
        return True
    # Without the binary form all dialects are alike. An unknown name may be any of them.
    return detected.binary and detected.name in DIALECTS and detected.name != declared.name


async def _probe_model(endpoint: UpstreamEndpoint, model: DeclaredModel) -> _Found:
    """Compare the metadata of a model with what is declared."""
    name = model.metadata.name
    try:
        metadata = await fetch_metadata(name, None, endpoint)
        max_batch_size = await fetch_max_batch_size(name, None, endpoint)
    except UpstreamResponseError as error:
        quoted = f"{error.status} {_excerpt(error.body)}"
        if error.status in _UNKNOWN_MODEL:
            return Verdict.MISMATCH, (f"does not know it: {quoted}",)
        return Verdict.UNAVAILABLE, (f"returned {quoted}",)
    differences = list(find_differences(model, metadata, max_batch_size))
    if differences:
        return Verdict.MISMATCH, differences
    messages = [] if metadata.inputs else ["does not say what it takes: what is declared is used"]
    return Verdict.AS_DECLARED, messages


def _excerpt(body: bytes) -> str:
    """Return the start of a server's response, in one line."""
    return " ".join(body[:QUOTED_TEXT].decode(errors="replace").split())
