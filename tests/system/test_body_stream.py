from __future__ import annotations

import random

from gateway.system.buffers import BufferAccount, BufferShare
from gateway.system.sockets.body_stream import BodyStream

FRAME = 16 * 1024
"""Bytes of a DATA frame of HTTP/2, as most peers send them."""
MOST = 64 * 1024


async def read_all(body: BodyStream) -> list[bytes]:
    pieces: list[bytes] = []
    while piece := await body.read():
        pieces.append(bytes(piece))
    return pieces


async def test_frames_that_wait_are_read_as_few_pieces() -> None:
    data = random.Random(1).randbytes(40 * FRAME)
    account = BufferAccount()
    body = BodyStream(BufferShare(account))
    for start in range(0, len(data), FRAME):
        body.feed(data[start : start + FRAME])
    assert account.buffered == len(data)
    body.end()
    pieces = await read_all(body)
    assert b"".join(pieces) == data
    assert len(pieces) == 10
    assert max(map(len, pieces)) <= MOST
    assert account.buffered == 0


async def test_large_read_is_not_copied_for_a_small_one_behind_it() -> None:
    large = memoryview(bytes(100_000))
    body = BodyStream(BufferShare(BufferAccount()))
    body.feed(large)
    body.feed(b"end", last=True)
    body.end()
    assert await body.read() is large
    assert await read_all(body) == [b"end"]


async def test_pieces_are_the_body_whatever_was_read_between_them() -> None:
    chance = random.Random(2)
    for _ in range(50):
        account = BufferAccount()
        body = BodyStream(BufferShare(account))
        sent = received = b""
        for _ in range(30):
            size = chance.choice([1, 60, 255, 256, 5000, FRAME, FRAME + 1, 70_000])
            data = chance.randbytes(size)
            sent += data
            body.feed(memoryview(data) if chance.random() < 0.3 else data)
            if chance.random() < 0.3:
                received += await body.read()
        assert account.buffered == body.buffered_size >= len(sent) - len(received)
        body.end()
        assert received + body.peek() == sent
        assert received + b"".join(await read_all(body)) == sent
        assert account.buffered == 0
