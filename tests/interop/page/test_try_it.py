"""The panel "Try it": operators send calls to models, and see the outputs and both sides."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from tests.interop.page.browser import TIMEOUT
from tests.interop.page.stand import TOKEN, Stand, violations
from tests.support.gateway import until

_SEND = "#panel-try .primary"
_SHOWN_RESULT = "!document.querySelector('.result').hidden"

_ADD_FAILED_ATTEMPT = """
(() => {
  const fetchAnyhow = window.fetch;
  window.fetch = async (url, options) => {
    const response = await fetchAnyhow(url, options);
    if (url !== 'api/try' || !response.ok) return response;
    const found = await response.json();
    const endpoint = 'http://failed.example';
    found.attempts.unshift(
      {...found.attempts[0], endpoint, response: null, error: 'connection refused'});
    return new Response(JSON.stringify(found));
  };
})()
"""


Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def write_png(file: Path, pixels: Pixels) -> None:
    """Write RGB pixels, an array of rows × columns × 3."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # each row without a filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)


async def _show_model(stand: Stand, model: str, inputs: int = 1) -> None:
    await stand.show(f"try?model={quote(model, safe='')}")
    await stand.page.wait_for_count(inputs, ".input")


async def _type_values(stand: Stand, text: str) -> None:
    await stand.page.fill("select[id$=-fill]", "values")
    await stand.page.fill(".input textarea", text)


async def _send(stand: Stand) -> str:
    """Send by the keyboard, enter the token, and return the text of the result."""
    await stand.page.press("Enter", _SEND)
    await stand.enter_token()
    await stand.page.wait_for(_SHOWN_RESULT)
    return await stand.page.text(".result")


async def _choose_view(stand: Stand, name: str) -> None:
    """Choose a view of each output that has it."""
    await stand.page.evaluate(
        "[...document.querySelectorAll('.output .choices button')]"
        f".filter(each => each.innerText === '{name}').forEach(each => each.click())"
    )


async def test_values_are_sent_as_json_and_both_sides_are_shown(stand: Stand) -> None:
    page = stand.page
    await _show_model(stand, "half")
    await _type_values(stand, "[1, 2.5, -3]")
    # The values tell the size of the free dimension.
    assert await page.each("input[id$=-size-0]", "value") == ["3"]
    await page.evaluate(_ADD_FAILED_ATTEMPT)
    result = await _send(stand)
    assert "200 OK" in result
    assert "FP16 · 3 · 3 values · minimum -1.5 · maximum 1.25 · mean 0.0833333" in result
    rows = [row.split() for row in await page.each(".output tbody tr")]
    assert rows == [["[0]", "0.5"], ["[1]", "1.25"], ["[2]", "-1.5"]]
    assert "of JSON; the server got" in result
    assert '"data": [1, 2.5, -3]' in result
    assert "POST /v2/models/half/infer HTTP/1.1" in result
    # FP16 of 1, 2.5 and -3, at the server's side.
    assert "00 3c 00 41 00 c2" in result
    # A failed attempt is shown before the next one.
    assert "Attempt 1 of 2: http://failed.example of " in result
    assert "connection refused" in result
    assert "Attempt 2 of 2: http://127." in result
    assert "of binary at attempt 2." in result
    await page.wait_for_text("half: 200 OK after", "#announcements")
    # The focus stays, so that the next call is one key away.
    assert await page.evaluate(f"document.activeElement === document.querySelector('{_SEND}')")


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ("binary", " of binary; the server got "),
        ("raw", "The client sent 400 B of raw bytes; the server got "),
        ("v1", " of JSON; the server got "),
        ("grpc", " of gRPC; the server got "),
    ],
)
async def test_call_is_sent_in_each_form(stand: Stand, form: str, sentence: str) -> None:
    page = stand.page
    await _show_model(stand, "identity_fp32")
    await page.fill("input[id$=-size-0]", "100")
    await page.click(f"#try-form-{form}")
    result = await _send(stand)
    assert "200 OK" in result
    assert sentence in result
    assert "100 values" in result
    await _choose_view(stand, "Histogram")
    (label,) = await page.each(".histogram", "ariaLabel")
    assert "100 values from" in label


