"""Writes a call as a shell command with curl, and as Python code with tritonclient."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.protocol.datatypes import DATATYPES, Family
from gateway.settings.schema import Settings
from gateway.settings.values.addresses import TcpAddress, UnixAddress
from gateway.upstream.transport import UpstreamRequest

_MAX_INLINE = 2000
"""Bytes of a body of text that stands in the command itself."""
_FILE = "body.bin"
_ANY_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that stand for all of a host, with one that clients can connect to."""
_DATA_TYPES = {"FP16": "float16", "FP32": "float32", "FP64": "float64", "BOOL": "bool"}
"""Names in numpy that are not the datatype's in lower case."""
_OTHER_FORMS = {
    "raw": "# tritonclient has no raw binary requests: this one has binary tensors.\n",
    "v1": "# tritonclient does not speak V1: this request has binary tensors.\n",
}


def client_address(settings: Settings) -> str:
    """Return the first address for clients as ``http://host:port`` or ``unix:/path``."""
    first = settings.listen[0]
    if isinstance(first, UnixAddress):
        return str(first)
    scheme = "http" if settings.tls is None else "https"
    host = _ANY_HOSTS.get(first.host, first.host)
    return f"{scheme}://{TcpAddress(host, first.port)}"


def write_curl(address: str, request: UpstreamRequest) -> str:
    """Write a command with curl; a large or binary body is read of body.bin."""
    assert isinstance(request.body, Sequence)
    words = ["curl"]
    if address.startswith("unix:"):
        words += ["--unix-socket", shlex.quote(address.removeprefix("unix:"))]
        address = "http://localhost"
    if request.is_grpc:
        words += ["--http2" if address.startswith("https:") else "--http2-prior-knowledge"]
    words.append(shlex.quote(address + request.target))
    lines = [" ".join(words)]
    for name, value in request.headers.items():
        lines.append("-H " + shlex.quote(f"{name}: {value}"))
    lines.append(_body_option(request))
    if "json" not in request.headers.get("Content-Type", ""):
        lines.append("--output response.bin")
    return " \\\n  ".join(lines) + "\n"


def _body_option(request: UpstreamRequest) -> str:
    assert isinstance(request.body, Sequence)
    is_json = "json" in request.headers.get("Content-Type", "")
    if is_json and sum(map(len, request.body)) <= _MAX_INLINE:
        return "--data-raw " + shlex.quote(b"".join(request.body).decode())
    return f"--data-binary @{_FILE}"


def write_python(
    address: str,
    form: str,
    model: str,
    version: str,
    inputs: Sequence[Mapping[str, Any]],
    outputs: Sequence[str],
) -> str:
    """Write Python code with tritonclient; ``inputs`` are as ``make_request`` takes them.

    ``outputs`` are the names of all outputs that are wanted.
    """
    protocol = "grpc" if form == "grpc" else "http"
    where = address.removeprefix("http://").removeprefix("https://")
    tls = ", ssl=True" if address.startswith("https://") else ""
    lines = [
        "import numpy as np",
        f"import tritonclient.{protocol} as triton",
        "",
        f"client = triton.InferenceServerClient({where!r}{tls})",
        "inputs = []",
    ]
    binary = "" if form == "grpc" else f", binary_data={form != 'json'}"
    for each in inputs:
        name, datatype, shape = each["name"], each["datatype"], each["shape"]
        lines += [
            f"tensor = triton.InferInput({name!r}, {shape!r}, {datatype!r})",
            f"tensor.set_data_from_numpy({_array(each, datatype, shape)}{binary})",
            "inputs.append(tensor)",
        ]
    wanted = [f"triton.InferRequestedOutput({name!r}{binary})" for name in outputs]
    arguments = [repr(model), "inputs"]
    if version:
        arguments.append(f"model_version={version!r}")
    if wanted:
        arguments.append(f"outputs=[{', '.join(wanted)}]")
    lines.append(f"result = client.infer({', '.join(arguments)})")
    lines += [f"print({name!r}, result.as_numpy({name!r}))" for name in outputs]
    return _OTHER_FORMS.get(form, "") + "\n".join(lines) + "\n"


def _array(each: Mapping[str, Any], datatype: str, shape: Sequence[int]) -> str:
    """Return the expression of an input's array."""
    is_text = DATATYPES[datatype].family is Family.TEXT
    # tritonclient makes BF16 of FP32.
    dtype = "float32" if datatype == "BF16" else _DATA_TYPES.get(datatype, datatype.lower())
    numpy_type = "np.object_" if is_text else f"np.dtype({dtype!r})"
    if "values" in each:
        values = repr(each["values"])
        if len(values) <= _MAX_INLINE:
            return f"np.array({values}, dtype={numpy_type}).reshape({shape!r})"
    fill = each.get("fill")
    if is_text:
        text = "1" if fill == "ones" else "0" if fill == "zeros" else "text"
        return f"np.full({shape!r}, {text!r}, dtype={numpy_type})"
    if fill in ("zeros", "ones"):
        return f"np.{fill}({shape!r}, dtype={numpy_type})"
    if fill == "random" and DATATYPES[datatype].family is Family.FLOAT:
        return f"np.random.default_rng().standard_normal({shape!r}).astype({numpy_type})"
    if fill == "random":
        most = 2 if datatype == "BOOL" else 100
        return f"np.random.default_rng().integers({most}, size={shape!r}).astype({numpy_type})"
    return f"np.fromfile('tensor.bin', dtype={numpy_type}).reshape({shape!r})"
