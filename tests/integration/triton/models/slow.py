"""Sleep for as many seconds as the input says, then answer it."""

import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """INPUT0 [1] = seconds → OUTPUT0 [1]."""

    def execute(self, requests):
        """Answer the requests one after the other."""
        return [_answer(request) for request in requests]


def _answer(request):
    seconds = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
    time.sleep(float(seconds[0]))
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", seconds)])
