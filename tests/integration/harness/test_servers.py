"""Every server offers its models, datatypes and dialect to tests in the same way."""

from tests.integration.support.client import Client
from tests.integration.support.infer_messages import HALVES, Request, read_outputs, tensor
from tests.integration.support.real_server import HOST, InferenceServer
from tests.integration.support.round_trip import check_echo, send


def test_its_models_are_ready(any_server: InferenceServer) -> None:
    names = {model.name for model in any_server.models}
    assert names >= {f"identity_{each.lower()}" for each in any_server.datatypes} | {"add", "mixed"}
    with Client(HOST, any_server.http_port) as client:
        for name in names:
            assert client.get(f"/v2/models/{name}/ready").status == 200


def test_each_datatype_that_has_a_json_form(any_server: InferenceServer) -> None:
    with Client(HOST, any_server.http_port) as client:
        for datatype in set(any_server.datatypes) - set(HALVES):
            values = [b"a", "é".encode()] if datatype == "BYTES" else [0, 1]
            sent = tensor("INPUT0", datatype, values)
            request = Request(f"identity_{datatype.lower()}", (sent,))
            check_echo(read_outputs(send(client, request, "application/json")), sent)
