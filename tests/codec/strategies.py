"""Hypothesis strategies for infer bodies, for breaking them, and for splitting them."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import strategies as st

from gateway.codec.json import array_scanner
from gateway.codec.json.array_scanner import ElementRun, StringPart
from gateway.codec.json.data_extractor import Event
from tests.codec.reference import DATATYPES, DTYPES, FLOATS, INTEGERS, LARGEST, Fields, pack_bytes
from tests.http1 import splits
from tests.http1.splits import LAW as LAW
from tests.http1.splits import bytewise as bytewise

SEEDS = st.integers(0, 2**32 - 1)


# ---------------------------------------------------------------------------------- arrival


def cut(body: bytes, seed: int) -> list[bytes]:
    """Split a body at random places, into 2 to 10 pieces."""
    rng = random.Random(seed)
    return splits.cut(body, [rng.randrange(len(body) + 1) for _ in range(rng.randint(1, 9))])


@contextmanager
def windows_of(size: int) -> Iterator[None]:
    """Scan arrays in windows of so many bytes."""
    with (
        mock.patch.object(array_scanner, "WINDOW", size),
        mock.patch.object(array_scanner, "STRING_WINDOW", size),
    ):
        yield


def describe(event: Event) -> object:
    """Return what can be compared: a run's buffer depends on how the text arrived."""
    if isinstance(event, ElementRun):
        return event.text, event.depth_before, event.depth_after, event.first
    return event.text if isinstance(event, StringPart) else event


# ---------------------------------------------------------------------------------- JSON text


class Raw(str):
    """Text that goes into the JSON as it is."""

    __slots__ = ()


@dataclass
class Writer:
    """Writes JSON as clients do: with more or less white space and escapes."""

    rng: random.Random
    style: str

    def write(self, value: Any, level: int = 0) -> str:
        if isinstance(value, Raw):
            return str(value)
        if isinstance(value, str):
            return self._string(value)
        if isinstance(value, dict):
            items = [
                self._string(key) + self._gap() + ":" + self._gap(" ") + self.write(x, level + 1)
                for key, x in value.items()
            ]
            return self._brackets("{", items, "}", level)
        if isinstance(value, list):
            return self._brackets("[", [self.write(x, level + 1) for x in value], "]", level)
        return json.dumps(value)

    def _brackets(self, opening: str, items: list[str], closing: str, level: int) -> str:
        if self.style == "indent" and items:
            line = "\n" + " " * (level + 1)
            return opening + line + ("," + line).join(items) + "\n" + " " * level + closing
        comma = "," + self._gap(" ")
        return opening + self._gap() + comma.join(items) + self._gap() + closing

    def _gap(self, usual: str = "") -> str:
        if self.style == "wild":
            return self.rng.choice(["", "", "", " ", "\n", "\t ", "\r\n"])
        return usual if self.style == "spaces" else ""

    def _string(self, text: str) -> str:
        # The gateway requires `data` as a plain key.
        escapes = text != "data" and self.rng.random() < 0.5
        return '"' + "".join(self._character(c, escapes) for c in text) + '"'

    def _character(self, character: str, escapes: bool) -> str:
        if character in '"\\' or character < " ":
            if self.rng.random() < 0.5:
                return json.dumps(character)[1:-1]
            return f"\\u{ord(character):04x}"
        if escapes and self.rng.random() < 0.2:
            return json.dumps(character)[1:-1] if character != "/" else "\\/"
        return character


# ---------------------------------------------------------------------------------- elements


def element_texts(datatype: str) -> st.SearchStrategy[str]:
    """Generate elements of a datatype as they stand in JSON; strings are not quoted yet."""
    if datatype == "BYTES":
        return st.one_of(
            st.text(max_size=12),
            st.sampled_from(
                ["", '"', "\\", "]", "[", ",", '"data":[', "é", "😀", "\0", "a" * 20, "😀é" * 9]
            ),
        )
    if datatype == "BOOL":
        return st.sampled_from(["true", "false"])
    if datatype in INTEGERS:
        limits = np.iinfo(DTYPES[datatype])
        return st.one_of(
            st.integers(int(limits.min), int(limits.max)).map(str),
            st.sampled_from([str(limits.min), str(limits.max), "0", "-0"]),
        )
    return _float_texts(datatype)


