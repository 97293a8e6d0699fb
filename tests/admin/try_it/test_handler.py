"""Calls that operators try, from the request of the page to its response."""

import asyncio
import base64
import json
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gateway.admin import security
from gateway.admin.try_it import handler
from gateway.admin.try_it.outputs import describe_output
from gateway.admin.try_it.requests import FORMS, make_request
from gateway.demo.server.server import DemoServer
from gateway.observe.call_record import CallRecord
from gateway.protocol.datatypes import DATATYPES
from tests.admin.try_it.trying import (
    CLIENT_KEY,
    HEADERS,
    KEY,
    NUMBERS,
    VALUES,
    Trial,
    call,
    trying,
    wanted,
)
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import until
from tests.support.http_messages import http_response, request
from tests.support.raw_client import connect
from tests.support.scale import scaled
from tests.support.servers.scripted_server import Connection, ScriptedServer, never_respond

each_form = pytest.mark.parametrize("form", FORMS)


@pytest.fixture
async def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Trial]:
    """An operator of a gateway in front of a server that returns what it gets."""
    monkeypatch.setattr(security, "WRONG_KEY_DELAY", 0.001)
    async with DemoServer() as server, trying(tmp_path, server.url) as running:
        yield running


@each_form
async def test_call_is_made_and_all_is_told(
    call_records: list[CallRecord], trial: Trial, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    done = await trial.done(wanted(form))
    (record,) = [each for each in call_records if each.request_id == done["request_id"]]
    assert (done["status"], done["error"]) == (200, None)
    assert record.labels.model == "identity_fp32"
    assert abs(done["time"] - time.time()) < 60
    assert done["duration_ms"] > 0
    (output,) = done["outputs"]
    assert output["values"] == [1.5, -2.0]
    version = "HTTP/2" if form == "grpc" else "HTTP/1.1"
    sent, received = done["client"]["request"], done["client"]["response"]
    assert sent["start"].startswith("POST /")
    assert sent["start"].endswith(version)
    assert received["start"].startswith(f"{version} 200")
    assert len(base64.b64decode(sent["body"])) == sent["size"]
    (attempt,) = done["attempts"]
    assert (attempt["upstream"], attempt["error"]) == ("servers", None)
    assert attempt["request"]["start"] == "POST /v2/models/identity_fp32/infer HTTP/1.1"
    assert attempt["response"]["json_size"] > 0
    assert "curl" in done["curl"]
    assert "identity_fp32" in done["python"]
    (line,) = [each for each in caplog.messages if each.startswith("operator at")]
    assert (
        line
        == f"operator at 127.0.0.1 tries identity_fp32 as {form}, request " + (done["request_id"])
    )


async def test_large_tensors_of_the_python_code_are_there_as_files(trial: Trial) -> None:
    tensor = bytes(range(256)) * 16
    large = {"name": "INPUT0", "datatype": "FP32", "shape": [1024]}
    large["bytes"] = base64.b64encode(tensor).decode()
    done = await trial.done({"model": "identity_fp32", "form": "json", "inputs": [large]})
    assert "input0.bin" in done["python"]
    assert {name: base64.b64decode(data) for name, data in done["files"].items()} == {
        "input0.bin": tensor
    }
    small = await trial.done(wanted("json"))
    assert small["files"] == {}


CASES = st.sampled_from(list(DATATYPES)).flatmap(
    lambda datatype: st.tuples(
        st.just(datatype),
        st.lists(st.sampled_from(VALUES[datatype]), min_size=1, max_size=5),
        st.sampled_from(list(FORMS)),
        st.booleans(),
    )
)


@settings(max_examples=scaled(20), phases=[Phase.generate])
@given(st.lists(CASES, min_size=8, max_size=16))
def test_what_is_sent_in_any_form_comes_back(cases: list[tuple[str, list[Any], str, bool]]) -> None:
    async def send_all() -> None:
        with tempfile.TemporaryDirectory() as folder:
            async with DemoServer() as server, trying(Path(folder), server.url) as trial:
                for each in cases:
                    await _check_echo(trial, *each)

    asyncio.run(send_all())


async def _check_echo(
    trial: Trial, datatype: str, values: list[Any], form: str, as_bytes: bool
) -> None:
    if (form, datatype) == ("raw", "BYTES"):
        form = "binary"  # such a request needs a model of one element
    shape = [len(values)]
    tensor = {"name": "INPUT0", "datatype": datatype, "shape": shape, "values": values}
    (data,) = make_request(call(form, tensor).inputs, []).tensors
    assert not isinstance(data, int)
    packed = b"".join(data)
    if as_bytes:
        del tensor["values"]
        tensor["bytes"] = base64.b64encode(packed).decode()
    model = f"identity_{datatype.lower()}"
    done = await trial.done(wanted(form, model, inputs=[tensor]))
    assert (done["status"], done["error"]) == (200, None), (done["error"], tensor, form)
    (output,) = done["outputs"]
    expected = describe_output("OUTPUT0", DATATYPES[datatype], shape, packed)
    if form == "v1":  # it tells no name
        assert (output["values"], output["datatype"]) == (expected["values"], datatype)
    else:
        assert output == expected


async def test_several_inputs_give_the_outputs_that_are_wanted(trial: Trial) -> None:
    inputs = [NUMBERS, {**NUMBERS, "name": "INPUT1"}]
    for form in ("json", "grpc"):
        done = await trial.done(wanted(form, "add", inputs=inputs, outputs=["SUM"]))
        assert [(each["name"], each["values"]) for each in done["outputs"]] == [("SUM", [3, -4])]
    response = await trial.post(wanted("raw", inputs=inputs))
    assert (response.status, response.error) == (400, "a raw request has one input, not 2")
    response = await trial.post(wanted(inputs=[NUMBERS, {**NUMBERS, "datatype": "FP8"}]))
    assert response.error.startswith("inputs[1].datatype: expected one of BOOL, ")


async def test_call_of_an_unreachable_server_has_its_error(tmp_path: Path) -> None:
    async with trying(tmp_path, "http://127.0.0.1:1") as trial:
        for form in ("binary", "grpc"):
            done = await trial.done(wanted(form))
            assert done["status"] == 503
            assert "cannot connect" in done["error"]
            assert done["attempts"][0]["response"] is None


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("form", [None, "", "xml"]),
        ("model", [1, ""]),
        ("version", [1]),
        ("inputs", ["x", [1], [[]]]),
        ("outputs", [{}, [None]]),
        ("headers", [[], {"a": 1}, {"a": ""}, {"": "a"}, {"a b": "c"}, {"a": "b\r\nX: y"}]),
        ("headers", [{"a": "é"}, {"a": " b"}, {"Content-Length": "3"}, {"Connection": "close"}]),
    ],
)
async def test_wrong_type_is_a_bad_request_that_names_the_field(
    trial: Trial, field: str, values: list[Any]
) -> None:
    for value in values:
        response = await trial.post(wanted(**{field: value}))
        assert response.status == 400, (field, value, response.body)
        assert response.error.startswith(field)


