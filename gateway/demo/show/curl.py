"""Commands to try by hand."""

from typing import Final

_LINES: Final = """\
# JSON in, JSON out
curl -sw '\\n' URL/v2/models/add/infer -d '{"inputs": [
  {"name": "INPUT0", "datatype": "FP32", "shape": [3], "data": [1, 2, 3]},
  {"name": "INPUT1", "datatype": "FP32", "shape": [3], "data": [10, 20, 30]}]}'

# FP16 in JSON, which no server takes by itself
curl -sw '\\n' URL/v2/models/half/infer -d '{"inputs": [
  {"name": "INPUT0", "datatype": "FP16", "shape": [3], "data": [1, 2.5, -3]}]}'

# raw binary: the body is the tensor
printf 'hello' | curl -sw '\\n' URL/v2/models/upper/infer --data-binary @- \\
  -H 'Content-Type: application/octet-stream' -H 'Inference-Header-Content-Length: 0' --output -

# trace settings, as the specification spells the path
curl -sw '\\n' URL/v2/models/add/trace
curl -sw '\\n' URL/v2/models/add/trace -d '{"trace_rate": "100"}'

# what the server and a model are
curl -sw '\\n' URL/v2
curl -sw '\\n' URL/v2/models/image

# an answer that comes word by word
curl -sN URL/v2/models/upper/generate_stream -d '{"INPUT0": "word by word"}'
"""


def curl_commands(gateway_url: str) -> str:
    """Return curl commands for a POSIX shell, at most 100 columns wide for a usual URL."""
    return _LINES.replace("URL", gateway_url.rstrip("/"))
