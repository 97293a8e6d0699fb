"""Fail on each request."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """INPUT0 → an error."""

    def execute(self, requests):
        """Raise."""
        raise pb_utils.TritonModelException("this model always fails")
