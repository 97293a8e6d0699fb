"""What an HTTP/2 peer sends, by chance: valid, with broken frames, or with broken bytes."""

from __future__ import annotations

import random
from contextlib import suppress

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import ProtocolError

from gateway.http2.frames import PREFACE
from tests.fuzz.broken_bytes import broken

_HEAD_SIZE = 9

REQUEST = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":authority", b"a.test"),
    (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
)
_TRAILERS = ((b"grpc-status", b"0"), (b"grpc-message", b""))
_ODD_FIELDS = [
    *((b"", b"x"), (b":", b"x"), (b":status", b"204"), (b":path", b"/"), (b"Upper", b"x")),
    *((b"x y", b"z"), (b"connection", b"close"), (b"transfer-encoding", b"chunked")),
    *((b"content-length", b"3"), (b"content-length", b"-1"), (b"content-type", b"text/html")),
    *((b"content-encoding", b"gzip"), (b"grpc-encoding", b"\xff"), (b"grpc-status", b"x")),
    *((b"grpc-status", b"5" * 5000), (b"grpc-status", b"007"), (b"grpc-status", b"77")),
    *((b"grpc-message", b" %zz%ff "), (b"x-a", b"\0"), (b"x-a", b"\r\nx: y"), (b"x-a", b" x ")),
]


def client_bytes(chance: random.Random) -> tuple[bytes, int]:
    """Return what a client sends, and how many requests that are."""
    h2 = _connection(client_side=True)
    h2.initiate_connection()
    count = chance.randint(1, 6)
    for _ in range(count):
        stream_id = h2.get_next_available_stream_id()
        fields = (*REQUEST, *_more_fields(chance))
        ends = not chance.randrange(4)
        h2.send_headers(stream_id, fields, end_stream=ends)
        if not ends:
            _send_body(chance, h2, stream_id)
        _send_control(chance, h2)
    return h2.data_to_send(), count


def server_bytes(
    chance: random.Random, received: bytes, stream_ids: list[int], *, is_odd: bool = False
) -> bytes:
    """Return what a server sends that has received the requests of some streams.

    It may send other statuses, and fields that it must not, if it ``is_odd``.
    """
    h2 = _connection(client_side=False)
    h2.initiate_connection()
    h2.receive_data(received)
    for stream_id in stream_ids:
        if not chance.randrange(5):
            h2.send_headers(stream_id, ((b":status", b"103"),))
        statuses = [b"204", b"404", b"503", b"999"] if is_odd else []
        status = chance.choice([b"200"] * 6 + statuses)
        fields = ((b":status", status), (b"content-type", b"application/grpc"))
        odd = chance.sample(_ODD_FIELDS, chance.choice([0, 0, 1, 2])) if is_odd else []
        h2.send_headers(stream_id, (*fields, *_more_fields(chance), *odd))
        _send_body(chance, h2, stream_id)
        _send_control(chance, h2)
    return h2.data_to_send()


def with_broken_frames(chance: random.Random, data: bytes) -> bytes:
    """Drop, repeat, move, change or add whole frames."""
    preface = PREFACE if data.startswith(PREFACE) else b""
    frames = frames_of(data[len(preface) :])
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(frames))
        frame = frames[at]
        change = chance.randrange(5)
        if change == 0:
            del frames[at]
        elif change == 1:
            frames.insert(chance.randrange(len(frames) + 1), frame)
        elif change == 2:
            frames.append(frames.pop(at))
        elif change == 3:
            head = bytearray(frame[:_HEAD_SIZE])
            head[chance.choice([3, 4, 8])] = chance.choice([*range(12), 0x20, 0x80, 0xFF])
            frames[at] = bytes(head) + frame[_HEAD_SIZE:]
        else:
            frames.insert(at, _any_frame(chance))
        if not frames:
            break
    return preface + b"".join(frames)


def any_broken(chance: random.Random, data: bytes) -> bytes:
    """Break frames or bytes."""
    return with_broken_frames(chance, data) if chance.randrange(2) else broken(chance, data)


def _connection(*, client_side: bool) -> H2Connection:
    config = H2Configuration(
        client_side=client_side, validate_outbound_headers=False, header_encoding=None
    )
    return H2Connection(config)


def _more_fields(chance: random.Random) -> list[tuple[bytes, bytes]]:
    names = [b"x-a", b"authorization", b"grpc-timeout", b"x-long"]
    sizes = [0, 1, 20, 300, 20_000]
    weights = [4, 4, 4, 2, 1]
    return [
        (chance.choice(names), b"v" * chance.choices(sizes, weights)[0])
        for _ in range(chance.randrange(4))
    ]


def _send_body(chance: random.Random, h2: H2Connection, stream_id: int) -> None:
    """Send data as far as the windows go, and end the stream in one of its ways."""
    for _ in range(chance.randrange(4)):
        most = min(h2.local_flow_control_window(stream_id), 16_384)
        size = min(chance.choice([0, 1, 5, 1000, 16_384]), most)
        padding = chance.choice([None, None, 3]) if size < most - 4 else None
        h2.send_data(stream_id, chance.randbytes(size), pad_length=padding)
    end = chance.randrange(4)
    if end == 0:
        h2.send_headers(stream_id, _TRAILERS, end_stream=True)
    elif end == 1:
        h2.reset_stream(stream_id, chance.choice([0, 2, 5, 7, 8]))
    elif end == 2:
        h2.send_data(stream_id, b"", end_stream=True)


def _send_control(chance: random.Random, h2: H2Connection) -> None:
    kind = chance.randrange(8)
    if kind == 0:
        h2.ping(chance.randbytes(8))
    elif kind == 1:
        h2.increment_flow_control_window(chance.choice([1, 1000, 2**20]))
    elif kind == 2:
        h2.update_settings({4: chance.choice([0, 1, 65_535, 2**20])})
    elif kind == 3 and h2.config.client_side:
        with suppress(ProtocolError):  # the stream is closed
            h2.prioritize(1, weight=chance.randint(1, 256))


def frames_of(data: bytes) -> list[bytes]:
    """Cut bytes into whole frames, and a last one that may be cut short."""
    frames = []
    while data:
        size = _HEAD_SIZE + int.from_bytes(data[:3], "big")
        frames.append(data[:size])
        data = data[size:]
    return frames


def _any_frame(chance: random.Random) -> bytes:
    payload = chance.randbytes(chance.choice([0, 1, 4, 5, 6, 8, 12, 40]))
    head = len(payload).to_bytes(3, "big") + bytes([chance.randrange(12), chance.randrange(64)])
    return head + chance.choice([0, 1, 2, 3, 5, 99]).to_bytes(4, "big") + payload