async def test_json_call_is_compared_with_and_without_conversion(stand: Stand) -> None:
    page = stand.page
    await _show_model(stand, "identity_fp32")
    await page.click("#try-form-binary")
    assert await page.each("#try-compare", "disabled") == [True]
    await page.click("#try-form-json")
    await page.click("#try-compare")
    assert "Medians of three calls each." in await _send(stand)
    await stand.show("models?name=identity_fp32")
    await page.wait_for_text("a call of 2 elements took", "#panel-models")
    await _show_model(stand, "half")  # FP16 in JSON
    await page.click("#try-compare")
    result = await _send(stand)
    assert "200 OK" in result
    assert "No server takes this call without conversion." in result


async def test_token_is_asked_for_once_and_kept_nowhere(stand: Stand) -> None:
    page = stand.page
    await _show_model(stand, "add", inputs=2)
    await page.press("Enter", _SEND)
    await stand.enter_token("wrong")
    await page.wait_for_text("Not sent: an API key of the group in admin.keys is needed", "dialog")
    assert "a client's API key" in await page.text("#panel-try")
    await page.type(TOKEN)
    await page.press("Enter")
    await page.wait_for(_SHOWN_RESULT)
    await page.evaluate("document.querySelector('.result').hidden = true")
    await page.press("Enter", _SEND)
    await page.wait_for(_SHOWN_RESULT)
    assert await page.count("dialog") == 0
    await stand.check_that_the_token_is_kept_nowhere()


async def test_invalid_input_is_told_at_its_field_and_not_sent(stand: Stand) -> None:
    page = stand.page
    await _show_model(stand, "half")
    await _type_values(stand, "[1, 2")
    assert "This is not JSON:" in await page.text(".input .failure")
    assert await page.each(".input textarea", "ariaInvalid") == ["true"]
    await page.fill(".input textarea", "[[1], [2, 3]]")
    await page.fill("input[id$=-size-0]", "4")
    await page.press("Enter", _SEND)
    await page.wait_for_text("4 takes 4 values, not 3.", ".input .failure")
    await page.fill("input[id$=-size-0]", "1.5")
    await page.press("Enter", _SEND)
    await page.wait_for_text("must be a whole number", ".input .failure")
    assert await page.evaluate("document.activeElement.id.endsWith('-size-0')")
    assert await violations(page) == []
    # Nor is a call whose user does not enter the token.
    await _type_values(stand, '[1, "x"]')
    await page.press("Enter", _SEND)
    await page.wait_for("document.activeElement.id === 'action-key'")
    await page.press("Escape")
    await page.wait_for("!document.querySelector('dialog')")
    assert await page.text(_SEND) == "Send"
    assert not any(url.endswith("/api/try") for url in page.requests)
    # The gateway names the input of its error.
    await page.press("Enter", _SEND)
    await stand.enter_token()
    await page.wait_for_text("is not a number, as FP16 needs", ".input .failure")
    assert await page.focused("tagName") == "TEXTAREA"


async def test_image_file_becomes_the_tensor_of_an_input(stand: Stand, tmp_path: Path) -> None:
    page, file = stand.page, tmp_path / "image.png"
    await _show_model(stand, "image")
    await page.fill("select[id$=-fill]", "image")
    file.write_text("this is a text")
    await page.choose_file("input[type=file]", file)
    await page.wait_for_text("The browser cannot read this file as an image.", ".input .failure")
    await page.press("Enter", _SEND)
    await page.wait_for("document.activeElement.type === 'file'")
    image = tmp_path / "other.png"
    write_png(image, np.full((100, 150, 3), (255, 51, 0), np.uint8))
    await page.choose_file("input[type=file]", image)
    await page.wait_for_text("150 × 100 pixels, sent as 224 × 224.", ".image-fill")
    await page.click("#try-form-binary")
    await _send(stand)
    values = [float(each) for each in await page.each(".output:first-of-type tbody td")]
    assert np.allclose(values, [1, 0.2, 0])
    await _choose_view(stand, "Image")
    await page.wait_for_text("of 224 rows of the first colour", ".output")
    assert await page.count(".output canvas") == 1
    assert "Save input0.bin" in await page.each(".result .buttons button")
    assert await violations(page) == []


