"""The page's modules that make bytes of tensors and of images, and print them."""

from __future__ import annotations

import base64
import json
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.codec.reference import DTYPES
from tests.interop.page.stand import Stand

_FLOATS = [
    *(0.0, -0.0, 1.0, -2.5, 65504.0, 65519.0, 65520.0, 1e10, 2.0**-14, 2.0**-24, 2.0**-25),
    *(1.5 * 2.0**-25, 5.960464e-08, 1.0009765625, 1.00048828125, 1.00146484375, 3.4e38),
    *np.random.default_rng(1).standard_normal(500, np.float32).tolist(),
    *(np.random.default_rng(2).standard_normal(200) * 1e-6).astype(np.float32).tolist(),
]

_SCALES = {
    "unit": lambda image: image / 255,
    "bytes": lambda image: image,
    "signed": lambda image: image / 127.5 - 1,
    "imagenet": lambda image: (image / 255 - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225),
    "shifted": lambda image: image - 128,
}


async def _call(stand: Stand, module: str, expression: str) -> Any:
    """Evaluate an expression with a module of the page as ``it``."""
    if not await stand.page.evaluate("location.href.startsWith('http')"):
        await stand.show("overview")
    return await stand.page.evaluate(f"import('./page/{module}').then((it) => {expression})")


async def _bytes(stand: Stand, values: object, datatype: str) -> bytes:
    arguments = f"{json.dumps(values)}, {json.dumps(datatype)}"
    text = await _call(stand, "bytes.js", f"it.toBase64(it.tensorBytes({arguments}))")
    return base64.b64decode(text)


async def test_numbers_become_bytes_of_each_datatype(stand: Stand) -> None:
    values = [0, 1, 2, 127]
    for datatype in ("UINT8", "UINT32", "INT8", "INT64", "FP16", "FP32", "FP64"):
        dtype = DTYPES[datatype]
        assert await _bytes(stand, values, datatype) == np.array(values, dtype).tobytes()
    floats = np.array(_FLOATS, np.float32)
    with np.errstate(over="ignore"):
        assert await _bytes(stand, _FLOATS, "FP16") == floats.astype("<f2").tobytes()
    # The nearest of two; in the middle, the even one.
    bits = floats.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()
    assert await _bytes(stand, _FLOATS, "BF16") == rounded


async def test_what_is_not_finite_stays_so_in_16_bits(stand: Stand) -> None:
    numbers = "[Infinity, -Infinity, NaN]"
    expression = f"{numbers}.map((each) => [it.halfBits(each), it.bfloatBits(each)])"
    *infinite, (half, bfloat) = await _call(stand, "bytes.js", expression)
    assert infinite == [[0x7C00, 0x7F80], [0xFC00, 0xFF80]]
    assert np.isnan(np.array([half], np.uint16).view(np.float16)[0])
    assert np.isnan(np.array([bfloat << 16], np.uint32).view(np.float32)[0])


async def test_integers_of_64_bits_that_json_rounds_stay_exact(stand: Stand) -> None:
    text = '[[1, -9007199254740993], [9223372036854775807, "-9223372036854775808"]]'
    expression = f"it.parseValues({json.dumps(text)}, 'INT64').flat()"
    parsed = await _call(stand, "try_inputs.js", expression)
    numbers = [1, -9007199254740993, 2**63 - 1, -(2**63)]
    assert await _bytes(stand, parsed, "INT64") == np.array(numbers, "<i8").tobytes()


async def test_image_becomes_a_tensor(stand: Stand) -> None:
    for layout, scale in product(("CHW", "NHWC"), ("unit", "bytes", "signed", "imagenet")):
        await _check_image(stand, layout, scale, "FP32")
    await _check_image(stand, "NCHW", "bytes", "UINT8")
    await _check_image(stand, "HWC", "shifted", "INT8")
    await _check_image(stand, "CHW", "imagenet", "FP16")


