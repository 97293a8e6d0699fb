"""The manifests in deploy/kubernetes/ are valid, fit together, and their gateways run."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import kubernetes_validate
import pytest

from gateway import __version__
from gateway.demo.server.server import DemoServer
from gateway.settings.values.addresses import TcpAddress
from gateway.settings.values.units import parse_size
from tests.deploy.dockerfile import read_stages
from tests.deploy.files import (
    DEPLOY,
    FOLDER,
    GATEWAY,
    GATEWAYS,
    PROBES,
    SIDECAR,
    TRITON,
    Document,
    Manifest,
    Pod,
    documents,
    ports,
    replace_folders,
    run_gateway,
    shared_memory_size,
)
from tests.support.addresses import free_address
from tests.support.gateway_process import TENSORGATE, run
from tests.support.raw_client import connect

CUSTOM = "servicemonitor.yaml"
"""The file with a kind that Kubernetes itself does not have."""
every_file = pytest.mark.parametrize(
    "file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem
)
OLDEST = "1.30"
OF_ITS_OWN = 256 * 2**20
"""Bytes that the gateway takes beyond 1.25 × `limits.max_buffered_bytes`, and some more."""


# What Kubernetes says


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@every_file
def test_the_manifests_fit_the_schema(file: Path, version: str) -> None:
    if file.name == CUSTOM:
        return
    for document in documents(file):
        kubernetes_validate.validate(document, version, strict=True)


@every_file
def test_the_manifests_name_the_oldest_version_that_they_fit(file: Path) -> None:
    assert f"For Kubernetes {OLDEST} or newer." in file.read_text()


# What belongs together


def test_every_selector_matches_pods(manifest: Manifest) -> None:
    chosen = [
        [pod for pod in manifest.pods if pod.is_selected_by(labels)]
        for _, labels in manifest.selectors()
    ]
    assert [len(pods) for pods in chosen] == [1] * len(chosen)
    assert len(chosen) >= len(manifest.pods) + len(manifest.all("Service"))


def test_services_lead_to_existing_ports(manifest: Manifest) -> None:
    for service in manifest.all("Service"):
        (pod,) = [pod for pod in manifest.pods if pod.is_selected_by(service["spec"]["selector"])]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= pod.ports.keys()


@pytest.mark.parametrize(
    ("file", "name"),
    [(SIDECAR, "triton"), (GATEWAYS, "tensorgate")],
    ids=["sidecar", "gateway"],
)
def test_the_service_of_clients_leads_to_the_gateway(file: Path, name: str) -> None:
    manifest = Manifest(file)
    service = manifest.one("Service", name)["spec"]
    assert manifest.pod_with(GATEWAY).is_selected_by(service["selector"])
    (port,) = service["ports"]
    assert port["targetPort"] == "http"
    assert "http" in ports(manifest.gateway)


def test_probes_use_ports_of_their_container(manifest: Manifest) -> None:
    for pod in manifest.pods:
        for container in pod.containers.values():
            names = {port["name"] for port in container["ports"]}
            asked = {container[each]["httpGet"]["port"] for each in PROBES if each in container}
            assert asked <= names
            assert asked


def test_probes_of_the_gateway_ask_the_admin_address(manifest: Manifest) -> None:
    asked = {each: manifest.gateway[each]["httpGet"] for each in PROBES}
    assert asked == {
        "startupProbe": {"path": "/live", "port": "admin"},
        "livenessProbe": {"path": "/live", "port": "admin"},
        "readinessProbe": {"path": "/ready", "port": "admin"},
    }


def test_each_pod_of_a_gateway_has_an_address_for_prometheus(manifest: Manifest) -> None:
    """Also a pod that is not ready, which is the one to look at."""
    (service,) = [
        each["spec"]
        for each in manifest.all("Service")
        if each["metadata"]["labels"].get("app.kubernetes.io/component") == "admin"
    ]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert manifest.pod_with(GATEWAY).is_selected_by(service["selector"])
    (port,) = service["ports"]
    assert port["targetPort"] == "admin"


def test_every_volume_exists_and_is_mounted(manifest: Manifest) -> None:
    for pod in manifest.pods:
        mounts = [each for one in pod.containers.values() for each in one["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == {each["name"] for each in pod.spec["volumes"]}


def test_settings_are_mounted_as_a_folder(manifest: Manifest) -> None:
    """Kubernetes never updates a file mounted by subPath."""
    mount = manifest.settings_mount
    assert mount.keys() == {"name", "mountPath", "readOnly"}
    assert Path(manifest.gateway["args"][-1]).parent == Path(mount["mountPath"])


def test_triton_finds_its_models(manifest: Manifest) -> None:
    places = [mount["mountPath"] for mount in manifest.triton["volumeMounts"]]
    (models,) = re.findall(r"--model-repository=(\S+)", " ".join(manifest.triton["args"]))
    assert models in places


def test_images_are_pinned_and_the_same_everywhere(manifest: Manifest) -> None:
    (compose,) = documents(DEPLOY / "compose.yaml")
    assert manifest.gateway["image"] == f"tensorgate:{__version__}"
    assert manifest.triton["image"] == compose["services"]["triton"]["image"]


# The settings


def test_the_gateway_listens_at_its_container_ports(manifest: Manifest, tmp_path: Path) -> None:
    settings = manifest.write_settings(tmp_path)
    found = ports(manifest.gateway)
    assert settings.listen == (TcpAddress("0.0.0.0", found.pop("http")),)
    assert settings.admin.listen == TcpAddress("0.0.0.0", found.pop("admin"))
    assert not found


def test_the_gateway_sends_requests_to_triton(manifest: Manifest, tmp_path: Path) -> None:
    for url in manifest.write_settings(tmp_path).upstreams["triton"].endpoints:
        assert urlsplit(str(url)).port == manifest.pod_with(TRITON).ports["triton"]


def test_the_sidecar_sends_requests_within_its_pod(tmp_path: Path) -> None:
    manifest = Manifest(SIDECAR)
    (url,) = manifest.write_settings(tmp_path).upstreams["triton"].endpoints
    assert urlsplit(str(url)).hostname == "127.0.0.1"
    assert manifest.pod_with(GATEWAY) == manifest.pod_with(TRITON)


def test_gateways_find_each_pod_by_the_headless_service(tmp_path: Path) -> None:
    manifest = Manifest(GATEWAYS)
    upstream = manifest.write_settings(tmp_path).upstreams["triton"]
    (url,) = upstream.endpoints
    service = manifest.one("Service", urlsplit(str(url)).hostname or "")
    assert service["spec"]["clusterIP"] == "None"
    assert manifest.pod_with(TRITON).is_selected_by(service["spec"]["selector"])
    assert upstream.dns_refresh is not None


def test_the_memory_limit_suffices_for_buffers(manifest: Manifest, tmp_path: Path) -> None:
    settings = manifest.write_settings(tmp_path)
    limit = parse_size(manifest.gateway["resources"]["limits"]["memory"] + "B")
    assert limit >= settings.limits.max_buffered_bytes * 5 // 4 + OF_ITS_OWN


def test_sidecar_has_the_shared_memory_of_triton(tmp_path: Path) -> None:
    """With room for a second gateway: the memory of a killed one is freed after its start."""
    manifest = Manifest(SIDECAR)
    mounts = [
        [each for each in container["volumeMounts"] if each["mountPath"] == "/dev/shm"]
        for container in (manifest.gateway, manifest.triton)
    ]
    (mount,) = mounts[0]
    assert mounts == [[{"name": mount["name"], "mountPath": "/dev/shm"}]] * 2
    folder = manifest.volume(mount)["emptyDir"]
    assert folder["medium"] == "Memory"
    needed = shared_memory_size(manifest.write_settings(tmp_path, shares_memory=True))
    assert 0 < 2 * needed < parse_size(folder["sizeLimit"] + "B")


def test_triton_gets_the_flag_for_shared_memory_from_the_release_on_that_knows_it() -> None:
    """Without it, 2.68 and later refuse to share; with it, older ones end at once."""
    (minor,) = re.findall(r"tests run against: 2\.(\d+)\.", SIDECAR.read_text())
    flags = Manifest(SIDECAR).triton["args"]
    assert ("--allow-client-shm=true" in flags) == (int(minor) >= 68)


# Its end


def pause(container: Document) -> int:
    return int(container["lifecycle"]["preStop"]["sleep"]["seconds"])


def exit_time(container: Document) -> int:
    """Return the seconds after which Triton ends at the latest."""
    (seconds,) = re.findall(r"--exit-timeout-secs=(\d+)", " ".join(container["args"]))
    return int(seconds)


def test_running_calls_may_finish(manifest: Manifest, tmp_path: Path) -> None:
    settings = manifest.write_settings(tmp_path)
    for pod in manifest.pods:
        ends = 0.0
        if GATEWAY in pod.containers:
            ends += pause(manifest.gateway) + settings.limits.drain_timeout
        if TRITON in pod.containers:
            ends += exit_time(manifest.triton)
        assert pod.spec["terminationGracePeriodSeconds"] > ends


def test_the_gateway_in_the_sidecar_ends_before_triton() -> None:
    """Init containers that always restart end after all others, in reverse order."""
    spec = Manifest(SIDECAR).pod_with(GATEWAY).spec
    assert [(each["name"], each["restartPolicy"]) for each in spec["initContainers"]] == [
        (TRITON, "Always")
    ]
    assert [each["name"] for each in spec["containers"]] == [GATEWAY]


# Rights


def test_containers_have_no_unneeded_rights(manifest: Manifest) -> None:
    for pod in manifest.pods:
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["securityContext"] == {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        for container in pod.containers.values():
            context = container["securityContext"]
            assert context["runAsUser"] > 0
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_the_gateway_runs_as_in_its_image_and_writes_nothing(manifest: Manifest) -> None:
    context = manifest.gateway["securityContext"]
    user = f"{context['runAsUser']}:{context['runAsGroup']}"
    assert user == read_stages(DEPLOY / "Dockerfile")[-1].value("USER")
    assert context["readOnlyRootFilesystem"] is True


def test_only_gateways_reach_triton() -> None:
    manifest = Manifest(GATEWAYS)
    policy = manifest.one("NetworkPolicy", "triton")["spec"]
    gateways, metrics = policy["ingress"]
    assert manifest.pod_with(TRITON).is_selected_by(policy["podSelector"]["matchLabels"])
    (peer,) = gateways["from"]
    assert manifest.pod_with(GATEWAY).is_selected_by(peer["podSelector"]["matchLabels"])
    assert [port["port"] for port in gateways["ports"]] == ["triton"]
    assert [port["port"] for port in metrics["ports"]] == ["triton-metrics"]


# Several gateways


def gateways() -> tuple[Manifest, Pod]:
    manifest = Manifest(GATEWAYS)
    return manifest, manifest.pod_with(GATEWAY)


def test_there_is_always_a_gateway() -> None:
    manifest, pod = gateways()
    scaler = manifest.one("HorizontalPodAutoscaler", "tensorgate")["spec"]
    assert 2 <= scaler["minReplicas"] < scaler["maxReplicas"]
    budget = manifest.one("PodDisruptionBudget", "tensorgate")["spec"]
    assert budget["maxUnavailable"] < scaler["minReplicas"]
    assert pod.workload["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_the_autoscaler_sets_the_number_of_gateways() -> None:
    manifest, pod = gateways()
    scaler = manifest.one("HorizontalPodAutoscaler", "tensorgate")["spec"]
    target = {key: pod.workload[key] for key in ("apiVersion", "kind")} | {"name": pod.name}
    assert scaler["scaleTargetRef"] == target
    # Who says how many there are here would undo what the scaler says.
    assert "replicas" not in pod.workload["spec"]
    # Without a request there is nothing to be a share of.
    assert "cpu" in manifest.gateway["resources"]["requests"]


# Running gateways


@dataclass(frozen=True, slots=True)
class Moved:
    """A gateway's command line for this machine, and the URL of its admin address."""

    arguments: list[str]
    admin: str


