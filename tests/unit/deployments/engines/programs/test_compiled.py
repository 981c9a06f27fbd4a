"""Programs compiled on the node: the same values in the whole range, one package for all fine-tunes, and refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch
from kit.programs import MAX_LENGTH, MAX_ROWS, VOCABULARY, WIDTH, Classifier, export_bert, export_classifier, tiny_bert
from kit.waiting import wait_until
from torch import nn
from torch.export import Dim, ExportedProgram

from deployments.engines.programs import compiling
from deployments.engines.programs.bound import BoundProgram, BoundPrograms
from deployments.engines.programs.rows import jobs_of, run_jobs
from deployments.engines.records.protocol import EngineError
from weights.programs.exported import externalize_program
from weights.programs.signature import COMPONENT
from weights.programs.storing import program_tensors
from weights.records.manifest import Component
from weights.storage.store import WeightStore

torch.set_num_threads(1)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
PATIENCE_S = 240
compiles = pytest.mark.long


@dataclass
class Node:
    """A store and the node's folder of packages. `graphs` are a replica's; `num_compiles` those that ran here."""

    folder: Path
    graphs: BoundPrograms = field(init=False)
    num_compiles: int = 0

    def __post_init__(self) -> None:
        self.store = WeightStore(self.folder / "store")
        self.restart()

    @property
    def packages(self) -> Path:
        return self.folder / "packages"

    def restart(self) -> None:
        """Begin with another replica."""
        self.graphs = BoundPrograms(packages=self.packages)

    def put(self, name: str, program: ExportedProgram) -> None:
        externalize_program(self.store, name, program)

    def component(self, name: str) -> Component:
        return self.store.manifest(name).components[COMPONENT]

    def bind(self, name: str) -> BoundProgram:
        """Return the program once what compiles it has ended."""
        manifest = self.store.manifest(name)
        self.graphs.compile(self.component(name))
        tensors = program_tensors(self.store, name, None)
        found = self.graphs.bind(self.component(name), self.store.skeleton(manifest), tensors)
        assert isinstance(found, BoundProgram)
        assert found.compiled is not None
        assert found.compiled.ended.wait(PATIENCE_S)
        return found


def counted(node: Node, patch: pytest.MonkeyPatch) -> Node:
    plain = compiling._run_compiler

    def counting(component: Component, folder: Path, target: Path) -> None:
        node.num_compiles += 1
        plain(component, folder, target)

    patch.setattr(compiling, "_run_compiler", counting)
    return node


def plain_call(program: BoundProgram, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the outputs of the graph that was not compiled."""
    places = {place: name for name, place in program.inputs.items()}
    arguments = [given[places[at]] if at in places else value for at, value in enumerate(program.arguments)]
    with torch.no_grad():
        found = program.module(*arguments)
    return {name: found[place] for name, place in program.outputs.items()}


