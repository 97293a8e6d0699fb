"""Run a real Triton server on this machine."""

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.integration.support.real_server import HOST, Program, RealServer, ServerError
from tests.integration.triton.install import find
from tests.integration.triton.models import MODELS, Model, write_repository

__all__ = ["HOST", "TritonServer"]

SHARED_MEMORY = Path("/dev/shm")

# Each model version begins with this much shared memory, and gets more as its tensors need it.
_REGION_BYTES = 1024 * 1024
_SPARE_BYTES = 8 * 1024 * 1024
# Triton says that it started a service before it binds the port, and ends if it cannot. With
# this line the HTTP port is its own: before it, another server might be answering there.
_STARTED_LAST = b"Started Metrics Service"


class TritonServer(RealServer):
    """A Triton server with the tests' models; it has ports of its own for gRPC and metrics."""

    name = "triton"
    dialect = "triton"

    def __init__(
        self,
        models: Sequence[Model] = MODELS,
        *,
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
    ) -> None:
        super().__init__(models, ports=(http_port, grpc_port, metrics_port))
        self.metrics_port = self.ports[2]
        self.metrics_url = f"http://{HOST}:{self.metrics_port}/metrics"
        self.region_prefix = f"tensorgate_{secrets.token_hex(4)}_"

    @property
    def trace_path(self) -> Path:
        """The file that traces go to; stop() removes it."""
        return self._home() / "trace.json"

    def _prepare(self, folder: Path) -> Program:
        installation = find()
        _check_shared_memory(self.models)
        write_repository(self.models, folder / "models")
        installation.copy_backends(folder / "backends")
        command = (str(installation.tritonserver), *self._arguments(folder))
        return Program(installation.interpreter.path, command, installation.environment())

    def _arguments(self, folder: Path) -> list[str]:
        return [
            f"--model-repository={folder / 'models'}",
            f"--backend-directory={folder / 'backends'}",
            *("--model-control-mode=explicit", "--load-model=*"),
            # Else each Python model is started twice: 13 s instead of 2 s for 35 models.
            "--disable-auto-complete-config",
            f"--backend-config=python,shm-region-prefix-name={self.region_prefix}",
            f"--backend-config=python,shm-default-byte-size={_REGION_BYTES}",
            *(f"--http-address={HOST}", f"--http-port={self.http_port}"),
            *(f"--grpc-address={HOST}", f"--grpc-port={self.grpc_port}"),
            *(f"--metrics-address={HOST}", f"--metrics-port={self.metrics_port}"),
            "--allow-gpu-metrics=false",
            "--trace-config=mode=triton",
            "--trace-config=level=TIMESTAMPS",
            "--trace-config=rate=1000",
            f"--trace-config=triton,file={self.trace_path}",
        ]

    def _has_bound(self) -> bool:
        return _STARTED_LAST in self.log_path.read_bytes()

    def _clean_up(self) -> None:
        # A server that was killed leaves its shared memory behind.
        for region in SHARED_MEMORY.glob(f"{self.region_prefix}*"):
            region.unlink(missing_ok=True)
        super()._clean_up()


def _check_shared_memory(models: Sequence[Model]) -> None:
    # A tensor takes its size there, on the way in and out, until its model is unloaded.
    needed = sum(len(model.versions) for model in models) * _REGION_BYTES + _SPARE_BYTES
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < needed:
        raise ServerError(
            f"{SHARED_MEMORY} has {free} bytes free, and Triton needs {needed} to start: "
            "in a container, run it with --shm-size=1g"
        )
