"""Answer a text as often as the request's parameters say, or fail in between."""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """text_input [1] → count times text_output [1] and the request's parameters [1]; decoupled.

    Parameters: count (1), pause in seconds (0), fail_at (none): the response that is an error.
    """

    def execute(self, requests):
        """Answer the requests one after the other."""
        for request in requests:
            _answer(request)


def _answer(request):
    parameters = json.loads(request.parameters() or "{}")
    text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0]
    sender = request.get_response_sender()
    for number in range(parameters.get("count", 1)):
        if number == parameters.get("fail_at"):
            error = pb_utils.TritonError(f"no response {number}")
            sender.send(pb_utils.InferenceResponse([], error))
        else:
            sender.send(_response(text, number, request.parameters()))
        time.sleep(float(parameters.get("pause", 0)))
        if request.is_cancelled():
            break
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _response(text, number, parameters):
    outputs = {"text_output": text + b" %d" % number, "parameters": parameters.encode()}
    return pb_utils.InferenceResponse([_tensor(*output) for output in outputs.items()])


def _tensor(name, text):
    return pb_utils.Tensor(name, np.array([text], dtype=np.object_))
