"""Hypothesis strategies for infer requests in every encoding."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from tests.integration.support.infer_messages import DTYPES, FLOATS, Array, Request, Tensor

SIZES = st.integers(0, 8)
FLAGS = st.sampled_from([None, True, False])


def elements(datatype: str, size: int, *, text: bool = True) -> st.SearchStrategy[Array]:
    """Make flat elements; ``text`` where BYTES have to be in JSON."""
    dtype = DTYPES[datatype]
    if datatype == "BYTES":
        texts = st.text(st.characters(codec="utf-8"), max_size=12).map(str.encode)
        one = texts if text else texts | st.binary(max_size=12)
        return _lists(one, size).map(lambda values: np.array(values, dtype))
    if datatype == "BOOL":
        return _lists(st.booleans(), size).map(lambda values: np.array(values, dtype))
    length = size * dtype.itemsize
    bits = st.binary(min_size=length, max_size=length).map(lambda data: np.frombuffer(data, dtype))
    return bits | _lists(st.sampled_from(SPECIAL[datatype]), size).map(
        lambda values: np.array(values, dtype)
    )


def _lists(one: st.SearchStrategy[Any], size: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(one, min_size=size, max_size=size)


def _special(datatype: str) -> list[Any]:
    if datatype not in FLOATS:
        limits = np.iinfo(DTYPES[datatype])
        return [0, 1, int(limits.min), int(limits.max)]
    limit = ml_dtypes.finfo(DTYPES[datatype])  # type: ignore[no-untyped-call]
    extreme = [float(limit.min), float(limit.max), float(limit.smallest_subnormal)]
    return [0.0, -0.0, 0.1, -2.5, 1e-3, np.nan, np.inf, -np.inf, *extreme]


SPECIAL = {each: _special(each) for each in DTYPES if each not in ("BOOL", "BYTES")}


@st.composite
def requests(
    draw: st.DrawFn, model: str, inputs: tuple[Tensor, ...], outputs: tuple[str, ...]
) -> Request:
    """Make a request of these inputs, in any order and form."""
    forms = [replace(each, binary=draw(st.booleans())) for each in inputs]
    listed = draw(st.lists(st.sampled_from(outputs), unique=True))
    return Request(
        model,
        tuple(draw(st.permutations(forms))),
        outputs=tuple((name, draw(FLAGS)) for name in listed),
        binary_data_output=draw(FLAGS),
        id=draw(st.none() | st.text(st.characters(codec="utf-8"), max_size=8)),
        with_length=draw(st.booleans()),
        ascii=draw(st.booleans()),
        data_first=draw(st.booleans()),
        order=tuple(draw(st.permutations(range(4)))),
        pieces=draw(st.sampled_from([0, 0, 1, 7, 100])),
    )
