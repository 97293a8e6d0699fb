"""Inference requests in each form: what the models make of them, and what is refused."""

import json
import math
from typing import Any

import numpy as np
import pytest

from gateway.demo.server.models import MODELS
from gateway.demo.server.tensors import DTYPES
from gateway.demo.server.wire import HEADER_LENGTH
from tests.demo.conftest import Demo, Reply

IMAGE = [1, 3, 224, 224]
X = {"name": "INPUT0", "datatype": "FP32", "shape": [2], "data": [1, 2]}
BINARY = {"parameters": {"binary_data_output": True}}


def outputs(response: Reply) -> dict[str, tuple[list[int], list[Any]]]:
    """Return shapes and elements of the outputs by their names."""
    assert response.status == 200, response.body
    length = int(response.headers.get(HEADER_LENGTH, len(response.body)))
    rest, found = response.body[length:], {}
    for each in json.loads(response.body[:length])["outputs"]:
        elements = each.get("data")
        if elements is None:
            size = each["parameters"]["binary_data_size"]
            data, rest = rest[:size], rest[size:]
            is_text = each["datatype"] == "BYTES"
            elements = [data] if is_text else np.frombuffer(data, DTYPES[each["datatype"]]).tolist()
        found[each["name"]] = each["shape"], elements
    assert not rest
    return found


def entry(data: Any, datatype: str = "FP32", name: Any = "INPUT0", **more: Any) -> dict[str, Any]:
    shape = list(np.shape(data))
    return {"name": name, "datatype": datatype, "shape": shape, "data": data, **more}


def sized(size: object, shape: list[int], **more: Any) -> dict[str, Any]:
    parameters = {"binary_data_size": size}
    return {"name": "INPUT0", "datatype": "FP32", "shape": shape, "parameters": parameters, **more}


async def test_json_and_binary_inputs_may_be_mixed_in_any_order(demo: Demo) -> None:
    right = entry([10, 20], name="INPUT1")
    response = await demo.infer(
        "add", {"inputs": [right, sized(8, [2])]}, np.array([1, 2], np.float32).tobytes()
    )
    assert outputs(response) == {"SUM": ([2], [11, 22])}


async def test_upper_changes_letters_and_preserves_other_bytes(demo: Demo) -> None:
    text = "aé".encode() + b"\xff"
    response = await demo.send("upper", {HEADER_LENGTH: "0"}, text)
    upper = "AÉ".encode() + b"\xff"
    assert outputs(response) == {"OUTPUT0": ([1], [len(upper).to_bytes(4, "little") + upper])}


async def test_image_returns_means_and_inverted_pixels_in_the_order_of_the_model(
    demo: Demo,
) -> None:
    image = np.linspace(0, 1, 3 * 224 * 224, dtype=np.float32).reshape(IMAGE)
    wanted = [{"name": name} for name in ("INVERTED", "MEAN")]
    document = {"inputs": [entry(image.tolist(), name="INPUT")], "outputs": wanted}
    response = outputs(await demo.infer("image", document))
    assert [*response] == ["MEAN", "INVERTED"]
    np.testing.assert_allclose(response["MEAN"][1], image.mean(axis=(2, 3)).ravel(), rtol=1e-5)
    np.testing.assert_array_equal(
        np.array(response["INVERTED"][1], np.float32), (1 - image).ravel()
    )
    del document["outputs"][1]
    assert [*outputs(await demo.infer("image", document))] == ["INVERTED"]


@pytest.mark.parametrize("shape", [[], [0], [1, 3], [2, 1, 2, 1]])
async def test_identity_accepts_every_rank_and_nested_data(demo: Demo, shape: list[int]) -> None:
    data = np.ones(shape).tolist()
    response = await demo.infer("identity_fp64", {"inputs": [entry([data], "FP64", shape=shape)]})
    assert outputs(response)["OUTPUT0"] == (shape, np.ones(shape).ravel().tolist())


async def test_json_numbers_are_exact_doubles_and_nan_and_infinity_bare_tokens(demo: Demo) -> None:
    data = b'"data":[NaN,Infinity,-Infinity,0.10000000149011612]'
    head = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[4],'
    response = await demo.infer(
        "identity_fp32", head + data + b',"data":[2]}]}'
    )  # the first member counts
    assert data in response.body


