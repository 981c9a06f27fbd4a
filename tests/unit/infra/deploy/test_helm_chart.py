"""The Helm chart makes the objects of the kustomization. Judges: helm itself, and the schemas of Kubernetes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.judges import judge_folder
from unit.infra.deploy.test_deploy_files import kubernetes, pods

ROOT = Path(__file__).parents[4]
CHART = ROOT / "infra/deploy/helm"
Objects = dict[tuple[str, str], dict[str, Any]]

pytestmark = pytest.mark.long


def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # helm-binary is the program itself; the other one is a script of its environment
    path = judge_folder("kubernetes") / "bin" / program
    return subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def serve_config(tmp_path: Path) -> Path:
    file = tmp_path / "serve.yaml"
    file.write_text(kubernetes()["RayService", "atelier"]["spec"]["serveConfigV2"])
    return file


def objects(serve_config: Path, *values: str) -> Objects:
    options = [option for value in values for option in ("--set-json", value)]
    done = run("helm", "template", "atelier", CHART, "--set-file", f"serveConfig={serve_config}", *options)
    assert done.returncode == 0, done.stderr
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout) if one}


def test_the_chart_makes_what_the_kustomization_has(serve_config: Path) -> None:
    assert objects(serve_config) == kubernetes()


def test_the_values_are_those_that_operators_change(serve_config: Path) -> None:
    found = objects(
        serve_config,
        'workers={"min": 2, "max": 3, "accelerators": null, "nodeSelector": {"disk": "fast"},'
        ' "tolerations": [{"key": "gpu", "operator": "Exists"}]}',
        'store={"size": "2Ti", "storageClassName": "nfs"}',
    )
    (group,) = found["RayService", "atelier"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 2, 3)
    pod = group["template"]["spec"]
    assert pod["nodeSelector"] == {"disk": "fast"}
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "32Gi"}
    claim = found["PersistentVolumeClaim", "atelier-store"]["spec"]
    assert (claim["storageClassName"], claim["resources"]["requests"]) == ("nfs", {"storage": "2Ti"})


def test_a_chart_without_an_application_is_refused() -> None:
    done = run("helm", "template", "atelier", CHART)
    assert done.returncode == 1
    assert "serveConfig is empty: give what `atelier render CONFIG` prints" in done.stderr


def test_the_application_of_a_checkout_is_refused(serve_config: Path) -> None:
    """Its modules are not below one name, as those of the image are: no replica would start."""
    serve_config.write_text(serve_config.read_text().replace("atelier.deployments.app:", "deployments.app:"))
    done = run("helm", "template", "atelier", CHART, "--set-file", f"serveConfig={serve_config}")
    assert done.returncode == 1
    assert "render it where the wheel is installed" in done.stderr


def test_helm_finds_nothing_to_complain_of(serve_config: Path) -> None:
    done = run("helm", "lint", "--strict", CHART, "--set-file", f"serveConfig={serve_config}")
    assert done.returncode == 0, done.stdout


def judged(found: list[dict[str, Any]], folder: Path) -> list[str]:
    """Return the faults that Kubernetes' schemas find with objects."""
    file = folder / "objects.yaml"
    file.write_text(yaml.safe_dump_all(found))
    done = run("kubernetes-validate", "--strict", file)
    lines = done.stdout.splitlines() + done.stderr.splitlines()
    assert len([line for line in lines if "passed" in line or "ERROR" in line]) == len(found), lines
    return [line for line in lines if "ERROR" in line]


def test_kubernetes_knows_every_field(serve_config: Path, tmp_path: Path) -> None:
    found = objects(serve_config)
    cluster = found.pop(("RayService", "atelier"))["spec"]["rayClusterConfig"]
    of_ray = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**pod["metadata"], "name": f"pod-{number}"},
            "spec": pod["spec"],
        }
        for number, pod in enumerate(pods(cluster))
    ]
    assert judged([*found.values(), *of_ray], tmp_path) == []
    of_ray[0]["spec"] = of_ray[0]["spec"] | {"containerz": []}
    assert len(judged(of_ray, tmp_path)) == 1
