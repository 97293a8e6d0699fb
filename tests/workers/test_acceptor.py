"""Clients that connect while the gateway stops: a program of its own, as it forks."""

import signal
import socket

from tests.support.gateway_process import running_process
from tests.workers.programs import command


async def test_client_whose_handshake_is_under_way_at_the_stop_is_served() -> None:
    """Each worker reports how many connections it got, as if it had cut so many calls."""
    main = """
channel.send_ready(); got = 0
while (message := next_message(channel)) and message[0] != ToWorker.DRAIN:
    if message[0] == ToWorker.CLIENT:
        got += 1; channel._send(FromWorker.RECEIVED)
channel.send_dropped(got)
"""
    setup = """
from tests.support.servers.stalled_handshakes import stall_handshakes
stall_handshakes(sock)
print('port', sock.getsockname()[1], file=sys.stderr, flush=True)
"""
    async with running_process(*command(main, 2, setup=setup)) as process:
        port = int((await process.wait_for_output(r"port (\d+)"))[1])
        await process.wait_for_output("started")
        with socket.create_connection(("127.0.0.1", port)) as client:
            process.signal(signal.SIGTERM)
            client.sendall(b"what ends the handshake")
            assert (await process.end())[:2] == (0, "dropped 1\n")
