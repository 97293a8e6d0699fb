"""V1 predictions: each is sent as the infer request that asks for the same."""

from __future__ import annotations

from multidict import CIMultiDict, CIMultiDictProxy

from gateway.protocol.operations import Operation
from gateway.protocol.v1 import infer_path
from gateway.proxy.calls.handler import CallHandler, HandlerScope, ResponsePlans, ServerRequest
from gateway.proxy.calls.infer import InferHandler
from gateway.proxy.destination import Destination
from gateway.proxy.infer.convert_buffered_request import read_buffered_prediction
from gateway.proxy.interfaces import ClientHead
from gateway.sizes import MAX_UNSCHEDULED


class PredictHandler(InferHandler):
    """Converts V1 predictions to infer requests."""

    def __init__(
        self,
        target: str,
        headers: CIMultiDictProxy[str],
        operation: Operation,
        plans: ResponsePlans,
    ) -> None:
        target = infer_path(operation) + "".join(target.partition("?")[1:])
        passed = CIMultiDict(headers)
        passed.popall("Accept-Encoding", None)  # the gateway reads the response
        super().__init__(
            "POST", target, CIMultiDictProxy(passed), operation, None, MAX_UNSCHEDULED, plans
        )

    def to_server(
        self, head: ClientHead, body: bytes, destination: Destination, request_id: str
    ) -> ServerRequest | None:
        """Return the request for a server."""
        if not request_id:  # ids are off, so that the client's own passes
            own = [field.value for field in head.noted if field.lower == "x-request-id"]
            request_id = own[0] if own and own[0].isascii() else ""
        prediction = read_buffered_prediction(self._operation, destination, body, request_id)
        if prediction is None:
            return None
        received, layout = prediction
        return self._write(head, received, destination, layout)


def make_predict_handler(scope: HandlerScope) -> CallHandler:
    """Return the handler of predictions."""
    return PredictHandler(scope.target, scope.headers, scope.operation, scope.response_plans)