@pytest.fixture(scope="module", autouse=True)
def _compilers_that_are_not_nice() -> Iterator[None]:
    """Or they wait for all other tests, which take the whole machine for longer than anybody has patience."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "NICENESS", 0)
        yield


@pytest.fixture(scope="module")
def classifiers() -> dict[str, Classifier]:
    return {"base": Classifier(), "tuned": Classifier()}


@pytest.fixture(scope="module")
def node(classifiers: dict[str, Classifier], tmp_path_factory: pytest.TempPathFactory):
    """Two fine-tunes of a classifier, compiled."""
    node = Node(tmp_path_factory.mktemp("node"))
    for name, module in classifiers.items():
        node.put(name, export_classifier(module))
    with pytest.MonkeyPatch.context() as patch:
        counted(node, patch)
        for name in classifiers:
            node.bind(name)
        yield node


@compiles
def test_what_is_compiled_gives_what_the_module_gives(node: Node, classifiers: dict[str, Classifier]) -> None:
    for name, module in classifiers.items():
        program = node.bind(name)
        assert program.compiled is not None
        assert program.compiled.run is not None, program.compiled.reason
        for rows in range(1, MAX_ROWS + 1):
            features = torch.randn(rows, WIDTH)
            found = program({"features": features})
            torch.testing.assert_close(found["logits"], module.dense(features), **CLOSE)


@compiles
def test_fine_tunes_share_what_is_compiled(node: Node) -> None:
    assert node.bind("base").compiled is node.bind("tuned").compiled
    assert node.num_compiles == 1
    assert node.graphs.graph_stats() == {"graphs": 1, "compiled": 1, "compiling": 0, "not_compiled": {}}


@compiles
def test_the_package_has_no_weights_and_is_this_users_alone(node: Node, classifiers: dict[str, Classifier]) -> None:
    (package,) = node.packages.glob("*.pt2")
    content = package.read_bytes()
    for module in classifiers.values():
        assert module.dense.weight.detach().numpy().tobytes() not in content
    assert node.packages.stat().st_mode & 0o777 == 0o700


@compiles
def test_another_replica_finds_it_and_compiles_nothing_to_open_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object, **kwargs: object) -> None:
        raise AssertionError("a compiler was wanted")

    for name in ("subprocess.Popen", "torch._inductor.cpu_vec_isa.pick_vec_isa"):
        monkeypatch.setattr(name, refuses)
    before = node.num_compiles
    node.restart()
    program = node.bind("base")
    assert program.compiled is not None
    assert program.compiled.run is not None
    assert node.num_compiles == before


@compiles
def test_a_package_that_was_changed_is_compiled_again(node: Node) -> None:
    (package,) = node.packages.glob("*.pt2")
    content = bytearray(package.read_bytes())
    content[len(content) // 2] ^= 1
    package.write_bytes(content)
    before = node.num_compiles
    node.restart()
    features = torch.randn(2, WIDTH)
    program = node.bind("base")
    assert node.num_compiles == before + 1
    assert program.compiled is not None
    assert program.compiled.run is not None
    torch.testing.assert_close(program({"features": features}), plain_call(program, {"features": features}), **CLOSE)


@compiles
def test_a_bert_is_the_same_in_its_whole_range(tmp_path: Path) -> None:
    bert, node = tiny_bert(), Node(tmp_path)
    node.put("bert", export_bert(bert))
    program = node.bind("bert")
    assert program.compiled is not None
    assert program.compiled.run is not None, program.compiled.reason
    for rows, length in ((1, 1), (1, MAX_LENGTH), (2, 1), (3, 5), (5, 17), (MAX_ROWS, MAX_LENGTH)):
        ids = torch.randint(0, VOCABULARY, (rows, length))
        mask = torch.ones_like(ids)
        mask[0, length // 2 + 1 :] = 0
        found = run_jobs(jobs_of(program, {"input_ids": ids, "attention_mask": mask}))
        with torch.no_grad():
            expected = bert(ids, mask)
        for name in ("last_hidden_state", "pooler_output"):
            torch.testing.assert_close(torch.stack([row[name] for row in found]), expected[name], **CLOSE)


class Looking(nn.Module):
    """Looks up what a request says, of which nobody has checked that it is there."""

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return x.index_select(1, at)


class Dividing(nn.Module):
    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(5) // by


class Scaled(nn.Module):
    """Divides and looks up, and no value of a request ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1] - 1, -1, -1)
        return self.table(ids)[:, places] / x[..., None] + torch.zeros_like(x).long()[..., None] // 2


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("module", "inputs", "operator"),
    [
        (Looking(), (torch.rand(2, 5), torch.tensor([0, 1])), "aten.index_select"),
        (Dividing(), (torch.rand(2, 5), torch.tensor([1, 2, 3, 4, 5])), "aten.floor_divide"),
    ],
)
def test_what_a_value_of_a_request_might_end_runs_as_it_is(
    tmp_path: Path, module: nn.Module, inputs: tuple[torch.Tensor, ...], operator: str
) -> None:
    node = Node(tmp_path)
    node.put("m", torch.export.export(module, inputs))
    manifest = node.store.manifest("m")
    program = compiling.open_graph(node.component("m"), node.store.skeleton(manifest))
    with pytest.raises(compiling.NotCompiled, match=f"its operator {operator}.* unchecked"):
        compiling._check_values(program, compiling.signature_of(node.component("m")))


def test_what_no_value_can_end_is_compiled(tmp_path: Path) -> None:
    node = Node(tmp_path)
    inputs = torch.randint(0, 9, (2, 3)), torch.rand(2, 3)
    sizes = {0: Dim("rows", min=1, max=4), 1: Dim("length", min=1, max=4)}
    node.put("m", torch.export.export(Scaled(), inputs, dynamic_shapes=(sizes, sizes)))
    node.put("bert", export_bert(tiny_bert()))
    for name in ("m", "bert"):
        program = compiling.open_graph(node.component(name), node.store.skeleton(node.store.manifest(name)))
        compiling._check_values(program, compiling.signature_of(node.component(name)))


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("prevent", "reason"),
    [
        (
            lambda node, patch: patch.setenv("CXX", "no-such-compiler"),
            "no C[+][+] compiler: none of no-such-compiler is",
        ),
        (lambda node, patch: node.packages.mkdir(mode=0o755), "not used: its mode is 0755"),
        (lambda node, patch: node.packages.symlink_to(node.folder), "not used: it is a link"),
        (
            lambda node, patch: patch.setattr(compiling, "_MODULE", "no.such.module"),
            "No module named no|ModuleNotFound",
        ),
        (lambda node, patch: patch.setattr(compiling, "COMPILE_TIMEOUT_S", 0.01), "it took more than 0.01 s"),
    ],
)
def test_without_a_package_the_program_runs_as_it_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    prevent: Callable[[Node, pytest.MonkeyPatch], object],
    reason: str,
) -> None:
    node, module = Node(tmp_path), Classifier()
    node.put("m", export_classifier(module))
    prevent(node, monkeypatch)
    with caplog.at_level(logging.WARNING, logger=compiling.__name__):
        program = node.bind("m")
        node.bind("m")  # what is not compiled once is not tried again
    (line,) = [record.getMessage() for record in caplog.records if "not compiled" in record.getMessage()]
    stats = node.graphs.graph_stats()
    assert (stats["compiled"], stats["compiling"]) == (0, 0)
    (told,) = stats["not_compiled"].values()
    assert told in line
    assert re.search(reason, told), told
    features = torch.randn(2, WIDTH)
    torch.testing.assert_close(program({"features": features})["logits"], module.dense(features), **CLOSE)


