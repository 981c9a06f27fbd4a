"""Graphs over several backends: the worked example, tables, and that every operation finds what it reads."""

from __future__ import annotations

import random
import re
import time

import pytest

from infra.offline.splitting import MAX_INPUTS, Backend, Copy, Leaf, Node, SplitGraph, split_graph

CPU = Backend("cpu")


def gpu(*unsupported: str, name: str = "gpu", reads: frozenset[str] = frozenset()) -> Backend:
    return Backend(name, lambda node: node.op not in unsupported, reads)


def chain(found: SplitGraph) -> list[tuple[str, int, int, list[str]]]:
    return [(one.backend, one.start, one.stop, [copy.value for copy in one.inputs]) for one in found.splits]


def check(leaves: list[Leaf], nodes: list[Node], backends: list[Backend], found: SplitGraph) -> None:
    """Run the splits with a memory for each backend: operations read what is there, each value is copied once."""
    by_name, kept = {one.name: one for one in backends}, {one.name: one for one in leaves}
    memory: dict[str, set[str]] = {one.name: set() for one in backends}
    for leaf in leaves:
        memory[found.places[leaf.name]].add(leaf.name)
    roots = {node.name: node.view_of for node in nodes if node.view_of is not None}
    assert [(one.start, one.stop) for one in found.splits] == list(
        zip([0, *(one.stop for one in found.splits[:-1])], [*(one.stop for one in found.splits)], strict=True)
    )
    assert found.splits[-1].stop == len(nodes)
    copied = [(copy.value, copy.target) for copy in found.copies]
    assert len(copied) == len(set(copied))
    for split in found.splits:
        for copy in split.inputs:
            assert copy.value in memory[copy.source]
            assert copy.target == split.backend
            assert copy.is_input == (copy.value in kept and kept[copy.value].is_input)
            memory[split.backend].add(copy.value)
        assert len(split.inputs) <= MAX_INPUTS or split.stop - split.start == 1
        for node in nodes[split.start : split.stop]:
            if node.view_of is not None:
                continue
            assert found.places[node.name] == split.backend == (node.backend or split.backend)
            assert by_name[split.backend].supports(node) or node.backend is not None
            for source in node.sources:
                while source in roots:
                    source = roots[source]
                near = [one for one in backends if by_name[split.backend].can_read(one.name)]
                assert any(source in memory[one.name] for one in near), (node, source)
            memory[split.backend].add(node.name)


def test_the_worked_example_has_two_splits_and_one_copy() -> None:
    leaves = [Leaf("input1", "gpu"), Leaf("input2", "gpu"), Leaf("scale", "gpu", is_weight=True)]
    nodes = [
        Node("add", "Add", ("input1", "input2")),
        Node("relu", "ReLU", ("add",)),
        Node("mul", "Mul", ("relu", "scale")),
        Node("concat", "Concat", ("mul", "relu")),
        Node("norm", "Norm", ("concat",)),
    ]
    backends = [gpu("Norm"), CPU]
    found = split_graph(leaves, nodes, backends)
    check(leaves, nodes, backends, found)
    assert chain(found) == [("gpu", 0, 4, []), ("cpu", 4, 5, ["concat"])]
    assert found.copies == [Copy("concat", "gpu", "cpu")]


def decoder(num_layers: int, on_gpu: int) -> tuple[list[Leaf], list[Node]]:
    """Return a graph of layers of six operations; the weights of the last `on_gpu` are on the accelerator."""
    leaves = [Leaf("x", is_input=True), Leaf("embedding", "cpu", is_weight=True)]
    nodes, last = [Node("embedded", "get_rows", ("embedding", "x"))], "embedded"
    for layer in range(num_layers):
        place = "gpu" if layer >= num_layers - on_gpu else "cpu"
        leaves += [Leaf(f"{layer}.{name}", place, is_weight=True) for name in ("norm", "qkv", "out", "ff")]
        nodes += [
            Node(f"{layer}.n", "norm", (last, f"{layer}.norm")),
            Node(f"{layer}.q", "mul_mat", (f"{layer}.qkv", f"{layer}.n")),
            Node(f"{layer}.v", "view", (f"{layer}.q",), view_of=f"{layer}.q"),
            Node(f"{layer}.a", "attention", (f"{layer}.q", f"{layer}.v")),
            Node(f"{layer}.o", "mul_mat", (f"{layer}.out", f"{layer}.a")),
            Node(f"{layer}.r", "add", (f"{layer}.o", last)),
            Node(f"{layer}.f", "mul_mat", (f"{layer}.ff", f"{layer}.r")),
        ]
        last = f"{layer}.f"
    return leaves, nodes


