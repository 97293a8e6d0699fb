"""Run a real KServe model server on this machine."""

from tests.integration.kserve.models import DATATYPES, MODELS
from tests.integration.support.python_server import PythonServer


class KServe(PythonServer):
    """A KServe model server with the tests' models."""

    name = "kserve"
    dialect = "kserve"
    datatypes = DATATYPES

    def __init__(self) -> None:
        super().__init__(MODELS)
