"""Who connects as it ends: a program of its own, as it forks."""

import signal
import socket

from tests.support.gateway_process import running_process
from tests.workers.programs import command


async def test_a_handshake_under_way_at_the_end_is_waited_for() -> None:
    """Each worker tells how many connections it got, as if it had dropped so many exchanges."""
    work = (
        "post.send_ready(); got = 0\n"
        "    while (word := socket.recv_fds(post._channel, 1, 2)[0]) in (b'+', b'~'):\n"
        "        got += word == b'+'; word == b'+' and post._say(word)\n"
        "    post.send_dropped(got)"
    )
    *python, program = command(work, 2)
    module = "tests.support.servers.stalled_handshakes"
    held = f"from {module} import stall_handshakes\n    stall_handshakes(sock)\n"
    port = "    print('port', sock.getsockname()[1], file=sys.stderr, flush=True)\n"
    program = program.replace('    print("dropped"', f'    {held}{port}    print("dropped"', 1)
    async with running_process(*python, program) as process:
        number = int((await process.wait_for_output(r"port (\d+)"))[1])
        await process.wait_for_output("begun")
        with socket.create_connection(("127.0.0.1", number)) as client:
            process.signal(signal.SIGTERM)
            client.sendall(b"what ends the handshake")
            assert (await process.end())[:2] == (0, "dropped 1\n")
