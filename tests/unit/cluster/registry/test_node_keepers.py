"""A restarted keeper gets its pins and budget again, and its claims are free for others."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from cluster.keeper.actor import KeeperSettings, NodeKeeper
from cluster.peers.protocol import PeerAddress, Question, ResidencyReport
from cluster.records.errors import KeeperFailed
from cluster.registry.node_keepers import FIRST_PAUSE_S, IDLE_S, LONGEST_PAUSE_S, NodeKeepers
from weights.records.manifest import ExtentRef

DEFAULT_BUDGET_BYTES = 1000


class Call:
    """A method of an actor, as Ray has it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def remote(self, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        return self._function(*arguments)


class Keeper:
    """A keeper that remembers what it is told and asked."""

    def __init__(self, port: int) -> None:
        self.address = f"10.0.0.1:{port}"
        self.life = 0
        self.reachable = True
        self.num_holders = 1
        self.broken = ""
        self.has_storage = True
        self.prefetched: list[ExtentRef] = []
        self.prefetch = SimpleNamespace(remote=self.prefetched.extend)
        self.restart()
        self.stats, self.residents = Call(self._stats), Call(lambda: self.extents)
        self.set_pins, self.pins, self.set_budget = Call(self._pin), Call(lambda: self.pinned), Call(self._set_budget)

    def restart(self) -> None:
        self.life += 1
        self.budget_bytes = DEFAULT_BUDGET_BYTES
        self.pinned: Mapping[str, Sequence[str]] = {}
        self.extents: list[Any] = []
        self.num_told = 0

    def _stats(self) -> Any:
        if self.broken:
            cause = RayTaskError(
                "__init__", f"Traceback of the actor:\n  here\n{self.broken}\n", ValueError(self.broken)
            )
            raise ActorDiedError(cause)
        if not self.reachable:
            raise ConnectionError("it is starting")
        return SimpleNamespace(
            generation=f"life {self.life}",
            budget_bytes=self.budget_bytes,
            address=self.address,
            num_holders=self.num_holders,
            has_storage=self.has_storage,
        )

    def _pin(self, extents_of: Mapping[str, Sequence[str]]) -> None:
        if not self.reachable:
            raise ConnectionError("it is starting")
        self.num_told += 1
        self.pinned = dict(extents_of)

    @property
    def pinned_ids(self) -> str:
        return "".join(sorted({id_ for ids in self.pinned.values() for id_ in ids}))

    def _set_budget(self, budget_bytes: int) -> None:
        self.num_told += 1
        self.budget_bytes = budget_bytes


@pytest.fixture
def nodes() -> dict[str, Keeper]:
    return {"n1": Keeper(7001), "n2": Keeper(7002)}


class Ray:
    """A record of what Ray was told to do, and the time."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.killed: list[Keeper] = []
        self.draining: set[str] = set()
        self.now_s = 0.0


@pytest.fixture
def done() -> Ray:
    return Ray()


@pytest.fixture
def models() -> dict[str, tuple[str, ...]]:
    """The extents of what is served; `one` and `two` share some."""
    return {"one": ("a", "b", "s"), "two": ("c", "s")}


@pytest.fixture
def known() -> set[str]:
    """The models of the registry, served yet or not."""
    return {"one", "two", "coming"}


@pytest.fixture
def start(
    nodes: dict[str, Keeper],
    done: Ray,
    models: dict[str, tuple[str, ...]],
    known: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[], NodeKeepers]:
    """Another life of the registry, with the keepers of the one before. Nodes n1 and n2 have a replica."""

    def start_keeper(_: NodeKeepers, node_id: str) -> Keeper:
        done.started.append(node_id)
        return nodes[node_id]

    def make() -> NodeKeepers:
        made = NodeKeepers(
            "/packs",
            DEFAULT_BUDGET_BYTES,
            "c:0",
            KeeperSettings(),
            clock=lambda: done.now_s,
            models=SimpleNamespace(by_model=models, is_known=known.__contains__),
            draining_nodes=lambda: done.draining,
        )
        for node_id in nodes:
            made.keeper(node_id)
        return made

    monkeypatch.setattr(NodeKeepers, "_start", start_keeper)
    monkeypatch.setattr("cluster.registry.node_keepers.ray.kill", done.killed.append)
    return make


@pytest.fixture
def keepers(start: Callable[[], NodeKeepers]) -> NodeKeepers:
    return start()


async def test_a_restarted_keeper_gets_its_nodes_pins_and_budget_again(
    keepers: NodeKeepers, nodes: dict[str, Keeper]
) -> None:
    await keepers.follow(["n1", "n2"])
    for model, pinned in (("one", True), ("two", True), ("one", False)):
        assert await keepers.set_pinned(model, pinned) == {"n1": None, "n2": None}
    nodes["n1"].budget_bytes = 70
    await keepers.follow(["n1", "n2"])
    nodes["n1"].restart()
    await keepers.follow(["n1", "n2"])
    assert [(node.pinned_ids, node.budget_bytes) for node in nodes.values()] == [("cs", 70), ("cs", 1000)]
    nodes["n1"].restart()  # what was given again is not forgotten with the second life
    await keepers.follow(["n1", "n2"])
    assert (nodes["n1"].pinned_ids, nodes["n1"].budget_bytes) == ("cs", 70)


async def test_a_keeper_that_lives_on_is_told_nothing(keepers: NodeKeepers, nodes: dict[str, Keeper]) -> None:
    await keepers.follow(["n1", "n2"])
    for _ in range(2):
        await keepers.set_pinned("one", True)
    before = [node.num_told for node in nodes.values()]
    nodes["n1"].budget_bytes = 70
    for _ in range(3):
        await keepers.follow(["n1", "n2"])
    assert [node.num_told for node in nodes.values()] == before == [1, 1]
    assert nodes["n1"].budget_bytes == 70


async def test_unpinning_one_model_leaves_what_another_one_pins(keepers: NodeKeepers, nodes: dict[str, Keeper]) -> None:
    await keepers.follow(["n1"])
    seen = []
    for model, pinned in (("one", True), ("two", True), ("one", False), ("two", False), ("two", False)):
        await keepers.set_pinned(model, pinned)
        seen.append(nodes["n1"].pinned_ids)
    assert seen == ["abs", "abcs", "cs", "", ""]


async def test_a_pin_follows_its_model_to_the_next_version_and_lets_go_of_the_one_before(
    keepers: NodeKeepers, nodes: dict[str, Keeper], models: dict[str, tuple[str, ...]]
) -> None:
    await keepers.follow(["n1"])
    await keepers.set_pinned("one", True)
    models["one"] = ("b", "new")
    await keepers.follow(["n1"])
    assert nodes["n1"].pinned_ids == "".join(sorted(("b", "new")))
    await keepers.set_pinned("one", False)
    assert nodes["n1"].pinned_ids == ""


async def test_a_pin_holds_on_every_node_after_an_absent_keeper_or_a_restarted_registry(
    start: Callable[[], NodeKeepers], nodes: dict[str, Keeper], models: dict[str, tuple[str, ...]]
) -> None:
    before = start()
    await before.follow(["n1"])  # n2 joins later
    await before.set_pinned("one", True)
    known = dict(models)
    models.clear()  # the next life has not looked at its models yet
    keepers = start()
    await keepers.follow(["n1", "n2"])
    assert [node.pinned_ids for node in nodes.values()] == ["abs", ""]
    models |= known
    nodes["n1"].reachable = False
    failed = (await keepers.set_pinned("two", True))["n1"]
    assert isinstance(failed, ConnectionError)
    nodes["n1"].restart()
    keepers.keeper("n2")
    await keepers.follow(["n1", "n2"])
    assert [node.pinned_ids for node in nodes.values()] == ["", "abcs"]  # it is not back yet
    nodes["n1"].reachable = True
    await keepers.follow(["n1", "n2"])
    assert nodes["n1"].pinned_ids == "abcs"


async def test_a_pin_that_comes_before_the_keepers_were_looked_at_costs_none_of_theirs(
    start: Callable[[], NodeKeepers], nodes: dict[str, Keeper]
) -> None:
    before = start()
    await before.follow(["n1"])
    await before.set_pinned("one", True)
    keepers = start()
    await keepers.set_pinned("two", True)
    assert nodes["n1"].pinned_ids == "abcs"


async def test_a_pin_ends_with_its_model_though_the_registry_died_before_it_could_tell_the_keepers(
    start: Callable[[], NodeKeepers], nodes: dict[str, Keeper], known: set[str]
) -> None:
    before = start()
    await before.follow(["n1", "n2"])
    for model in ("one", "two", "coming"):  # the registry has not looked at the last one yet
        await before.set_pinned(model, True)
    nodes["n1"].pinned = {**nodes["n1"].pinned, "coming": ("x",)}
    known.remove("one")
    keepers = start()
    await keepers.follow(["n1", "n2"])
    assert [node.pinned_ids for node in nodes.values()] == ["csx", "cs"]


async def test_of_two_changes_at_once_the_last_one_holds(keepers: NodeKeepers, nodes: dict[str, Keeper]) -> None:
    await keepers.follow(["n1"])
    tell, first, go_on = nodes["n1"]._pin, asyncio.Event(), asyncio.Event()

    class Slow:
        @staticmethod
        async def remote(extents_of: Any) -> None:
            first.set()
            await go_on.wait()
            tell(extents_of)

    real, nodes["n1"].set_pins = nodes["n1"].set_pins, Slow()
    pinning = asyncio.ensure_future(keepers.set_pinned("one", True))
    await first.wait()
    nodes["n1"].set_pins = real
    unpinning = asyncio.ensure_future(keepers.set_pinned("one", False))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(pinning, unpinning)
    assert nodes["n1"].pinned_ids == ""


async def test_the_claims_of_a_restarted_keeper_end(keepers: NodeKeepers, nodes: dict[str, Keeper]) -> None:
    await keepers.follow(["n1", "n2"])
    question = Question(("a", "b"), max_claims=4)
    assert keepers.residency.locate("n1", question, 0).claimed == ("a", "b")
    await keepers.follow(["n1", "n2"])
    assert keepers.residency.locate("n2", question, 0).reading == {"a": "n1", "b": "n1"}  # the same life: still loading
    nodes["n1"].restart()
    await keepers.follow(["n1", "n2"])
    assert keepers.residency.locate("n2", question, 0).claimed == ("a", "b")
    assert keepers.residency.locate("n1", question, 0).reading == {"a": "n2", "b": "n2"}


async def test_what_a_keeper_reports_while_it_is_met_is_kept(keepers: NodeKeepers, nodes: dict[str, Keeper]) -> None:
    here = PeerAddress("10.0.0.1", 7001)

    def report_and_answer() -> list[Any]:
        before, nodes["n1"].extents = nodes["n1"].extents, [SimpleNamespace(id="a"), SimpleNamespace(id="b")]
        keepers.residency.report_residency("n1", ResidencyReport(here, ["b"]))  # overtakes the answer
        return before

    nodes["n1"].extents, nodes["n1"].residents = [SimpleNamespace(id="a")], Call(report_and_answer)
    await keepers.follow(["n1", "n2"])
    found = keepers.residency.locate("n2", Question(("a", "b"), max_claims=4))
    assert {id_: [offer.node for offer in offers] for id_, offers in found.offers.items()} == {"a": ["n1"], "b": ["n1"]}


async def test_a_node_that_left_is_a_new_one_when_it_comes_back(keepers: NodeKeepers, nodes: dict[str, Keeper]) -> None:
    await keepers.follow(["n1", "n2"])
    nodes["n1"].budget_bytes = 70
    await keepers.follow(["n1", "n2"])
    await keepers.follow(["n2"])
    nodes["n1"].restart()
    keepers.keeper("n1")
    await keepers.follow(["n1", "n2"])
    assert nodes["n1"].budget_bytes == DEFAULT_BUDGET_BYTES


async def test_only_nodes_with_replicas_have_keepers(keepers: NodeKeepers, nodes: dict[str, Keeper], done: Ray) -> None:
    nodes["head"] = nodes["found"] = Keeper(7003)
    await keepers.follow(["head", "n1", "n2", "found"], running=["found"])
    assert (done.started, set(keepers._handles)) == (["n1", "n2", "found"], {"n1", "n2", "found"})


async def test_a_keeper_ends_a_while_after_the_last_replica_of_its_node(
    keepers: NodeKeepers, nodes: dict[str, Keeper], done: Ray
) -> None:
    await keepers.follow(["n1", "n2"])
    nodes["n1"].num_holders = 0
    done.now_s += 0.9 * IDLE_S
    await keepers.follow(["n1", "n2"])
    keepers.residency.report_residency("n1", ResidencyReport(PeerAddress("10.0.0.1", 7001), ["a"], is_full=True))
    assert done.killed == []
    done.now_s += 0.2 * IDLE_S
    await keepers.follow(["n1", "n2"], running=["n1", "n2"])
    assert (done.killed, set(keepers._handles)) == ([nodes["n1"]], {"n2"})
    assert keepers.residency.locate("n2", Question(("a",), max_claims=0)).offers == {}  # nobody is sent to it
    assert keepers.keeper("n1") is nodes["n1"]
    await keepers.follow(["n1", "n2"])
    assert set(keepers._handles) == {"n1", "n2"}


async def test_a_keeper_does_not_hold_up_a_node_that_drains(
    keepers: NodeKeepers, nodes: dict[str, Keeper], done: Ray
) -> None:
    """Ray waits for it, and gives up after 30 s. Who still has leases, or does not say, keeps it."""
    await keepers.follow(["n1", "n2"])
    done.draining = {"n1", "n2"}
    nodes["n2"].num_holders = 0
    nodes["n2"].reachable = False
    await keepers.follow(["n1", "n2"])
    assert done.killed == []
    nodes["n1"].num_holders = 0
    await keepers.follow(["n1", "n2"])
    assert done.killed == [nodes["n1"]]
    nodes["n2"].reachable = True
    await keepers.follow(["n1", "n2"])
    assert done.killed == [nodes["n1"], nodes["n2"]]


async def test_a_keeper_that_cannot_start_is_replaced_later_and_later_and_says_why_meanwhile(
    keepers: NodeKeepers, nodes: dict[str, Keeper], done: Ray
) -> None:
    nodes["n1"].broken = "WeightsError: ATELIER_READ: no such strategy"
    started_s = []
    done.started.clear()
    while done.now_s < 4 * LONGEST_PAUSE_S:
        await keepers.follow(["n1", "n2"], running=["n1", "n2"] if not started_s else [])
        answer = (await keepers.call_keepers(NodeKeeper.stats))["n1"]
        assert isinstance(answer, KeeperFailed)
        assert str(answer) == "the keeper of node n1 cannot start: WeightsError: ATELIER_READ: no such strategy"
        with pytest.raises(KeeperFailed, match="no such strategy"):
            keepers.keeper("n1")
        done.now_s += FIRST_PAUSE_S / 2
        started_s += [done.now_s] * (len(done.started) - len(started_s))
    pauses_s = [later - sooner for sooner, later in itertools.pairwise(started_s)]
    assert pauses_s[:4] == [FIRST_PAUSE_S * 2**number for number in range(1, 5)]
    assert max(pauses_s) == LONGEST_PAUSE_S
    nodes["n1"].broken = ""
    done.now_s += LONGEST_PAUSE_S
    await keepers.follow(["n1", "n2"])
    assert (await keepers.call_keepers(NodeKeeper.stats))["n1"].num_holders == 1
    nodes["n1"].broken = "again"
    await keepers.follow(["n1", "n2"])
    done.now_s += FIRST_PAUSE_S
    assert keepers.keeper("n1") is nodes["n1"]  # it begins with a short pause again


async def test_keepers_tell_whether_replicas_hold_leases_there(keepers: NodeKeepers, nodes: dict[str, Keeper]) -> None:
    nodes["n2"].num_holders = 0
    await keepers.follow(["n1", "n2"])
    assert keepers.may_have_holders
    nodes["n1"].num_holders = 0
    await keepers.follow(["n1", "n2"])
    assert not keepers.may_have_holders
    nodes["n2"].num_holders = 1
    await keepers.follow(["n1", "n2"])
    assert keepers.may_have_holders
    await keepers.follow(["n1"])  # its replicas went with their node
    assert not keepers.may_have_holders


async def test_a_keeper_that_does_not_say_may_have_holders_until_it_does_or_is_known_to_be_broken(
    keepers: NodeKeepers, nodes: dict[str, Keeper]
) -> None:
    nodes["n1"].num_holders = nodes["n2"].num_holders = 0
    await keepers.follow(["n1", "n2"])
    assert not keepers.may_have_holders
    nodes["n1"].reachable = nodes["n2"].reachable = False
    await keepers.follow(["n1", "n2"])
    nodes["n1"].reachable = True
    await keepers.follow(["n1", "n2"])
    assert keepers.may_have_holders
    nodes["n2"].broken = "WeightsError: no such folder"
    await keepers.follow(["n1", "n2"])
    assert not keepers.may_have_holders
    nodes["n1"].reachable = False
    await keepers.follow(["n1", "n2"])
    assert keepers.may_have_holders
    await keepers.follow(["n2"])
    assert not keepers.may_have_holders


def some_extents(number: int) -> list[ExtentRef]:
    return [ExtentRef(id=f"e{index}", pack="p", offset=0, nbytes=1, checksum="0" * 32) for index in range(number)]


async def test_what_a_node_cannot_read_is_read_by_those_that_can(
    keepers: NodeKeepers, nodes: dict[str, Keeper], done: Ray
) -> None:
    nodes["n3"] = Keeper(7003)
    keepers.keeper("n3")
    nodes["n1"].has_storage = False
    await keepers.follow(nodes)
    for _ in range(2):
        keepers.read_for_others(some_extents(40), "n1")
    asked = [nodes[name].prefetched for name in ("n1", "n2", "n3")]
    assert asked[0] == []
    assert min(len(asked[1]), len(asked[2])) >= 2 * 5, "they share the work"
    assert all(found[: len(found) // 2] == found[len(found) // 2 :] for found in asked), "and each keeps its own"
    assert len(asked[1]) + len(asked[2]) == 80
    nodes["n2"].has_storage = False
    await keepers.follow(["n1", "n2"])
    keepers.read_for_others(some_extents(1), "n2")
    assert nodes["n2"].prefetched[-1:] == some_extents(1), "nobody can: the registry's own node has to"


async def test_the_registrys_own_node_gets_a_keeper_when_no_other_can_read(
    keepers: NodeKeepers, nodes: dict[str, Keeper], done: Ray
) -> None:
    for keeper in nodes.values():
        keeper.has_storage = False
    await keepers.follow(nodes)
    nodes["head"] = Keeper(7003)
    keepers.read_for_others(some_extents(2), "head")
    assert done.started == ["n1", "n2", "head"]
    assert nodes["head"].prefetched == some_extents(2)
