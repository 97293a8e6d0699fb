"""Answer INPUT0 as OUTPUT0, whatever its datatype."""

import json

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """INPUT0 → OUTPUT0."""

    def initialize(self, args):
        """Note whether numpy can hold the datatype: it has no bfloat16, DLPack has."""
        config = json.loads(args["model_config"])
        self.numpy_has_it = config["input"][0]["data_type"] != "TYPE_BF16"

    def execute(self, requests):
        """Answer each request by itself."""
        return [pb_utils.InferenceResponse([self._renamed(request)]) for request in requests]

    def _renamed(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
        if self.numpy_has_it:
            return pb_utils.Tensor("OUTPUT0", tensor.as_numpy())
        return pb_utils.Tensor.from_dlpack("OUTPUT0", tensor.to_dlpack())