@pytest.mark.parametrize(
    ("document", "binary"),
    [
        ({}, False),
        ({"outputs": [], **BINARY}, True),
        ({"outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]}, True),
        # against the specification, as in Triton:
        ({"outputs": [{"name": "OUTPUT0"}], **BINARY}, False),
    ],
)
async def test_requested_outputs_are_binary(
    demo: Demo, document: dict[str, Any], binary: bool
) -> None:
    response = await demo.infer("identity_fp32", {"id": "7", "inputs": [X], **document})
    content = b'"parameters":{"binary_data_size":8}' if binary else b'"data":[1.0,2.0]'
    header = (
        b'{"id":"7","model_name":"identity_fp32","model_version":"1","outputs":'
        b'[{"name":"OUTPUT0","datatype":"FP32","shape":[2],%b}]}' % content
    )
    data = np.array([1, 2], np.float32).tobytes() if binary else b""
    assert response.body == header + data
    form = "octet-stream" if binary else "json"
    assert response.headers["Content-Type"] == f"application/{form}"
    assert response.headers.get(HEADER_LENGTH) == (str(len(header)) if binary else None)


async def test_response_with_only_empty_binary_outputs_is_json(demo: Demo) -> None:
    response = await demo.infer("identity_fp32", {"inputs": [entry([])], **BINARY})
    assert response.headers["Content-Type"] == "application/json"
    assert HEADER_LENGTH not in response.headers
    assert outputs(response) == {"OUTPUT0": ([0], [])}


@pytest.mark.parametrize(
    ("model", "body", "shapes"),
    [
        ("identity_fp32", b"", [[0]]),
        ("image", bytes(602_112), [[1, 3], IMAGE]),
    ],
)
async def test_shape_of_a_raw_input_follows_from_its_size(
    demo: Demo, model: str, body: bytes, shapes: list[list[int]]
) -> None:
    response = outputs(await demo.send(model, {HEADER_LENGTH: "0"} if body else {}, body))
    assert [shape for shape, _ in response.values()] == shapes


@pytest.mark.parametrize(
    ("datatype", "elements", "classes", "expected"),
    [
        ("FP32", [0.25, 3, 2, -1], 2, ["3.000000:1", "2.000000:2"]),
        ("INT32", [5, 3, 2, 5], 2, ["5:0", "5:3"]),
        ("FP32", [], 5, []),
    ],
)
async def test_classification_returns_the_largest_elements(
    demo: Demo, datatype: str, elements: list[float], classes: int, expected: list[str]
) -> None:
    wanted = [{"name": "OUTPUT0", "parameters": {"classification": classes}}]
    document = {"inputs": [entry(elements, datatype)], "outputs": wanted}
    response = outputs(await demo.infer(f"identity_{datatype.lower()}", document))
    assert response == {"OUTPUT0": ([len(expected)], expected)}


async def test_classification_of_a_batch_is_by_row(demo: Demo) -> None:
    image = np.zeros((2, 3, 224, 224))
    image[1, 2] = 1
    wanted = [{"name": "MEAN", "parameters": {"classification": 1}}]
    document = {"inputs": [entry(image.tolist(), name="INPUT")], "outputs": wanted}
    assert outputs(await demo.infer("image", document)) == {
        "MEAN": ([2, 1], ["0.000000:0", "1.000000:2"])
    }


def _image(*shape: int) -> dict[str, Any]:
    return {"inputs": [sized(4 * math.prod(shape), list(shape), name="INPUT")]}


@pytest.mark.parametrize(
    ("model", "document", "message"),
    [
        ("add", b"[]", "not a JSON object"),
        ("add", b"\xff", "failed to parse"),
        ("add", b'{"inputs":' + b"[" * 100_000, "failed to parse"),
        ("add", {}, "inputs"),
        ("add", {"inputs": [{**X, "parameters": {"binary_data_size": 8}}]}, "only one of"),
        ("add", {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}]}, "only one of"),
        ("add", {"inputs": [entry([1], "FP31")]}, "invalid datatype"),
        ("add", {"inputs": [entry([1], shape=[-1])]}, "shape"),
        ("add", {"inputs": [entry([1], shape=[True])]}, "shape"),
        ("add", {"inputs": [sized(-4, [1])]}, "binary_data_size"),
        ("add", {"inputs": [sized(4, [1])]}, "4 additional bytes expected"),
        ("add", {"inputs": [], "outputs": [{}]}, "outputs.0.name"),
        ("add", {"inputs": [], "parameters": {"binary_data_output": 1}}, "invalid type"),
        ("add", {"inputs": [], "parameters": {"triton_x": 1}}, "are reserved"),
        ("add", {"inputs": [X]}, "missing required input 'INPUT1'"),
        ("add", {"inputs": [X, entry([1], name="Q")]}, "unexpected inference input 'Q'"),
        ("add", {"inputs": [X, entry([1, 2], "FP64", "INPUT1")]}, "data-type is 'FP64'"),
        ("add", {"inputs": [X, entry([[1, 2]], name="INPUT1")]}, "Expected [-1], got [1, 2]"),
        ("add", {"inputs": [X, entry([1], name="INPUT1")]}, "same shape"),
        ("identity_fp32", {"inputs": [X, X]}, "already exists"),
        ("identity_fp32", {"inputs": [X], "outputs": [{"name": "Q"}]}, "output 'Q'"),
        ("identity_fp32", {"inputs": [entry([1], shape=[2])]}, "expected 2 elements, got 1"),
        ("identity_fp32", {"inputs": [entry([1], shape=[1] * 99)]}, "unexpected shape"),
        ("identity_fp32", {"inputs": [entry(5, shape=[])]}, "not an array"),
    ],
)
async def test_requests_that_do_not_fit_are_rejected(
    demo: Demo, model: str, document: Any, message: str
) -> None:
    response = await demo.infer(model, document)
    _check_rejected(response, message)


