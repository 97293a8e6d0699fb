from gateway.app.build.routes import declared_models
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.declared_model import DeclaredModel
from gateway.protocol.tensors import ModelMetadata, TensorSpec
from gateway.settings.models import Model


def test_batch_dimension_comes_first() -> None:
    x = {"name": "x", "datatype": "FP32", "shape": [3, -1]}
    y = {"name": "y", "datatype": "BYTES", "shape": []}
    declared = {
        "plain": Model.model_validate({"inputs": [x], "outputs": [y]}),
        "batched": Model.model_validate({"inputs": [x], "outputs": [y], "max_batch_size": 8}),
        "silent": Model.model_validate({"inputs": [y]}),
    }
    fp32, text = DATATYPES["FP32"], DATATYPES["BYTES"]
    assert declared_models(declared) == {
        "plain": DeclaredModel(
            ModelMetadata(
                "plain", (TensorSpec("x", fp32, (3, -1)),), False, (TensorSpec("y", text, ()),)
            )
        ),
        "batched": DeclaredModel(
            ModelMetadata(
                "batched",
                (TensorSpec("x", fp32, (-1, 3, -1)),),
                True,
                (TensorSpec("y", text, (-1,)),),
            ),
            8,
        ),
        "silent": DeclaredModel(ModelMetadata("silent", (TensorSpec("y", text, ()),), False)),
    }
