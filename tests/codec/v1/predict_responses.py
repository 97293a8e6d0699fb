"""Converts infer responses to predictions for tests, and makes their outputs."""

from __future__ import annotations

import math
import random

import numpy as np

from gateway.codec.policies import BytesEncoding, JsonPolicies, Nonfinite
from gateway.codec.v1.response import predict_converter
from gateway.protocol.v1 import V1ResponseLayout
from tests.codec.reference import DATATYPES, DTYPES, pack_bytes
from tests.codec.strategies import Output, output


def convert(
    pieces: list[bytes],
    header_size: int,
    predicted: V1ResponseLayout,
    *,
    body_cap: int = 10**9,
    bytes_encoding: BytesEncoding = BytesEncoding.UTF8,
    nonfinite: Nonfinite = Nonfinite.LITERAL,
) -> bytes:
    policies = JsonPolicies(nonfinite=nonfinite, bytes_encoding=bytes_encoding)
    codec = predict_converter(header_size, predicted, policies, 1 << 24, body_cap)
    return b"".join([*map(codec.text, pieces), *codec.finish()])


def floats(name: str, *shape: int) -> Output:
    values = np.arange(math.prod(shape), dtype="<f4")
    return output(name, "FP32", list(shape), values.tobytes())


def texts(name: str, *elements: bytes, shape: list[int] | None = None) -> Output:
    return output(name, "BYTES", shape or [len(elements)], pack_bytes(list(elements)))


def some_output(rng: random.Random, name: str, shape: list[int]) -> Output:
    datatype = rng.choice(DATATYPES)
    count = math.prod(shape)
    if datatype == "BYTES":
        data = pack_bytes([("é\\" * rng.randrange(4)).encode() for _ in range(count)])
    elif datatype == "BOOL":
        data = bytes(rng.choices([0, 1], k=count))
    else:
        data = np.array(rng.choices(range(9), k=count)).astype(DTYPES[datatype]).tobytes()
    return output(name, datatype, shape, data)