def _check_rejected(response: Reply, message: str, status: int = 400) -> None:
    assert response.status == status
    assert message in json.loads(response.body)["error"]


@pytest.mark.parametrize(
    ("model", "shape", "data", "message"),
    [
        ("identity_fp32", [1], bytes(5), "expected 4 bytes, got 5"),
        ("identity_bytes", [1], b"\5\0\0\0abcd", "ends within a string"),
        ("identity_bytes", [2], b"\4\0\0\0abcd", "expected 2 string elements, got 1"),
        ("identity_bytes", [1], b"\1\0\0\0\xff", "is not UTF-8"),
        ("identity_fp16", [1], bytes(2), "sending FP16 data via JSON"),
        ("image", [3, 224, 224], bytes(602_112), "unexpected shape"),
        ("image", [9, 3, 224, 224], bytes(9 * 602_112), "from 1 to 8"),
    ],
)
async def test_binary_tensors_that_do_not_fit_are_rejected(
    demo: Demo, model: str, shape: list[int], data: bytes, message: str
) -> None:
    name = "INPUT" if model == "image" else "INPUT0"
    datatype = "FP32" if model == "image" else model.removeprefix("identity_").upper()
    document = {"inputs": [sized(len(data), shape, name=name, datatype=datatype)]}
    response = await demo.infer(model, document, data)
    _check_rejected(response, message)


async def test_surplus_bytes_and_shared_memory_are_rejected(demo: Demo) -> None:
    _check_rejected(
        await demo.infer("add", {"inputs": [sized(4, [1])]}, bytes(5)), "input data: 1 bytes"
    )
    shared = {"inputs": [{**X, "parameters": {"shared_memory_region": "r"}}]}
    response = await demo.infer("add", shared)
    _check_rejected(response, "region: 'r'", 404)


@pytest.mark.parametrize("length", ["xx", "", "-1", "+5", "5.0", "²", "99999", "9" * 5000])
async def test_header_length_must_be_at_most_the_body_size(demo: Demo, length: str) -> None:
    response = await demo.send("add", {HEADER_LENGTH: length}, b"{}")
    _check_rejected(response, "inference header size")


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        ("add", bytes(8), "must only have 1 input"),
        ("identity_fp32", bytes(7), "expected 4 bytes, got 7"),
        ("image", bytes(602_108), "expected 602112 bytes, got 602108"),
        ("identity_bytes", b"abc", "must have input shape [1]"),
    ],
)
async def test_ambiguous_raw_inputs_are_rejected(
    demo: Demo, model: str, body: bytes, message: str
) -> None:
    response = await demo.send(model, {HEADER_LENGTH: "0"}, body)
    _check_rejected(response, message)


async def test_classification_rejects_some_datatypes(demo: Demo) -> None:
    wanted = [{"name": "OUTPUT0", "parameters": {"classification": 1}}]
    document = {"inputs": [entry([True], "BOOL")], "outputs": wanted}
    response = await demo.infer("identity_bool", document)
    _check_rejected(response, "class result not available")


