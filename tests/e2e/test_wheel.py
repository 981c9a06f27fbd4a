"""The wheel in a user's project, which has folders by the names of ours.

Atelier's dependencies are those of this environment; of Atelier only the wheel is there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from infra.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("configs", "weights", "cluster", "deployments")
LIBRARY = """
import configs, weights, cluster, deployments
from atelier.cluster.start.session import join_ray
from atelier.deployments.app import build_app
from atelier.deployments.records import ImageRequest
from atelier.weights.operations.externalize import externalize
from atelier.weights.loading.loader import load_model
from atelier.weights.loading.provider import LocalExtents
from atelier.weights.storage.store import WeightStore
print(configs.MINE, weights.MINE, cluster.MINE, deployments.MINE, WeightStore.__module__)
"""


class Project:
    """A folder with packages of the user's own, and an environment in which the wheel is installed."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder / "project"
        self._bin = folder / "environment" / "bin"
        environment = self._bin.parent
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
        site = next(environment.glob("lib/python*/site-packages"))
        pip = [sys.executable, "-m", "pip", "--python", str(self._bin / "python"), "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, str(wheel)], check=True)
        # A path only: .pth files in there, such as the one of an editable Atelier, are not followed.
        (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
        for room in ROOMS:
            (self.folder / room).mkdir(parents=True)
            (self.folder / room / "__init__.py").write_text(f"MINE = 'my {room}'\n")
        folders = {"XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": str(folder)}
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._variables = inherited | folders | {"COLUMNS": "200"}

    def run(self, *arguments: str) -> str:
        """Run the environment's Python in the project, and return what it prints."""
        return self._output([str(self._bin / "python"), *arguments])

    def atelier(self, *arguments: str) -> str:
        """Run the command that the wheel installs."""
        return self._output([str(self._bin / "atelier"), *arguments])

    def _output(self, command: list[str]) -> str:
        ended = subprocess.run(
            command, cwd=self.folder, env=self._variables, capture_output=True, text=True, timeout=240, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout


pytestmark = [pytest.mark.ray, pytest.mark.long]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout; pip fetches what builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(build, check=True)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Project:
    return Project(tmp_path_factory.mktemp("user"), wheel)


def test_the_command_the_module_and_the_library_leave_a_users_folders_alone(project: Project) -> None:
    version = project.atelier("--version")
    assert version.startswith("atelier ")
    assert project.run("-m", "atelier", "--version") == version
    assert (
        project.run("-c", LIBRARY) == "my configs my weights my cluster my deployments atelier.weights.storage.store\n"
    )


def test_the_wheel_serves_from_a_users_project(project: Project) -> None:
    port = free_port()
    config = {
        "name": "wheel",
        "http": {"port": port},
        "ray": {"num_cpus": 4, "object_store_bytes": "256 MiB"},
        "store": {"path": "store"},
        "models": [{"id": "adder", "path": str(ROOT / "infra/demo/models/adder"), "dtype": "float32"}],
    }
    (project.folder / "wheel.yaml").write_text(yaml.safe_dump(config))
    assert "nothing wrong" in project.atelier("check", "wheel.yaml")
    assert "import_path: atelier.deployments.app:build_app" in project.atelier("render", "wheel.yaml")
    project.atelier("up", "wheel.yaml", "--detach")
    try:
        assert project.atelier("chat", "What is 12 + 7?", "--url", f"http://127.0.0.1:{port}").strip() == "19."
    finally:
        project.atelier("down")


def test_the_wheel_without_its_tools_has_the_other_commands(project: Project, wheel: Path, tmp_path: Path) -> None:
    tools = ("bench", "inspect", "quantize")
    assert all(f" {tool} " in project.atelier("--help") for tool in tools)
    without = Project(tmp_path, wheel)
    shutil.rmtree(without.run("-c", "import atelier; print(atelier.__path__[0])").strip() + "/infra")
    shown = without.atelier("--help")
    assert " up " in shown
    assert not any(f" {tool} " in shown for tool in tools)