@pytest.mark.parametrize("key", ["", "Bearer wrong", KEY, f"Bearer {CLIENT_KEY}"])
async def test_wrong_key_is_refused(trial: Trial, key: str, call_records: list[Any]) -> None:
    response = await trial.post(wanted(), Authorization=key)
    assert response.status == 401
    assert call_records == []


async def test_payloads_have_to_be_allowed(tmp_path: Path) -> None:
    allowed = {"payloads": False, "actions": True}
    async with trying(tmp_path, "http://127.0.0.1:1", allowed=allowed) as trial:
        response = await trial.post(wanted())
        assert response.status == 403
        assert response.error == "values of tensors are not shown here (admin.payloads)"


async def test_largest_tensors_fit(trial: Trial) -> None:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [2**21], "fill": "ones"}
    done = await trial.done(wanted("binary", inputs=[tensor]))
    (output,) = done["outputs"]
    assert (done["status"], output["elements"]) == (200, 2**21)
    sent = done["client"]["request"]
    assert sent["size"] == 2**23 + sent["json_size"]
    assert len(base64.b64decode(done["attempts"][0]["request"]["body"])) == 65536
    tensor["shape"] = [2**21 + 1]
    assert (await trial.post(wanted("binary", inputs=[tensor]))).status == 400


HOSTILE = ["a\"b'c", "a\r\nX-Evil: 1", "a/../../b", "%2e%2e%2f", "é😀", "\x1b[31m\0", "x" * 10_000]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
async def test_hostile_name_is_only_a_name(
    trial: Trial, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for form in FORMS:
        caplog.clear()
        done = await trial.done(wanted(form, name, version=name[:100]))
        assert done["status"] >= 400
        assert done["error"]
        lines = [each for each in caplog.messages if each.startswith("operator")]
        assert len(lines) == 1
        assert lines[0].isprintable()
        assert len(lines[0]) < 2000
        for attempt in done["attempts"]:
            names = [each.lower() for each, _ in attempt["request"]["headers"]]
            assert "x-evil" not in names


async def test_second_operator_waits_for_the_first(tmp_path: Path) -> None:
    released = asyncio.Event()
    arrived = 0

    async def respond(connection: Connection) -> None:
        nonlocal arrived
        await connection.request()
        arrived += 1
        await released.wait()
        await connection.send(http_response(b"{}"))

    async with (
        ScriptedServer(respond) as server,
        trying(tmp_path, server.url) as trial,
        connect(f"http://{trial.admin}") as other,
    ):
        body = json.dumps(wanted("binary", "m")).encode()
        one = asyncio.create_task(trial.post(body))
        await until(lambda: arrived == 1)
        two = asyncio.create_task(other.call("POST", "/api/try", body, HEADERS))
        await asyncio.sleep(0.02)
        assert arrived == 1
        released.set()
        assert [(await one).status, (await two).status] == [200, 200]
        assert arrived == 2


async def test_operator_who_sends_no_body_blocks_others_for_a_while(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler, "BODY_TIMEOUT", 0.05)
    head = request("POST", "/api/try", None, {**HEADERS, "Content-Length": "100"})
    async with connect(f"http://{trial.admin}") as slow:
        await slow.send(head + b"{")
        assert (await trial.post(wanted())).status == 200
        response = await slow.read_response()
        assert response.status == 408
        assert response.error == "the body did not arrive within 0.05 s"


async def test_stopping_gateway_ends_a_call_that_hangs(tmp_path: Path) -> None:
    async with (
        ScriptedServer(never_respond) as server,
        trying(tmp_path, server.url, drain_timeout=0.05) as trial,
    ):
        waiting = asyncio.create_task(trial.post(wanted("binary", "m")))
        await server.connection()
        await trial.gateway.gateway._captured.close()
        response = await waiting
        assert response.status in (200, 502)
        # From now on, no call is made.
        response = await trial.post(wanted("binary", "m"))
        assert response.status == 502
        assert not trial.gateway.gateway._captured.served