@pytest.mark.parametrize(
    ("datatype", "element"),
    [
        ("BOOL", "1"),
        ("UINT8", "-1"),
        ("INT32", "true"),
        ("INT32", str(-(2**31) - 1)),
        ("INT64", str(2**63)),
        ("FP32", "null"),
        ("FP32", "1e40"),
        ("FP64", "1" + "0" * 400),
        ("BYTES", r'"\ud83d"'),
    ],
)
async def test_element_out_of_range_is_rejected_and_named(
    demo: Demo, datatype: str, element: str
) -> None:
    good = {"BOOL": "true", "BYTES": '"x"'}.get(datatype, "0")
    data = f'"datatype": "{datatype}", "shape": [2], "data": [{good}, {element}]'
    text = f'{{"inputs": [{{"name": "INPUT0", {data}}}]}}'
    response = await demo.infer(f"identity_{datatype.lower()}", text.encode())
    _check_rejected(response, f"input 'INPUT0' takes {datatype}: element 1 is ")


async def test_16_bit_floats_have_no_json_form(demo: Demo) -> None:
    response = await demo.infer("identity_bf16", {"inputs": [entry([1.0], "BF16")]})
    _check_rejected(response, "receiving BF16 data via JSON")


# ----------------------------------------------------------------------------- the other operations


async def get(demo: Demo, path: str) -> Any:
    response = await demo.ask("GET", path)
    assert response.status == 200
    return json.loads(response.body)


ADD = {
    "inputs": [
        {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1]},
        {"name": "INPUT1", "datatype": "FP32", "shape": [1], "data": [2]},
    ]
}


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/models/add/versions/1/ready"])
async def test_health_response_has_no_body(demo: Demo, path: str) -> None:
    response = await demo.ask("GET", path)
    assert (response.status, response.body) == (200, b"")


@pytest.mark.parametrize("path", ["/v2/models/image", "/v2/models/image/versions/1"])
async def test_metadata_shows_the_batch_dimension(demo: Demo, path: str) -> None:
    assert await get(demo, path) == {
        "name": "image",
        "versions": ["1"],
        "platform": "python",
        "inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [-1, 3, 224, 224]}],
        "outputs": [
            {"name": "MEAN", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "INVERTED", "datatype": "FP32", "shape": [-1, 3, 224, 224]},
        ],
    }


async def test_config_leaves_the_batch_dimension_out(demo: Demo) -> None:
    config = await get(demo, "/v2/models/image/config")
    assert (config["max_batch_size"], config["input"][0]["dims"]) == (8, [3, 224, 224])
    text = await get(demo, "/v2/models/upper/config")
    assert (text["max_batch_size"], text["input"][0]["data_type"]) == (0, "TYPE_STRING")


async def test_statistics_count_calls(demo: Demo) -> None:
    await demo.ask("POST", "/v2/models/add/versions/1/infer", ADD)
    await demo.ask("POST", "/v2/models/add/infer", {"inputs": []})
    (stats,) = (await get(demo, "/v2/models/add/stats"))["model_stats"]
    counts = {name: stats["inference_stats"][name]["count"] for name in ("success", "fail")}
    assert counts == {"success": 1, "fail": 1}
    assert (stats["inference_count"], stats["last_inference"] > 0) == (1, True)
    everything = (await get(demo, "/v2/models/stats"))["model_stats"]
    assert [entry["name"] for entry in everything] == sorted(MODELS)


async def test_unloaded_model_is_unknown_until_it_is_loaded(demo: Demo) -> None:
    assert (await demo.ask("POST", "/v2/repository/models/add/unload")).status == 200
    assert (await demo.ask("GET", "/v2/models/add/ready")).status == 400
    rejected = await demo.ask("POST", "/v2/models/add/infer", ADD)
    assert (rejected.status, b"no available versions" in rejected.body) == (404, True)
    assert (await demo.ask("POST", "/v2/repository/models/add/load")).status == 200
    assert (await demo.ask("POST", "/v2/models/add/infer", ADD)).status == 200


