"""Measures text to elements and back in this process, by CPU time: in C, and by the libraries."""

from __future__ import annotations

import json
import random
import string
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import orjson

from benchmarks.harness.environment import Environment
from benchmarks.harness.requests import normal
from benchmarks.harness.rounds import Ratio, run_rounds
from benchmarks.report import Row, at_most
from gateway.codec.elements.decode import TensorDecoder, decode_plainly
from gateway.codec.elements.encode import make_tensor_encoder
from gateway.codec.json.array_scanner import ArrayScanner
from gateway.codec.native import DATATYPE_CODES, decode_numbers, encode_numbers
from gateway.codec.policies import JsonPolicies
from gateway.protocol.datatypes import DATATYPES

_COUNT = 12_000
"""Numbers of one window, which stay in the CPU's caches."""
_REPEATS = 10
_MOST_READING, _MOST_PRINTING = 0.6, 0.7
_MOST_STRING = 60e-9
_DEPTH_CAP = 64

Job = Callable[[], object]


def rows(env: Environment) -> list[Row]:
    """Measure reading and printing of numbers, and of strings through the whole codec."""
    if not DATATYPE_CODES:
        return [Row("text to elements in C", result="not measured: the C module is not compiled")]
    values = normal(_COUNT)
    digits = {
        "17 digits": json.dumps(values.tolist()).encode(),
        "shortest digits": orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY),
    }
    reading = [_reading(env, f"FP32 of {name}", text, "FP32") for name, text in digits.items()]
    doubles = np.random.default_rng(0).standard_normal(_COUNT)
    integers = np.random.default_rng(0).integers(-(2**31), 2**31, _COUNT).astype(np.int32)
    texts: dict[str, Any] = {"FP64": doubles, "INT32": integers}
    for name, array in texts.items():
        reading.append(_reading(env, name, orjson.dumps(array.tolist()), name))
    printing = [_printing(env, name, array) for name, array in ({"FP32": values} | texts).items()]
    return [*reading, *printing, *_strings(env)]


def _reading(env: Environment, what: str, text: bytes, datatype: str) -> Row:
    """Compare with orjson and numpy, as a gateway reads that is not compiled."""
    code, known = DATATYPE_CODES[datatype], DATATYPES[datatype]
    return _compared(
        env,
        f"reading {what}",
        lambda: decode_numbers(text, code),
        lambda: decode_plainly(text, known),
        "orjson with numpy",
        _MOST_READING,
    )


def _printing(env: Environment, datatype: str, values: Any) -> Row:
    code, data = DATATYPE_CODES[datatype], values.tobytes()
    return _compared(
        env,
        f"printing {datatype}",
        lambda: encode_numbers(data, code),
        lambda: orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY),
        "orjson",
        _MOST_PRINTING,
    )


def _compared(env: Environment, what: str, ours: Job, theirs: Job, name: str, most: float) -> Row:
    timed = {"ours": partial(_cpu_time, ours), "theirs": partial(_cpu_time, theirs)}
    times = run_rounds(env.rounds(30), timed, short=True)
    ratio = Ratio.of(times["ours"], times["theirs"])
    return Row(
        f"{what}, a number",
        f"{name}: {_each(times['theirs'], _COUNT)}",
        _each(times["ours"], _COUNT),
        ratio.shown(2, name),
        at_most(ratio.median, most, f"{most} ×"),
    )


def _strings(env: Environment) -> list[Row]:
    """Measure short strings through scanner, decoder and encoder, each window by itself."""
    letters = random.Random(0)
    texts = [
        "".join(letters.choices(string.ascii_letters, k=letters.randint(3, 12)))
        for _ in range(_COUNT)
    ]
    text = json.dumps(texts).encode()
    data = _read_strings(text)
    jobs: dict[str, Job] = {
        "reading BYTES, short texts": lambda: _read_strings(text),
        "printing BYTES, short texts": lambda: _print_strings(data),
    }
    timed = {name: partial(_cpu_time, job) for name, job in jobs.items()}
    times = run_rounds(env.rounds(30), timed, short=True)
    return [
        Row(
            f"{name}, an element",
            "",
            _each(taken, _COUNT),
            "",
            at_most(sorted(taken)[len(taken) // 2] / _COUNT, _MOST_STRING, "60 ns"),
        )
        for name, taken in times.items()
    ]


def _read_strings(text: bytes) -> bytes:
    decoder = TensorDecoder("", DATATYPES["BYTES"])
    for item in ArrayScanner("", _DEPTH_CAP).scan(text, last=True):
        decoder.feed(item)
    return b"".join(decoder.chunks)


def _print_strings(data: bytes) -> bytes:
    return bytes(make_tensor_encoder("", DATATYPES["BYTES"], JsonPolicies()).feed(data))


def _cpu_time(job: Job) -> float:
    """Return the CPU time of a job; it runs once untimed."""
    job()
    began = time.process_time()
    for _ in range(_REPEATS):
        job()
    return (time.process_time() - began) / _REPEATS


def _each(seconds: list[float], count: int) -> str:
    return f"{sorted(seconds)[len(seconds) // 2] / count * 1e9:.1f} ns"
