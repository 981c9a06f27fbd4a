"""The name that Atelier is installed by: on the public index `atelier`, the name of the command, is a stranger's."""

from __future__ import annotations

import os
import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from configs.distribution import COMMANDS, DEVICES, DISTRIBUTION, installed_version, left_out_parts, optional_parts

ROOT = Path(__file__).parents[2]
ROOMS = ("configs", "weights", "cluster", "deployments", "infra", "docs", "tests")
KINDS = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".html", ".js", ".sh", ".service", ""}
STRANGER = re.compile(r"pip3? install[^`\n;&]*[\s'\"]atelier(?![\w.-])|\batelier\\?\[|\batelier *(?:==|>=|~=)")
OURS = re.compile(rf"{re.escape(DISTRIBUTION)}\[(\w+)\]")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def texts() -> dict[str, str]:
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*")] + list(ROOT.glob("[!.]*"))
    found = (file for file in files if file.is_file() and file.suffix in KINDS and file != Path(__file__))
    return {str(file.relative_to(ROOT)): file.read_text(errors="replace") for file in found}


def test_no_text_names_the_package_of_a_stranger() -> None:
    found = texts()
    assert {
        "README.md",
        "docs/operations/start.md",
        "cluster/process/tracing.py",
        "infra/deploy/Dockerfile",
    } <= found.keys()
    named = [f"{file}: {match[0]}" for file, text in found.items() for match in STRANGER.finditer(text)]
    assert named == []


@pytest.mark.parametrize(
    ("text", "is_strange"),
    [
        ("pip install 'atelier[otel]'", True),
        ("pip install --upgrade atelier", True),
        ("atelier>=0.1", True),
        ("pip install 'atelier-serve[otel]'", False),
        ("pip install /opt/atelier/atelier_serve-0.1.0.whl; atelier up", False),
    ],
)
def test_a_strange_name_is_found(text: str, is_strange: bool) -> None:
    assert bool(STRANGER.search(text)) == is_strange


def test_every_extra_that_a_text_names_is_there() -> None:
    named = {extra for text in texts().values() for extra in OURS.findall(text)}
    assert {"s3", "otel", "video", "onnx"} <= named
    assert named <= PROJECT["optional-dependencies"].keys()


def test_the_distribution_the_command_and_the_tree_of_a_wheel_have_their_names() -> None:
    from infra.package import one_name

    assert (PROJECT["name"], list(PROJECT["scripts"]), one_name.NAME) == (DISTRIBUTION, ["atelier"], "atelier")


def test_the_version_is_that_of_our_own_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {DISTRIBUTION: "1.2", "atelier": "99"}

    def version(name: str) -> Any:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("configs.distribution.metadata.version", version)
    assert installed_version() == "1.2"
    del installed[DISTRIBUTION]
    assert installed_version() == ""


class Installed:
    """A distribution with these entry points of one group."""

    def __init__(self, **points: str) -> None:
        self.entry_points = [metadata.EntryPoint(name, value, "tools") for name, value in points.items()]


def test_optional_parts_are_found_and_those_that_are_left_out_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Installed(join="os.path:join", gone="infra.left_out.app:app")
    monkeypatch.setattr("configs.distribution.metadata.distribution", lambda name: known)
    assert optional_parts("tools") == {"join": os.path.join}
    assert optional_parts("others") == {}
    assert left_out_parts("tools") == ["gone"]
    assert left_out_parts("others") == []


def test_an_optional_part_that_is_broken_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_tool.py").write_text("import nothing_by_this_name")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("configs.distribution.metadata.distribution", lambda name: Installed(tool="broken_tool:app"))
    with pytest.raises(ModuleNotFoundError, match="nothing_by_this_name"):
        optional_parts("tools")


def test_each_entry_point_of_ours_is_there() -> None:
    wanted = {group: set(points) for group, points in PROJECT["entry-points"].items()}
    assert {group: optional_parts(group).keys() for group in wanted} == wanted
    assert wanted.keys() == {COMMANDS, DEVICES}
