"""The answer of an infer exchange, brought into the form that the client wants."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from multidict import CIMultiDictProxy

from gateway.codec.elements.encode import OffloadedText, TextChunk
from gateway.codec.json.header_length_check import HeaderLengthCheck
from gateway.codec.v2.binary_response import BinaryResponseConverter
from gateway.codec.v2.fast_response import fast_convert_response
from gateway.codec.v2.response import JsonResponseConverter, MixedResponseConverter
from gateway.errors import ErrorKind, GatewayError, bad_response
from gateway.protocol.request_header import OutputEncoding
from gateway.protocol.response_header import (
    check_no_binary_promised,
    parse_response_header,
    read_outputs,
)
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.body_io import CHUNK_SIZE, response_chunks, whole_response, write
from gateway.proxy.headers import HEADER_LENGTH, end_to_end, with_body
from gateway.proxy.infer.asked_form import relay_in_form
from gateway.proxy.infer.buffered_response import relay_mixed
from gateway.proxy.interfaces import ClientResponse, Route
from gateway.proxy.passthrough import forward_answer
from gateway.sizes import CONVERT_CHUNK
from gateway.upstream.transport import UpstreamResponse, UpstreamResponseHead

_EMPTY = re.compile(rb'"shape"\s*:\s*\[(?:\s*[0-9]+\s*,)*\s*0\s*[],]')
"""The shape of an output without elements."""

_MOST_WAITING = 10
"""Parts of an answer, and commas, that wait, at most, for one before them converted elsewhere."""


async def relay_answer(
    response: UpstreamResponse,
    answer: ClientResponse,
    form: OutputEncoding,
    route: Route,
    url: str,
    deadline: Deadline,
) -> None:
    """Pass a server's response on in the client's form; errors of its own pass as they are.

    An answer passes untouched where it surely is, or is seen to be, in that form already.
    """
    route = with_wishes(route, form)
    as_asked = route.upstream.dialect.honors_output_encoding
    with naming_endpoint(url):
        if response.status != 200 or (form.all_binary and as_asked):
            await _forward_binary(response, answer, route, url, deadline)
        elif as_asked:
            await _relay_binary(response, answer, form, route, url, deadline)
        else:
            await _relay_doubted(response, answer, form, route, url, deadline)


async def _forward_binary(
    response: UpstreamResponse, answer: ClientResponse, route: Route, url: str, deadline: Deadline
) -> None:
    """Pass on, as it is, an error or an answer whose outputs the client wants in binary form."""
    headers = response.headers
    # What is compressed is for the client alone to read.
    if response.status != 200 or HEADER_LENGTH in headers or "Content-Encoding" in headers:
        await forward_answer(response, answer, url, deadline)
        return
    chunks = json_alone(response_chunks(response, url, deadline))
    cap = route.limits.header_bytes
    await relay_document(response, chunks, answer, _as_promised, cap, route, deadline)


def _as_promised(document: bytes) -> bytes:
    """Give an answer as it is; raises GatewayError (502) for one that promises tensors."""
    check_no_binary_promised(document)
    return document


async def json_alone(
    chunks: AsyncIterator[bytes | memoryview],
) -> AsyncIterator[bytes | memoryview]:
    """Pass on an answer without a header length; raises GatewayError (502) if tensors follow."""
    check = HeaderLengthCheck()
    async for chunk in chunks:
        check.feed(chunk)
        yield chunk


def with_wishes(route: Route, form: OutputEncoding) -> Route:
    """Have the policies know which outputs a request wants as base64."""
    if not form.as_base64:
        return route
    return replace(route, policies=replace(route.policies, as_base64=form.as_base64))


async def _relay_binary(
    response: UpstreamResponse,
    answer: ClientResponse,
    form: OutputEncoding,
    route: Route,
    url: str,
    deadline: Deadline,
) -> None:
    """Pass on an answer whose outputs are in binary form."""
    cap = route.limits.header_bytes
    header_size = answer_header_size(response, cap)
    if form.all_json and header_size is not None:
        await _relay_as_json(response, header_size, answer, route, url, deadline)
        return
    chunks = response_chunks(response, url, deadline)
    if header_size is None:
        change = partial(with_empty_data, form=form, route=route)
        document = json_alone(chunks)
        await relay_document(response, document, answer, change, cap, route, deadline)
    else:
        await relay_mixed(response, chunks, header_size, answer, form, route, deadline)


async def _relay_doubted(
    response: UpstreamResponse,
    answer: ClientResponse,
    form: OutputEncoding,
    route: Route,
    url: str,
    deadline: Deadline,
) -> None:
    """Pass on an answer whose outputs may be JSON although they were asked for in binary form."""
    # Data may stand in the header: they count as what is held.
    header_size = answer_header_size(response, None)
    text_is_fine = header_size is not None or not route.policies.any_base64
    if form.all_json and text_is_fine and (header_size or 0) <= route.limits.header_bytes:
        await _relay_binary(response, answer, form, route, url, deadline)
        return
    chunks = response_chunks(response, url, deadline)
    if header_size is None:
        chunks = json_alone(chunks)
    await relay_in_form(response, chunks, header_size, answer, form, route, deadline)


def naming(url: str, error: GatewayError) -> GatewayError:
    """Name the endpoint in an error of its answer: the codecs, which know of none, do not."""
    if error.kind is ErrorKind.BAD_RESPONSE and url not in error.message:
        return bad_response(f"{url}: {error.message}")
    return error


@contextmanager
def naming_endpoint(url: str) -> Iterator[None]:
    """Name the endpoint in what is raised of its answer; see ``naming``."""
    try:
        yield
    except GatewayError as error:
        named = naming(url, error)
        if named is error:
            raise
        raise named from error


def answer_header_size(head: UpstreamResponseHead, cap: int | None) -> int | None:
    """Give the size of the JSON before an answer's tensors; None where there are none.

    Raises GatewayError (502) for one that is no number or above the cap, if there is one.
    """
    return stated_header_size(head.headers, cap)


def stated_header_size(headers: CIMultiDictProxy[str], cap: int | None) -> int | None:
    """Give the size of the JSON before an answer's tensors, by the answer's headers."""
    # Servers differ in Content-Type: a binary answer is known by this header alone.
    values = headers.getall(HEADER_LENGTH, [])
    if not values:
        return None
    value = ", ".join(values)  # which is no number where there are two
    if not (value.isascii() and value.isdigit() and len(value) < 20):
        raise bad_response(f"the server's response has {HEADER_LENGTH}: {value[:40]!r}")
    if cap is not None and int(value) > cap:
        raise bad_response(
            f"the server's response has {value} bytes of JSON before the tensors; "
            f"at most {cap} are taken (limits.header_bytes)"
        )
    return int(value)


async def _relay_as_json(
    response: UpstreamResponse,
    header_size: int,
    answer: ClientResponse,
    route: Route,
    url: str,
    deadline: Deadline,
) -> None:
    headers = with_body(response.headers, {"Content-Type": "application/json"})
    size = response.content_length
    if size is not None and size <= CHUNK_SIZE:
        body = await whole_response(response, url, deadline)
        text = whole_as_json(body, header_size, route)
        deadline.expect_client()
        await answer.send(200, response.reason, headers, text)
        return
    codec = JsonResponseConverter(header_size, route.policies)
    offloader = route.offloader_for(size)
    waiting: deque[TextChunk | OffloadedText] = deque()
    with route.held.reserve() as holding:
        async for chunk in response_chunks(response, url, deadline):
            for start in range(0, len(chunk), CONVERT_CHUNK):
                waiting.extend(codec.parts(chunk[start : start + CONVERT_CHUNK], offloader))
                holding.note(codec.buffered_bytes + sum(map(_size_of, waiting)))
                if waiting and not answer.started:
                    await answer.start(200, response.reason, headers)
                await _write_parts(waiting, answer, deadline, _MOST_WAITING)
                await route.scheduler.next()
        codec.finish()
        await _write_parts(waiting, answer, deadline, 0)
    await answer.finish()


def _size_of(part: TextChunk | OffloadedText) -> int:
    """Give the bytes of a part of an answer, about; what is lent is in memory of its own."""
    return CONVERT_CHUNK if isinstance(part, OffloadedText) else len(part)


async def _write_parts(
    parts: deque[TextChunk | OffloadedText],
    answer: ClientResponse,
    deadline: Deadline,
    most_left: int,
) -> None:
    """Write, in order, the parts that are there, and wait for those beyond ``most_left``."""
    while parts:
        part = parts[0]
        if isinstance(part, OffloadedText):
            if not part.future.done and len(parts) <= most_left:
                return
            await part.future.wait()
            part = part.text()
        parts.popleft()
        if part:
            await write(answer, part, deadline)


def whole_as_json(body: bytes, header_size: int, route: Route) -> bytes:
    """Write a whole answer as JSON; raises GatewayError."""
    text = fast_convert_response(body, header_size)
    if text is None:
        codec = JsonResponseConverter(header_size, route.policies)
        text = codec.feed(body)
        codec.finish()
    return text


async def relay_document(
    response: UpstreamResponse,
    chunks: AsyncIterator[bytes | memoryview],
    answer: ClientResponse,
    change: Callable[[bytes], bytes],
    cap: int,
    route: Route,
    deadline: Deadline,
) -> None:
    """Pass on an answer of status 200, changed as a whole; as it is where it exceeds the cap."""
    first: list[bytes | memoryview] = []
    size = 0
    with route.held.reserve() as holding:
        async for chunk in chunks:
            first.append(chunk)
            size += len(chunk)
            if size > cap:
                break
            holding.resize(size)
        else:
            document = change(b"".join(first))
            deadline.expect_client()
            await answer.send(200, response.reason, with_body(response.headers, {}), document)
            return
        await answer.start(response.status, response.reason, end_to_end(response.headers))
        for chunk in first:
            await write(answer, chunk, deadline)
    async for chunk in chunks:
        await write(answer, chunk, deadline)
    await answer.finish()


def with_empty_data(document: bytes, form: OutputEncoding, route: Route) -> bytes:
    """Give an answer without tensors behind it the data that the client wants as JSON.

    Triton sends such a one where every binary output is empty: with sizes of 0, and no data;
    OpenVINO Model Server without any size. What servers give as text although it was asked for in
    binary form may have to become base64. Raises GatewayError (502) for one that promises tensors.
    """
    check_no_binary_promised(document)
    may_be_text = not route.upstream.dialect.honors_output_encoding
    convert = _with_base64 if route.policies.any_base64 and may_be_text else _with_data
    try:
        return convert(document, form, route)
    except GatewayError:
        return document  # not what we know: the client shall see what the server said


def _with_data(document: bytes, form: OutputEncoding, route: Route) -> bytes:
    if b'"binary_data_size"' not in document and not _EMPTY.search(document):
        return document
    if all(output.binary_size is None for output in read_outputs(parse_response_header(document))):
        return document
    if form.all_json:
        return whole_as_json(document, len(document), route)
    caps = route.limits.header_bytes, route.limits.spool_bytes
    mixed = MixedResponseConverter(len(document), form, route.policies, *caps)
    mixed.feed(document)
    return mixed.finish()[0]


def _with_base64(document: bytes, form: OutputEncoding, route: Route) -> bytes:
    codec = BinaryResponseConverter(
        form, route.limits.header_bytes, route.limits.spool_bytes, route.policies
    )
    codec.feed(document, last=True)
    return codec.finish()[0]
