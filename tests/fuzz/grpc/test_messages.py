"""Fuzzing gRPC: the model of broken messages is what the official runtime reads; framing."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.message import DecodeError

from gateway.errors import GatewayError
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.grpc.framing import MessageReader, frame
from gateway.protocol.grpc.model_scanner import ModelScanner
from tests.fuzz.broken_bytes import broken, pieces, rounds
from tests.protocol.grpc.scanned import Named, reader_error, scan
from tests.support.grpc.proto_file import ModelInferRequest
from tests.support.grpc.random_messages import fill

TYPED = {
    "INT32": "int_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "BOOL": "bool_contents",
    "BYTES": "bytes_contents",
}
TEXTS = ("", "m", "m" * 200, "é", "a/b")


def infer_request(chance: random.Random) -> bytes:
    """Write an infer request with tensors in one of the two forms."""
    message: Any = ModelInferRequest(model_name=chance.choice(TEXTS), model_version="1")
    fill(chance, message.parameters["p"])
    is_raw = chance.random() < 0.5
    for _ in range(chance.randint(1, 3)):
        datatype, size = chance.choice([*TYPED]), chance.randrange(4)
        tensor = message.inputs.add(name="x", datatype=datatype, shape=[size])
        if is_raw:
            message.raw_input_contents.append(
                bytes(size * {"UINT64": 8, "BOOL": 1}.get(datatype, 4))
            )
        else:
            value = b"abc" if datatype == "BYTES" else 1
            getattr(tensor.contents, TYPED[datatype]).extend([value] * size)
    return bytes(message.SerializeToString())


def test_model_in_broken_messages() -> None:
    """It is what the runtime reads; refused is what the reader of whole messages refuses."""
    for chance in rounds(3):
        data = broken(chance, infer_request(chance))
        scanner = ModelScanner((1,), 2)
        assert bool(scan(scanner, pieces(chance, data))) == bool(reader_error(data))
        try:
            read = Named.FromString(data)
        except DecodeError:
            continue
        if scanner.ended:
            assert scanner.model == (read.name, read.version)


# ------------------------------------------------------------------------------- framing

CAP = 1000


def read_framed(parts: list[bytes]) -> tuple[list[tuple[bool, bytes]], str]:
    """Return the whole messages of a body with their flags, and the error."""
    reader = MessageReader(CAP, "a.limit", REQUEST)
    found: list[tuple[bool, bytes]] = []
    message = b""
    try:
        for part in parts:
            reader.feed(part)
            while (piece := reader.next_piece()) is not None:
                message = bytes(piece.data) if piece.begins else message + bytes(piece.data)
                if piece.ends:
                    assert len(message) == piece.size
                    found.append((piece.is_compressed, message))
        reader.end()
    except GatewayError as error:
        return found, error.message
    return found, ""


def split_framed(data: bytes) -> tuple[list[tuple[bool, bytes]], bool]:
    """Do the same the simple way; the second is whether the body ends well."""
    found: list[tuple[bool, bytes]] = []
    while data:
        flag, size = data[0], int.from_bytes(data[1:5], "big")
        if len(data) < 5 or flag > 1 or size > CAP or len(data) < 5 + size:
            return found, False
        found.append((flag == 1, data[5 : 5 + size]))
        data = data[5 + size :]
    return found, True


def test_framed_messages() -> None:
    for chance in rounds(2):
        sizes = [chance.choice([0, 1, 5, 100, CAP, CAP + 1]) for _ in range(chance.randrange(5))]
        data = b"".join(
            frame(size, chance.random() < 0.3) + chance.randbytes(size) for size in sizes
        )
        if chance.randrange(3):
            data = broken(chance, data)
        found, error = read_framed(pieces(chance, data))
        assert (found, error == "") == split_framed(data)
        assert read_framed([data]) == (found, error)
