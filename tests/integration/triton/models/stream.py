"""Answer a text in five pieces with a pause after each, as a language model would."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils

PIECES = 5
PAUSE_SECONDS = 0.05


class TritonPythonModel:
    """text_input [1] → five times text_output [1]; decoupled."""

    def execute(self, requests):
        """Answer the requests one after the other."""
        for request in requests:
            _answer(request)


def _answer(request):
    text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0]
    sender = request.get_response_sender()
    for number in range(PIECES):
        piece = np.array([text + b" %d" % number], dtype=np.object_)
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", piece)]))
        time.sleep(PAUSE_SECONDS)
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
