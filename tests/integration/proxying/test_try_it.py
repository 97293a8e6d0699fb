"""Calls that operators try in front of real servers, and the code that does the same."""

import base64
import itertools
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.admin.try_it.requests import FORMS
from tests.integration.support.gateway import gateway_with_settings
from tests.integration.triton.server import TritonServer
from tests.support.addresses import free_address

KEY = "token-of-operators-0123456789abcdef"
VALUES: dict[str, list[Any]] = {
    "BOOL": [True, False],
    "UINT64": [0, 2**64 - 1],
    "INT64": [-(2**63), 2**63 - 1],
    "FP16": [0.5, -2.0],
    "BF16": [0.5, -2.0],
    "FP32": [0.5, -3e38],
    "FP64": [0.5, -1e300],
    "BYTES": ["", "é😀"],
}
Try = Callable[[dict[str, Any]], dict[str, Any]]


@contextmanager
def _serve(folder: Path, url: str, dialect: str) -> Iterator[Try]:
    """Run a gateway, and return what tries a call at its admin address."""
    admin, keys = free_address(), folder / "keys"
    keys.write_text(f"{KEY}\n")
    settings = {
        "listen": free_address(),
        "admin": {"listen": admin, "payloads": True, "keys": "operators"},
        "api_keys": {"operators": {"file": str(keys)}},
        "upstreams": {"server": {"endpoints": [url], "dialect": dialect}},
    }
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}

    def call(document: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(document).encode()
        request = urllib.request.Request(f"http://{admin}/api/try", data, headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            done: dict[str, Any] = json.load(response)
        return done

    with gateway_with_settings(folder, settings):
        yield call


@pytest.fixture(scope="module")
def try_triton(triton: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Try]:
    """Try a call in front of Triton."""
    with _serve(tmp_path_factory.mktemp("gateway"), triton.http_url, "triton") as try_call:
        yield try_call


def _identity(form: str, datatype: str) -> dict[str, Any]:
    values = VALUES[datatype]
    tensor = {"name": "INPUT0", "datatype": datatype, "shape": [2], "values": values}
    model = f"identity_{datatype.lower()}"
    return {"model": model, "version": "", "form": form, "inputs": [tensor], "outputs": []}


def _shown(datatype: str) -> list[Any]:
    values = VALUES[datatype]
    return [str(each) if type(each) is int and abs(each) > 2**53 else each for each in values]


@pytest.mark.triton
def test_triton_and_the_python_code_return_what_was_sent(try_triton: Try, tmp_path: Path) -> None:
    """All code is run by one process, as the client takes long to load."""
    programs, expected = [], []
    for datatype, form in itertools.product(VALUES, FORMS):
        if (form, datatype) == ("raw", "BYTES"):
            continue  # such a request needs a model of one element
        done = try_triton(_identity(form, datatype))
        assert (done["status"], done["error"]) == (200, None), form
        (output,) = done["outputs"]
        assert output["values"] == _shown(datatype)
        (attempt,) = done["attempts"]
        assert attempt["response"]["start"] == "HTTP/1.1 200 OK"
        assert len(base64.b64decode(attempt["request"]["body"])) == attempt["request"]["size"]
        programs.append(done["python"])
        expected.append((datatype, form))
    file = tmp_path / "programs.json"
    file.write_text(json.dumps(programs))
    runner = (
        "import json\n"
        "def show(name, array):\n"
        "    texts = [x.decode() if isinstance(x, bytes) else x for x in array.tolist()]\n"
        "    print(json.dumps([name, texts]))\n"
        f"for each in json.load(open({str(file)!r})):\n"
        "    exec(each, {'print': show})\n"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done_all = subprocess.run(
        [sys.executable, "-c", runner],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert done_all.returncode == 0, done_all.stderr[-2000:]
    shown = [json.loads(line) for line in done_all.stdout.splitlines()]
    assert len(shown) == len(expected)
    for (datatype, form), (name, values) in zip(expected, shown, strict=True):
        assert name == "OUTPUT0"
        if datatype == "FP32":
            values = [round(values[0], 3), float(f"{values[1]:.6g}")]
        assert values == VALUES[datatype], (datatype, form)
