"""Writes a call as a shell command with curl, and as Python code with tritonclient."""

from __future__ import annotations

import shlex
from base64 import b64encode
from collections.abc import Sequence

from gateway.admin.try_it.requests import Call, TensorInput
from gateway.protocol.datatypes import DATATYPES, Family
from gateway.settings.schema import Settings
from gateway.settings.values.addresses import TcpAddress, UnixAddress
from gateway.upstream.transport import UpstreamRequest

_MAX_INLINE = 2000
"""Bytes of a body of text that stands in the command itself."""
_FILE = "body.bin"
_ANY_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that stand for all of a host, with one that clients can connect to."""
_DATA_TYPES = {
    "BF16": "ml_dtypes.bfloat16",
    "BYTES": "np.object_",
    "FP16": "np.float16",
    "FP32": "np.float32",
    "FP64": "np.float64",
    "BOOL": "np.bool_",
}
"""Types in numpy that are not named as the datatype in lower case."""
_MODULES = {
    "b64decode(": "from base64 import b64decode",
    "ml_dtypes.": "import ml_dtypes",
    "Path(": "from pathlib import Path",
    "deserialize_bytes_tensor(": "from tritonclient.utils import deserialize_bytes_tensor",
}
"""What the code may use, with its import."""
_NO_UNIX_SOCKETS = "# tritonclient has no Unix sockets for HTTP: set the address of a TCP socket.\n"
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


def tensor_file(index: int) -> str:
    """Return the file in which Python code expects a large tensor, by its index."""
    return f"input{index}.bin"


def write_curl(address: str, request: UpstreamRequest) -> str:
    """Write a command with curl; a large or binary body is read of body.bin."""
    assert isinstance(request.body, Sequence)
    words = ["curl", "--path-as-is"]
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


def write_python(address: str, wanted: Call, outputs: Sequence[str]) -> str:
    """Write Python code with tritonclient; ``outputs`` are the names of all wanted outputs."""
    form = wanted.form
    is_grpc = form == "grpc"
    where = address.removeprefix("http://").removeprefix("https://")
    tls = ", ssl=True" if address.startswith("https://") else ""
    lines = [f"client = triton.InferenceServerClient({where!r}{tls})", "inputs = []"]
    for index, each in enumerate(wanted.inputs):
        # tritonclient does not write BF16 as JSON.
        binary = form != "json" or each.datatype == "BF16"
        in_binary = "" if is_grpc else f", binary_data={binary}"
        lines += [
            f"tensor = triton.InferInput({each.name!r}, {each.shape!r}, {each.datatype!r})",
            f"tensor.set_data_from_numpy({_array(each, index)}{in_binary})",
            "inputs.append(tensor)",
        ]
    arguments = [repr(wanted.model), "inputs"]
    if wanted.version:
        arguments.append(f"model_version={wanted.version!r}")
    if outputs:
        in_binary = "" if is_grpc else f", binary_data={form != 'json'}"
        requested = [f"triton.InferRequestedOutput({name!r}{in_binary})" for name in outputs]
        arguments.append(f"outputs=[{', '.join(requested)}]")
    if wanted.headers:
        lower = {name.lower(): value for name, value in wanted.headers.items()}
        arguments.append(f"headers={lower!r}")
    lines += [f"result = client.infer({', '.join(arguments)})", *_print(outputs, is_grpc)]
    modules = [line for use, line in _MODULES.items() if any(use in each for each in lines)]
    protocol = "grpc" if is_grpc else "http"
    imports = [*modules, "import numpy as np", f"import tritonclient.{protocol} as triton", ""]
    notes = _OTHER_FORMS.get(form, "")
    if address.startswith("unix:") and not is_grpc:
        notes += _NO_UNIX_SOCKETS
    return notes + "\n".join([*imports, *lines]) + "\n"


def _print(outputs: Sequence[str], is_grpc: bool) -> list[str]:
    """Return the lines that print the outputs: all, if none are named."""
    if outputs:
        return [f"print({name!r}, result.as_numpy({name!r}))" for name in outputs]
    found, name = (".outputs", "output.name") if is_grpc else ('["outputs"]', 'output["name"]')
    return [
        f"for output in result.get_response(){found}:",
        f"    print({name}, result.as_numpy({name}))",
    ]


def _array(each: TensorInput, index: int) -> str:
    """Return the expression of an input's array."""
    datatype, shape = each.datatype, each.shape
    numpy_type = _DATA_TYPES.get(datatype, f"np.{datatype.lower()}")
    if each.fill is not None:
        return _filled(datatype, shape, each.fill, numpy_type)
    values = repr(each.values)
    if each.is_values and len(values) <= _MAX_INLINE:
        return f"np.array({values}, dtype={numpy_type}).reshape({shape!r})"
    data = f"Path({tensor_file(index)!r}).read_bytes()"
    if each.data is not None and len(encoded := b64encode(each.data).decode()) <= _MAX_INLINE:
        data = f"b64decode({encoded!r})"
    if datatype == "BYTES":
        return f"deserialize_bytes_tensor({data}).reshape({shape!r})"
    return f"np.frombuffer({data}, dtype={numpy_type}).reshape({shape!r})"


def _filled(datatype: str, shape: Sequence[int], fill: str, numpy_type: str) -> str:
    """Return the expression of an array of zeros, ones, or random elements."""
    if datatype == "BYTES":
        text = {"zeros": "0", "ones": "1"}.get(fill, "text")
        return f"np.full({shape!r}, {text!r}, dtype={numpy_type})"
    if fill in ("zeros", "ones"):
        return f"np.{fill}({shape!r}, dtype={numpy_type})"
    generator = "np.asarray(np.random.default_rng()"
    if DATATYPES[datatype].family is Family.FLOAT:
        return f"{generator}.standard_normal({shape!r})).astype({numpy_type})"
    most = 2 if datatype == "BOOL" else 100
    return f"{generator}.integers({most}, size={shape!r})).astype({numpy_type})"
