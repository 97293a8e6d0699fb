"""Answer the version of the model."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """INPUT0 → OUTPUT0 [1]."""

    def initialize(self, args):
        """Note the version."""
        self.version = np.array([int(args["model_version"])], dtype=np.int32)

    def execute(self, requests):
        """Answer each request by itself."""
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", self.version)])
            for _request in requests
        ]
