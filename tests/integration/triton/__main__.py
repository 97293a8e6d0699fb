"""Run the tests' Triton by hand: python -m tests.integration.triton."""

import argparse
import signal
import sys
import time
from types import FrameType

from tests.integration.environment import MissingServerError
from tests.integration.support.real_server import HOST, ServerError
from tests.integration.triton.models import Model, Tensor
from tests.integration.triton.server import TritonServer


def main() -> None:
    """Start the server and keep it until Ctrl-C."""
    arguments = _parse(sys.argv[1:])
    # SIGINT too: a shell starts background jobs with it ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    try:
        _run(TritonServer(**vars(arguments)))
    except KeyboardInterrupt:
        print("stopped")
    except (ServerError, MissingServerError) as error:
        sys.exit(str(error))


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.integration.triton",
        description="Run the real Triton server of the tests by hand. A port of 0 is any free one.",
    )
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    return parser.parse_args(words)


def _run(server: TritonServer) -> None:
    print(f"starting Triton with {len(server.models)} models ...", flush=True)
    began = time.monotonic()
    with server:
        seconds = time.monotonic() - began
        print(f"ready after {seconds:.1f} s: {server.http_url}", flush=True)
        print(f"gRPC {HOST}:{server.grpc_port}, metrics {server.metrics_url}")
        print(f"log {server.log_path}\n")
        for model in server.models:
            print(_describe(model))
        print("\nCtrl-C ends it", flush=True)
        status = server.wait()
        raise ServerError(f"Triton ended by itself with status {status}:\n{server.log_tail()}")


def _describe(model: Model) -> str:
    inputs = ", ".join(_shape(model, tensor) for tensor in model.inputs)
    outputs = ", ".join(_shape(model, tensor) for tensor in model.outputs)
    return f"  {model.name:20} {inputs} → {outputs}"


def _shape(model: Model, tensor: Tensor) -> str:
    dims = (-1, *tensor.dims) if model.max_batch_size else tensor.dims
    return f"{tensor.name} {tensor.datatype} {list(dims)}"


def _leave(_signal: int, _frame: FrameType | None) -> None:
    # An exception, so that the server is stopped and its files are removed on the way out.
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