@pytest.mark.parametrize(("on_gpu", "splits", "copies"), [(0, 1, 0), (3, 2, 1), (8, 2, 1)])
def test_layers_of_a_decoder_cross_the_border_once(on_gpu: int, splits: int, copies: int) -> None:
    leaves, nodes = decoder(8, on_gpu)
    found = split_graph(leaves, nodes, [gpu(), CPU])
    check(leaves, nodes, [gpu(), CPU], found)
    assert (len(found.splits), len(found.copies)) == (splits, copies)
    if copies:
        assert found.copies[0].value == (f"{7 - on_gpu}.f" if on_gpu < 8 else "embedded")


def names(found: SplitGraph, nodes: list[Node]) -> list[str]:
    return [found.places[node.name] for node in nodes]


def row(*ops: str, **given: str) -> list[Node]:
    """Return operations that read each other in a row, with backends that a user gave some of."""
    return [
        Node(f"n{at}", op, (f"n{at - 1}",) if at else ("x",), backend=given.get(f"n{at}")) for at, op in enumerate(ops)
    ]


def test_an_accelerator_spreads_over_open_operations_and_the_host_does_not() -> None:
    leaves, g = [Leaf("x", is_input=True)], [gpu("b"), CPU]
    assert names(split_graph(leaves, n := row("a", "a", "a", n1="gpu"), g), n) == ["gpu"] * 3
    assert names(split_graph(leaves, n := row("a", "a", "a", n1="cpu"), g), n) == ["cpu"] * 3
    assert names(split_graph(leaves, n := row("a", "a", "a", n0="gpu", n2="cpu"), g), n) == ["gpu", "gpu", "cpu"]
    found = split_graph(leaves, n := row("a", "b", "a", n0="gpu"), g)
    assert names(found, n) == ["gpu", "cpu", "gpu"]
    assert chain(found)[1:] == [("cpu", 1, 2, ["n0"]), ("gpu", 2, 3, ["n1"])]
    with pytest.raises(ValueError, match=re.escape("no backend computes n0 (b)")):
        split_graph(leaves, row("b"), [gpu("b"), Backend("host", lambda node: node.op != "b")])


def test_what_a_user_has_placed_is_never_changed_even_where_another_backend_would_do() -> None:
    better, same = gpu(name="npu", reads=frozenset({"cpu"})), Backend("cpu", reads=frozenset({"npu"}))
    leaves = [Leaf("x", "cpu"), Leaf("w", "cpu", is_weight=True)]
    free = [Node("y", "mul", ("x", "w"))]
    assert split_graph(leaves, free, [better, same]).places["y"] == "npu"
    assert split_graph(leaves, free, [better, same]).copies == []
    assert split_graph(leaves, [Node("y", "mul", ("x", "w"), backend="cpu")], [better, same]).places["y"] == "cpu"


def test_an_open_operation_goes_where_most_of_its_inputs_are() -> None:
    leaves = [Leaf("a", "one"), Leaf("b", "two"), Leaf("c", "two")]
    backends = [gpu(name="one"), gpu(name="two"), CPU]
    found = split_graph(leaves, [Node("y", "cat", ("a", "b", "c"))], backends)
    assert found.places["y"] == "two"
    assert found.copies == [Copy("a", "one", "two")]


