"""Answer each input IN_X as the output OUT_X, in the order of the configuration."""

import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """IN_FP32, IN_INT64, IN_BYTES, IN_BOOL → OUT_FP32, OUT_INT64, OUT_BYTES, OUT_BOOL."""

    def initialize(self, args):
        """Read the inputs' names from the configuration."""
        config = json.loads(args["model_config"])
        self.inputs = [tensor["name"] for tensor in config["input"]]

    def execute(self, requests):
        """Answer each request by itself."""
        return [
            pb_utils.InferenceResponse([_renamed(request, name) for name in self.inputs])
            for request in requests
        ]


def _renamed(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return pb_utils.Tensor(name.replace("IN_", "OUT_"), tensor.as_numpy())