async def test_index_lists_loaded_and_unloaded_models(demo: Demo) -> None:
    await demo.ask("POST", "/v2/repository/models/add/unload")
    everything = json.loads((await demo.ask("POST", "/v2/repository/index")).body)
    ready = json.loads((await demo.ask("POST", "/v2/repository/index", {"ready": True})).body)
    unloaded = {"name": "add", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
    assert [entry for entry in everything if entry not in ready] == [unloaded]
    assert {entry["state"] for entry in ready} == {"READY"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/nope", 404),
        ("GET", "/v2/models/%61dd", 404),
        ("GET", "/v2/models/add/versions/9", 404),
        ("GET", "/v2/models/add/versions/x", 404),
        ("GET", "/v2/models/nope/stats", 400),
        ("GET", "/v2/models/nope/ready", 400),
        ("POST", "/v2/repository/models/nope/load", 400),
        ("GET", "/v2/models/add/trace", 404),
        ("GET", "/v2/models/nope/trace/setting", 400),
        ("GET", "/v2/models/add/infer", 405),
    ],
)
async def test_rejected_requests_have_an_error_message(
    demo: Demo, method: str, path: str, status: int
) -> None:
    response = await demo.ask(method, path)
    assert response.status == status
    assert list(json.loads(response.body)) == ["error"]


async def test_trace_settings_of_a_model_override_the_global_ones(demo: Demo) -> None:
    path, everywhere = "/v2/models/add/trace/setting", "/v2/trace/setting"

    async def change(path: str, **changes: Any) -> Any:
        return json.loads((await demo.ask("POST", path, changes)).body)

    await change(path, trace_count="5", trace_level=["TENSORS", "TIMESTAMPS"])
    await change(everywhere, trace_rate="50", trace_count="9")
    settings = await get(demo, path)
    assert (settings["trace_rate"], settings["trace_count"]) == ("50", "5")
    assert settings["trace_level"] == ["TIMESTAMPS", "TENSORS"]
    assert await change(path) == await change(path, colour="red") == settings
    assert (await change(path, trace_count=None))["trace_count"] == "9"


@pytest.mark.parametrize(
    "changes",
    [
        {"trace_rate": 7},
        {"trace_rate": "-1"},
        {"trace_rate": "9" * 5000},
        {"trace_count": "-2"},
        {"trace_level": ["OFF", "TENSORS"]},
        {"trace_level": []},
        {"trace_file": "/tmp/x"},
    ],
)
async def test_one_wrong_setting_rejects_all_changes(demo: Demo, changes: dict[str, Any]) -> None:
    before = await get(demo, "/v2/trace/setting")
    rejected = await demo.ask("POST", "/v2/trace/setting", {"log_frequency": "3", **changes})
    assert rejected.status == (501 if "trace_file" in changes else 400)
    assert await get(demo, "/v2/trace/setting") == before


@pytest.mark.parametrize(
    ("model", "document", "expected"),
    [
        ("upper", {"INPUT0": "two words"}, {"OUTPUT0": "TWO WORDS"}),
        ("upper", {"INPUT0": ["a"], "id": "7"}, {"OUTPUT0": "A", "id": "7"}),
        ("add", {"INPUT0": [1, 2], "INPUT1": [3, 4], "x": 1}, {"SUM": [4.0, 6.0]}),
    ],
)
async def test_generate_returns_plain_members(
    demo: Demo, model: str, document: object, expected: dict[str, object]
) -> None:
    response = await demo.ask("POST", f"/v2/models/{model}/generate", document)
    assert json.loads(response.body) == {**expected, "model_name": model, "model_version": "1"}


@pytest.mark.parametrize(
    ("model", "document"),
    [
        ("upper", {}),
        ("upper", {"INPUT0": ["a", "b"]}),
        ("upper", {"INPUT0": "a", "id": 5}),
        ("half", {"INPUT0": [1]}),
    ],
)
@pytest.mark.parametrize("kind", ["generate", "generate_stream"])
async def test_generate_rejects_inputs_that_do_not_fit(
    demo: Demo, model: str, document: object, kind: str
) -> None:
    response = await demo.ask("POST", f"/v2/models/{model}/{kind}", document)
    assert response.status == 400


async def test_error_message_may_quote_a_lone_surrogate(demo: Demo) -> None:
    document = {"inputs": [{**ADD["inputs"][0], "name": "\ud83d"}]}
    response = await demo.ask("POST", "/v2/models/add/infer", document)
    assert (response.status, "error" in json.loads(response.body)) == (400, True)
