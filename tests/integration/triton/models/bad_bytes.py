"""Answer each element with the byte 0xFF before it, which UTF-8 never has."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """INPUT0 → OUTPUT0."""

    def execute(self, requests):
        """Answer each request by itself."""
        return [_answer(request) for request in requests]


def _answer(request):
    elements = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
    bad = np.array([b"\xff" + element for element in elements], dtype=np.object_)
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", bad)])
