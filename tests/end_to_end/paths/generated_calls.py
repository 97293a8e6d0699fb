"""Generates calls: what a client sends, what its servers send back, and the gateway between."""

from __future__ import annotations

import gzip
import json
import math
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.codec import strategies_v1
from tests.codec.reference import DATATYPES, DTYPES, pack_bytes
from tests.codec.strategies import (
    SEEDS,
    Raw,
    Writer,
    element_texts,
    mutated,
    request_bodies,
    responses,
)
from tests.fuzz.malicious_responses import any_response
from tests.http1.splits import cut
from tests.support.http_messages import chunked
from tests.support.inference_messages import HEADER_LENGTH

Headers = list[tuple[str, str]]

MODEL = "/v2/models/m"
_CLOUD_TYPE = "application/vnd.sagemaker-triton.binary+json"

_INFER, _V1, _RAW, _OTHER = "infer", "V1", "raw", "other"

THEMES = {
    "plain": [_INFER, _INFER, _V1, _RAW, _OTHER],
    "headers": [_OTHER, _INFER, _INFER, _V1, _OTHER],
    "response headers": [_INFER, _OTHER, _INFER, _OTHER, _RAW, _V1],
    "retry": [_OTHER, _INFER, _V1, _INFER, _RAW],
    "compression": [_V1, _OTHER, _INFER],
    "base64": [_INFER, _INFER, _INFER, _V1],
    "nonfinite": [_V1, _INFER, _RAW, _INFER],
    "empty": [_INFER, _INFER, _V1],
    "limits": [_RAW, _V1, _INFER, _OTHER, _INFER],
    "wrong request": [_INFER, _INFER, _V1, _INFER],
    "wrong response": [_INFER, _V1, _INFER, _RAW, _OTHER],
    "malicious": [_V1, _INFER, _RAW, _INFER, _OTHER],
    "error": [_OTHER, _RAW, _INFER, _V1],
    "mirror": [_INFER, _OTHER, _RAW, _V1],
    "classification": [_INFER],
}
"""What may be special about a call, and the kinds of such calls.

All else is mostly plain, so that what belongs together meets.
"""


@dataclass(frozen=True)
class ServerResponse:
    """What a server sends, where it may be cut, and whether the server then closes or hangs."""

    data: bytes
    cuts: tuple[int, ...] = ()
    closes: bool = False
    hangs: bool = False


@dataclass(frozen=True)
class GeneratedCall:
    """A call; ``responses`` are those to the first attempt and to the next ones."""

    request: bytes
    cuts: tuple[int, ...]
    responses: tuple[ServerResponse, ...]
    metadata: bytes
    dialect: str = "triton"
    route: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    endpoints: int = 1
    is_mirrored: bool = False

    @property
    def target(self) -> str:
        """The path of the request."""
        return self.request.split(b" ", 2)[1].decode()

    @property
    def is_inference(self) -> bool:
        """Whether the gateway converts the request."""
        return self.target.partition("?")[0].endswith(("/infer", ":predict"))


def _rarely(draw: st.DrawFn, one_in: int) -> bool:
    """Draw whether to do what makes a call less simple."""
    return draw(st.sampled_from(range(one_in))) == one_in - 1


