"""A request of each kind that the gateway treats in its own way."""

from tests.support.http_messages import request
from tests.support.inference_messages import binary_header, infer_binary, infer_json, infer_raw

EVERY_OPERATION = {
    "GET": request("GET", "/v2/x"),
    "POST": request("POST", "/v2/x", b"hello"),
    "JSON": infer_json(),
    "binary": infer_binary(binary_header(4), bytes(4)),
    "raw": infer_raw(bytes(8)),
    "server metadata": request("GET", "/v2"),
    "trace settings": request("GET", "/v2/trace"),
    "load": request("POST", "/v2/repository/models/m/load", b"{}"),
    "HEAD": request("HEAD", "/v2/x"),
}