def _float_texts(datatype: str) -> st.SearchStrategy[str]:
    most = LARGEST[datatype]
    numbers = st.floats(-most, most, allow_nan=False, width=64)
    return st.one_of(
        numbers.map(repr),
        st.integers(-2000, 2000).map(str),
        st.tuples(st.integers(-99, 99), st.integers(0, 999), st.integers(-30, 2)).map(
            lambda t: f"{t[0]}.{t[1]:03}{'eE'[t[1] % 2]}{t[2]:+}"
        ),
        st.sampled_from(["NaN", "Infinity", "-Infinity", "-0", "-0.0", "1e-400", "0.1", "1E+3"]),
        st.sampled_from(["60000", "65519", "1" + "0" * 25 if most > 1e30 else "10000"]),
        st.sampled_from(
            [repr(most), repr(-most), "9007199254740993", "5e-324"][: 4 if most > 1e30 else 2]
        ),
    )


_FAULTS = [
    *("null", "true", "1.5", "1e5", "300", "-1", "99999999999999999999", "-129", "70000"),
    *('"x"', '"1"', "{}", '{"data":[1]}', '{"a":"b"}', "[", "]", ",", "", "01", "1.", "+1", "-"),
    *("nan", "-NaN", "'a'", '"\\ud83d"', '"\\udc00x"', '"\\x"', "1 2", "1e400", '"', "\\", "tru"),
    *("1e40", "1" * 5000, "NaN", "[]", '"\t"', "3.5e38", "65520", "\ufeff", "\x0c", "1\x00", "]["),
]


def _nested(items: list[Any], rng: random.Random) -> list[Any]:
    """Return the same elements in order, flat or nested, even or ragged."""
    mode = rng.choice(["flat", "flat", "rows", "ragged"])
    if mode == "rows":
        row = rng.randint(1, 5)
        return [items[i : i + row] for i in range(0, len(items), row)]
    if mode == "ragged":
        nested = list(items)
        for _ in range(rng.randint(1, 4)):
            a = rng.randint(0, len(nested))
            b = min(len(nested), a + rng.randint(0, 4))
            nested[a:b] = [nested[a:b]]
        return nested
    return items


def _shape(count: int, rng: random.Random) -> list[int]:
    shapes = [[count], [count], [1, count], [count, 1, 1]]
    shapes += [[n, count // n] for n in (2, 3) if count % n == 0]
    shapes += [[]] if count == 1 else [[3, 0, 9]] if count == 0 else []
    return rng.choice(shapes) if rng.random() > 0.02 else [count + 1]


# ---------------------------------------------------------------------------------- requests

_NEARLY_DATA = ['my"data', '"data"', 'data"', "dat", 'C:\\"data', "datas"]
_KEYS = st.sampled_from(["x", "note", "\\", "é", "model_name", *_NEARLY_DATA])
_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8),
        st.sampled_from(
            ["data", '"data"', '"data": [1, 2]', '\\"data\\":[', "\\", '"', '{"data":']
        ),
    ),
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.dictionaries(_KEYS, below, max_size=3),
        st.fixed_dictionaries({"data": below.filter(lambda x: not isinstance(x, list))}),
    ),
    max_leaves=4,
)
_EXTRAS = st.dictionaries(_KEYS, _VALUES, max_size=2)


_CONTENT_TYPES = st.sampled_from([*["base64"] * 4, "np", "Base64", 64, None, ["base64"]])
_NOT_BASE64 = [
    *("Y", "YQ", "YQ=", "YR==", "YWK=", "Y===", "====", "=", "YQ==YQ==", "YW-j", "YW_j", "YQ=a"),
    *("YQ==\n", " YQ==", "YWJj=", "é", "YWJjé", "=YWJ", "😀" * 9, "YWJj" * 9 + "=", "YQ==é"),
]


