"""Servers that accept only JSON: clients of every encoding get the same tensors."""

import json
from typing import Any

import numpy as np
import pytest

from tests.support.http_messages import chunk, message, request
from tests.support.inference_messages import HEADER_LENGTH, INFER, infer_raw
from tests.support.raw_client import ReceivedResponse
from tests.support.servers.json_server import echo_inputs
from tests.support.servers.served import served

JSON_ONLY = {"dialect": "json"}
TEXT = [b"", "é".encode(), b'"\\']
SIZES = {"small": 3, "large": 20_000}


def _elements(count: int) -> bytes:
    texts = (TEXT * count)[:count]
    return b"".join(len(x).to_bytes(4, "little") + x for x in texts)


def _tensors(count: int) -> dict[str, tuple[str, bytes]]:
    """Return inputs by name: their datatypes and bytes."""
    rng = np.random.default_rng(count)
    return {
        "IN0": ("FP32", rng.standard_normal(count).astype("<f4").tobytes()),
        "IN1": ("INT64", rng.integers(-(2**63), 2**63 - 1, count).astype("<i8").tobytes()),
        "IN2": ("BYTES", _elements(count)),
        "IN3": ("BOOL", rng.integers(0, 2, count).astype("?").tobytes()),
    }


def _values(datatype: str, data: bytes, count: int) -> list[Any]:
    match datatype:
        case "FP32":
            return [float(str(x)) for x in np.frombuffer(data, "<f4")]
        case "INT64":
            return list(np.frombuffer(data, "<i8").tolist())
        case "BOOL":
            return list(np.frombuffer(data, "?").tolist())
    return [x.decode() for x in (TEXT * count)[:count]]


def _request(count: int, binary: set[str], wanted: dict[str, bool] | bool, *, by: int = 0) -> bytes:
    """Return a request with some binary inputs; `by` is the size of its chunks, if any."""
    inputs, tail = [], b""
    for name, (datatype, data) in _tensors(count).items():
        entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": [count]}
        if name in binary:
            entry["parameters"] = {"binary_data_size": len(data)}
            tail += data
        else:
            entry["data"] = _values(datatype, data, count)
        inputs.append(entry)
    fields: dict[str, Any] = {"inputs": inputs}
    if isinstance(wanted, bool):
        fields["parameters"] = {"binary_data_output": wanted}
    else:
        fields["outputs"] = [
            {"name": name, "parameters": {"binary_data": flag}} for name, flag in wanted.items()
        ]
    header = json.dumps(fields).encode()
    headers = {HEADER_LENGTH: str(len(header))} if binary else {}
    body = header + tail
    if not by:
        return request("POST", INFER, body, headers)
    pieces = [body[i : i + by] for i in range(0, len(body), by)]
    coding = {"Host": "x", "Transfer-Encoding": "chunked"}
    chunks = b"".join(map(chunk, [*pieces, b""]))
    return message(f"POST {INFER} HTTP/1.1", {**headers, **coding}, chunks)


def _outputs(reply: ReceivedResponse) -> dict[str, Any]:
    """Return the outputs of a response by name: bytes of binary outputs, values of others."""
    size = int(reply.head.get(HEADER_LENGTH) or len(reply.body))
    tail = reply.body[size:]
    found: dict[str, Any] = {}
    for entry in json.loads(reply.body[:size])["outputs"]:
        length = (entry.get("parameters") or {}).get("binary_data_size")
        if length is None:
            found[entry["name"]] = entry["data"]
        else:
            assert "data" not in entry
            found[entry["name"]], tail = tail[:length], tail[length:]
    assert not tail
    return found


IN = {"json": set[str](), "binary": {"IN0", "IN1", "IN2", "IN3"}, "mixed": {"IN1", "IN2"}}
OUT: dict[str, dict[str, bool] | bool] = {
    "all json": False,
    "all binary": True,
    "mixed": {"OUT0": True, "OUT1": False, "OUT2": True, "OUT3": False},
}


ROUND_TRIPS = [
    *((inputs, wanted, "small") for inputs in IN for wanted in ("all binary", "mixed")),
    ("json", "all binary", "large"),
    ("binary", "all json", "large"),
    ("mixed", "mixed", "large"),
]


@pytest.mark.parametrize(("inputs", "outputs_", "size"), ROUND_TRIPS)
async def test_every_encoding_round_trips(inputs: str, outputs_: str, size: str) -> None:
    binary, wanted, count = IN[inputs], OUT[outputs_], SIZES[size]
    async with served(echo_inputs, upstream=JSON_ONLY) as (server, _, client):
        for by in (0, 50_000):
            reply = await client.ask(_request(count, binary, wanted, by=by))
            assert reply.status == 200, reply.body
            outputs = _outputs(reply)
            for name, (datatype, data) in _tensors(count).items():
                output = name.replace("IN", "OUT")
                in_binary = wanted if isinstance(wanted, bool) else wanted[output]
                expected = data if in_binary else _values(datatype, data, count)
                assert outputs[output] == expected, name
        # Large requests are never buffered as text, so that their length is unknown.
        (first, second) = server.requests
        assert first.body == second.body
        assert (first.head.get("Transfer-Encoding") == "chunked") is (count > 3)


@pytest.mark.parametrize("count", SIZES.values(), ids=SIZES)
async def test_raw_binary_round_trips(count: int) -> None:
    data = np.arange(count, dtype="<f4").tobytes()
    async with served(echo_inputs, upstream=JSON_ONLY) as (_, _, client):
        reply = await client.ask(infer_raw(data))
        assert _outputs(reply) == {"OUT": data}
