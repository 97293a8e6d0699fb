"""Answer the request's own parameters, as JSON text."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """INPUT0 → OUTPUT0 [1].

    Responses cannot have parameters with the Python backend of Triton 2.51.
    """

    def execute(self, requests):
        """Answer each request by itself."""
        return [_answer(request) for request in requests]


def _answer(request):
    text = np.array([request.parameters().encode()], dtype=np.object_)
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", text)])
