import json
from typing import Any

import pytest

from gateway.demo.server.models import MODELS
from tests.demo.conftest import Demo


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
