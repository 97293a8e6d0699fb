"""The models that the tests' KServe serves: Triton's, as far as it can have them, and its own."""

from tests.integration.triton import models as triton
from tests.integration.triton.models import Model, Tensor

# It knows no BF16.
DATATYPES = tuple(each for each in triton.DATATYPES if each != "BF16")

_FP32 = (Tensor("INPUT0", "FP32"),), (Tensor("OUTPUT0", "FP32"),)
UNDECLARED = Model("undeclared", "identity", *_FP32)
"""As most models of KServe are: its metadata tells of no inputs and no outputs."""
ALWAYS_JSON = Model("always_json", "identity", *_FP32)
"""As its older models are: answers in JSON, whatever a request asks for."""
GIVES_ID_BACK = Model("gives_id_back", "identity", *_FP32)
"""As models written by hand are: V1 is answered in V1, and V2 in JSON with the request's id."""

MODELS = (
    *triton.named(*(f"identity_{datatype.lower()}" for datatype in DATATYPES)),
    *triton.named("add", "mixed", "zeros", "slow", "fails"),
    *(UNDECLARED, ALWAYS_JSON, GIVES_ID_BACK),
)