async def _check_image(stand: Stand, layout: str, scale: str, datatype: str) -> None:
    image = np.random.default_rng(3).integers(256, size=(4, 5, 3))
    pixels = np.dstack([image, np.full((4, 5), 255)]).ravel().tolist()
    shape = [{"N": 2, "C": 3, "H": 4, "W": 5}[letter] for letter in layout]
    spec = {"shape": shape, "layout": layout, "datatype": datatype, "scale": scale}
    tensor = f"it.imageTensor({json.dumps(pixels)}, {json.dumps(spec)})"
    text = await _call(
        stand,
        "try_image.js",
        f"import('./page/bytes.js').then((bytes) => bytes.toBase64({tensor}))",
    )
    expected = _SCALES[scale](image.astype(np.float64))
    if layout.endswith("CHW"):
        expected = expected.transpose(2, 0, 1)
    batch = np.stack([expected] * (2 if "N" in layout else 1))
    # The page computes with doubles, and rounds to FP32 before it rounds to FP16.
    numbers = (batch.astype("<f4") if datatype == "FP16" else batch).astype(DTYPES[datatype])
    assert base64.b64decode(text) == numbers.tobytes()


_RESULTS: dict[str, tuple[str, str, list[tuple[list[Any], Any]]]] = {
    "values tell the sizes of free dimensions": (
        "try_inputs.js",
        "it.sizesOf(...each)",
        [
            ([[1, 2, 3], [-1]], [3]),
            ([[[1, 2, 3], [4, 5, 6]], [-1, -1]], [2, 3]),
            ([[1, 2, 3, 4, 5, 6], [-1, 3]], [2, 3]),
            ([[1, 2, 3, 4], [-1, -1]], None),
        ],
    ),
    "layouts are those that a shape may have": (
        "try_image.js",
        "it.imageLayouts({datatype: each[0], shape: each[1]})",
        [
            (["FP32", [-1, 3, 224, 224]], ["NCHW"]),
            (["FP32", [-1, -1, -1, 3]], ["NHWC", "NCHW"]),
            (["FP32", [28, 28]], ["HW"]),
            (["FP32", [1, 1, 3, 8, 8]], []),
            (["BYTES", [8, 8]], []),
        ],
    ),
    "a grey image has the brightness of its colours": (
        "try_image.js",
        "[...it.imageTensor(each, "
        "{shape: [1, 3], layout: 'HW', datatype: 'UINT8', scale: 'bytes'})]",
        [([255, 0, 0, 255, 0, 255, 0, 255, 10, 20, 30, 255], [76, 150, 18])],
    ),
    "the index of a value is told by dimensions": (
        "try_outputs.js",
        "it.indexText(...each, [2, 3, 4])",
        [([0], "[0, 0, 0]"), ([5], "[0, 1, 1]"), ([23], "[1, 2, 3]")],
    ),
    "bytes are dumped with offsets and text": (
        "bytes.js",
        "it.hexDump(new TextEncoder().encode(...each))",
        [
            (
                ["sixteen bytes, \u00e9nd"],
                "00000000  73 69 78 74 65 65 6e 20  62 79 74 65 73 2c 20 c3  |sixteen bytes, .|\n"
                "00000010  a9 6e 64                                          |.nd|",
            )
        ],
    ),
}


@pytest.mark.parametrize(("module", "expression", "cases"), _RESULTS.values(), ids=_RESULTS)
async def test_modules_compute(
    stand: Stand, module: str, expression: str, cases: list[tuple[list[Any], Any]]
) -> None:
    given = json.dumps([each for each, _ in cases])
    found = await _call(stand, module, f"{given}.map((each) => {expression})")
    assert found == [expected for _, expected in cases]


async def test_json_of_any_depth_is_printed_in_lines_and_long_lists_are_cut(stand: Stand) -> None:
    document = {"outputs": [{"name": "OUTPUT0", "shape": [1000], "data": list(range(1000))}]}
    found = await _call(stand, "try_messages.js", f"it.prettyJson({json.dumps(document)})")
    assert found.startswith('{\n  "outputs": [\n    {\n      "name": "OUTPUT0",\n')
    assert "22, 23, … 976 more]" in found
    nested = "JSON.parse('['.repeat(3000) + ']'.repeat(3000))"
    assert len(await _call(stand, "try_messages.js", f"it.prettyJson({nested})")) < 5000
