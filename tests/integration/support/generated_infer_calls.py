"""Hypothesis strategies for inference calls that a client form can say and a server is to take."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from tests.codec.reference import FLOATS
from tests.integration.kserve import models as kserve
from tests.integration.mlserver import models as mlserver
from tests.integration.support.client_forms import CONTENTS, InferCall
from tests.integration.support.infer_messages import DTYPES, Array, Tensor
from tests.integration.triton import models as triton

_DATATYPES = {
    "triton": triton.DATATYPES,
    "kserve": kserve.DATATYPES,
    "mlserver": mlserver.DATATYPES,
}
_SPECIAL_MODELS = {
    "kserve": ("undeclared", "always_json", "gives_id_back"),
    "mlserver": ("undeclared", "reshaped"),
}
_MIXED = ("FP32", "INT64", "BYTES", "BOOL")
_MANY = 60_000
"""Elements of a tensor that is too large for the fast path."""

_TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
_IDS = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=8)
_IDS_IN_A_HEADER = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=8)
"""MLServer writes the id into a header."""

_NAMES = st.text("abcdefgh_", min_size=1, max_size=6).map(lambda name: f"p_{name}")
_VALUES = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXTS
)

# Servers write others in JSON as nulls.
_FINITE = st.floats(-(2.0**99), 2.0**99, width=32)


@dataclass(frozen=True, slots=True)
class Scene:
    """A server, the protocol spoken with it, and the form of the client: what bounds the calls."""

    server: str
    protocol: str
    form: str

    @property
    def takes_text_only(self) -> bool:
        """Return whether BYTES have to be UTF-8: one side speaks JSON, or the server demands it."""
        if (self.server, self.protocol) == ("kserve", "grpc"):
            return self.in_text or self.form == "gRPC typed"
        return self.in_text or (self.server, self.protocol) == ("mlserver", "http")

    @property
    def has_versions(self) -> bool:
        """Return whether the server has model versions."""
        return self.server != "kserve"

    @property
    def in_text(self) -> bool:
        """Return whether the client writes numbers as text."""
        return self.form in ("JSON", "V1")

    @property
    def has_header(self) -> bool:
        """Return whether the form says anything but the tensors."""
        return self.form not in ("raw", "V1")

    def can_say(self, datatype: str) -> bool:
        """Return whether the form has the datatype for a model that takes several elements."""
        if self.form == "gRPC typed":
            return datatype in CONTENTS
        # The bytes of the body are one element of BYTES.
        return not (self.form == "raw" and datatype == "BYTES")


def infer_calls(scene: Scene) -> st.SearchStrategy[InferCall]:
    """Make calls, one in six of which has a flaw."""
    kinds = [_identity(scene), _identity(scene), _zeros(scene)]
    if scene.form != "raw":
        kinds += [_add(scene), _mixed(scene)]
    if scene.has_versions:
        kinds.append(_of_one_number(scene, "versioned", ["1", "2"]))
    if scene.server == "triton":
        kinds += [_of_more_dimensions(scene), _of_one_number(scene, "with_parameters", ["", "1"])]
        if scene.has_header:
            kinds.append(_classified(scene))
    elif scene.has_header:
        kinds.append(_of_special_model(scene))
    valid = st.one_of(kinds)
    return st.integers(0, 5).flatmap(lambda number: valid if number else _flawed(scene))


# ------------------------------------------------------------------------------- tensors


def _elements(datatype: str, size: int, *, text: bool = True) -> st.SearchStrategy[Array]:
    """Make flat elements; ``text`` where BYTES have to be in JSON."""
    dtype = DTYPES[datatype]
    if datatype == "BYTES":
        texts = st.text(st.characters(codec="utf-8"), max_size=12).map(str.encode)
        one = texts if text else texts | st.binary(max_size=12)
        return _lists(one, size).map(lambda values: np.array(values, dtype))
    if datatype == "BOOL":
        return _lists(st.booleans(), size).map(lambda values: np.array(values, dtype))
    length = size * dtype.itemsize
    bits = st.binary(min_size=length, max_size=length).map(lambda data: np.frombuffer(data, dtype))
    return bits | _lists(st.sampled_from(_SPECIAL_VALUES[datatype]), size).map(
        lambda values: np.array(values, dtype)
    )


def _lists(one: st.SearchStrategy[Any], size: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(one, min_size=size, max_size=size)


def _special(datatype: str) -> list[Any]:
    if datatype not in FLOATS:
        limits = np.iinfo(DTYPES[datatype])
        return [0, 1, int(limits.min), int(limits.max)]
    limit = ml_dtypes.finfo(DTYPES[datatype])  # type: ignore[no-untyped-call]
    extreme = [float(limit.min), float(limit.max), float(limit.smallest_subnormal)]
    return [0.0, -0.0, 0.1, -2.5, 1e-3, np.nan, np.inf, -np.inf, *extreme]


_SPECIAL_VALUES = {each: _special(each) for each in DTYPES if each not in ("BOOL", "BYTES")}


@st.composite
def _tensor(
    draw: st.DrawFn, scene: Scene, name: str, datatype: str, shape: Sequence[int]
) -> Tensor:
    flat = draw(_elements(datatype, int(np.prod(shape)), text=scene.takes_text_only))
    if scene.in_text and datatype in FLOATS:
        # Text has one NaN.
        flat = np.where(np.isnan(flat), DTYPES[datatype].type(np.nan), flat)
    return Tensor(name, datatype, flat, tuple(shape))


def _as_tensor(name: str, numbers: Array) -> Tensor:
    return Tensor(name, "FP32", np.ascontiguousarray(numbers), numbers.shape)


@st.composite
def _large_tensor(draw: st.DrawFn, datatype: str) -> Tensor:
    chance = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    numbers = chance.integers(0, 100, _MANY)
    if datatype == "BYTES":
        flat: Array = np.array([b"%d" % number for number in numbers[: _MANY // 10]], object)
    else:
        flat = (numbers > 50) if datatype == "BOOL" else numbers.astype(DTYPES[datatype])
    return Tensor("INPUT0", datatype, flat, flat.shape)


def _shapes(scene: Scene) -> st.SearchStrategy[tuple[int, ...]]:
    few, small = st.integers(scene.form == "V1", 6), st.integers(1, 3)
    if scene.server == "triton" or not scene.has_header:
        return st.tuples(few)
    return st.tuples(few) | st.tuples(few, small) | st.tuples(small, few, small)


# ------------------------------------------------------------------------------- calls


@st.composite
def _call(
    draw: st.DrawFn,
    scene: Scene,
    model: str,
    inputs: tuple[Tensor, ...],
    outputs: Sequence[str] = ("OUTPUT0",),
) -> InferCall:
    """Put around the tensors what the form can say."""
    is_small = sum(each.elements.size for each in inputs) < 1000
    call = InferCall(model, inputs, pieces=draw(st.sampled_from([0, 0, 0, 50])) * is_small)
    if scene.has_versions:
        call = replace(call, version=draw(st.sampled_from(["", "", "1"])))
    if scene.form == "V1":
        sizes = {each.shape[0] for each in inputs}
        return replace(call, in_rows=len(sizes) == 1 and draw(st.booleans()))
    if scene.form == "raw":
        return call
    names = draw(st.lists(st.sampled_from(outputs), unique=True))
    return replace(
        call,
        inputs=tuple(draw(st.permutations(inputs))),
        id=draw(_IDS_IN_A_HEADER if scene.server == "mlserver" else _IDS),
        parameters=draw(st.dictionaries(_NAMES, _VALUES, max_size=2)),
        outputs=tuple((name, 0) for name in names),
    )


@st.composite
def _identity(draw: st.DrawFn, scene: Scene) -> InferCall:
    datatype = draw(st.sampled_from([*filter(scene.can_say, _DATATYPES[scene.server])]))
    if draw(st.integers(0, 15)) == 15:
        tensor = draw(_large_tensor(datatype))
    else:
        tensor = draw(_tensor(scene, "INPUT0", datatype, draw(_shapes(scene))))
    return draw(_call(scene, f"identity_{datatype.lower()}", (tensor,)))


@st.composite
def _of_more_dimensions(draw: st.DrawFn, scene: Scene) -> InferCall:
    """Ask models of Triton that have more dimensions, or batches."""
    models = [
        ("batched_fp32", "FP32", (-1, 4)),
        ("batched_var", "FP32", (1, -1, 4)),
        ("batched_bytes", "BYTES", (-1, 1)),
    ]
    if scene.form == "raw":
        models = [(name, kind, (1, *dims[1:])) for name, kind, dims in models]
    else:
        models += [("two_variable", "FP32", (-1, -1)), ("identity_bytes_2d", "BYTES", (-1, -1))]
        if scene.can_say("FP16"):
            models.append(("identity_fp16_2d", "FP16", (-1, -1)))
    model, datatype, dims = draw(st.sampled_from(models))
    shape = [draw(st.integers(1, 3)) if size == -1 else size for size in dims]
    return draw(_call(scene, model, (draw(_tensor(scene, "INPUT0", datatype, shape)),)))


@st.composite
def _add(draw: st.DrawFn, scene: Scene) -> InferCall:
    pairs = np.array(draw(st.lists(st.tuples(_FINITE, _FINITE), min_size=1)), np.float32)
    inputs = [_as_tensor(f"INPUT{number}", pairs[:, number]) for number in range(2)]
    return draw(_call(scene, "add", tuple(inputs), ("SUM", "DIFFERENCE")))


@st.composite
def _mixed(draw: st.DrawFn, scene: Scene) -> InferCall:
    sizes = st.integers(1, 4)
    inputs = [draw(_tensor(scene, f"IN_{kind}", kind, (draw(sizes),))) for kind in _MIXED]
    return draw(_call(scene, "mixed", tuple(inputs), [f"OUT_{kind}" for kind in _MIXED]))


@st.composite
def _zeros(draw: st.DrawFn, scene: Scene) -> InferCall:
    flat = np.array([draw(st.integers(0, 20))], np.int32)
    call = draw(_call(scene, "zeros", (Tensor("INPUT0", "INT32", flat, (1,)),)))
    return replace(call, in_rows=False)  # one row gives as many zeros as it says


@st.composite
def _of_one_number(draw: st.DrawFn, scene: Scene, model: str, versions: Sequence[str]) -> InferCall:
    call = draw(_call(scene, model, (draw(_tensor(scene, "INPUT0", "FP32", (1,))),)))
    return replace(call, version=draw(st.sampled_from(versions)))


@st.composite
def _classified(draw: st.DrawFn, scene: Scene) -> InferCall:
    model, shape = draw(st.sampled_from([("identity_fp32", (8,)), ("batched_fp32", (2, 4))]))
    numbers = np.array(draw(st.permutations(range(-3, 5))), np.float32)
    call = draw(_call(scene, model, (Tensor("INPUT0", "FP32", numbers, shape),)))
    return replace(call, outputs=(("OUTPUT0", draw(st.integers(1, 4))),))


@st.composite
def _of_special_model(draw: st.DrawFn, scene: Scene) -> InferCall:
    model = draw(st.sampled_from(_SPECIAL_MODELS[scene.server]))
    numbers = np.array(draw(st.lists(_FINITE, min_size=1)), np.float32)
    return draw(_call(scene, model, (_as_tensor("INPUT0", numbers),)))


@st.composite
def _flawed(draw: st.DrawFn, scene: Scene) -> InferCall:
    flaws = ["an unknown model", "a model that fails"]
    if scene.has_versions:
        flaws.append("an unknown version")
    if scene.has_header:
        flaws += ["an unknown output", "an unknown input", "a lacking input"]
        flaws += ["another datatype", "another size"]
    flaw = draw(st.sampled_from(flaws))
    tensor = Tensor("INPUT0", "FP32", np.array([0.5, -2], np.float32), (2,))
    call = draw(_call(scene, "identity_fp32", (tensor,)))
    integers = replace(tensor, datatype="INT32", elements=np.array([1, 2], np.int32))
    changes: dict[str, dict[str, Any]] = {
        "an unknown model": {"model": "nope"},
        "a model that fails": {"model": "fails"},
        "an unknown version": {"version": "9"},
        "an unknown output": {"outputs": (("OTHER", 0),)},
        "an unknown input": {"inputs": (replace(tensor, name="OTHER"),)},
        "a lacking input": {"model": "add", "outputs": ()},
        "another datatype": {"inputs": (integers,)},
        "another size": {"inputs": (replace(tensor, shape=(3,), data=tensor.values()),)},
    }
    return replace(call, **changes[flaw], flaw=flaw)
