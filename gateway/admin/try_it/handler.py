"""The panel "Try it": it makes a call, and tells all that was sent for it."""

from __future__ import annotations

import asyncio
import logging
import re
import statistics
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import orjson
from aiohttp import web

from gateway.admin.authorization import Authorization, read_object
from gateway.admin.own_calls import OwnCallError, OwnCalls
from gateway.admin.savings import Measurement, Savings
from gateway.admin.source import GatewaySource
from gateway.admin.try_it.captured_call import CapturedCall, make_captured_call
from gateway.admin.try_it.code import client_address, tensor_file, write_curl, write_python
from gateway.admin.try_it.forms import FORMS
from gateway.admin.try_it.inputs import MAX_DATA, make_request
from gateway.admin.try_it.outputs import MAX_RESPONSE, read_error, read_outputs
from gateway.errors import GatewayError, bad_request, escape_for_log, shorten
from gateway.observe.call_capture import CapturedMessage
from gateway.protocol.messages import TensorData
from gateway.protocol.operations import model_path, quote_name
from gateway.protocol.tensors import element_count
from gateway.upstream.transport import HOP_BY_HOP, UpstreamRequest

_ROUNDS = 3
"""Calls with conversion, and as many without, that are compared."""
MAX_BODY = 16 * 2**20
"""Bytes of what the page sends: tensors in base64, or as JSON."""
_BODY_TIMEOUT = 60.0
"""Seconds for it to arrive."""
_MAX_LOGGED = 200
"""Characters of a model's name in the log."""
_MADE_HERE = HOP_BY_HOP | {"content-length"}
"""Headers that frame the request, so that an operator cannot choose them."""

# RFC 9110, sections 5.1 and 5.5, without what is not ASCII.
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e\t]*[\x21-\x7e])?")

_log = logging.getLogger("tensorgate.admin")


class TryIt:
    """The handler of ``POST /api/try``; it makes one call at a time.

    It needs ``admin.payloads: true`` and a key of ``admin.keys``.
    """

    def __init__(
        self, source: GatewaySource, authorization: Authorization, savings: Savings
    ) -> None:
        self._source = source
        self._own_calls = OwnCalls(source)
        self._savings = savings
        self._authorization = authorization
        self._one_at_a_time = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        """Return the route."""
        return [web.post("/api/try", self.call)]

    async def call(self, request: web.Request) -> web.Response:
        """Make a call; respond with both sides' messages, and the outputs."""
        allowed = self._source.settings.admin.payloads
        obstacle = "" if allowed else "values of tensors are not shown here (admin.payloads)"
        await self._authorization.check(request, obstacle)
        async with self._one_at_a_time:
            wanted = await _read_body(request)
            try:
                document = await self._try(request, wanted)
            except GatewayError as error:
                raise web.HTTPBadRequest(text=str(error)) from None
            except OwnCallError as error:
                raise web.HTTPBadGateway(text=str(error)) from None
            body = await asyncio.to_thread(orjson.dumps, document)
        return web.Response(body=body, content_type="application/json")

    async def _try(self, request: web.Request, wanted: Mapping[str, Any]) -> dict[str, Any]:
        form, model, version = (
            _text(wanted, "form"),
            _text(wanted, "model"),
            _text(wanted, "version"),
        )
        outputs = _outputs(wanted)
        sent, tensors = await asyncio.to_thread(
            _write, form, model, version, wanted.get("inputs"), outputs
        )
        headers = _headers(wanted)
        for name, value in headers.items():
            sent.headers[name] = value
        request_id = f"try-{uuid4().hex[:16]}"
        address = client_address(self._source.settings)
        curl = write_curl(address, sent)
        sent.headers["X-Request-Id"] = request_id
        _log.info(
            "operator at %s tries %s as %s, request %s",
            request.remote,
            escape_for_log(shorten(model, _MAX_LOGGED)),
            form,
            request_id,
        )
        call = await make_captured_call(self._source, sent, MAX_RESPONSE)
        is_v1 = form == "v1" and call.reply.status == HTTPStatus.OK
        declared = await self._declared_datatypes(model, version) if is_v1 else {}
        shown, error = await asyncio.to_thread(_read, form, call, declared)
        # V1 has no names for the outputs of rows.
        names = outputs or ([] if form == "v1" else [each["name"] for each in shown])
        measured = None
        if wanted.get("compare") is True and form == "json" and not error:
            measured = await self._measure(model, sent, _count(wanted["inputs"], shown))
        python = write_python(address, form, wanted, names, headers)
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

    async def _declared_datatypes(self, model: str, version: str) -> dict[str, str]:
        """Return the datatypes of a model's outputs by name, as far as a server tells them."""
        path = model_path(quote_name(model), quote_name(version) or None)
        try:
            document = await self._own_calls.get_document(path)
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
        return measurement.describe()


def _count(inputs: Sequence[Mapping[str, Any]], outputs: Sequence[Mapping[str, Any]]) -> int:
    """Return the elements of all tensors."""
    sent = sum(element_count(each["shape"]) for each in inputs)
    return sent + sum(int(each["elements"]) for each in outputs)


async def _read_body(request: web.Request) -> dict[str, Any]:
    """Read a request in time, as others wait for it. Raises HTTPException (4xx)."""
    try:
        async with asyncio.timeout(_BODY_TIMEOUT):
            return await read_object(request, MAX_BODY)
    except TimeoutError:
        text = f"the body did not arrive within {_BODY_TIMEOUT:g} s"
        raise web.HTTPRequestTimeout(text=text) from None


def _write(
    form: str, model: str, version: str, inputs: object, outputs: Sequence[str]
) -> tuple[UpstreamRequest, tuple[TensorData, ...]]:
    """Return the request and its tensors. Raises GatewayError (400)."""
    if form not in FORMS:
        raise bad_request(f"form: expected one of {', '.join(FORMS)}")
    if not model:
        raise bad_request("model: expected a name")
    request = make_request(inputs, outputs)
    return FORMS[form](request, model, version), request.tensors


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


def _text(wanted: Mapping[str, Any], name: str) -> str:
    value = wanted.get(name, "")
    if not isinstance(value, str):
        raise bad_request(f"{name}: expected a text")
    return value


def _headers(wanted: Mapping[str, Any]) -> dict[str, str]:
    """Return the further headers of a call, such as the key of a client."""
    headers = wanted.get("headers", {})
    if not isinstance(headers, dict) or not all(isinstance(each, str) for each in headers.values()):
        raise bad_request("headers: expected an object of texts")
    for name, value in headers.items():
        is_valid = _HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(value)
        if not is_valid or name.lower() in _MADE_HERE:
            raise bad_request(f"headers: {name[:60]!r} is not a header that can be sent")
    return headers


def _outputs(wanted: Mapping[str, Any]) -> list[str]:
    names = wanted.get("outputs", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise bad_request("outputs: expected an array of names")
    return names