def _base64_texts(faulty: bool) -> st.SearchStrategy[str]:
    if faulty:
        return st.sampled_from(_NOT_BASE64)
    return st.binary(max_size=30).map(lambda data: base64.b64encode(data).decode())


@st.composite
def inputs(draw: st.DrawFn, faulty: bool) -> dict[str, Any]:
    """Generate one input as the values that a Writer takes."""
    datatype = draw(st.sampled_from(DATATYPES))
    rng = random.Random(draw(SEEDS))
    entry: dict[str, Any] = {"name": draw(st.sampled_from(["a", "in put", 'q"', "é"]))}
    entry["datatype"] = datatype
    parameters = draw(_EXTRAS)
    form = draw(st.sampled_from(["data"] * 8 + ["binary", "shared"]))
    texts = draw(st.lists(element_texts(datatype), max_size=24))
    if draw(st.integers(0, 4)) == 0:
        parameters["content_type"] = draw(_CONTENT_TYPES)
        if datatype == "BYTES" and parameters["content_type"] == "base64":
            texts = [draw(_base64_texts(rng.random() < 0.03)) for _ in texts]
    entry["shape"] = _shape(len(texts), rng)
    if form == "data":
        elements: list[Any] = [x if datatype == "BYTES" else Raw(x) for x in texts]
        if faulty and elements:
            elements[rng.randrange(len(elements))] = Raw(rng.choice(_FAULTS))
        entry["data"] = _nested(elements, rng)
    elif form == "binary":
        entry["shape"] = [len(texts)]
        size = 7 if datatype == "BYTES" else len(texts) * np.dtype(DTYPES[datatype]).itemsize
        parameters["binary_data_size"] = size
    else:
        parameters["shared_memory_region"] = "region"
    if parameters or rng.random() < 0.2:
        entry["parameters"] = parameters
    entry |= {k: v for k, v in draw(_EXTRAS).items() if k not in entry}
    return _reordered(entry, rng)


