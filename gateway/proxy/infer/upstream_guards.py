"""What is refused here because a server would not survive it, or answer for the client's fault."""

from __future__ import annotations

from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.protocol.datatypes import Family
from gateway.protocol.operations import Operation
from gateway.protocol.request_features import RequestFeatures
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.infer.metadata import model_metadata
from gateway.proxy.interfaces import Route


async def check_infer(
    features: RequestFeatures, asked: Operation, route: Route, deadline: Deadline
) -> None:
    """Check what a request's header asks of its model.

    Raises GatewayError (400) that names the input, output or parameter, and what
    ``model_metadata`` raises where that is needed.
    """
    declared = route.models.get(asked.model or "")
    if declared is not None:
        declared.check(features.inputs)
    if features.is_plain or not route.upstream.dialect.triton_extensions:
        return
    if features.error:
        raise bad_request(features.error)
    _check_elements(features)
    await _check_classified(features, asked, route, deadline)


def _check_elements(features: RequestFeatures) -> None:
    """Refuse classes of nothing: Triton divides by the number of elements, and ends."""
    for tensor in features.inputs:
        if 0 in tensor.shape:
            raise bad_request(
                f"output '{features.classified_outputs[0]}': "
                "classification needs elements, and input "
                f"'{tensor.name}' of shape {list(tensor.shape)} has none"
            )


async def _check_classified(
    features: RequestFeatures, asked: Operation, route: Route, deadline: Deadline
) -> None:
    """Refuse classes of strings: Triton ends as it compares them."""
    outputs = (await model_metadata(asked, route, deadline)).outputs
    if not outputs:
        raise GatewayError(
            ErrorKind.UNSUPPORTED,
            f"classification of output '{features.classified_outputs[0]}': "
            "the server does not say what "
            f"outputs model '{asked.model}' has",
        )
    datatypes = {output.name: output.datatype for output in outputs}
    for name in features.classified_outputs:
        # An output that the model does not have is the server's to refuse.
        if name in datatypes and datatypes[name].family is Family.TEXT:
            raise bad_request(
                f"output '{name}' of model '{asked.model}' is {datatypes[name].name}, of which "
                "there is no classification"
            )