def test_a_refusal_is_the_graphs_own(tmp_path: Path) -> None:
    """A compiled graph says no more than that it failed."""
    node = Node(tmp_path)
    node.put("m", torch.export.export(Looking(), (torch.rand(2, 5), torch.tensor([0, 1]))))
    component, folder = node.component("m"), node.store.skeleton(node.store.manifest("m"))
    program = node.graphs.bind(component, folder, {})
    assert isinstance(program, BoundProgram)

    def fails(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        tensors.clear()
        raise RuntimeError("run failed")

    compiled = dataclasses.replace(program, compiled=compiling.CompiledGraph(fails))
    with pytest.raises(EngineError, match="the program refuses these values: INDICES element is out of DATA bounds"):
        run_jobs(jobs_of(compiled, {"x": torch.rand(2, 5), "at": torch.tensor([0, 5])}))
    given = {"x": torch.rand(2, 5), "at": torch.tensor([0, 4])}
    assert torch.equal(compiled(given)["output"], program(given)["output"])


def test_weights_that_lie_otherwise_than_traced_are_not_given_to_what_was_compiled(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.put("m", export_classifier(Classifier()))
    manifest = node.store.manifest("m")
    program = compiling.open_graph(node.component("m"), node.store.skeleton(manifest))
    weight, bias = torch.rand(3, WIDTH), torch.rand(3)
    assert compiling.has_traced_strides(program, [weight, bias, None])
    assert not compiling.has_traced_strides(program, [weight.T.contiguous().T, bias, None])


def test_a_package_is_whole_only_with_its_digest(tmp_path: Path) -> None:
    package = tmp_path / "p.pt2"
    assert not compiling._is_whole(package)
    package.write_bytes(b"from outside")
    assert not compiling._is_whole(package)


REPLICA = """
import sys
from pathlib import Path
from deployments.engines.programs import compiling
from weights.programs.signature import COMPONENT
from weights.storage.store import WeightStore

store, packages = WeightStore(Path(sys.argv[1])), Path(sys.argv[2])
compiling._MODULE, compiling.NICENESS = sys.argv[3], 0
manifest = store.manifest("m")
try:
    compiling._find_package(manifest.components[COMPONENT], store.skeleton(manifest), packages)
except compiling.NotCompiled as error:
    print(error, flush=True)
sys.stdin.read()
"""
COMPILER = """#!/bin/sh
sleep 600 &
wait
"""
# In the place of the process that compiles: it starts the compiler at once. Inductor takes ten seconds until then.
AT_ONCE = """
import os, subprocess
from deployments.engines.programs import compiling

compiling._end_with_stdin()
subprocess.run([os.environ["CXX"]])
"""


def has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
@pytest.mark.drawn(by="module")
@pytest.mark.parametrize("victim", ["replica", "compiling process"])
@pytest.mark.parametrize("module", ["compiles_at_once", pytest.param(compiling.__name__, marks=pytest.mark.long)])
def test_no_compiler_outlives_what_started_it(tmp_path: Path, module: str, victim: str) -> None:
    """A C++ compiler has a process of its own for what takes long; here, one that never ends."""
    node, compiler = Node(tmp_path), tmp_path / "compiler"
    node.put("m", export_classifier(Classifier()))
    compiler.write_text(COMPILER)
    compiler.chmod(0o700)
    (tmp_path / "compiles_at_once.py").write_text(AT_ONCE)
    paths = {"PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)]), "CXX": str(compiler)}
    begun: list[psutil.Process] = []
    command = [sys.executable, "-c", REPLICA, str(node.folder / "store"), str(node.packages), module]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | paths
    ) as replica:
        try:
            below = psutil.Process(replica.pid)
            wait_until(
                lambda: any(one.name() == "sleep" for one in below.children(recursive=True) if not has_ended(one)),
                "a compiler at work",
                PATIENCE_S,
            )
            begun = below.children(recursive=True)
            (compiling_process,) = below.children()
            assert len(begun) >= 3
            (replica if victim == "replica" else compiling_process).kill()
            wait_until(lambda: all(map(has_ended, begun)), f"the end of {begun}")
            if victim != "replica":
                assert replica.stdout is not None
                assert replica.stdout.readline() == "the compiling process ended with -9\n"
                assert replica.poll() is None
        finally:
            replica.kill()
            for one in begun:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
