"""What the models of servers written in Python do: arrays in, arrays out, as Triton's models do.

The servers run this in their own virtual environments.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = Mapping[str, npt.NDArray[Any]]


def identity(inputs: Arrays) -> Arrays:
    """INPUT0 → OUTPUT0."""
    return {"OUTPUT0": inputs["INPUT0"]}


def add(inputs: Arrays) -> Arrays:
    """INPUT0, INPUT1 → SUM, DIFFERENCE."""
    left, right = inputs["INPUT0"], inputs["INPUT1"]
    return {"SUM": left + right, "DIFFERENCE": left - right}


def mixed(inputs: Arrays) -> Arrays:
    """IN_FP32, IN_INT64, IN_BYTES, IN_BOOL → OUT_FP32, OUT_INT64, OUT_BYTES, OUT_BOOL."""
    names = ("FP32", "INT64", "BYTES", "BOOL")
    return {f"OUT_{name}": inputs[f"IN_{name}"] for name in names}


def slow(inputs: Arrays) -> Arrays:
    """Take as many seconds as the first element of INPUT0 says."""
    time.sleep(float(inputs["INPUT0"].flat[0]))
    return identity(inputs)


def fails(inputs: Arrays) -> Arrays:
    """Never answer."""
    raise RuntimeError("this model always fails")


def zeros(inputs: Arrays) -> Arrays:
    """Answer with as many zeros as INPUT0 says."""
    return {"OUTPUT0": np.zeros(int(inputs["INPUT0"][0]), np.float32)}


def filled(inputs: Arrays) -> Arrays:
    """Answer with as many elements as an image has, each of which is INPUT0."""
    return {"OUTPUT0": np.full(3 * 224 * 224, inputs["INPUT0"][0], np.float32)}


WORK: dict[str, Callable[[Arrays], Arrays]] = {
    work.__name__: work for work in (identity, add, mixed, slow, fails, zeros, filled)
}
