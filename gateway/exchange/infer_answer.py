"""The answer of an infer exchange, brought into the form that the client wants."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial

from gateway.codec.elements_to_json import LentText
from gateway.codec.infer_answer import JsonAnswer, MixedAnswer
from gateway.codec.small_answer import convert_small_answer
from gateway.errors import ErrorKind, GatewayError, bad_answer
from gateway.exchange.base import ClientAnswer, Route
from gateway.exchange.deadline import Deadline
from gateway.exchange.forward import forward_answer
from gateway.exchange.headers import HEADER_LENGTH, end_to_end, with_body
from gateway.exchange.pump import CHUNK, response_chunks, whole_response, write
from gateway.protocol.inference_header import AnswerForm
from gateway.upstream.base import AnswerHead, UpstreamResponse

_PIECE = 32 * 1024
"""Bytes of an answer that become text at a time, four times as many: the last one is waited for."""

_MOST_WAITING = 8
"""Parts of an answer that wait, at most, for one before them that is converted elsewhere."""


async def relay_answer(
    response: UpstreamResponse,
    answer: ClientAnswer,
    form: AnswerForm,
    route: Route,
    url: str,
    deadline: Deadline,
) -> None:
    """Pass a server's answer on in the client's form; errors of its own pass as they are."""
    if response.status != 200 or form.all_binary:
        await forward_answer(response, answer, url, deadline)
        return
    if form.as_base64:
        route = replace(route, policies=replace(route.policies, as_base64=form.as_base64))
    try:
        header_size = answer_header_size(response, route.limits.header_bytes)
        if header_size is None:
            chunks = response_chunks(response, url, deadline)
            change = partial(with_empty_data, form=form, route=route)
            cap = route.limits.header_bytes
            await relay_document(response, chunks, answer, change, cap, deadline)
        elif form.all_json:
            await _relay_as_json(response, header_size, answer, route, url, deadline)
        else:
            chunks = response_chunks(response, url, deadline)
            await _relay_mixed(response, chunks, header_size, answer, form, route, deadline)
    except GatewayError as error:
        named = naming(url, error)
        if named is error:
            raise
        raise named from error


def naming(url: str, error: GatewayError) -> GatewayError:
    """Name the endpoint in an error of its answer: the codecs, which know of none, do not."""
    if error.kind is ErrorKind.BAD_ANSWER and url not in error.message:
        return bad_answer(f"{url}: {error.message}")
    return error


def answer_header_size(head: AnswerHead, cap: int) -> int | None:
    """Give the size of the JSON before an answer's tensors; None where there are none.

    Raises GatewayError (502) for one that is no number or above the cap.
    """
    # Servers differ in Content-Type: a binary answer is known by this header alone.
    value = head.headers.get(HEADER_LENGTH)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 20):
        raise bad_answer(f"the server's answer has {HEADER_LENGTH}: {value[:40]!r}")
    if int(value) > cap:
        raise bad_answer(
            f"the server's answer has {value} bytes of JSON before the tensors; "
            f"at most {cap} are taken (limits.header_bytes)"
        )
    return int(value)


async def _relay_as_json(
    response: UpstreamResponse,
    header_size: int,
    answer: ClientAnswer,
    route: Route,
    url: str,
    deadline: Deadline,
) -> None:
    headers = with_body(response.headers, {"Content-Type": "application/json"})
    size = response.content_length
    if size is not None and size <= CHUNK:
        body = await whole_response(response, url, deadline)
        text = whole_as_json(body, header_size, route)
        deadline.wait_for_client()
        await answer.send(200, response.reason, headers, text)
        return
    codec = JsonAnswer(header_size, route.policies)
    lender = route.lender_for(size)
    waiting: deque[bytes | LentText] = deque()
    async for chunk in response_chunks(response, url, deadline):
        for start in range(0, len(chunk), _PIECE):
            waiting.extend(codec.parts(chunk[start : start + _PIECE], lender))
            if waiting and not answer.started:
                await answer.start(200, response.reason, headers)
            await _write_parts(waiting, answer, deadline, _MOST_WAITING)
            await route.turns.next()
    codec.finish()
    await _write_parts(waiting, answer, deadline, 0)
    await answer.finish()


async def _write_parts(
    parts: deque[bytes | LentText], answer: ClientAnswer, deadline: Deadline, most_left: int
) -> None:
    """Write, in order, the parts that are there, and wait for those beyond ``most_left``."""
    while parts:
        part = parts[0]
        if isinstance(part, LentText):
            if not part.loan.done and len(parts) <= most_left:
                return
            await part.loan.wait()
            part = part.text()
        parts.popleft()
        if part:
            await write(answer, part, deadline)


def whole_as_json(body: bytes, header_size: int, route: Route) -> bytes:
    """Write a whole answer as JSON; raises GatewayError."""
    text = convert_small_answer(body, header_size)
    if text is None:
        codec = JsonAnswer(header_size, route.policies)
        text = codec.feed(body)
        codec.finish()
    return text


async def _relay_mixed(
    response: UpstreamResponse,
    chunks: AsyncIterator[bytes | memoryview],
    header_size: int,
    answer: ClientAnswer,
    form: AnswerForm,
    route: Route,
    deadline: Deadline,
) -> None:
    codec = MixedAnswer(header_size, form, route.policies, route.limits.spool_bytes)
    with route.held.holding() as holding:
        async for chunk in chunks:
            for start in range(0, len(chunk), CHUNK):
                codec.feed(chunk[start : start + CHUNK])
                holding.is_now(codec.held)
                await route.turns.next()
        header, tensors = codec.finish()
        await send_held(response, answer, header, tensors, deadline)


async def send_held(
    response: UpstreamResponse,
    answer: ClientAnswer,
    header: bytes,
    tensors: Sequence[bytes | memoryview],
    deadline: Deadline,
) -> None:
    """Give an answer of a header, and tensors in binary form if there are any behind it."""
    changed = {"Content-Type": "application/json"}
    if any(tensors):
        changed = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(header))}
    headers = with_body(response.headers, changed)
    headers["Content-Length"] = str(len(header) + sum(map(len, tensors)))
    await answer.start(200, response.reason, headers)
    for part in (header, *tensors):
        await write(answer, part, deadline)
    await answer.finish()


async def relay_document(
    response: UpstreamResponse,
    chunks: AsyncIterator[bytes | memoryview],
    answer: ClientAnswer,
    change: Callable[[bytes], bytes],
    cap: int,
    deadline: Deadline,
) -> None:
    """Pass on an answer of status 200, changed as a whole; as it is where it exceeds the cap."""
    held: list[bytes | memoryview] = []
    size = 0
    async for chunk in chunks:
        held.append(chunk)
        size += len(chunk)
        if size > cap:
            break
    else:
        document = change(b"".join(held))
        deadline.wait_for_client()
        await answer.send(200, response.reason, with_body(response.headers, {}), document)
        return
    await answer.start(response.status, response.reason, end_to_end(response.headers))
    for chunk in held:
        await write(answer, chunk, deadline)
    async for chunk in chunks:
        await write(answer, chunk, deadline)
    await answer.finish()


def with_empty_data(document: bytes, form: AnswerForm, route: Route) -> bytes:
    """Give an answer without tensors behind it the data that the client wants as JSON.

    Triton sends such a one where every binary output is empty: with sizes of 0, and no data.
    """
    if b'"binary_data_size"' not in document:
        return document
    try:
        if form.all_json:
            return whole_as_json(document, len(document), route)
        mixed = MixedAnswer(len(document), form, route.policies, route.limits.spool_bytes)
        mixed.feed(document)
        return mixed.finish()[0]
    except GatewayError:
        return document  # not what we know: the client shall see what the server said
