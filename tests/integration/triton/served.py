"""Serves each of the tests' models, of which those in STREAMS are decoupled.

In a model, SOURCE and tests/support/servers/numpy_models.py stand before this text.
"""

# ruff: noqa: F821

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils

PIECES = 5
PAUSE_SECONDS = 0.05


class TritonPythonModel:
    """Answers each request by itself, or in several pieces."""

    def initialize(self, args):
        """Note the inputs and the version; numpy cannot hold bfloat16, DLPack can."""
        inputs = json.loads(args["model_config"])["input"]
        self.inputs = [tensor["name"] for tensor in inputs]
        self.is_bfloat = inputs[0]["data_type"] == "TYPE_BF16"
        self.version = np.array([int(args["model_version"])], dtype=np.int32)

    def execute(self, requests):
        """Answer the requests one after the other."""
        if SOURCE not in STREAMS:
            return [pb_utils.InferenceResponse(self._outputs(request)) for request in requests]
        for request in requests:
            sender = request.get_response_sender()
            for response in STREAMS[SOURCE](request):
                sender.send(response)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None

    def _outputs(self, request):
        tensors = {name: pb_utils.get_input_tensor_by_name(request, name) for name in self.inputs}
        if self.is_bfloat:
            return [pb_utils.Tensor.from_dlpack("OUTPUT0", tensors["INPUT0"].to_dlpack())]
        arrays = {name: tensor.as_numpy() for name, tensor in tensors.items()}
        if SOURCE == "versioned":
            outputs = {"OUTPUT0": self.version}
        elif SOURCE == "with_parameters":
            # Responses cannot have parameters with the Python backend of Triton 2.51.
            outputs = {"OUTPUT0": _text(request.parameters().encode())}
        else:
            outputs = WORK[SOURCE](arrays)
        return [pb_utils.Tensor(*output) for output in outputs.items()]


def _text(text):
    return np.array([text], dtype=np.object_)


def _stream(request):
    """Yield a text in five pieces with a pause after each, as a language model would."""
    text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0]
    for number in range(PIECES):
        piece = pb_utils.Tensor("text_output", _text(text + b" %d" % number))
        yield pb_utils.InferenceResponse([piece])
        time.sleep(PAUSE_SECONDS)


def _decoupled(request):
    """Yield a text, and the request's parameters, as often as these say.

    Parameters: count (1), pause in seconds (0), fail_at (none): the response that is an error.
    """
    parameters = json.loads(request.parameters() or "{}")
    text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0]
    for number in range(parameters.get("count", 1)):
        outputs = {
            "text_output": text + b" %d" % number,
            "parameters": request.parameters().encode(),
        }
        tensors = [pb_utils.Tensor(name, _text(value)) for name, value in outputs.items()]
        response = pb_utils.InferenceResponse(tensors)
        if number == parameters.get("fail_at"):
            error = pb_utils.TritonError(f"no response {number}")
            response = pb_utils.InferenceResponse([], error)
        yield response
        time.sleep(float(parameters.get("pause", 0)))
        if request.is_cancelled():
            break


STREAMS = {"stream": _stream, "decoupled": _decoupled}