def _reordered(entry: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    keys = list(entry)
    match rng.choice(["as is", "sorted", "shuffled"]):
        case "sorted":
            keys.sort()
        case "shuffled":
            rng.shuffle(keys)
    return {key: entry[key] for key in keys}


@st.composite
def request_bodies(draw: st.DrawFn, faulty: bool = False) -> bytes:
    """Generate the body of a request; a faulty one may contain invalid elements."""
    rng = random.Random(draw(SEEDS))
    fields: dict[str, Any] = draw(_EXTRAS)
    fields["inputs"] = draw(st.lists(inputs(faulty), min_size=1, max_size=3))
    if draw(st.booleans()):
        fields["id"] = draw(st.text(max_size=3))
    if draw(st.booleans()):
        fields["outputs"] = draw(st.lists(_requested_outputs(), max_size=3))
    if draw(st.booleans()):
        flag = {"binary_data_output": draw(st.booleans())} if draw(st.booleans()) else {}
        fields["parameters"] = draw(_EXTRAS) | flag
    writer = Writer(rng, rng.choice(["compact", "compact", "spaces", "indent", "wild"]))
    text = writer.write(_reordered(fields, rng))
    return (text + rng.choice(["", "", "\n"])).encode()


@st.composite
def _requested_outputs(draw: st.DrawFn) -> dict[str, Any]:
    output: dict[str, Any] = {"name": draw(st.sampled_from(["y", "z", "data"]))}
    parameters = draw(_EXTRAS)
    if draw(st.booleans()):
        parameters["binary_data"] = draw(st.booleans())
    if draw(st.integers(0, 9)) == 0:
        parameters["shared_memory_region"] = "r"
    if draw(st.integers(0, 3)) == 0:
        parameters["content_type"] = draw(_CONTENT_TYPES)
    return output | ({"parameters": parameters} if parameters else {})


_WORDS = [b"null", b"NaN", b"1e999", b'"datatype":"INT8",', b"\\ud83d", b"\x00"]
_RUNS = [b" " * 40, b"7" * 40, b"a" * 40, b"\\" * 5, b"[[[[[[", b"]]", b",,"]
_CRUMBS = [
    *(b"[", b"]", b"{", b"}", b",", b":", b'"', b"\\", b" ", b"\n", b"0", b"1", b"-", b".", b"e"),
    *(b'"data":[', b'"data"', b'"data": 1,', b'"data":[1],', b"\xff", b"\xc3", b"\xed\xa0\x80"),
    *(b'"inputs":[', b'"id":1,', b'"shape":[1],', *_WORDS, *_RUNS),
]


def mutated(body: bytes, seed: int) -> bytes:
    """Break a body in one to three places: delete, insert, replace, swap, truncate."""
    rng = random.Random(seed)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        at = rng.randrange(len(body) + 1)
        end = min(len(body), at + rng.choice([1, 1, 2, 5, 20]))
        match rng.choice(["delete", "insert", "insert", "replace", "byte", "swap", "truncate"]):
            case "delete":
                body = body[:at] + body[end:]
            case "insert":
                body = body[:at] + rng.choice(_CRUMBS) + body[at:]
            case "replace":
                body = body[:at] + rng.choice(_CRUMBS) + body[end:]
            case "byte":
                body = body[:at] + rng.randbytes(1) + body[at + 1 :]
            case "swap":
                body = body[:at] + body[end : end + 5] + body[at:end] + body[end + 5 :]
            case "truncate":
                body = body[:at]
    return body


# ---------------------------------------------------------------------------------- responses


@dataclass(frozen=True)
class Output:
    """An output of a binary response; `shown` are its fields in the header."""

    name: str
    shown: Fields
    data: bytes


def response_body(outputs: list[Output], fields: Fields | None = None) -> tuple[bytes, int]:
    """Return a binary response and the size of its header."""
    shown = {"model_name": "m", "outputs": [output.shown for output in outputs]}
    header = json.dumps(shown if fields is None else shown | fields).encode()
    return header + b"".join(output.data for output in outputs), len(header)


def output(name: str, datatype: str, shape: list[int], data: bytes, **more: Any) -> Output:
    size = {"parameters": more.pop("parameters", {}) | {"binary_data_size": len(data)}}
    shown = {"name": name, "datatype": datatype, "shape": shape} | size | more
    return Output(name, shown, data)


@st.composite
def outputs(draw: st.DrawFn, name: str) -> Output:
    datatype = draw(st.sampled_from(DATATYPES))
    rng = random.Random(draw(SEEDS))
    count = draw(st.integers(0, 20))
    if datatype == "BYTES":
        element = st.one_of(st.text(max_size=9).map(str.encode), st.binary(max_size=3))
        data = pack_bytes(draw(st.lists(element, min_size=count, max_size=count)))
    elif datatype == "BOOL":
        data = bytes(rng.choices([0, 1], k=count))
    else:
        # Often zeros, so that not every float is an odd one.
        size = count * np.dtype(DTYPES[datatype]).itemsize
        data = bytes(rng.choice([0, rng.randrange(256)]) for _ in range(size))
    made = output(name, datatype, [count], data, **draw(_EXTRAS))
    made.shown["parameters"] = draw(_EXTRAS) | made.shown["parameters"]
    if draw(st.integers(0, 9)) == 0:
        # An output that the server sent as JSON.
        made.shown.pop("parameters")
        some: tuple[Any, ...] = (2.5, None) if datatype in FLOATS else (7,)
        some = {"BOOL": (True,), "BYTES": ("x",)}.get(datatype, some)
        return Output(name, made.shown | {"data": rng.choices(some, k=count)}, b"")
    return Output(name, _reordered(made.shown, rng), data)


@st.composite
def responses(draw: st.DrawFn) -> tuple[bytes, int]:
    """Generate the body of a binary response, and the size of its header."""
    names = draw(st.lists(st.sampled_from(["y", "z", 'q"', "é"]), unique=True, max_size=3))
    made = [draw(outputs(name)) for name in names]
    rng = random.Random(draw(SEEDS))
    fields = draw(_EXTRAS) | {"outputs": [output.shown for output in made]}
    writer = Writer(rng, rng.choice(["compact", "spaces"]))
    header = writer.write(_reordered(fields, rng)).encode()
    return header + b"".join(output.data for output in made), len(header)