def test_a_value_is_copied_once_for_all_who_read_it_and_views_are_where_their_source_is() -> None:
    leaves = [Leaf("x", "gpu")]
    nodes = [
        Node("y", "a", ("x",), backend="gpu"),
        Node("v", "view", ("y",), view_of="y"),
        Node("p", "a", ("v",), backend="cpu"),
        Node("q", "a", ("y", "p"), backend="cpu"),
        Node("r", "a", ("q",), backend="gpu"),
        Node("s", "a", ("y", "r"), backend="cpu"),
    ]
    found = split_graph(leaves, nodes, [gpu(), CPU])
    check(leaves, nodes, [gpu(), CPU], found)
    assert found.places["v"] == "gpu"
    assert [copy.value for copy in found.copies] == ["y", "q", "r"]


def test_a_users_input_is_marked_and_its_copies_take_turns() -> None:
    leaves = [Leaf("x", is_input=True), Leaf("w", "gpu", is_weight=True)]
    nodes = [Node("y", "mul", ("w", "x")), Node("z", "add", ("y", "x"))]
    assert split_graph(leaves, nodes, [gpu(), CPU]).copies == [Copy("x", "cpu", "gpu", is_input=True)]
    ring = split_graph(leaves, nodes, [gpu(), CPU], num_slots=4)
    assert ring.copies == [Copy("x", "cpu", "gpu", is_input=True, num_slots=4)]
    on_host = [Node("y", "neg", ("x",), backend="cpu")]
    assert split_graph(leaves, on_host, [gpu(), CPU]).copies == []
    assert split_graph(leaves, on_host, [gpu(), CPU], num_slots=2).copies[0].target == "cpu"


def test_too_many_inputs_begin_another_split() -> None:
    leaves = [Leaf(f"x{n}", "cpu") for n in range(3 * MAX_INPUTS)]
    nodes = [Node(f"y{n}", "add", (f"x{2 * n}", f"x{2 * n + 1}"), backend="gpu") for n in range(MAX_INPUTS)]
    found = split_graph(leaves, nodes, [gpu(), CPU])
    check(leaves, nodes, [gpu(), CPU], found)
    assert [len(split.inputs) for split in found.splits] == [MAX_INPUTS, MAX_INPUTS]


def test_any_graph_runs_split_by_split() -> None:
    chance = random.Random(random.getrandbits(30))
    for _ in range(150):
        backends = [gpu("b", name="one"), gpu("c", name="two"), CPU]
        places = [None, "one", "two", "cpu"]
        leaves = [
            Leaf(f"l{n}", chance.choice(places), is_weight=chance.random() < 0.5, is_input=chance.random() < 0.2)
            for n in range(chance.randint(1, 8))
        ]
        nodes: list[Node] = []
        for number in range(chance.randint(1, 60)):
            values = [leaf.name for leaf in leaves] + [node.name for node in nodes]
            sources = tuple(chance.choices(values[-10:], k=chance.randint(1, 3)))
            view = sources[0] if chance.random() < 0.15 else None
            wish = chance.choice(places[1:]) if view is None and chance.random() < 0.1 else None
            nodes.append(Node(f"n{number}", chance.choice("abc"), sources[:1] if view else sources, view, wish))
        check(leaves, nodes, backends, split_graph(leaves, nodes, backends, chance.choice([1, 1, 2])))


def test_what_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="y reads 'nothing', which nothing before it computes"):
        split_graph([], [Node("y", "a", ("nothing",))], [CPU])
    with pytest.raises(ValueError, match="x is on 'tpu', expected one of gpu, cpu"):
        split_graph([Leaf("x", "tpu")], [Node("y", "a", ("x",))], [gpu(), CPU])


def test_two_thousand_operations_take_little_time() -> None:
    leaves, nodes = decoder(285, 100)
    assert len(nodes) > 1990
    best_s = min(_thread_s(leaves, nodes) for _ in range(5))
    assert best_s < 0.02  # 6 ms of a processor at rest


def _thread_s(leaves: list[Leaf], nodes: list[Node]) -> float:
    begin_s = time.thread_time()
    split_graph(leaves, nodes, [gpu(), CPU])
    return time.thread_time() - begin_s
