"""Hypothesis strategies for V1 requests and their models."""

from __future__ import annotations

import base64
import math
import random
from typing import Any

from hypothesis import strategies as st

from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.tensors import ModelMetadata, TensorSpec
from tests.codec import reference
from tests.codec.reference_v1 import Declared
from tests.codec.strategies import SEEDS, Raw, Writer, element_texts

_NAMES = ["x", "y", "é", 'q"', "b64", "instances", "\\"]
_ANY = st.one_of(
    st.just({"a": 1, "b": 'x]}\\"', "c": [[], {}]}),
    st.sampled_from([0, -1.5, None, True, "inputs", "]"]),
    st.just([{"instances": [1, "]"]}]),
)
_OTHERS = st.fixed_dictionaries(
    {},
    optional={
        "signature_name": st.sampled_from(["", "serving_default"]),
        "parameters": st.one_of(st.none(), st.just({"a": 1, "b": "é", "c": [[], {}]})),
        "inputs ": _ANY,
        "é": _ANY,
    },
)


def model(declared: Declared, batching: bool = False) -> ModelMetadata:
    """Make a model's metadata."""
    inputs = tuple(
        TensorSpec(name, DATATYPES[datatype], tuple(shape))
        for name, (datatype, shape) in declared.items()
    )
    return ModelMetadata("m", inputs, batching)


@st.composite
def predict_requests(draw: st.DrawFn, faulty: bool = False) -> tuple[bytes, Declared]:
    """Generate a request and the inputs of its model."""
    rng = random.Random(draw(SEEDS))
    names = draw(st.lists(st.sampled_from(_NAMES), unique=True, min_size=1, max_size=3))
    form = rng.choice(["instances", "inputs"])
    count = rng.choice([0, 1, 1, 2, 3, 5]) if form == "inputs" else rng.choice([1, 1, 2, 3, 7])
    declared: Declared = {}
    columns: dict[str, Any] = {}
    for name in names:
        datatype = draw(st.sampled_from(reference.DATATYPES))
        shape = [count, *rng.choices([1, 2, 3, 4, 0], [4, 4, 2, 1, 1], k=rng.randrange(4))]
        # What is nested in an empty array is unknown.
        shape = shape[: shape.index(0) + 1] if 0 in shape else shape
        size = math.prod(shape)
        texts = draw(st.lists(element_texts(datatype), min_size=size, max_size=size))
        if faulty and size and rng.random() < 0.2:
            texts[rng.randrange(size)] = rng.choice(
                ["null", "[]", "{}", '"x"', "1.5", "300", "1e99"]
            )
            items: list[Any] = list(map(Raw, texts))
        else:
            items = [_element(text, datatype, rng) for text in texts]
        columns[name] = _nested(items, shape)
        if faulty and rng.random() < 0.1:
            _make_ragged(columns[name], rng)
        declared[name] = (datatype, _declared(shape, form, rng, faulty))
    value = _value(columns, form, count, rng)
    fields = {form: value, **draw(_OTHERS)}
    keys = list(fields)
    rng.shuffle(keys)
    writer = Writer(rng, rng.choice(["compact", "spaces", "wild", "indent"]))
    return writer.write({key: fields[key] for key in keys}).encode(), declared


def _element(text: str, datatype: str, rng: random.Random) -> Any:
    if datatype != "BYTES":
        return Raw(text)
    if rng.random() < 0.3:
        return {"b64": base64.b64encode(text.encode()).decode().rstrip("=" * rng.randrange(2))}
    return text


def _nested(items: list[Any], shape: list[int]) -> Any:
    if not shape:
        return items[0]
    size = math.prod(shape[1:])
    return [_nested(items[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]


def _make_ragged(value: Any, rng: random.Random) -> None:
    while value and isinstance(value[0], list) and rng.random() < 0.7:
        value = rng.choice(value)
    if value and rng.random() < 0.5:
        value.pop()
    else:
        value.append(rng.choice([[], Raw("1"), [Raw("1")]]))


def _declared(shape: list[int], form: str, rng: random.Random, faulty: bool) -> list[int]:
    if form == "instances" and shape[0] == 1 and shape[1:2] != [-1] and rng.random() < 0.3:
        return shape[1:]  # one instance at a time
    if faulty and rng.random() < 0.1:
        return [*shape, 2]
    return [size if rng.random() < 0.3 else -1 for size in shape]


def _value(columns: dict[str, Any], form: str, count: int, rng: random.Random) -> Any:
    if len(columns) == 1 and rng.random() < 0.5:
        return next(iter(columns.values()))
    if form == "inputs":
        return columns
    # Each instance has its members in an order of its own.
    rows = []
    for number in range(count):
        names = rng.sample(list(columns), len(columns))
        rows.append({name: columns[name][number] for name in names if number < len(columns[name])})
    return rows
