"""The page's modules that make bytes of tensors and of images, and print them."""

from __future__ import annotations

import base64
import json
from itertools import product
from typing import Any

import numpy as np

from tests.interop.page.stand import Stand

_FLOATS = [
    *(0.0, -0.0, 1.0, -2.5, 65504.0, 65519.0, 65520.0, 1e10, 2.0**-14, 2.0**-24, 2.0**-25),
    *(1.5 * 2.0**-25, 5.960464e-08, 1.0009765625, 1.00048828125, 1.00146484375, 3.4e38),
    *np.random.default_rng(1).standard_normal(500, np.float32).tolist(),
    *(np.random.default_rng(2).standard_normal(200) * 1e-6).astype(np.float32).tolist(),
]

_DTYPES = {
    "UINT8": "<u1",
    "UINT32": "<u4",
    "INT8": "<i1",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}

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


async def test_fp16_is_rounded_as_numpy_does(stand: Stand) -> None:
    with np.errstate(over="ignore"):
        expected = np.array(_FLOATS, np.float32).astype("<f2").tobytes()
    assert await _bytes(stand, _FLOATS, "FP16") == expected


async def test_bf16_is_rounded_to_the_nearest_of_two_to_the_even_one(stand: Stand) -> None:
    bits = np.array(_FLOATS, np.float32).view(np.uint32).astype(np.uint64)
    expected = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()
    assert await _bytes(stand, _FLOATS, "BF16") == expected


async def test_what_is_not_finite_stays_so_in_16_bits(stand: Stand) -> None:
    found = await _call(
        stand,
        "bytes.js",
        "[Infinity, -Infinity, NaN].map((each) => [it.halfBits(each), it.bfloatBits(each)])",
    )
    assert found[:2] == [[0x7C00, 0x7F80], [0xFC00, 0xFF80]]
    assert np.isnan(np.array([found[2][0]], np.uint16).view(np.float16)[0])
    assert np.isnan(np.array([found[2][1] << 16], np.uint32).view(np.float32)[0])


async def test_numbers_become_bytes_of_each_datatype(stand: Stand) -> None:
    values = [0, 1, 2, 127]
    for datatype, dtype in _DTYPES.items():
        assert await _bytes(stand, values, datatype) == np.array(values, dtype).tobytes()


async def test_integers_of_64_bits_that_json_rounds_stay_exact(stand: Stand) -> None:
    text = '[[1, -9007199254740993], [9223372036854775807, "-9223372036854775808"]]'
    parsed = await _call(
        stand, "try_inputs.js", f"it.parseValues({json.dumps(text)}, 'INT64').flat()"
    )
    numbers = [1, -9007199254740993, 2**63 - 1, -(2**63)]
    assert await _bytes(stand, parsed, "INT64") == np.array(numbers, "<i8").tobytes()


async def test_values_tell_the_sizes_of_free_dimensions(stand: Stand) -> None:
    cases: list[tuple[object, list[int], list[int] | None]] = [
        ([1, 2, 3], [-1], [3]),
        ([[1, 2, 3], [4, 5, 6]], [-1, -1], [2, 3]),
        ([1, 2, 3, 4, 5, 6], [-1, 3], [2, 3]),
        ([1, 2, 3, 4], [-1, 3], None),
        ([1, 2, 3, 4], [-1, -1], None),
    ]
    given = json.dumps([case[:2] for case in cases])
    found = await _call(stand, "try_inputs.js", f"{given}.map((each) => it.sizesOf(...each))")
    assert found == [expected for _, _, expected in cases]


async def test_layouts_are_those_that_a_shape_may_have(stand: Stand) -> None:
    cases: list[tuple[str, list[int], list[str]]] = [
        ("FP32", [-1, 3, 224, 224], ["NCHW"]),
        ("UINT8", [1, 28, 28, 1], ["NHWC"]),
        ("FP32", [-1, -1, -1, 3], ["NHWC", "NCHW"]),
        ("FP32", [3, 8, 8], ["CHW"]),
        ("FP32", [28, 28], ["HW"]),
        ("FP32", [8], []),
        ("FP32", [1, 1, 3, 8, 8], []),
        ("BYTES", [8, 8], []),
    ]
    given = json.dumps([{"datatype": datatype, "shape": shape} for datatype, shape, _ in cases])
    found = await _call(stand, "try_image.js", f"{given}.map((each) => it.imageLayouts(each))")
    assert found == [expected for _, _, expected in cases]