def moved(manifest: Manifest, folder: Path, url: str) -> Moved:
    """Write the settings for a server and for addresses of this machine."""
    settings, admin = manifest.write_settings(folder), free_address()
    if settings.upstreams["triton"].dns_refresh is not None:
        url = url.replace("127.0.0.1", "localhost")
    for name, text in manifest.settings_text().items():
        here = text.replace(str(settings.listen[0]), "127.0.0.1:0")
        here = here.replace(str(settings.admin.listen), admin)
        for endpoint in settings.upstreams["triton"].endpoints:
            here = here.replace(str(endpoint), url)
        (folder / name).write_text(here)
    arguments = replace_folders(manifest.gateway["args"], {manifest.settings_folder: folder})
    return Moved(arguments, f"http://{admin}")


@asynccontextmanager
async def started(gateway: Moved) -> AsyncIterator[str]:
    """Run a gateway with its admin address; yield the address for clients."""
    async with run_gateway(gateway.arguments) as (process, url):
        await process.wait_for_output(r"listening on \S+ \(admin\)")
        yield url


async def probe(container: Document, name: str, admin: str) -> int:
    """Return the status of the response to a probe."""
    async with connect(admin) as kubelet:
        return (await kubelet.call("GET", container[name]["httpGet"]["path"])).status


