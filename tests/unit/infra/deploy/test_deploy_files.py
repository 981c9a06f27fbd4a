"""The files of infra/deploy: each is what its program reads, and its commands, configs and paths are Atelier's.

Judges: Ray's own schemas and systemd's own reading; for Kubernetes and compose, the fields that are used.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import typer.main
import yaml
from ray.serve.schema import ServeDeploySchema

from configs.cluster import ClusterConfig
from deployments.cli.cluster import _render_serve_yaml
from deployments.cli.main import _app
from deployments.ingress.admin.vllm_metrics import vllm_metrics
from infra.package.one_name import moved

ROOT = Path(__file__).parents[4]
DEPLOY = ROOT / "infra/deploy"
FILES = sorted(file for file in DEPLOY.rglob("*") if file.is_file() and file.suffix != ".json")
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMMANDS = typer.main.get_command(_app)
PLACEHOLDER = re.compile(r"<[a-z][\w -]*>|\bTODO\b|\bFIXME\b|\bXXX|change[-_ ]?me|example\.(com|org)|:latest\b", re.I)
OURS = {"app.kubernetes.io/name": "atelier"}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def kubernetes() -> dict[tuple[str, str], dict[str, Any]]:
    """Every object that `kubectl apply --kustomize` makes of files, by kind and name."""
    (index,) = documents(DEPLOY / "kuberay/kustomization.yaml")
    found = [one for name in index["resources"] for one in documents(DEPLOY / "kuberay" / name)]
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(by_name) == len(found)
    return by_name


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"] for group in groups]


def service() -> dict[str, Any]:
    found: dict[str, Any] = kubernetes()["RayService", "atelier"]["spec"]
    return found


def commands() -> Iterator[list[str]]:
    """Every command of Atelier's that a file has, without its program."""
    for file in FILES:
        for found in re.finditer(r"(?<![\w./:-])(?:/opt/atelier/bin/)?atelier ([a-z]+[^\n`]*)", file.read_text()):
            words = shlex.split(found[1].partition(", and")[0], comments=True)
            if words[0] in COMMANDS.commands:
                yield words
    yield documents(DEPLOY / "compose/compose.yaml")[0]["services"]["atelier"]["command"][1:]
    for group in service()["rayClusterConfig"]["workerGroupSpecs"]:
        for container in group["template"]["spec"]["containers"]:
            yield container["lifecycle"]["preStop"]["exec"]["command"][1:]
    for line in (DEPLOY / "Dockerfile").read_text().splitlines():
        if line.startswith("CMD "):
            yield json.loads(line[4:])[1:]


def parse(command: Any, words: list[str]) -> None:
    """Let the command line read words, through its groups. Raises its own error for what it does not know."""
    context = command.make_context(command.name, list(words))
    if hasattr(command, "commands"):
        name, inner, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert name
        parse(inner, rest)


def test_every_command_is_read_by_the_command_line() -> None:
    found = list(commands())
    assert {words[0] for words in found} >= {"up", "keys", "render", "drain"}
    for words in found:
        parse(COMMANDS, words)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(DEPLOY)))
def test_nothing_is_left_to_fill_in(file: Path) -> None:
    assert PLACEHOLDER.findall(file.read_text()) == []
    assert "\t" not in file.read_text()


@pytest.mark.parametrize("name", ["compose/studio.yaml", "compose/studio.gpu.yaml", "kuberay/studio.yaml"])
def test_the_configs_listen_beyond_the_machine_and_so_have_keys(name: str) -> None:
    config = ClusterConfig.model_validate(documents(DEPLOY / name)[0])
    assert config.http.host == "0.0.0.0"
    assert config.access.keys_file
    assert config.open_hosts() == {}


def test_the_ray_service_is_the_config_rendered() -> None:
    config = ClusterConfig.model_validate(documents(DEPLOY / "kuberay/studio.yaml")[0])
    inside = yaml.safe_load(service()["serveConfigV2"])
    # As the wheel in the image renders it, whose modules are below one name.
    rendered = yaml.safe_load(ast.literal_eval(moved(repr(_render_serve_yaml(config)).encode(), ROOT).decode()))
    assert inside == rendered, "take what `atelier render infra/deploy/kuberay/studio.yaml` prints"
    ServeDeploySchema.model_validate(inside)
    assert inside["applications"][0]["external_scaler_enabled"] is True


