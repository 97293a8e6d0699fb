"""Run a real MLServer on this machine."""

from tests.integration.mlserver.models import DATATYPES, MODELS
from tests.integration.support.python_server import PythonServer


class MLServer(PythonServer):
    """An MLServer with the tests' models."""

    name = "mlserver"
    dialect = "json"
    datatypes = DATATYPES

    def __init__(self) -> None:
        super().__init__(MODELS)