async def test_image_becomes_a_tensor(stand: Stand) -> None:
    for layout, scale in product(("CHW", "NHWC"), ("unit", "bytes", "signed", "imagenet")):
        await _check_image(stand, layout, scale, "FP32")
    await _check_image(stand, "NCHW", "bytes", "UINT8")
    await _check_image(stand, "HWC", "shifted", "INT8")
    await _check_image(stand, "CHW", "imagenet", "FP16")


async def _check_image(stand: Stand, layout: str, scale: str, datatype: str) -> None:
    image = np.random.default_rng(3).integers(256, size=(4, 5, 3))
    pixels = np.dstack([image, np.full((4, 5), 255)]).ravel().tolist()
    sizes = {"N": 2, "C": 3, "H": 4, "W": 5}
    spec = {
        "shape": [sizes[letter] for letter in layout],
        "layout": layout,
        "datatype": datatype,
        "scale": scale,
    }
    arguments = f"{json.dumps(pixels)}, {json.dumps(spec)}"
    text = await _call(
        stand,
        "try_image.js",
        f"import('./page/bytes.js').then(({{toBase64}}) => toBase64(it.imageTensor({arguments})))",
    )
    expected = _SCALES[scale](image.astype(np.float64))
    if layout.endswith("CHW"):
        expected = expected.transpose(2, 0, 1)
    batch = np.stack([expected] * (2 if "N" in layout else 1))
    # The page computes with doubles, and rounds to FP32 before it rounds to FP16.
    tensor = (batch.astype("<f4") if datatype == "FP16" else batch).astype(_DTYPES[datatype])
    assert base64.b64decode(text) == tensor.tobytes()


async def test_grey_image_has_the_brightness_of_its_colours(stand: Stand) -> None:
    pixels = [255, 0, 0, 255, 0, 255, 0, 255, 10, 20, 30, 255]
    spec = {"shape": [1, 3], "layout": "HW", "datatype": "UINT8", "scale": "bytes"}
    arguments = f"{json.dumps(pixels)}, {json.dumps(spec)}"
    found = await _call(stand, "try_image.js", f"[...it.imageTensor({arguments})]")
    assert found == [76, 150, 18]


async def test_bytes_are_dumped_with_offsets_and_text(stand: Stand) -> None:
    found = await _call(
        stand, "bytes.js", "it.hexDump(new TextEncoder().encode('sixteen bytes, \\u00e9nd'))"
    )
    assert found == (
        "00000000  73 69 78 74 65 65 6e 20  62 79 74 65 73 2c 20 c3  |sixteen bytes, .|\n"
        "00000010  a9 6e 64                                          |.nd|"
    )


async def test_json_is_printed_in_lines_and_long_lists_are_cut(stand: Stand) -> None:
    document = {"outputs": [{"name": "OUTPUT0", "shape": [1000], "data": list(range(1000))}]}
    found = await _call(stand, "try_messages.js", f"it.prettyJson({json.dumps(document)})")
    assert found.splitlines()[:4] == [
        "{",
        '  "outputs": [',
        "    {",
        '      "name": "OUTPUT0",',
    ]
    assert "22, 23, … 976 more]" in found


async def test_json_of_any_depth_is_printed(stand: Stand) -> None:
    depth = 3000
    nested = f"JSON.parse('['.repeat({depth}) + ']'.repeat({depth}))"
    assert len(await _call(stand, "try_messages.js", f"it.prettyJson({nested})")) < 5000


async def test_index_of_a_value_is_told_by_dimensions(stand: Stand) -> None:
    places = "[0, 5, 23].map((index) => it.indexText(index, [2, 3, 4]))"
    assert await _call(stand, "try_outputs.js", places) == ["[0, 0, 0]", "[0, 1, 1]", "[1, 2, 3]"]
