"""Hypothesis strategies for numbers near the middle of two floats."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import strategies as st

from tests.codec.exact_rounding import FORMATS, tie, written


@st.composite
def near_ties(draw: st.DrawFn) -> tuple[str, str]:
    """Generate a datatype, and the text of a number at a tie of its floats, or very near to one."""
    datatype = draw(st.sampled_from(list(FORMATS)))
    precision, least, most = FORMATS[datatype]
    exponent = draw(st.integers(least - precision - 2, most + 1))
    significand = draw(st.integers(0, 2**precision - 1) | st.just(2**precision - 1))
    value = tie(significand, exponent, FORMATS[datatype])
    hair = Fraction(draw(st.integers(-9, 9)), 10 ** draw(st.integers(9, 60) | st.integers(15, 20)))
    value *= draw(st.sampled_from([1, -1])) * (1 + hair)
    digits = draw(st.integers(7, 120) | st.integers(15, 19))
    return datatype, written(value, digits, draw(st.integers(0, 3)))
