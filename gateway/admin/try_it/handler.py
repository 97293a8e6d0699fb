"""The panel "Try it": it makes a call, and tells all that was sent for it."""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import orjson
from aiohttp import web

from gateway.admin.own_calls import (
    CapturedCall,
    OwnCallError,
    call_for_document,
    make_captured_call,
)
from gateway.admin.panels.models import Measurement, Savings
from gateway.admin.security import authorize, read_body
from gateway.admin.source import GatewaySource
from gateway.admin.try_it.code import client_address, tensor_file, write_curl, write_python
from gateway.admin.try_it.outputs import MAX_RESPONSE, read_error, read_outputs
from gateway.admin.try_it.requests import FORMS, MAX_DATA, Call, make_request
from gateway.errors import GatewayError, escape_for_log, shorten
from gateway.observe.call_capture import CapturedMessage
from gateway.protocol.messages import TensorData
from gateway.protocol.operations import model_path, quote_name
from gateway.protocol.tensors import element_count
from gateway.upstream.transport import UpstreamRequest

_ROUNDS = 3
"""Calls with conversion, and as many without, that are compared."""
MAX_BODY = 16 * 2**20
"""Bytes of what the page sends: tensors in base64, or as JSON."""
BODY_TIMEOUT = 60.0
"""Seconds for it to arrive."""
_MAX_LOGGED = 200
"""Characters of a model's name in the log."""
_log = logging.getLogger("tensorgate.admin")


class TryIt:
    """The handler of ``POST /api/try``; it makes one call at a time.

    It needs ``admin.payloads: true`` and a key of ``admin.keys``.
    """

    def __init__(self, source: GatewaySource, savings: Savings) -> None:
        self._source = source
        self._savings = savings
        self._one_at_a_time = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        """Return the route."""
        return [web.post("/api/try", self.call)]

    async def call(self, request: web.Request) -> web.Response:
        """Make a call; respond with both sides' messages, and the outputs."""
        allowed = self._source.settings.admin.payloads
        obstacle = "" if allowed else "values of tensors are not shown here (admin.payloads)"
        await authorize(self._source, request, obstacle)
        async with self._one_at_a_time:
            try:
                async with asyncio.timeout(BODY_TIMEOUT):  # others wait for it
                    wanted = await read_body(request, Call, MAX_BODY)
            except TimeoutError:
                text = f"the body did not arrive within {BODY_TIMEOUT:g} s"
                raise web.HTTPRequestTimeout(text=text) from None
            try:
                document = await self._try(request, wanted)
            except GatewayError as error:
                raise web.HTTPBadRequest(text=str(error)) from None
            except OwnCallError as error:
                raise web.HTTPBadGateway(text=str(error)) from None
            body = await asyncio.to_thread(orjson.dumps, document)
        return web.Response(body=body, content_type="application/json")

    async def _try(self, request: web.Request, wanted: Call) -> dict[str, Any]:
        sent, tensors = await asyncio.to_thread(_write, wanted)
        sent.headers.update(wanted.headers)
        request_id = f"try-{uuid4().hex[:16]}"
        address = client_address(self._source.settings)
        curl = write_curl(address, sent)
        sent.headers["X-Request-Id"] = request_id
        _log.info(
            "operator at %s tries %s as %s, request %s",
            request.remote,
            escape_for_log(shorten(wanted.model, _MAX_LOGGED)),
            wanted.form,
            request_id,
        )
        call = await make_captured_call(self._source, sent, MAX_RESPONSE)
        is_v1 = wanted.form == "v1" and call.reply.status == HTTPStatus.OK
        declared = await self._declared_datatypes(wanted) if is_v1 else {}
        shown, error = await asyncio.to_thread(_read, wanted.form, call, declared)
        # V1 has no names for the outputs of rows.
        names = [] if wanted.form == "v1" else [each["name"] for each in shown]
        measured = None
        if wanted.compare and wanted.form == "json" and not error:
            elements = sum(element_count(each.shape) for each in wanted.inputs)
            elements += sum(int(each["elements"]) for each in shown)
            measured = await self._measure(wanted.model, sent, elements)
        python = write_python(address, wanted, wanted.outputs or names)
        return {
            "time": time.time(),
            "request_id": request_id,
            "status": call.reply.status,
            "duration_ms": call.seconds * 1000,
            "error": error or None,
            "comparison": measured,
            "client": {
                "request": _describe_request(sent),
                "response": call.reply.captured.describe(),
            },
            "attempts": call.attempts,
            "outputs": shown,
            "curl": curl,
            "python": python,
            "files": _encode_files(tensors, python),
        }

    async def _declared_datatypes(self, wanted: Call) -> dict[str, str]:
        """Return the datatypes of a model's outputs by name, as far as a server tells them."""
        path = model_path(quote_name(wanted.model), quote_name(wanted.version) or None)
        try:
            document = await call_for_document(self._source, "GET", path)
            return {str(each["name"]): str(each["datatype"]) for each in document["outputs"]}
        except (OwnCallError, LookupError, TypeError):
            return {}

    async def _measure(
        self, model: str, sent: UpstreamRequest, elements: int
    ) -> dict[str, Any] | None:
        """Make a call with conversion and without, some times; None if a server refuses it."""
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(_ROUNDS):
            for skips_conversion, seconds in times.items():
                call = await make_captured_call(self._source, sent, MAX_RESPONSE, skips_conversion)
                if call.reply.status != 200:
                    return None
                seconds.append(call.seconds * 1000)
        converted, untouched = map(statistics.median, times.values())
        measurement = Measurement(converted, untouched, elements)
        self._savings.add(model, measurement)
        return asdict(measurement)


def _write(wanted: Call) -> tuple[UpstreamRequest, tuple[TensorData, ...]]:
    """Return the request and its tensors. Raises GatewayError (400)."""
    request = make_request(wanted.inputs, wanted.outputs)
    return FORMS[wanted.form](request, wanted.model, wanted.version), request.tensors


def _encode_files(tensors: Sequence[TensorData], code: str) -> dict[str, str]:
    """Return the files that Python code reads, in base64."""
    return {
        tensor_file(index): b64encode(b"".join(data)).decode()
        for index, data in enumerate(tensors)
        if tensor_file(index) in code and not isinstance(data, int)
    }


def _describe_request(request: UpstreamRequest) -> dict[str, Any]:
    """Return a request with its whole body, so that an operator can save it."""
    head = (request.method, request.target, request.headers)
    message = CapturedMessage.of_request(*head, is_grpc=request.is_grpc, max_body=MAX_DATA)
    assert isinstance(request.body, Sequence)
    for piece in request.body:
        message.add(piece)
    return message.describe()


def _read(
    form: str, call: CapturedCall, declared: Mapping[str, str]
) -> tuple[list[dict[str, Any]], str]:
    """Return the outputs, and the words of an error."""
    reply = call.reply
    if reply.status != 200:
        words = reply.grpc_message or read_error(reply.body)
        return [], words or f"the response has the status {reply.status}"
    try:
        return read_outputs(form, reply.headers, reply.body, declared), ""
    except GatewayError as error:
        return [], str(error)
