"""Answer the sum and the difference of two tensors."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """INPUT0, INPUT1 → SUM, DIFFERENCE."""

    def execute(self, requests):
        """Answer each request by itself."""
        return [_answer(request) for request in requests]


def _answer(request):
    left = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
    right = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor("SUM", left + right), pb_utils.Tensor("DIFFERENCE", left - right)]
    )
