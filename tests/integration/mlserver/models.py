"""The models that the tests' MLServer serves: Triton's, as far as it can have them, and its own."""

from tests.integration.triton import models as triton
from tests.integration.triton.models import Model, Tensor

# It knows no BF16.
DATATYPES = tuple(each for each in triton.DATATYPES if each != "BF16")

_FP32 = (Tensor("INPUT0", "FP32"),), (Tensor("OUTPUT0", "FP32"),)
UNDECLARED = Model("undeclared", "identity", *_FP32)
"""Its metadata tells of no inputs and no outputs."""
RESHAPED = Model("reshaped", "identity", *_FP32)
"""Answers the shape that MLServer's own codec gives: [3] becomes [3, 1]."""

MODELS = (
    *triton.named(*(f"identity_{datatype.lower()}" for datatype in DATATYPES)),
    *triton.named("add", "mixed", "zeros", "slow", "fails", "versioned"),
    *(UNDECLARED, RESHAPED),
)
