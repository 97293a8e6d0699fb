from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gateway.demo.server.errors import RequestError
from gateway.demo.server.inference import infer
from gateway.demo.server.models import MODELS
from gateway.demo.server.tensors import DTYPES, Tensor
from gateway.demo.server.wire import InferRequest, RequestedOutput


def tensor(name: str, datatype: str, array: Any) -> Tensor:
    return Tensor(name, datatype, np.array(array, DTYPES[datatype]))


def run(model: str, *inputs: Tensor, outputs: Sequence[RequestedOutput] = ()) -> list[Tensor]:
    return infer(MODELS[model], InferRequest(inputs=inputs, outputs=tuple(outputs)))


def raw(model: str, body: bytes) -> list[Tensor]:
    return infer(MODELS[model], InferRequest(raw=body, binary_output=True))


def test_add_adds_its_inputs() -> None:
    left, right = tensor("INPUT0", "FP32", [1, 2]), tensor("INPUT1", "FP32", [10, 20])
    (total,) = run("add", right, left)
    assert (total.name, total.array.tolist()) == ("SUM", [11, 22])


def test_half_halves_its_input() -> None:
    (output,) = run("half", tensor("INPUT0", "FP16", [1, -3]))
    assert output.array.dtype == np.float16
    assert output.array.tolist() == [0.5, -1.5]


def test_upper_changes_letters_and_preserves_other_bytes() -> None:
    (output,) = run("upper", tensor("INPUT0", "BYTES", ["aé".encode() + b"\xff"]))
    assert output.array.tolist() == ["AÉ".encode() + b"\xff"]


def test_image_returns_means_and_inverted_pixels() -> None:
    image = np.linspace(0, 1, 2 * 3 * 224 * 224, dtype=np.float32).reshape(2, 3, 224, 224)
    mean, inverted = run("image", Tensor("INPUT", "FP32", image))
    np.testing.assert_allclose(mean.array, image.mean(axis=(2, 3)), rtol=1e-5)
    np.testing.assert_array_equal(inverted.array, 1 - image)
    assert mean.array.shape == (2, 3)
    assert mean.array.dtype == np.float32


@pytest.mark.parametrize("shape", [(), (0,), (2,), (1, 3), (2, 1, 2, 1)])
def test_identity_accepts_every_rank(shape: tuple[int, ...]) -> None:
    (output,) = run("identity_int8", tensor("INPUT0", "INT8", np.ones(shape)))
    assert output.array.shape == shape


def test_infinities_cause_no_warnings() -> None:
    left, right = tensor("INPUT0", "FP32", [np.inf]), tensor("INPUT1", "FP32", [-np.inf])
    assert np.isnan(run("add", left, right)[0].array).all()


def test_outputs_are_in_the_order_of_the_model() -> None:
    image = tensor("INPUT", "FP32", np.zeros((1, 3, 224, 224)))
    wanted = [RequestedOutput("INVERTED"), RequestedOutput("MEAN")]
    assert [t.name for t in run("image", image, outputs=wanted)] == ["MEAN", "INVERTED"]
    assert [t.name for t in run("image", image, outputs=wanted[:1])] == ["INVERTED"]


X = tensor("INPUT0", "FP32", [1, 2])


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        ("add", [X], "missing required input 'INPUT1'"),
        ("add", [X, tensor("Q", "FP32", [1])], "unexpected inference input 'Q'"),
        ("identity_fp32", [X, X], "already exists"),
        ("add", [X, tensor("INPUT1", "FP64", [1, 2])], "data-type is 'FP64'"),
        ("add", [X, tensor("INPUT1", "FP32", [[1, 2]])], r"Expected \[-1\], got \[1, 2\]"),
        ("add", [X, tensor("INPUT1", "FP32", [1])], "same shape"),
        ("image", [tensor("INPUT", "FP32", np.zeros((3, 224, 224)))], "unexpected shape"),
        ("image", [tensor("INPUT", "FP32", np.zeros((9, 3, 224, 224)))], "from 1 to 8"),
        ("image", [tensor("INPUT", "FP32", np.zeros((0, 3, 224, 224)))], "from 1 to 8"),
    ],
)
def test_inputs_that_do_not_fit_the_model_are_rejected(
    model: str, inputs: list[Tensor], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        run(model, *inputs)


def test_unknown_outputs_are_rejected() -> None:
    with pytest.raises(RequestError, match="unexpected inference output 'Q'"):
        run("identity_fp32", X, outputs=[RequestedOutput("Q")])


@pytest.mark.parametrize(
    ("model", "body", "shapes"),
    [
        ("identity_fp32", bytes(8), [(2,)]),
        ("identity_bf16", bytes(8), [(4,)]),
        ("identity_fp32", b"", [(0,)]),
        ("image", bytes(602_112), [(1, 3), (1, 3, 224, 224)]),
    ],
)
def test_shape_of_a_raw_input_follows_from_its_size(
    model: str, body: bytes, shapes: list[tuple[int, ...]]
) -> None:
    assert [output.array.shape for output in raw(model, body)] == shapes


@pytest.mark.parametrize("body", [b"hello", b""])
def test_raw_text_is_one_element(body: bytes) -> None:
    assert raw("upper", body)[0].array.tolist() == [body.upper()]


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        ("add", bytes(8), "must only have 1 input"),
        ("identity_fp32", bytes(7), "expected 4 bytes, got 7"),
        ("image", bytes(602_108), "expected 602112 bytes, got 602108"),
        ("identity_bytes", b"abc", r"must have input shape \[1\]"),
    ],
)
def test_ambiguous_raw_inputs_are_rejected(model: str, body: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        raw(model, body)


@pytest.mark.parametrize(
    ("datatype", "elements", "classes", "expected"),
    [
        ("FP32", [0.25, 3, 2, -1], 2, [b"3.000000:1", b"2.000000:2"]),
        ("INT32", [5, 3, 2, 5], 2, [b"5:0", b"5:3"]),
        ("FP32", [1], 5, [b"1.000000:0"]),
        ("FP32", [], 5, []),
    ],
)
def test_classification_returns_the_largest_elements(
    datatype: str, elements: list[float], classes: int, expected: list[bytes]
) -> None:
    wanted = [RequestedOutput("OUTPUT0", classes=classes)]
    model = f"identity_{datatype.lower()}"
    (output,) = run(model, tensor("INPUT0", datatype, elements), outputs=wanted)
    assert (output.datatype, output.array.tolist()) == ("BYTES", expected)


def test_classification_of_a_batch_is_by_row() -> None:
    image = np.zeros((2, 3, 224, 224))
    image[1, 2] = 1
    wanted = [RequestedOutput("MEAN", classes=1)]
    (output,) = run("image", tensor("INPUT", "FP32", image), outputs=wanted)
    assert output.array.tolist() == [[b"0.000000:0"], [b"1.000000:2"]]


@pytest.mark.parametrize("datatype", ["BOOL", "BYTES", "FP16", "BF16"])
def test_classification_rejects_some_datatypes(datatype: str) -> None:
    wanted = [RequestedOutput("OUTPUT0", classes=1)]
    with pytest.raises(RequestError, match="class result not available"):
        run(f"identity_{datatype.lower()}", tensor("INPUT0", datatype, [0]), outputs=wanted)
