"""The fast path for V1 responses gives the same result as the streaming path."""

from __future__ import annotations

import math
import random
from itertools import product

import numpy as np
import pytest
from hypothesis import given

from gateway.codec.v1.prediction_form import write_prediction_fast
from gateway.errors import GatewayError
from gateway.protocol.v1 import V1Format, V1ResponseLayout
from tests.codec import strategies
from tests.codec.reference import DTYPES
from tests.codec.strategies import Output, output, response_body
from tests.codec.v1.predict_responses import convert, floats, some_output, texts

LAYOUTS = [V1ResponseLayout(form, single) for form in V1Format for single in (False, True)]


def agrees(layout: V1ResponseLayout, *outputs: Output) -> bool:
    """Check that both ways agree; tell whether the fast path wrote the response."""
    body, size = response_body(list(outputs))
    found = write_prediction_fast(body, size, layout)
    if found is not None:
        count = sum(math.prod(each.shown["shape"]) for each in outputs)
        assert found == (convert([body], size, layout), count)
    return found is not None


@pytest.mark.parametrize("datatype", DTYPES)
def test_output_of_numbers_is_written(datatype: str) -> None:
    for layout, shape in product(LAYOUTS, ([1], [3], [2, 2], [1, 2, 3])):
        values = (np.arange(math.prod(shape)) / 3 + 1e-7).astype(DTYPES[datatype])
        assert agrees(layout, output("o", datatype, shape, values.tobytes()))


@pytest.mark.parametrize(
    "outputs",
    [
        [],
        [floats("a", 2), floats("b", 2)],
        [floats("a", 0)],
        [floats("a", *[1] * 33)],
        [texts("a", b"x")],
        [output("a", "FP32", [2], np.array([1, math.nan], "<f4").tobytes())],
        [output("a", "BOOL", [1], b"\2")],
    ],
)
def test_other_responses_are_left_to_the_streaming_path(outputs: list[Output]) -> None:
    assert not any(agrees(layout, *outputs) for layout in LAYOUTS)


@given(strategies.SEEDS)
@strategies.LAW
def test_every_response_is_written_alike_or_left(seed: int) -> None:
    rng = random.Random(seed)
    shape = [rng.randint(1, 3) for _ in range(rng.randint(0, 3))]
    body, size = response_body([some_output(rng, "o", shape)])
    layout = rng.choice(LAYOUTS)
    found = write_prediction_fast(body, size, layout)
    try:
        assert found in (None, (convert([body], size, layout), math.prod(shape)))
    except GatewayError:
        assert found is None
