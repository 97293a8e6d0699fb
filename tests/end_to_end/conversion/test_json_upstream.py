"""Servers that accept only JSON: clients of every encoding get the same tensors."""

import json
from typing import Any

import numpy as np
import pytest

from tests.support.gateway import served
from tests.support.http_messages import chunked, message, request
from tests.support.inference_messages import HEADER_LENGTH, INFER, infer_raw
from tests.support.servers.model_scripts import echo_json

JSON_ONLY = {"dialect": "json"}
TEXT = [b"", "é".encode(), b'"\\']
SIZES = {"small": 3, "large": 20_000}


def _tensors(count: int) -> dict[str, tuple[str, bytes, list[Any]]]:
    """Return inputs by name: their datatypes, bytes and elements in JSON."""
    rng = np.random.default_rng(count)
    floats = rng.standard_normal(count).astype("<f4")
    integers = rng.integers(-(2**63), 2**63 - 1, count).astype("<i8")
    truths = rng.integers(0, 2, count).astype("?")
    texts = (TEXT * count)[:count]
    packed = b"".join(len(x).to_bytes(4, "little") + x for x in texts)
    return {
        "IN0": ("FP32", floats.tobytes(), [float(str(x)) for x in floats]),
        "IN1": ("INT64", integers.tobytes(), integers.tolist()),
        "IN2": ("BYTES", packed, [x.decode() for x in texts]),
        "IN3": ("BOOL", truths.tobytes(), truths.tolist()),
    }


def _request(count: int, binary: set[str], wanted: dict[str, bool], *, by: int = 0) -> bytes:
    """Return a request with some binary inputs; ``by`` is the size of its chunks, if any."""
    inputs, tail = [], b""
    for name, (datatype, data, elements) in _tensors(count).items():
        entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": [count]}
        if name in binary:
            entry["parameters"] = {"binary_data_size": len(data)}
            tail += data
        else:
            entry["data"] = elements
        inputs.append(entry)
    outputs = [{"name": name, "parameters": {"binary_data": it}} for name, it in wanted.items()]
    header = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    headers = {HEADER_LENGTH: str(len(header))} if binary else {}
    body = header + tail
    if not by:
        return request("POST", INFER, body, headers)
    pieces = chunked(*(body[i : i + by] for i in range(0, len(body), by)))
    head = {**headers, "Host": "x", "Transfer-Encoding": "chunked"}
    return message(f"POST {INFER} HTTP/1.1", head, pieces)


IN = {"json": set[str](), "binary": {"IN0", "IN1", "IN2", "IN3"}, "mixed": {"IN1", "IN2"}}
NAMES = ("OUT0", "OUT1", "OUT2", "OUT3")
ALL, NONE = dict.fromkeys(NAMES, True), dict.fromkeys(NAMES, False)
SOME = {**NONE, "OUT0": True, "OUT2": True}
ROUND_TRIPS = [
    *((inputs, wanted, "small") for inputs in IN for wanted in (ALL, SOME)),
    *(("json", ALL, "large"), ("binary", NONE, "large"), ("mixed", SOME, "large")),
]


@pytest.mark.parametrize(("inputs", "wanted", "size"), ROUND_TRIPS)
async def test_every_encoding_round_trips(inputs: str, wanted: dict[str, bool], size: str) -> None:
    count = SIZES[size]
    async with served(echo_json, upstream=JSON_ONLY) as (server, _, client):
        for by in (0, 50_000):
            reply = await client.ask(_request(count, IN[inputs], wanted, by=by))
            assert reply.status == 200, reply.body
            end = int(reply.head.get(HEADER_LENGTH) or len(reply.body))
            tail = reply.body[end:]
            for entry in json.loads(reply.body[:end])["outputs"]:
                _, data, elements = _tensors(count)[entry["name"].replace("OUT", "IN")]
                if wanted[entry["name"]]:
                    assert "data" not in entry
                    assert tail.startswith(data)
                    tail = tail[len(data) :]
                else:
                    assert entry["data"] == elements
            assert not tail
        # Large requests are never buffered as text, so that their length is unknown.
        (first, second) = server.requests
        assert first.body == second.body
        assert (first.head.get("Transfer-Encoding") == "chunked") is (size == "large")


@pytest.mark.parametrize("count", SIZES.values(), ids=SIZES)
async def test_raw_binary_round_trips(count: int) -> None:
    data = np.arange(count, dtype="<f4").tobytes()
    async with served(echo_json, upstream=JSON_ONLY) as (_, _, client):
        reply = await client.ask(infer_raw(data))
        assert reply.body[int(reply.head.get(HEADER_LENGTH) or 0) :] == data