async def test_inputs_of_a_model_without_metadata_are_added_by_hand(stand: Stand) -> None:
    page = stand.page
    await _show_model(stand, "no-such-model")
    assert "The inputs are not known" in await page.text("#panel-try")
    await page.fill("input[id$=-name]", "TEXT")
    await page.fill("select[id$=-datatype]", "BYTES")
    await page.fill("input[id$=-shape]", "2, 1")
    await _type_values(stand, '["a", "b"]')
    await page.press_button("Add an input")
    assert await page.evaluate("document.activeElement.id.endsWith('-name')")
    assert await page.each("#try-form-raw", "disabled") == [True]
    await page.press_button("Remove this input", ".input:last-of-type button")
    await page.wait_for_count(1, ".input")
    result = await _send(stand)
    assert "404 Not found" in result
    assert "'no-such-model' is not found" in result
    assert '"name": "TEXT"' in result
    assert '"data": ["a", "b"]' in result


async def test_model_is_found_as_one_types(stand: Stand) -> None:
    page = stand.page
    await stand.show("try")
    await page.wait_for("document.querySelectorAll('#try-models option').length > 5")
    await page.type("identity_int", "#try-model")
    await page.wait_for_count(4, "#try-models option")
    await page.type("64")
    await page.wait_for("location.hash === '#try?model=identity_int64'")
    await page.wait_for_count(1, ".input")
    assert "INT64" in await page.text(".input legend")


async def test_panel_models_and_panel_calls_lead_here_and_there(stand: Stand) -> None:
    page = stand.page
    await stand.show("models?name=half")
    await page.click("#panel-models .crumbs a[href='#try?model=half']")
    await page.wait_for_count(1, ".input")
    await _send(stand)
    await page.click(".result a[href^='#calls?request_id=']")
    await page.wait_for_count(1, ".calls .toggle")
    assert "half" in await page.text(".calls tbody")
    # Who comes back finds the model, and its result.
    await page.click("nav a[href='#try']")
    await page.wait_for("location.hash === '#try?model=half'")
    assert "200 OK" in await page.text(".result")
    assert await page.count(".input") == 1


async def test_text_is_shown_without_a_clipboard_and_a_body_is_saved(
    stand: Stand, tmp_path: Path
) -> None:
    page = stand.page
    await _show_model(stand, "identity_fp32")
    await _type_values(stand, "[1, 2.5, -3]")
    await page.click("#try-form-raw")
    await page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    await _send(stand)
    for name, part in (
        ("curl", "curl --path-as-is "),
        ("tritonclient code", "import numpy"),
    ):
        await page.press_button(f"Copy as {name}", ".result button")
        await page.wait_for("document.activeElement.id === 'try-copy'")
        assert part in await page.evaluate("getSelection().toString()")
    assert await violations(page) == []
    folder = tmp_path / "saved"
    await page.save_downloads_in(folder)
    await page.press_button("Save body.bin", ".result button")
    file = folder / "body.bin"
    await until(file.exists, TIMEOUT)
    assert np.frombuffer(file.read_bytes(), "<f4").tolist() == [1, 2.5, -3]


async def test_large_outputs_show_their_first_values(stand: Stand) -> None:
    page = stand.page
    await _show_model(stand, "identity_fp32")
    await page.fill("input[id$=-size-0]", "1000000")
    await page.click("#try-form-binary")
    assert "more bytes" in await _send(stand)
    assert "the first 100 of 1,000,000" in await page.text(".output")
    for _ in range(2):
        await page.evaluate("document.querySelector('.output .buttons button').click()")
    assert "the first 1,000 of 1,000,000" in await page.text(".output")
    assert await page.count(".output tbody tr") == 1000
    assert await page.count("*") < 12_000


async def test_panel_with_a_result_is_accessible_and_fits(stand: Stand) -> None:
    page = stand.page
    await _show_model(stand, "add", inputs=2)
    await _send(stand)
    await _choose_view(stand, "Histogram")
    for width, scheme in ((1600, "light"), (1024, "dark"), (320, "light")):
        await page.resize(width)
        await page.prefer(scheme)
        assert await violations(page) == []
        assert await page.fits_width(), width
