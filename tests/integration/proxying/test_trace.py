"""Trace settings: the specification's paths and the server's own lead to the same."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.integration.support.client import Client, Response
from tests.integration.support.gateway import Gateway, running_gateway
from tests.integration.triton.server import TritonServer

pytestmark = pytest.mark.triton

# What a client may ask for, and where the server has it.
GLOBAL = [("/v2/trace", "/v2/trace/setting"), ("/v2/trace/setting", "/v2/trace/setting")]
MODEL = [
    (f"/v2/models/add{version}/{trace}", "/v2/models/add/trace/setting")
    for version in ("", "/versions/1")
    for trace in ("trace", "trace/setting")
]


@pytest.fixture(autouse=True)
def unchanged(direct: Client) -> Iterator[None]:
    """Undo what a test has set."""
    yield
    names = ("trace_level", "trace_rate", "trace_count", "log_frequency")
    clear = json.dumps(dict.fromkeys(names)).encode()
    for path in ("/v2/models/add/trace/setting", "/v2/trace/setting"):
        assert direct.send("POST", path, clear).status == 200


def check_same(response: Response, like: Response) -> None:
    assert (response.status, response.reason, response.body) == (
        like.status,
        like.reason,
        like.body,
    )
    assert response.headers["Content-Type"] == like.headers["Content-Type"]
    assert response.headers["Content-Length"] == like.headers["Content-Length"]


@pytest.mark.parametrize(("path", "own"), GLOBAL + MODEL)
def test_trace_settings_are_read_and_updated(
    via_gateway: Client, direct: Client, path: str, own: str
) -> None:
    before = via_gateway.get(path).fields
    assert before == direct.get(own).fields
    changes = {"trace_level": ["OFF"], "trace_rate": "77", "trace_count": "5"}
    response = via_gateway.send("POST", path, json.dumps(changes).encode())
    assert response.status == 200
    assert response.fields == {**before, **changes}
    check_same(via_gateway.get(path), direct.get(own))
    assert direct.get(own).fields == response.fields


def test_a_model_has_settings_of_its_own(via_gateway: Client) -> None:
    everywhere = via_gateway.get("/v2/trace").fields
    via_gateway.send("POST", "/v2/models/add/trace", b'{"trace_rate": "78"}')
    assert via_gateway.get("/v2/models/add/trace").fields == {**everywhere, "trace_rate": "78"}
    assert via_gateway.get("/v2/trace").fields == everywhere
    assert via_gateway.get("/v2/models/mixed/trace").fields == everywhere
    cleared = via_gateway.send("POST", "/v2/models/add/trace", b'{"trace_rate": null}')
    assert cleared.fields == everywhere
    unchanged = via_gateway.send("POST", "/v2/models/add/trace", b"{}")
    assert unchanged.fields == everywhere


@pytest.mark.parametrize("path", ["/v2/trace", "/v2/models/add/trace/setting"])
@pytest.mark.parametrize(
    "body", [b'{"trace_file": "/tmp/trace.json"}', b'{"trace_rate": "x"}', b"nonsense", b"{}", b""]
)
def test_any_response_of_the_server_passes_unchanged(
    via_gateway: Client, direct: Client, path: str, body: bytes
) -> None:
    own = path.removesuffix("/setting") + "/setting"
    check_same(via_gateway.send("POST", path, body), direct.send("POST", own, body))


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_trace_settings_of_an_unknown_model_are_an_error(
    via_gateway: Client, direct: Client, method: str
) -> None:
    body = b"{}" if method == "POST" else None
    response = via_gateway.send(method, "/v2/models/nope/trace", body)
    like = direct.send(method, "/v2/models/nope/trace/setting", body)
    assert like.status == 400
    assert "nope" in response.error
    check_same(response, like)


@pytest.mark.parametrize(("method", "path"), [("GET", "/v2/trace/other"), ("PUT", "/v2/trace")])
def test_unknown_trace_requests_pass_as_they_are(
    via_gateway: Client, direct: Client, method: str, path: str
) -> None:
    check_same(via_gateway.send(method, path), direct.send(method, path))


def test_the_server_logs_that_versions_share_trace_settings(
    triton: TritonServer, tmp_path: Path
) -> None:
    with (
        running_gateway(tmp_path, triton.http_url) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        assert client.get("/v2/models/versioned/trace").status == 200
        assert "version" not in gateway.log.replace("/v2/models/versioned/trace", "")
        assert client.get("/v2/models/versioned/versions/2/trace").status == 200
        assert "version 2 of model versioned" in gateway.log


def test_tritonclient_reads_and_updates(gateway: Gateway, direct: Client) -> None:
    with triton_http.InferenceServerClient(gateway.address) as client:
        everywhere = client.get_trace_settings()
        changes = {"trace_level": ["TIMESTAMPS"], "trace_rate": "79"}
        updated = client.update_trace_settings("add", changes)
        assert updated == {**everywhere, **changes} == client.get_trace_settings("add")
        assert direct.get("/v2/models/add/trace/setting").fields == updated
        assert client.update_trace_settings("add", dict.fromkeys(changes)) == everywhere
        with pytest.raises(InferenceServerException, match="trace file"):
            client.update_trace_settings(settings={"trace_file": "/tmp/trace.json"})