async def test_the_gateway_accepts_its_settings(manifest: Manifest, tmp_path: Path) -> None:
    manifest.write_settings(tmp_path)
    file = replace_folders(manifest.gateway["args"], {manifest.settings_folder: tmp_path})[-1]
    status, out, err = await run(TENSORGATE, "check", file)
    assert status == 0, err
    assert "listen on 0.0.0.0:8080" in out


async def test_the_gateway_serves_and_answers_its_probes(
    manifest: Manifest, tmp_path: Path
) -> None:
    async with DemoServer() as server:
        gateway = moved(manifest, tmp_path, server.url)
        async with started(gateway) as url, connect(url) as client:
            for name in PROBES:
                assert await probe(manifest.gateway, name, gateway.admin) == 200
            reply = await client.call("GET", "/v2/models/identity_fp32")
            assert reply.json["name"] == "identity_fp32"


async def test_a_gateway_without_triton_is_alive_and_not_ready(
    manifest: Manifest, tmp_path: Path
) -> None:
    gateway = moved(manifest, tmp_path, "http://127.0.0.1:1")
    async with started(gateway):
        assert await probe(manifest.gateway, "readinessProbe", gateway.admin) == 503
        for name in ("startupProbe", "livenessProbe"):
            assert await probe(manifest.gateway, name, gateway.admin) == 200
