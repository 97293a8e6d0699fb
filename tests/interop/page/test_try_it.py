"""The panel "Try it": operators send calls to models, and see the outputs and both sides."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from tests.interop.page.accessibility import violations
from tests.interop.page.browser import TIMEOUT
from tests.interop.page.png import write_png
from tests.interop.page.stand import TOKEN, Stand
from tests.interop.page.test_names import NAMES

_INPUTS = "document.querySelectorAll('.input').length"
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


async def _show_model(stand: Stand, model: str, inputs: int = 1) -> None:
    await stand.show(f"try?model={quote(model, safe='')}")
    await stand.page.wait_for(f"{_INPUTS} === {inputs}")


async def _set(stand: Stand, selector: str, value: str) -> None:
    """Set a field as a user does who types or chooses."""
    await stand.page.evaluate(
        f"(() => {{ const field = document.querySelector({json.dumps(selector)});"
        f" field.value = {json.dumps(value)};"
        " field.dispatchEvent(new Event('input')); field.dispatchEvent(new Event('change')); })()"
    )


async def _type_values(stand: Stand, text: str) -> None:
    await _set(stand, "select[id$=-fill]", "values")
    await _set(stand, ".input textarea", text)


async def _send(stand: Stand, token: str = TOKEN) -> None:
    """Send by the keyboard; enter the token."""
    await _press_send(stand)
    await stand.page.wait_for("document.activeElement.id === 'action-key'")
    await stand.page.type(token)
    await stand.page.press("Enter")


async def _send_and_wait(stand: Stand) -> None:
    await _send(stand)
    await stand.page.wait_for(_SHOWN_RESULT)


async def _press_send(stand: Stand) -> None:
    await stand.page.evaluate(f"document.querySelector('{_SEND}').focus()")
    await stand.page.press("Enter")


async def _choose_view(stand: Stand, name: str) -> None:
    """Choose a view of each output that has it."""
    await stand.page.evaluate(
        "[...document.querySelectorAll('.output .choices button')]"
        f".filter(each => each.innerText === '{name}').forEach(each => each.click())"
    )


async def test_values_are_sent_as_json_and_both_sides_are_shown(
    stand_with_payloads: Stand,
) -> None:
    stand = stand_with_payloads
    page = stand.page
    await _show_model(stand, "half")
    await _type_values(stand, "[1, 2.5, -3]")
    # The values tell the size of the free dimension.
    assert await page.evaluate("document.querySelector('input[id$=-size-0]').value") == "3"
    await _send_and_wait(stand)
    result = await page.text(".result")
    assert "200 OK" in result
    assert "FP16 · 3 · 3 values · minimum -1.5 · maximum 1.25 · mean 0.0833333" in result
    cells = (
        "[...document.querySelectorAll('.output tbody tr')]"
        ".map(each => each.innerText.split(/\\s+/))"
    )
    assert await page.evaluate(cells) == [["[0]", "0.5"], ["[1]", "1.25"], ["[2]", "-1.5"]]
    assert "of JSON; the server got" in result
    assert '"data": [1, 2.5, -3]' in result
    assert "POST /v2/models/half/infer HTTP/1.1" in result
    # FP16 of 1, 2.5 and -3, at the server's side.
    assert "00 3c 00 41 00 c2" in result
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
async def test_call_is_sent_in_each_form(
    stand_with_payloads: Stand, form: str, sentence: str
) -> None:
    stand = stand_with_payloads
    page = stand.page
    await _show_model(stand, "identity_fp32")
    await _set(stand, "input[id$=-size-0]", "100")
    await page.click(f"#try-form-{form}")
    await _send_and_wait(stand)
    result = await page.text(".result")
    assert "200 OK" in result
    assert sentence in result
    assert "100 values" in result
    await _choose_view(stand, "Histogram")
    label = await page.evaluate("document.querySelector('.histogram').getAttribute('aria-label')")
    assert "100 values from" in label


async def test_json_call_is_compared_with_and_without_conversion(
    stand_with_payloads: Stand,
) -> None:
    stand = stand_with_payloads
    page = stand.page
    await _show_model(stand, "identity_fp32")
    await page.click("#try-form-binary")
    assert await page.evaluate("document.querySelector('#try-compare').disabled")
    await page.click("#try-form-json")
    await page.click("#try-compare")
    await _send_and_wait(stand)
    assert "Medians of three calls each." in await page.text(".result")
    await stand.show("models?name=identity_fp32")
    await page.wait_for_text("a call of 2 elements took", "#panel-models")


async def test_comparison_that_no_server_takes_is_told(stand_with_payloads: Stand) -> None:
    stand = stand_with_payloads
    await _show_model(stand, "half")  # FP16 in JSON
    await stand.page.click("#try-compare")
    await _send_and_wait(stand)
    result = await stand.page.text(".result")
    assert "200 OK" in result
    assert "No server takes this call without conversion." in result


async def test_token_is_asked_for_once_and_kept_nowhere(stand_with_payloads: Stand) -> None:
    stand = stand_with_payloads
    page = stand.page
    await _show_model(stand, "add", inputs=2)
    await _send(stand, "wrong")
    await page.wait_for_text("Not sent: an API key of the group in admin.keys is needed", "dialog")
    assert "a client's API key" in await page.text("#panel-try")
    await page.type(TOKEN)
    await page.press("Enter")
    await page.wait_for(_SHOWN_RESULT)
    await page.evaluate("document.querySelector('.result').hidden = true")
    await _press_send(stand)
    await page.wait_for(_SHOWN_RESULT)
    assert not await page.evaluate("document.querySelector('dialog') !== null")
    kept = (
        "JSON.stringify([location.href, document.cookie, {...localStorage}, {...sessionStorage}])"
    )
    assert TOKEN not in await page.evaluate(kept)
    assert TOKEN not in await page.evaluate("document.documentElement.outerHTML")


async def test_cancelled_call_is_not_sent(stand_with_payloads: Stand) -> None:
    stand = stand_with_payloads
    page = stand.page
    await _show_model(stand, "half")
    await _press_send(stand)
    await page.wait_for("document.activeElement.id === 'action-key'")
    await page.press("Escape")
    await page.wait_for("!document.querySelector('dialog')")
    assert await page.text(_SEND) == "Send"
    assert not any(url.endswith("/api/try") for url in page.requests)


async def test_invalid_input_is_told_at_its_field(stand_with_payloads: Stand) -> None:
    stand = stand_with_payloads
    page = stand.page
    await _show_model(stand, "half")
    await _type_values(stand, "[1, 2")
    assert "This is not JSON:" in await page.text(".input .failure")
    assert await page.evaluate("document.querySelector('.input textarea').ariaInvalid") == "true"
    await _set(stand, ".input textarea", "[[1], [2, 3]]")
    await _set(stand, "input[id$=-size-0]", "4")
    await _press_send(stand)
    await page.wait_for_text("4 takes 4 values, not 3.", ".input .failure")
    await _set(stand, "input[id$=-size-0]", "1.5")
    await _press_send(stand)
    await page.wait_for_text("must be a whole number", ".input .failure")
    assert await page.evaluate("document.activeElement.id.endsWith('-size-0')")
    assert await violations(page) == []
    assert not any(url.endswith("/api/try") for url in page.requests)


async def test_error_of_the_gateway_is_told_at_the_input_that_it_names(
    stand_with_payloads: Stand,
) -> None:
    stand = stand_with_payloads
    page = stand.page
    await _show_model(stand, "half")
    await _type_values(stand, '[1, "x"]')
    await _send(stand)
    await page.wait_for_text("is not a number, as FP16 needs", ".input .failure")
    assert await page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    page.network_errors.clear()


async def test_image_file_becomes_the_tensor_of_an_input(
    stand_with_payloads: Stand, tmp_path: Path
) -> None:
    stand, file = stand_with_payloads, tmp_path / "image.png"
    page = stand.page
    write_png(file, np.full((100, 150, 3), (255, 51, 0), np.uint8))
    await _show_model(stand, "image")
    await _set(stand, "select[id$=-fill]", "image")
    await page.choose_file("input[type=file]", file)
    await page.wait_for_text("150 × 100 pixels, sent as 224 × 224.", ".image-fill")
    await page.click("#try-form-binary")
    await _send_and_wait(stand)
    values = await page.evaluate(
        "[...document.querySelectorAll('.output')[0].querySelectorAll('tbody td')]"
        ".map(each => Number(each.innerText))"
    )
    assert np.allclose(values, [1, 0.2, 0])
    await _choose_view(stand, "Image")
    await page.wait_for_text("of 224 rows of the first colour", ".output")
    assert await page.evaluate("document.querySelectorAll('.output canvas').length") == 1
    saved = "[...document.querySelectorAll('.result .buttons button')].map(each => each.innerText)"
    assert "Save input0.bin" in await page.evaluate(saved)
    assert await violations(page) == []


async def test_image_of_one_colour_is_shown_grey(
    stand_with_payloads: Stand, tmp_path: Path
) -> None:
    stand, file = stand_with_payloads, tmp_path / "image.png"
    page = stand.page
    write_png(file, np.full((8, 8, 3), (255, 0, 0), np.uint8))
    await _show_model(stand, "no-such-model")
    await _set(stand, "input[id$=-shape]", "1, 4, -1")
    await _set(stand, "select[id$=-datatype]", "UINT8")
    await _set(stand, "select[id$=-fill]", "image")
    await _set(stand, "input[id$=-size-2]", "6")
    await page.choose_file("input[type=file]", file)
    await page.wait_for_text("8 × 8 pixels, sent as 6 × 4.", ".image-fill")
    await _send_and_wait(stand)
    assert f'"data": [{", ".join(["76"] * 24)}]' in await page.text(".result")
    # The call changes nothing of what is shown.
    pixel = "document.querySelector('.preview').getContext('2d').getImageData(3, 2, 1, 1).data"
    assert await page.evaluate(f"[...{pixel}]") == [76, 76, 76, 255]


async def test_file_that_is_no_image_is_told(stand_with_payloads: Stand, tmp_path: Path) -> None:
    stand, file = stand_with_payloads, tmp_path / "image.png"
    page = stand.page
    file.write_text("this is a text")
    await _show_model(stand, "image")
    await _set(stand, "select[id$=-fill]", "image")
    await page.choose_file("input[type=file]", file)
    await page.wait_for_text("The browser cannot read this file as an image.", ".input .failure")
    await _press_send(stand)
    await page.wait_for("document.activeElement.type === 'file'")


async def test_inputs_of_a_model_without_metadata_are_added_by_hand(
    stand_with_payloads: Stand,
) -> None:
    stand = stand_with_payloads
    page = stand.page
    await _show_model(stand, "no-such-model")
    assert "The inputs are not known" in await page.text("#panel-try")
    await _set(stand, "input[id$=-name]", "TEXT")
    await _set(stand, "select[id$=-datatype]", "BYTES")
    await _set(stand, "input[id$=-shape]", "2, 1")
    await _type_values(stand, '["a", "b"]')
    await page.evaluate(
        "[...document.querySelectorAll('button')].find(e => e.innerText === 'Add an input').click()"
    )
    assert await page.evaluate("document.activeElement.id.endsWith('-name')")
    assert await page.evaluate("document.querySelector('#try-form-raw').disabled")
    await page.evaluate(
        "[...document.querySelectorAll('button')].filter("
        "each => each.innerText === 'Remove this input')[1].click()"
    )
    await page.wait_for(f"{_INPUTS} === 1")
    await _send_and_wait(stand)
    result = await page.text(".result")
    assert "404 Not found" in result
    assert "'no-such-model' is not found" in result
    assert '"name": "TEXT"' in result
    assert '"data": ["a", "b"]' in result


async def test_model_is_found_as_one_types(stand_with_payloads: Stand) -> None:
    stand = stand_with_payloads
    page = stand.page
    await stand.show("try")
    await page.wait_for("document.querySelectorAll('#try-models option').length > 5")
    await page.evaluate("document.querySelector('#try-model').focus()")
    await page.type("identity_int")
    await page.wait_for("document.querySelectorAll('#try-models option').length === 4")
    await page.type("64")
    await page.wait_for("location.hash === '#try?model=identity_int64'")
    await page.wait_for(f"{_INPUTS} === 1")
    assert "INT64" in await page.text(".input legend")


async def test_panel_models_and_panel_calls_lead_here_and_there(
    stand_with_payloads: Stand,
) -> None:
    stand = stand_with_payloads
    page = stand.page
    await stand.show("models?name=half")
    await page.click("#panel-models .crumbs a[href='#try?model=half']")
    await page.wait_for(f"{_INPUTS} === 1")
    await _send_and_wait(stand)
    await page.click(".result a[href^='#calls?request_id=']")
    await page.wait_for("document.querySelectorAll('.calls .toggle').length === 1")
    assert "half" in await page.text(".calls tbody")
    # Who comes back finds the model, and its result.
    await page.click("nav a[href='#try']")
    await page.wait_for("location.hash === '#try?model=half'")
    assert "200 OK" in await page.text(".result")
    assert await page.evaluate(_INPUTS) == 1


async def test_failed_attempt_is_shown_before_the_next_one(stand_with_payloads: Stand) -> None:
    stand = stand_with_payloads
    page = stand.page
    await _show_model(stand, "half")
    await page.evaluate(_ADD_FAILED_ATTEMPT)
    await _send_and_wait(stand)
    result = await page.text(".result")
    assert "Attempt 1 of 2: http://failed.example of " in result
    assert "connection refused" in result
    assert "Attempt 2 of 2: http://127." in result
    assert "of binary at attempt 2." in result


async def test_copied_text_is_shown_where_there_is_no_clipboard(
    stand_with_payloads: Stand,
) -> None:
    stand = stand_with_payloads
    page = stand.page
    await _show_model(stand, "half")
    await page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    await _send_and_wait(stand)
    for name, begin in (
        ("curl", "curl --path-as-is http://"),
        ("tritonclient code", "import numpy"),
    ):
        await page.evaluate(
            "[...document.querySelectorAll('.result button')]"
            f".find(each => each.innerText === 'Copy as {name}').click()"
        )
        await page.wait_for("document.activeElement.id === 'try-copy'")
        text = await page.evaluate("getSelection().toString()")
        assert text.startswith(begin)
    assert await violations(page) == []


async def test_body_that_is_no_small_text_is_saved(
    stand_with_payloads: Stand, tmp_path: Path
) -> None:
    stand = stand_with_payloads
    page = stand.page
    await _show_model(stand, "identity_fp32")
    await _type_values(stand, "[1, 2.5, -3]")
    await page.click("#try-form-raw")
    await _send_and_wait(stand)
    await page.send(
        "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "saved")
    )
    await page.evaluate(
        "[...document.querySelectorAll('.result button')]"
        ".find(each => each.innerText === 'Save body.bin').click()"
    )
    file = tmp_path / "saved" / "body.bin"
    async with asyncio.timeout(TIMEOUT):
        while not file.exists():  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.05)
    assert np.frombuffer(file.read_bytes(), "<f4").tolist() == [1, 2.5, -3]


async def test_large_outputs_show_their_first_values(stand_with_payloads: Stand) -> None:
    stand = stand_with_payloads
    page = stand.page
    await _show_model(stand, "identity_fp32")
    await _set(stand, "input[id$=-size-0]", "1000000")
    await page.click("#try-form-binary")
    await _send_and_wait(stand)
    assert "the first 100 of 1,000,000" in await page.text(".output")
    for _ in range(2):
        await page.evaluate("document.querySelector('.output .buttons button').click()")
    assert "the first 1,000 of 1,000,000" in await page.text(".output")
    assert await page.evaluate("document.querySelectorAll('.output tbody tr').length") == 1000
    assert "more bytes" in await page.text(".result")
    assert await page.evaluate("document.querySelectorAll('*').length") < 12_000


@pytest.mark.parametrize("width", [320, 1024, 1600])
async def test_panel_is_accessible_and_fits(stand_with_payloads: Stand, width: int) -> None:
    stand = stand_with_payloads
    page = stand.page
    await page.resize(width)
    await _show_model(stand, "add", inputs=2)
    await _send_and_wait(stand)
    await _choose_view(stand, "Histogram")
    for scheme in ("light", "dark"):
        await page.prefer(color_scheme=scheme)
        assert await violations(page) == []
    assert await page.fits_width()


async def test_hostile_model_names_are_text(stand_with_payloads: Stand) -> None:
    stand = stand_with_payloads
    page = stand.page
    for name in (NAMES[0], NAMES[2], NAMES[4]):
        await _show_model(stand, name)
        title = await page.text("#try-title")
        assert title.startswith("A call of " + name[:20].replace("\u202e", "⟨U+202E⟩"))
        assert len(title) < 120
        await _send_and_wait(stand)
        assert await page.evaluate("window.hacked === undefined")
        assert await page.fits_width()


async def test_page_without_payloads_says_what_it_takes(stand: Stand) -> None:
    page = stand.page
    await stand.show("try?model=half")
    await page.wait_for_text("Calls cannot be sent from here", "#panel-try")
    text = await page.text("#panel-try")
    assert "payloads: true" in text
    assert "keys: operators" in text
    assert "Send" not in text.split()
