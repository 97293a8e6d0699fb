"""What MLServer and KServe alone get wrong, or do not take, works through the gateway."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.integration.support.client import Client
from tests.integration.support.gateway import running_gateway
from tests.integration.support.infer_messages import Request, check_echo, read_outputs, send, tensor
from tests.integration.support.python_server import KServe, MLServer
from tests.integration.support.real_server import RealServer


@contextmanager
def before(server: RealServer, folder: Path, **route: str) -> Iterator[Client]:
    """Run a gateway in front of a server, and connect to it."""
    with (
        running_gateway(folder, server.http_url, dialect=server.dialect, route=route) as gateway,
        Client(gateway.host, gateway.port) as client,
    ):
        yield client


@pytest.mark.mlserver
def test_nonfinite_values_reach_mlserver_as_strings(mlserver: MLServer, tmp_path: Path) -> None:
    """It has null for all of them."""
    with before(mlserver, tmp_path, nonfinite="string") as client:
        for binary in (True, False):
            sent = tensor("INPUT0", "FP32", [np.nan, np.inf, 1], binary=binary)
            request = Request("identity_fp32", (sent,), binary_data_output=True)
            (output,) = read_outputs(send(client, request))
            np.testing.assert_array_equal(output.elements, [np.nan, np.nan, 1])


@pytest.mark.mlserver
def test_bytes_reach_mlserver_nested_and_in_base64(mlserver: MLServer, tmp_path: Path) -> None:
    """It loses nested ones without a word."""
    nested = tensor("INPUT0", "BYTES", [b"a", b"b"], [2, 1])
    no_text = tensor("INPUT0", "BYTES", [b"\xff\x00", b"", b"a"], binary=True)
    with before(mlserver, tmp_path, bytes="base64") as client:
        for sent in (nested, no_text):
            request = Request("identity_bytes", (sent,), binary_data_output=True)
            check_echo(read_outputs(send(client, request)), sent)


@pytest.mark.kserve
def test_v1_clients_of_kserve_models_that_give_the_id_back_need_none(
    kserve: KServe, tmp_path: Path
) -> None:
    headers = {"Content-Type": "application/json"}
    with before(kserve, tmp_path) as client:
        target = "/v1/models/gives_id_back:predict"
        response = client.send("POST", target, b'{"instances": [0.5, 2]}', headers)
        assert (response.status, response.fields) == (200, {"predictions": [0.5, 2]})