def test_pods_fit_what_the_config_asks_of_them() -> None:
    config = ClusterConfig.model_validate(documents(DEPLOY / "kuberay/studio.yaml")[0])
    cluster = service()["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    assert config.controller.scaling is not None
    assert cluster["enableInTreeAutoscaling"] is True
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] == config.controller.scaling.max_workers
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert cluster["rayVersion"] == pinned[1]
    for template in pods(cluster):
        (container,) = template["spec"]["containers"]
        variables = {one["name"]: one.get("value") for one in container["env"]}
        drain_s = int(variables["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
        assert template["spec"]["terminationGracePeriodSeconds"] >= drain_s + int(hook[-1])
        assert drain_s > config.http.request_timeout_s
        assert {port["containerPort"] for port in container["ports"]} >= {config.http.port, config.grpc.port}
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert "/healthz" not in str(container["livenessProbe"]).replace("_healthz", "")
        mounted = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        assert {one["name"] for one in template["spec"]["volumes"]} == set(mounted.values())
        for path in (config.store.path, config.ingress.image_links.folder, config.access.keys_file):
            assert any(Path(path).is_relative_to(mount) for mount in mounted), path


def test_objects_name_objects_that_are_there() -> None:
    found = kubernetes()
    (index,) = documents(DEPLOY / "kuberay/kustomization.yaml")
    secrets = {one["name"] for one in index["secretGenerator"]}
    folder = DEPLOY / "kuberay"
    (written,) = re.findall(r"--file (\S+)\n", (folder / "kustomization.yaml").read_text())
    assert (ROOT / written).relative_to(folder) == Path(index["secretGenerator"][0]["files"][0])
    templates = [*pods(service()["rayClusterConfig"]), found["Deployment", "atelier-redis"]["spec"]["template"]]
    for volume in [volume for template in templates for volume in template["spec"]["volumes"]]:
        if claim := volume.get("persistentVolumeClaim"):
            assert ("PersistentVolumeClaim", claim["claimName"]) in found
        assert volume.get("secret", {}).get("secretName", "atelier-keys") in secrets
    assert all(template["metadata"]["labels"] == OURS for template in templates[:-1])
    assert found["PodDisruptionBudget", "atelier"]["spec"]["selector"]["matchLabels"] == OURS
    assert found["NetworkPolicy", "atelier"]["spec"]["podSelector"]["matchLabels"] == OURS
    host, port = re.fullmatch(
        r"redis://([\w-]+):(\d+)", service()["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"]
    ).groups()  # type: ignore[union-attr]
    assert found["Service", host]["spec"]["ports"][0]["port"] == int(port)


def test_what_is_open_to_all_is_http_and_grpc_alone() -> None:
    rules = kubernetes()["NetworkPolicy", "atelier"]["spec"]["ingress"]
    config = ClusterConfig.model_validate(documents(DEPLOY / "kuberay/studio.yaml")[0])
    open_to_all = [port["port"] for rule in rules if "from" not in rule for port in rule["ports"]]
    assert open_to_all == [config.http.port, config.grpc.port]


def test_compose_mounts_and_builds_what_is_there() -> None:
    folder = DEPLOY / "compose"
    (compose,) = documents(folder / "compose.yaml")
    targets = re.findall(r"^FROM \S+ AS (\w+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    build = compose["services"]["atelier"]["build"]
    assert (folder / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()
    assert build["target"] in targets
    made_by_hand = {"./keys", "./keys/prometheus"}
    for one in compose["services"].values():
        assert re.search(r":v?\d+\.\d+", one["image"])
        for volume in one["volumes"]:
            source = volume.partition(":")[0]
            known = source in compose["volumes"] or source in made_by_hand or (folder / source).exists()
            assert known, source
    config = ClusterConfig.model_validate(documents(folder / "studio.yaml")[0])
    assert f"{config.http.port}:{config.http.port}" in compose["services"]["atelier"]["ports"]
    (scraped,) = documents(folder / "prometheus.yaml")[0]["scrape_configs"]
    (over,) = documents(folder / "gpu.yaml")
    assert over["services"].keys() == {"atelier"}
    changed = over["services"]["atelier"]
    assert changed["build"]["target"] in targets
    assert changed["image"].endswith(f"-{changed['build']['target']}")
    (volume,) = changed["volumes"]  # takes the place of the volume at the same path
    assert (folder / volume.partition(":")[0]).is_file()
    assert volume.partition(":")[2] in {one.partition(":")[2] for one in compose["services"]["atelier"]["volumes"]}
    assert scraped["static_configs"][0]["targets"] == [f"atelier:{config.http.port}"]


def test_the_image_runs_as_a_user_with_pinned_parts() -> None:
    stages = re.split(r"^FROM ", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    for stage in stages:
        name = stage.split()[2]
        if name in ("cpu", "cuda"):
            assert "\nUSER 1000\n" in stage
        else:
            assert re.match(r"python:3\.\d+\.\d+-slim-\w+ ", stage)
        for install in re.findall(r"pip install .*", stage):
            assert "--constraint /opt/constraints.txt" in install


NAMES_OF_ROOMS = ("configs", "weights", "cluster", "deployments")


def left_out(path: str) -> bool:
    """Return whether Docker leaves a path out of what it is given: by a pattern of it, or of a folder above."""
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    parts = path.split("/")
    above = ["/".join(parts[: number + 1]) for number in range(len(parts))]
    expressions = [
        re.escape(one).replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*").replace(r"\*", "[^/]*") for one in patterns
    ]
    return any(re.fullmatch(expression, one) for expression in expressions for one in above)


def test_an_image_gets_what_a_wheel_is_built_of_and_nothing_else_of_a_checkout() -> None:
    for path in (
        ".git/HEAD",
        ".venv/bin/python",
        ".judges/protocol",
        "out/store/packs/1",
        "cluster/__pycache__/a.pyc",
        "infra/deploy/compose/keys/prometheus",
    ):
        assert left_out(path), path
    assert left_out("deployments/engines/native/kernels.so")
    kept = ["pyproject.toml", "hatch_build.py", "constraints.txt", "README.md", "LICENSE", "infra/package/one_name.py"]
    rooms = [file for room in NAMES_OF_ROOMS for file in (ROOT / room).rglob("*") if file.is_file()]
    kept += [str(file.relative_to(ROOT)) for file in rooms if file.suffix not in (".so", ".pyc")]
    assert len(kept) > 300
    assert [path for path in kept if left_out(path)] == []
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.endswith("/")]
    assert [folder for folder in ignored if not left_out(f"{folder}/file") and folder != "*.egg-info"] == []


def test_every_image_is_one_that_the_dockerfile_builds() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    built = {f"atelier:{version[1]}-{target}" for target in ("cpu", "cuda")}
    named = {found for file in FILES for found in re.findall(r"atelier:\d+\.[\w.-]*", file.read_text())}
    assert built <= named
    assert named <= built, "pods of an image that nobody builds never start"
    assert documents(DEPLOY / "helm/Chart.yaml")[0]["appVersion"] == version[1]


def test_ray_reads_its_cluster_file() -> None:
    (content,) = documents(DEPLOY / "ray-cluster.yaml")
    schema = Path(ray.autoscaler.__file__).with_name("ray-schema.json")
    jsonschema.validate(content, json.loads(schema.read_text()))
    assert content["max_workers"] == len(content["provider"]["worker_ips"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_reads_its_units(unit: Path, tmp_path: Path) -> None:
    # Of the program it wants a file that it can run, of the user's name nothing.
    text = re.sub(r"^ExecStart=\S+", f"ExecStart={shutil.which('true')}", unit.read_text(), flags=re.MULTILINE)
    for name in [one.name for one in UNITS]:
        (tmp_path / name).write_text(text if name == unit.name else "[Service]\nExecStart=/bin/true\n")
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)], capture_output=True, text=True, timeout=60
    )
    assert (verified.returncode, verified.stderr) == (0, "")


def test_the_pool_asks_for_metrics_that_there_are() -> None:
    found = [one for file in (DEPLOY / "pool").glob("*.yaml") for one in documents(file)]
    by_kind = {one["kind"]: one for one in found}
    assert len(by_kind) == len(found)
    config = ClusterConfig.model_validate(yaml.safe_load(by_kind["ConfigMap"]["data"]["studio.yaml"]))
    assert config.open_hosts() == {}
    (container,) = by_kind["Deployment"]["spec"]["template"]["spec"]["containers"]
    parse(COMMANDS, container["command"][1:])
    labels = by_kind["Deployment"]["spec"]["template"]["metadata"]["labels"]
    pool = by_kind["InferencePool"]["spec"]
    assert pool["selector"]["matchLabels"] == labels
    assert pool["targetPorts"] == [{"number": container["ports"][0]["containerPort"]}]
    scaled = by_kind["ScaledObject"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == by_kind["Deployment"]["metadata"]["name"]
    page = vllm_metrics('atelier_kv_blocks{model="m",state="total"} 4\natelier_admission_waiting{model="m"} 1\n')
    queries = [trigger["metadata"]["query"] for trigger in scaled["triggers"]]
    named = {name for query in queries for name in re.findall(r"vllm:\w+", query)}
    assert named == {"vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
    assert all(re.search(rf"^{name}\{{", page, re.MULTILINE) for name in named)
    for name in re.findall(r"vllm:\w+", (DEPLOY / "pool/atelier.yaml").read_text()):
        assert f"# TYPE {name} " in page
