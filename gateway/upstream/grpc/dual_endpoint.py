"""An endpoint with two addresses: one over HTTP, and one over gRPC for calls of gRPC."""

from __future__ import annotations

import asyncio

from gateway.errors import ErrorKind, GatewayError, ServerName
from gateway.upstream.transport import (
    CallCounter,
    ReservedConnection,
    UpstreamEndpoint,
    UpstreamRequest,
    UpstreamResponse,
)


class DualEndpoint(UpstreamEndpoint):
    """A server that is reached over HTTP and over gRPC.

    gRPC calls go to its gRPC address, all others to its HTTP address. The
    latter is its URL. Errors name the address that failed.
    """

    def __init__(self, http: UpstreamEndpoint, grpc: UpstreamEndpoint) -> None:
        self.url = http.url
        self.name = http.name
        self.own_request_headers = http.own_request_headers
        self._http = http
        self._grpc = grpc
        self._lacks_grpc = False

    @property
    def addresses(self) -> tuple[UpstreamEndpoint, ...]:
        """Return the endpoints of its addresses: HTTP, then gRPC."""
        return self._http, self._grpc

    @property
    def probe_targets(self) -> tuple[UpstreamEndpoint, ...]:
        """Return its HTTP address, and the gRPC one if the last call could not connect there.

        A gRPC address that nobody uses need not respond.
        """
        return self.addresses if self._lacks_grpc else (self._http,)

    def server_for(self, *, is_grpc: bool) -> ServerName:
        """Return the name of the address that a request goes to."""
        return (self._grpc if is_grpc else self._http).name

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send a request; see UpstreamEndpoint."""
        endpoint = self._grpc if request.is_grpc else self._http
        if endpoint is self._http:
            return await endpoint.send(request)
        try:
            response = await endpoint.send(request)
        except GatewayError as error:
            self._lacks_grpc = error.kind is ErrorKind.UNREACHABLE
            raise
        self._lacks_grpc = False
        return response

    def after_timeout(self) -> None:
        """Use the connection of a call that has timed out no more; see UpstreamEndpoint."""
        for endpoint in self.addresses:
            endpoint.after_timeout()

    def try_reserve(self) -> ReservedConnection | None:
        """Take a connection over HTTP; see UpstreamEndpoint."""
        return self._http.try_reserve()

    def try_reserve_stream(self) -> ReservedConnection | None:
        """Take a stream over gRPC; see UpstreamEndpoint."""
        return self._grpc.try_reserve_stream()

    def count_drained_in(self, counter: CallCounter) -> None:
        """Count drained calls; see UpstreamEndpoint."""
        self._grpc.count_drained_in(counter)

    async def close(self) -> None:
        """Close the connections to both addresses."""
        await asyncio.gather(self._http.close(), self._grpc.close())
