"""What is deployed is well-formed, runs as no root, and its flags, paths and files exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from limelight import __version__, cli

ROOT = Path(__file__).parents[2]
DOCKERFILE, MANIFEST = ROOT / "deploy/Dockerfile", ROOT / "deploy/kubernetes.yaml"
RAY_MANIFEST = ROOT / "deploy/kuberay.yaml"
# As published for these models, without the image.
COMMANDS = [
    "reflection/Beam-1.0-501B-A23B-NVFP4 -tp 4 --max-num-seqs 128 --reasoning-parser beam "
    "--tool-call-parser beam --enable-auto-tool-choice --kv-cache-dtype fp8",
    "RecursiveSI/flint-nvfp4-gguf --hf-config-path RecursiveSI/flint --tokenizer "
    "RecursiveSI/flint --enable-auto-tool-choice --tool-call-parser glm47 --reasoning-parser glm47 "
    "--exclude-tools-when-tool-choice-none",
]


@pytest.fixture(scope="module")
def manifests() -> list[dict]:
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def entrypoint() -> list[str]:
    """The command of the image, without the program."""
    (line,) = re.findall(r"^ENTRYPOINT (\[.*\])$", DOCKERFILE.read_text(), re.MULTILINE)
    program, *arguments = yaml.safe_load(line)
    assert program == "limelight"
    return arguments


def test_the_dockerfile_has_no_fault():
    program = Path(sys.executable).with_name("hadolint")
    if not program.exists():
        pytest.skip("hadolint has no wheel for this machine")
    done = subprocess.run([program, DOCKERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_runs_as_a_user_from_files_that_are_there():
    text = DOCKERFILE.read_text()
    assert re.findall(r"^USER (\w+)$", text, re.MULTILINE) == ["1000"]
    for sources in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), source
            assert f"!{source}" in (ROOT / ".dockerignore").read_text().split()


@pytest.mark.parametrize("command", COMMANDS, ids=["Beam", "Flint"])
def test_published_commands_work_on_the_image(command):
    args = cli.parse([*entrypoint(), *command.split()])
    assert args.model == command.split()[0] and args.host == "0.0.0.0"
    assert cli.parse([*entrypoint(), "--host", "::1"]).host == "::1"


def test_manifests_are_what_kubernetes_takes(manifests):
    validate = pytest.importorskip("kubernetes_validate").validate
    assert [one["kind"] for one in manifests] == ["Deployment", "Service", "PodDisruptionBudget"]
    for manifest in manifests:
        validate(manifest, "1.30", strict=True)


def test_the_deployment_asks_for_what_the_server_has(manifests):
    deployment, service, budget = manifests
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    args = cli.parse([*entrypoint(), *container["args"]])
    assert args.restart_engine == 3
    assert pod["spec"]["terminationGracePeriodSeconds"] > args.shutdown_timeout
    assert container["image"] == f"limelight:{__version__}"
    for probe, path in (("startup", "/ready"), ("readiness", "/ready"), ("liveness", "/health")):
        assert container[f"{probe}Probe"]["httpGet"] == {"path": path, "port": "http"}
    assert pod["spec"]["securityContext"]["runAsNonRoot"]
    labels = pod["metadata"]["labels"]
    for selector in (service["spec"]["selector"], budget["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()
    (port,) = service["spec"]["ports"]
    assert port["targetPort"] == container["ports"][0]["name"]


@pytest.fixture(scope="module")
def ray_service() -> dict:
    return yaml.safe_load(RAY_MANIFEST.read_text())


def pods(ray_service: dict) -> list[dict]:
    """The templates of Ray's head and of its workers."""
    cluster = ray_service["spec"]["rayClusterConfig"]
    return [one["template"] for one in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_pods_of_ray_are_what_kubernetes_takes(ray_service):
    validate = pytest.importorskip("kubernetes_validate").validate
    for pod in pods(ray_service):
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **pod}
        validate(whole, "1.30", strict=True)
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        mounts = {mount["name"] for mount in pod["spec"]["containers"][0].get("volumeMounts", [])}
        assert mounts == {volume["name"] for volume in pod["spec"].get("volumes", [])}


def test_workers_of_ray_have_room_for_all_replicas(ray_service):
    (application,) = yaml.safe_load(ray_service["spec"]["serveConfigV2"])["applications"]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in application["args"].items()]
    args = cli.parse(["serve", "--ray", *flags])
    (workers,) = ray_service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert (workers["minReplicas"], workers["maxReplicas"]) == (args.replicas, args.max_replicas)
    assert pod["terminationGracePeriodSeconds"] > args.shutdown_timeout


def test_ray_of_the_image_is_that_of_the_manifest(ray_service):
    version = ray_service["spec"]["rayClusterConfig"]["rayVersion"]
    image = f"limelight:{__version__}-ray"
    assert f"--build-arg RAY={version} -t {image} ." in DOCKERFILE.read_text()
    for pod in pods(ray_service):
        assert [container["image"] for container in pod["spec"]["containers"]] == [image]


def test_ray_serve_takes_the_configuration_of_the_manifest(ray_service):
    schema = pytest.importorskip("ray.serve.schema").ServeDeploySchema
    config = schema(**yaml.safe_load(ray_service["spec"]["serveConfigV2"]))
    assert [one.import_path for one in config.applications] == ["limelight.deploy:app"]
