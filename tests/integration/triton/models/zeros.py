"""Answer as many zeros as asked for: a response of any size to a tiny request."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """INPUT0 [1] = n → OUTPUT0 [n]."""

    def execute(self, requests):
        """Answer each request by itself."""
        return [_answer(request) for request in requests]


def _answer(request):
    count = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()[0]
    zeros = np.zeros(count, dtype=np.float32)
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", zeros)])