def _message(first: str, headers: Headers, body: bytes) -> bytes:
    lines = [first, *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


@st.composite
def _cuts(draw: st.DrawFn, data: bytes) -> tuple[int, ...]:
    """Draw places to cut at: around the end of the head, and anywhere."""
    end = data.find(b"\r\n\r\n") + 4
    near = st.integers(max(1, end - 5), end + 40)
    places = draw(st.lists(st.one_of(near, st.integers(1, max(1, len(data)))), max_size=4))
    return tuple(sorted(places))


# ------------------------------------------------------------------------------------------ tensors

_SIZES = st.sampled_from([0, 1, 1, 2, 3, 4])
_SHAPES = st.lists(_SIZES, min_size=1, max_size=3)
_LARGE = st.sampled_from([4_000, 8_190, 16_384, 16_400, 24_000, 40_000])
"""Elements of a tensor near the sizes of the fast path: 64 KiB, and 128 KiB of JSON."""


@dataclass(frozen=True)
class _Tensor:
    """A tensor: its entry without its data, its elements as they stand in JSON, and its bytes."""

    entry: dict[str, Any]
    texts: list[str]
    data: bytes

    def as_json(self, rng: random.Random) -> dict[str, Any]:
        """Return the entry with its data, flat or in rows."""
        is_text = self.entry["datatype"] == "BYTES"
        items: list[Any] = [text if is_text else Raw(text) for text in self.texts]
        if len(items) % 2 == 0 and rng.random() < 0.3:
            items = [items[i : i + 2] for i in range(0, len(items), 2)]
        return {**self.entry, "data": items}

    def as_binary(self) -> dict[str, Any]:
        """Return the entry of a tensor that follows the JSON."""
        parameters = {**self.entry.get("parameters", {}), "binary_data_size": len(self.data)}
        return {**self.entry, "parameters": parameters}


_DATATYPES = {"base64": ["BYTES", "BYTES", "FP32"], "nonfinite": ["FP32", "FP16", "BF16", "FP64"]}


@st.composite
def _tensors(draw: st.DrawFn, name: str, theme: str) -> _Tensor:
    datatype = draw(st.sampled_from(_DATATYPES.get(theme, DATATYPES)))
    rng = random.Random(draw(SEEDS))
    shape = draw(_SHAPES)
    if theme == "empty" and rng.random() < 0.7:
        shape = [*shape, 0]
    if _rarely(draw, 25):
        shape = [draw(_LARGE)]
    size = math.prod(shape)
    some = draw(st.lists(element_texts(datatype), min_size=min(size, 1), max_size=min(size, 12)))
    texts = [some[i % len(some)] for i in range(size)]
    if datatype == "BYTES":
        data = pack_bytes([text.encode() for text in texts])
        if texts and rng.random() < 0.15:
            data = pack_bytes([b"\xff\xfe"] * size)
    elif datatype == "BOOL":
        data = bytes(rng.choices([0, 1], k=size))
    else:
        width = np.dtype(DTYPES[datatype]).itemsize
        data = bytes(rng.choice([0, rng.randrange(256)]) for _ in range(width * min(size, 50)))
        data = (data * (size // 50 + 1))[: width * size]
        if theme == "nonfinite":
            data = np.resize([1.5, np.nan, -np.inf], size).astype(DTYPES[datatype]).tobytes()
    return _Tensor({"name": name, "shape": shape, "datatype": datatype}, texts, data)


@st.composite
def _several(draw: st.DrawFn, theme: str, *names: str) -> list[_Tensor]:
    count = draw(st.sampled_from([1, 1, 1, 2, 2, 0]))
    return [draw(_tensors(name, theme)) for name in names[:count]]


# ----------------------------------------------------------------------------------------- requests

_IDS = ["x", "", "é", "x" * 300]
_PARAMETERS: list[dict[str, Any]] = [
    {"binary_data_output": True},
    {"binary_data_output": False},
    {"priority": 1, "x": "y"},
    {},
]
_OUTPUT_PARAMETERS: list[dict[str, Any] | None] = [
    *[None, {"binary_data": True}, {"binary_data": False}] * 3,
    {"content_type": "base64"},
    {"shared_memory_region": "r"},
    {"x": "y"},
    {"classification": 2},
]
_HEADER_LENGTHS = ["", "xx", "+5", "-1", "00096", "96abc", "0", "99999", "9" * 20, "96, 96"]


@st.composite
def _requested_outputs(draw: st.DrawFn, theme: str) -> list[dict[str, Any]]:
    special: dict[str, list[dict[str, Any] | None]] = {
        "base64": [{"content_type": "base64"}],
        "classification": [{"classification": 2}],
    }
    choices = special.get(theme, []) * 12 + _OUTPUT_PARAMETERS
    outputs = []
    for name in draw(st.lists(st.sampled_from(["OUT0", "OUT0", "OUT1", "y"]), max_size=3)):
        parameters = draw(st.sampled_from(choices))
        outputs.append({"name": name} | ({} if parameters is None else {"parameters": parameters}))
    return outputs


@st.composite
def _infer_fields(draw: st.DrawFn, theme: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if _rarely(draw, 3):
        fields["id"] = draw(st.sampled_from(_IDS))
    if _rarely(draw, 2):
        fields["parameters"] = draw(st.sampled_from(_PARAMETERS))
    if theme in ("base64", "classification") or _rarely(draw, 3):
        fields["outputs"] = draw(_requested_outputs(theme))
    return fields


@st.composite
def _inference(draw: st.DrawFn, form: str, theme: str) -> tuple[bytes, int | None]:
    """Draw the body of a request, and the size of its JSON part, None if all of it is JSON."""
    rng = random.Random(draw(SEEDS))
    fields = draw(_infer_fields(theme))
    entries, tail = [], b""
    for number, tensor in enumerate(draw(_several(theme, "IN0", "IN1"))):
        is_binary = form == "binary" or (form == "mixed" and number == rng.randrange(2))
        entries.append(tensor.as_binary() if is_binary else tensor.as_json(rng))
        tail += tensor.data if is_binary else b""
    fields["inputs"] = entries
    text = Writer(rng, rng.choice(["compact", "compact", "spaces", "wild"])).write(fields).encode()
    size = None if form == "json" else len(text)
    if theme == "wrong request":
        text, tail = _broken(text, tail, rng)
    return text + tail, size


def _broken(text: bytes, tail: bytes, rng: random.Random) -> tuple[bytes, bytes]:
    """Break a message in its text or its size; the codec's strategies know all invalid fields."""
    ways = [(text, tail[:-1]), (text, tail + b"x"), (text[: rng.randrange(len(text))], tail)]
    return rng.choice([*ways, *[(mutated(text, rng.randrange(1000)), tail)] * 3])


@st.composite
def _infer_requests(draw: st.DrawFn, theme: str) -> tuple[str, Headers, bytes]:
    """Draw the target, the headers and the body of an infer request."""
    is_wrong = theme == "wrong request"
    anyhow = ["any"] * (8 if is_wrong else 2)
    form = draw(st.sampled_from(["json"] * 4 + ["binary"] * 4 + ["mixed"] * 2 + anyhow))
    if form == "any":
        body, size = draw(request_bodies(is_wrong)), None
        if is_wrong and draw(st.booleans()):
            body = mutated(body, draw(SEEDS))
        if is_wrong and _rarely(draw, 4):
            size = len(body)
            body += bytes(draw(st.integers(0, 40)))
    else:
        body, size = draw(_inference(form, theme))
    headers = [] if size is None else [(HEADER_LENGTH, str(size))]
    if theme == "wrong request" and _rarely(draw, 8):
        odd = draw(st.sampled_from(_HEADER_LENGTHS))
        headers = [*headers, (HEADER_LENGTH, odd)] if draw(st.booleans()) else []
    target = draw(st.sampled_from([f"{MODEL}/infer"] * 5 + [f"{MODEL}/versions/2/infer?x=%20"]))
    return target, headers, body


@st.composite
def _raw_requests(draw: st.DrawFn) -> tuple[str, Headers, bytes]:
    size = draw(st.sampled_from([0, 1, 3, 4, 8, 8, 12, 16, 24, 4096, 65_536, 65_540]))
    return (
        f"{MODEL}/infer",
        [(HEADER_LENGTH, "0")],
        bytes(range(256)) * (size // 256) + bytes(size % 256),
    )


@st.composite
def _other_requests(draw: st.DrawFn) -> tuple[str, str, Headers, bytes | None]:
    """Draw the method, target, headers and body of a request that passes through."""
    method = draw(st.sampled_from(["GET", "GET", "POST", "POST", "POST", "PUT", "DELETE"]))
    target = draw(
        st.sampled_from(
            [
                *(f"{MODEL}/generate", f"{MODEL}/generate_stream", f"{MODEL}/stats?x=1"),
                *("/v2/x", "http://else/v2/x", "/v2/models/m/versions/2/ready", "/v1/x"),
            ]
        )
    )
    bodies = [
        *(b'{"text_input":"hi"}', b"hello", b"", None, b"\r\n\r\n", b"[" * 80 + b"]" * 80),
        *(b"x" * 3000, b'{"a":' * 7 + b"1" + b"}" * 7, b"y" * 65_536, b"z" * 65_537),
    ]
    body = draw(st.sampled_from(bodies))
    if method == "GET" and draw(st.booleans()):
        body = None
    return method, target, [], body


_REQUEST_HEADERS: list[Headers] = [
    *([("Content-Type", each)] for each in ("application/json", "x/y", _CLOUD_TYPE, "")),
    *([("Accept-Encoding", each)] for each in ("gzip", "deflate;q=0.5, *;q=0")),
    *([("Connection", each)] for each in ("keep-alive", "close", "Keep-Alive, , close")),
    [("Connection", "X-Hop, close"), ("X-Hop", "1"), ("X-Stays", "2")],
    [("X-Hop", "1"), ("Connection", "keep-alive"), ("connection", "x-hop, cookie")],
    [("X-Two", "a"), ("Cookie", "c=d"), ("x-two", "b")],
    [("X-Request-Id", "own"), ("TE", "trailers"), ("Keep-Alive", "timeout=5")],
    [("X-Forwarded-For", "192.0.2.1"), ("Forwarded", "for=a"), ("Via", "1.1 a")],
    [("X-Latin", "caf\xe9"), ("Accept", "*/*"), ("Traceparent", "x")],
    *([("Content-Encoding", each)] for each in ("identity", "", "br")),
    [("Upgrade", "h2c"), ("Proxy-Authorization", "Basic eA==")],
]


def _several_headers(groups: list[Headers], *, many: bool) -> st.SearchStrategy[Headers]:
    least, most = (1, 5) if many else (0, 1)
    drawn = st.lists(st.sampled_from(groups), min_size=least, max_size=most)
    return drawn.map(lambda chosen: [line for group in chosen for line in group])


@st.composite
def _requests(draw: st.DrawFn, theme: str) -> tuple[bytes, bytes]:
    """Draw a request, and the metadata of the model that it names."""
    inputs = {"IN0": ("FP32", [-1])}
    method, kind = "POST", draw(st.sampled_from(THEMES[theme]))
    body: bytes | None
    if kind == _RAW:
        target, headers, body = draw(_raw_requests())
        inputs = {"IN0": draw(st.sampled_from(_RAW_INPUTS))}
    elif kind == _V1:
        body, declared = draw(strategies_v1.predict_requests(theme == "wrong request"))
        inputs = {name: (datatype, list(shape)) for name, (datatype, shape) in declared.items()}
        target, headers = "/v1/models/m:predict", []
    elif kind == _OTHER:
        method, target, headers, body = draw(_other_requests())
    else:
        target, headers, body = draw(_infer_requests(theme))
    headers = [*headers, *draw(_several_headers(_REQUEST_HEADERS, many=theme == "headers"))]
    if theme == "compression":
        headers.append(("Accept-Encoding", draw(st.sampled_from(["gzip", "deflate", "br"]))))
    if body and _rarely(draw, 25):
        headers.append(("Content-Encoding", "gzip"))
        body = body if _rarely(draw, 5) else gzip.compress(body, mtime=0)
    lines = [("Host", "localhost"), *headers]
    if body is not None:
        lines.insert(draw(st.integers(0, len(lines))), ("Content-Length", str(len(body))))
    return _message(f"{method} {target} HTTP/1.1", lines, body or b""), _metadata(inputs)


_RAW_INPUTS = [
    *(("FP32", [-1]), ("FP32", [-1, 4]), ("INT8", [-1, 1]), ("BYTES", [1]), ("BOOL", [-1])),
    *(("FP32", [-1]), ("FP32", [2]), ("FP32", [-1, -1])),
]


def _metadata(inputs: dict[str, Any]) -> bytes:
    entries = [
        {"name": name, "datatype": datatype, "shape": shape}
        for name, (datatype, shape) in inputs.items()
    ]
    outputs = [{"name": name, "datatype": "FP32", "shape": [-1]} for name in ("OUT0", "OUT1")]
    document = {"name": "m", "versions": ["1", "2"], "inputs": entries, "outputs": outputs}
    return json.dumps(document).encode()


# ---------------------------------------------------------------------------------------- responses

_RESPONSE_HEADERS: list[Headers] = [
    [("Server", "triton"), ("Date", "then")],
    [("Set-Cookie", "a=1"), ("X-Two", "a"), ("Set-Cookie", "b=2")],
    [("Connection", "X-Hop"), ("X-Hop", "1"), ("X-Stays", "2")],
    [("X-Hop", "1"), ("connection", "keep-alive, x-hop"), ("Keep-Alive", "timeout=5")],
    [("Connection", "Content-Type, Server"), ("Server", "triton")],
    [("Connection", "close, " + HEADER_LENGTH)],
    [("Upgrade", "h2c"), ("Trailer", "X"), ("Proxy-Authenticate", "Basic")],
    [("X-Latin", "caf\xe9"), ("X-Request-Id", "own"), ("Retry-After", "7")],
    *([("Vary", each)] for each in ("Accept", "*")),
    *([("Content-Type", each)] for each in ("text/html", "application/json", "text/event-stream")),
    [("Content-Type", "application/octet-stream"), ("ETag", '"x"')],
    [("Cache-Control", "no-transform"), ("Content-Range", "bytes 0-1/2")],
    *([("Connection", each)] for each in ("keep-alive", "close")),
    *([("Content-Encoding", each)] for each in ("gzip", "identity", "")),
]
_ERRORS = [
    *(b'{"error":"no"}', b'{"detail":[{"msg":"no"}]}', b"no such model", b"", b"{", b'{"error":7}'),
    *(b'{"error":"\xff"}', b"x" * 3000),
]
_STATUSES = [
    *("400 Bad Request", "404 Not Here", "500 Oh", "503 Busy", "502 Bad", "504 Late", "501 No"),
    *("201 Made", "204 No Content", "304 Not Modified", "302 Found", "299 So So", "422 Un"),
]


@st.composite
def _bodies(draw: st.DrawFn, theme: str) -> tuple[bytes, int | None]:
    """Draw the body of a response of status 200, and the size of its JSON part."""
    rng = random.Random(draw(SEEDS))
    form = draw(st.sampled_from(["binary"] * 5 + ["json"] * 2 + ["mixed", "any", "empty", "other"]))
    if form == "any":
        return draw(responses())
    if form == "other":
        other = [b"<html>", b"", b"[]", b'{"outputs":[]}', b'{"outputs":7}', b"data: 1\n\ndata: 2"]
        return draw(st.sampled_from(other)), None
    entries: list[dict[str, Any]] = []
    tail = b""
    for tensor in draw(_several(theme, "OUT0", "OUT1")):
        if form == "empty":
            shape = [0, *tensor.entry["shape"]]
            parameters = {"parameters": {"binary_data_size": 0}} if rng.random() < 0.7 else {}
            entries.append({**tensor.entry, "shape": shape, **parameters})
        elif form == "binary" or (form == "mixed" and rng.random() < 0.5):
            entries.append(tensor.as_binary())
            tail += tensor.data
        else:
            entries.append(tensor.as_json(rng))
    fields: dict[str, Any] = {"model_name": "m", "model_version": "1", "outputs": entries}
    if rng.random() < 0.3:
        fields["id"] = rng.choice(["x", "", None, 7])
    text = Writer(rng, "compact").write(fields).encode()
    size = len(text) if form != "json" and (tail or rng.random() < 0.1) else None
    if theme == "wrong response" and rng.random() < 0.6:
        text, tail = _broken(text, tail, rng)
    return text + tail, size


@st.composite
def _framed(
    draw: st.DrawFn, first: str, headers: Headers, body: bytes, theme: str
) -> ServerResponse:
    """Draw how a body is framed, whether it breaks off, and where it is cut."""
    framing = draw(st.sampled_from(["length"] * 4 + ["chunked"] * 3 + ["close"]))
    closes = framing == "close" or _rarely(draw, 10)
    at = draw(st.sampled_from(range(len(headers) + 1)))
    if framing == "length":
        headers = [*headers[:at], ("Content-Length", str(len(body))), *headers[at:]]
    elif framing == "chunked":
        headers = [*headers[:at], ("Transfer-Encoding", "chunked"), *headers[at:]]
        places = draw(st.lists(st.integers(1, max(1, len(body))), max_size=3))
        body = chunked(*filter(None, cut(body, places)))
    data = _message(first, headers, body)
    if theme == "wrong response" and _rarely(draw, 4):
        data = data[: draw(st.sampled_from(range(len(data))))]
        closes = True
    if _rarely(draw, 25):
        data = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + data
    return ServerResponse(data, draw(_cuts(data)), closes)


@st.composite
def _errors(draw: st.DrawFn, statuses: list[str], theme: str) -> ServerResponse:
    status = draw(st.sampled_from(statuses))
    headers = draw(_several_headers(_RESPONSE_HEADERS, many=theme == "response headers"))
    if status[:3] in ("204", "304"):
        return ServerResponse(_message(f"HTTP/1.1 {status}", headers, b""), (), draw(st.booleans()))
    return draw(_framed(f"HTTP/1.1 {status}", headers, draw(st.sampled_from(_ERRORS)), theme))


@st.composite
def _server_responses(draw: st.DrawFn, theme: str) -> ServerResponse:
    if theme == "malicious":
        made = any_response(random.Random(draw(SEEDS)))
        return ServerResponse(made.data, made.cuts[:20], closes=not made.right)
    if theme == "error" or (theme != "response headers" and _rarely(draw, 12)):
        return draw(_errors(_STATUSES, theme))
    body, size = draw(_bodies(theme))
    headers = draw(_several_headers(_RESPONSE_HEADERS, many=theme == "response headers"))
    if size is not None:
        headers.insert(0, (HEADER_LENGTH, str(size)))
    if theme == "wrong response" and _rarely(draw, 4):
        odd = [*_HEADER_LENGTHS, *(str((size or 90) + step) for step in (-1, 1, 4))]
        headers = [(HEADER_LENGTH, draw(st.sampled_from(odd))), *headers[1:]]
    return draw(_framed("HTTP/1.1 200 OK", headers, body, theme))


# -------------------------------------------------------------------------------------------- calls

_LIMITS: dict[str, list[int]] = {
    "max_inference_header_bytes": [1024, 2048],
    "max_request_bytes": [1024, 2048, 65_536],
    "max_json_depth": [5, 6],
    "max_tensors": [1],
    "max_buffered_body_bytes": [1024, 4096],
}


_RETRIED = ["500 Oh", "502 Bad", "503 Busy", "504 Late"]
_ROUTES: dict[str, list[dict[str, Any]]] = {
    "retry": [{"retry_on": [503]}, *[{"retry_on": ["no_response", 500, 502, 503, 504]}] * 3],
    "compression": [{"compression": "gzip"}, {"compression": ["deflate", "gzip"]}],
    "base64": [{}, {}, {"bytes": "base64"}],
    "nonfinite": [{"nonfinite": each} for each in ("null", "string", "error")],
    "response headers": [{}, {"compression": "gzip"}],
}


_SERVER_TIMING: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {}, {}, {"server_timing": True}]
)


@st.composite
def _all_responses(draw: st.DrawFn, theme: str, endpoints: int) -> tuple[ServerResponse, ...]:
    drawn = [draw(_server_responses(theme)) for _ in range(endpoints)]
    if theme == "retry":
        silent = st.just(ServerResponse(b"", (), closes=True))
        drawn[0] = draw(st.one_of(_errors(_RETRIED, theme), _errors(_RETRIED, theme), silent))
        if drawn[0].data == b"":
            drawn.insert(0, drawn[0])  # the first time, it passes for an idle connection's end
    return tuple(drawn)


@st.composite
def generated_calls(draw: st.DrawFn, theme: str) -> GeneratedCall:
    """Generate a call of one of the THEMES, with everything that decides its outcome."""
    request, metadata = draw(_requests(theme))
    limits = {}
    if theme == "limits":
        name = draw(st.sampled_from(list(_LIMITS)))
        limits[name] = draw(st.sampled_from(_LIMITS[name]))
    endpoints = 2 if theme == "retry" or _rarely(draw, 6) else 1
    return GeneratedCall(
        request,
        draw(_cuts(request)),
        draw(_all_responses(theme, endpoints)),
        metadata,
        draw(st.sampled_from(["triton"] * 3 + ["kserve", "openvino", "json", "json"])),
        draw(st.sampled_from(_ROUTES.get(theme, [{}]))) | draw(_SERVER_TIMING),
        limits,
        endpoints,
        theme == "mirror" or _rarely(draw, 15),
    )
