"""Each rule of the policy, on the smallest cluster that shows it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection
from dataclasses import replace

import pytest
from unit.cluster.placement.random_states import cluster

from cluster.admission.records import OnDemandSwitch
from cluster.placement.on_demand import waits_there
from cluster.placement.state import BATCH, INTERACTIVE, Components, Decision, ModelState, SwitchPlan, WorkerState
from cluster.placement.switching import THROUGHPUT_FIRST, least_harm, plan_switches

GB = 10**9


def model(id_: str, waiting: int = 0, age_s: float = 0.0, *, own: int = 10, family: str = "", **more) -> ModelState:
    sizes = {f"own-{id_}": own * GB} | ({family: 20 * GB} if family else {})
    return ModelState(id_, Components(sizes), waiting, age_s, **more)


def worker(id_: str, *models: ModelState, budget: int = 10, **more) -> WorkerState:
    sizes = {key: size for each in models for key, size in each.components.sizes.items()}
    usual = {"attach_bytes_per_s": 2e9, "idle_s": 60.0} | more
    return WorkerState(id_, "n", budget * GB, Components(sizes), tuple(each.id for each in models), **usual)


def plan_of(models: list[ModelState], workers: list[WorkerState], held=None, policy=None, **more) -> SwitchPlan:
    held = {"n": {key for each in models for key in each.components.sizes}} if held is None else held
    return plan_switches(cluster(models, workers, held, **more), *([policy] if policy else []))


def only(plan: SwitchPlan) -> Decision:
    assert len(plan.decisions) == 1, plan.decisions
    return plan.decisions[0]


def test_a_thousand_requests_for_a_cold_model_are_one_load() -> None:
    herd = model("a", 1000, 0.1, service_s=0.001)
    order = only(plan_of([herd], [worker(f"w{number}") for number in range(4)]))
    assert (order.action, order.model, order.evict) == ("switch", "a", ())
    on_its_way = worker("w0", switching_to="a", ready_in_s=4.0)
    plan = plan_of([herd], [on_its_way, *(worker(f"w{number}") for number in range(1, 4))])
    assert plan.decisions == ()
    assert plan.planned == {"a": ("w0",)}


def test_a_worker_that_loses_nothing_gets_ready_for_those_that_come_meanwhile() -> None:
    asked, other = model("asked", 2, 1.0, rate_long=0.4), model("other", rate_long=0.1)
    coming = worker("w0", switching_to="asked", ready_in_s=4.0)
    # Alone it would begin the second one after 5 s, which is as long as a switch; two more that come until then later.
    assert only(plan_of([asked, other], [coming, worker("w1")])).worker == "w1"
    assert plan_of([replace(asked, rate_long=0.0)], [coming, worker("w1")]).decisions == ()
    loses = worker("w1", other)
    assert plan_of([asked, other], [coming, loses]).decisions == ()


def test_the_model_that_differs_least_goes() -> None:
    tuned = model("tuned", 1, own=10, family="flux")
    flux, sdxl = model("flux", family="flux"), model("sdxl", family="xl")
    order = only(plan_of([tuned, flux, sdxl], [worker("w0", sdxl, budget=30), worker("w1", flux, budget=30)]))
    assert (order.worker, order.evict, order.switch_s) == ("w1", ("flux",), 5.0)


def test_what_goes_is_what_is_asked_for_least() -> None:
    cold = model("cold", 1, 1.0)
    hot, warm = model("hot", rate_long=1.0), model("warm", rate_long=0.01)
    order = only(plan_of([cold, hot, warm], [worker("w0", hot), worker("w1", warm)]))
    assert order.worker == "w1"
    order = only(plan_of([cold, hot, warm], [worker("w0", hot, warm, budget=25)]))
    assert order.evict == ("warm",)


def test_free_bytes_come_first() -> None:
    cold, other = model("cold", 1), model("other")
    order = only(plan_of([cold, other], [worker("w0", other), worker("w1", other, budget=20)]))
    assert (order.worker, order.evict) == ("w1", ())


def test_a_shared_component_counts_once() -> None:
    flux, tuned = model("flux", rate_long=1.0, family="flux"), model("tuned", 1, family="flux")
    order = only(plan_of([flux, tuned], [worker("w0", flux, budget=40)]))
    assert order.evict == ()


def test_a_queue_is_served_before_its_worker_switches_away() -> None:
    busy, other = model("busy", 10, 30.0), model("other", 3, 2.0)
    home = worker("w0", busy, running={"busy": 1})
    assert plan_of([busy, other], [home]).decisions == ()
    order = only(plan_of([replace(busy, waiting=0), other], [replace(home, running={})]))
    assert (order.model, order.evict) == ("other", ("busy",))


def test_a_model_that_starves_takes_a_worker_with_a_queue_and_running_work_ends_first() -> None:
    busy, other = model("busy", 100, 130.0), model("other", 1, 130.0, unstarted_s=130.0)
    home = worker("w0", busy, running={"busy": 1})
    order = only(plan_of([busy, other], [home]))
    assert (order.action, order.worker, order.model, order.evict) == ("drain", "w0", "other", ("busy",))
    assert "due" in order.reason
    drained = replace(home, running={}, reserved_for="other")
    order = only(plan_of([busy, other], [drained]))
    assert (order.action, order.model) == ("switch", "other")
    still = replace(home, reserved_for="other")
    assert only(plan_of([busy, other], [still])).action == "drain"
    gone = plan_of([busy, replace(other, waiting=0, oldest_age_s=0.0)], [drained])
    assert gone.decisions == ()
    assert gone.planned["busy"] == ("w0",)


def test_a_queue_that_ends_soon_is_not_interrupted_for_one_that_starves() -> None:
    busy, other = model("busy", 9, 130.0), model("other", 1, 130.0, unstarted_s=130.0)
    home = worker("w0", busy, running={"busy": 1})
    assert plan_of([busy, other], [home]).decisions == ()
    longer = replace(other, unstarted_s=129.0)  # and if it does not end, that counts
    assert plan_of([busy, longer], [home]).decisions == ()
    assert only(plan_of([busy, replace(other, unstarted_s=145.0)], [home])).model == "other"


def test_a_queue_is_interrupted_where_another_one_ends_more_waiting_the_way_there_and_back_counted() -> None:
    """Five a second against one in four: 100 wait behind each other for 4 s, 90 for 0.2 s behind a switch of 5 s."""
    slow, quick = model("slow", 100, 30.0, service_s=4.0), model("quick", 90, 1.0, service_s=0.2)
    home = worker("w0", slow, running={"slow": 1})
    order = only(plan_of([slow, quick], [home]))
    assert (order.action, order.model) == ("drain", "quick")
    assert plan_of([slow, replace(quick, waiting=2)], [home]).decisions == ()
    back = worker("w0", quick, running={"quick": 1})
    assert plan_of([slow, quick], [back]).decisions == ()


def test_the_way_back_brings_only_what_differs() -> None:
    """It once counted all of the model's bytes on the way back, though the shared ones had never gone."""
    slow = model("slow", 9, 1.0, service_s=4.0, family="flux")
    quick = model("quick", 4, 1.0, service_s=0.5, family="flux")
    home = worker("w0", slow, budget=30, running={"slow": 1})
    assert only(plan_of([slow, quick], [home])).model == "quick"  # 4 in 5 + 2 + 5 s, against one in 4 s and the margin
    apart = model("quick", 4, 1.0, service_s=0.5, family="xl")
    assert plan_of([slow, apart], [home]).decisions == ()


def test_what_has_got_ready_serves_before_it_goes() -> None:
    """Otherwise two models that starve would take a worker from each other for ever, and nothing would be served."""
    ready, other = (model(name, 50, 150.0, unstarted_s=150.0) for name in ("ready", "other"))
    assert plan_of([ready, other], [worker("w0", ready)]).decisions == ()
    assert only(plan_of([ready, other], [worker("w0", ready, running={"ready": 1})])).action == "drain"
    assert only(plan_of([ready, other], [worker("w0", ready, reserved_for="other")])).action == "switch"


def test_while_a_worker_drains_its_node_reads() -> None:
    busy, other = model("busy", 0, 0.0), model("other", 1, 15.0)
    plan = plan_of([busy, other], [worker("w0", busy, running={"busy": 1})], held={"n": set()})
    assert [order.action for order in plan.decisions] == ["drain", "prefetch"]


def test_the_weight_of_a_class_counts() -> None:
    busy = model("busy", 50, 30.0, service_s=4.0)
    home = worker("w0", busy, running={"busy": 1})
    for slo, count in ((INTERACTIVE, 1), (BATCH, 0)):
        assert len(plan_of([busy, model("other", 10, 12.0, slo=slo)], [home]).decisions) == count
    asked = [model("batch", 10, 16.0, slo=BATCH), model("interactive", 10, 16.0, slo=INTERACTIVE)]
    assert only(plan_of([*asked, busy], [home])).model == "interactive"


def test_of_those_that_are_not_due_the_weightier_class_goes_first() -> None:
    asked = [model("batch", 1, 1.0, slo=BATCH), model("interactive", 1, 0.9, slo=INTERACTIVE)]
    assert only(plan_of(asked, [worker("w0")])).model == "interactive"


def test_nobody_starves_while_a_round_through_all_that_wait_is_not_over() -> None:
    """Going by age alone, while every model is late, takes workers from long batches until all requests are late."""
    busy = model("busy", 900, 200.0)
    home = worker("w0", busy, running={"busy": 4})
    cold = [model(f"cold{number}", 900, 140.0, unstarted_s=140.0) for number in range(6)]
    assert "none of 900 has started" in only(plan_of([busy, *cold[:3]], [home])).reason  # 4 turns of 25 s
    assert plan_of([busy, *cold], [home]).decisions == ()  # 7 of them


def test_a_model_without_a_start_for_twice_its_target_is_due_whatever_waits_and_before_all_others() -> None:
    busy = model("busy", 900, 200.0)
    home = worker("w0", busy, running={"busy": 4})
    many = [model(f"cold{number}", 900, 200.0) for number in range(3)]
    assert plan_of([busy, *many], [home]).decisions == ()
    almost, starving, worse = (
        replace(each, unstarted_s=seconds) for each, seconds in zip(many, (119.0, 121.0, 122.0), strict=True)
    )
    assert plan_of([busy, almost], [home]).decisions == ()
    assert only(plan_of([busy, almost, starving, worse], [home])).model == worse.id
    hurried = model("hurried", 1, 50.0, slo=INTERACTIVE, unstarted_s=91.0)  # of a target of 15 s: waits longer for it
    assert only(plan_of([busy, starving, worse, hurried], [home])).model == "hurried"
    assert "none of 900 has started for 122.0 s" in only(plan_of([busy, worse], [home])).reason


def test_a_worker_that_drained_goes_on_with_those_that_have_come_meanwhile() -> None:
    """It once switched all the same: two that came for the loaded model waited for the way there and back."""
    busy, other = model("busy", 2, 0.5), model("other", 1, 1.0, service_s=0.05)
    drained = worker("w0", busy, reserved_for="other")
    gone_on = plan_of([busy, other], [drained])
    assert gone_on.decisions == ()
    assert gone_on.planned["busy"] == ("w0",)
    assert only(plan_of([busy, replace(other, waiting=90)], [drained])).action == "switch"
    assert only(plan_of([replace(busy, waiting=0), other], [drained])).action == "switch"
    near = replace(other, waiting=9)  # 0.86 a second against 1: too little for a drain, and enough to end one
    assert plan_of([busy, near], [worker("w0", busy, running={"busy": 1})]).decisions == ()
    order = only(plan_of([busy, near], [drained]))
    assert (order.action, order.model, order.evict) == ("switch", "other", ("busy",))


def test_a_near_deadline_makes_due() -> None:
    busy = model("busy", 2, 30.0)
    home = worker("w0", busy, running={"busy": 1})
    assert plan_of([busy, model("other", 1, 1.0)], [home]).decisions == ()
    assert only(plan_of([busy, model("other", 1, 1.0, slack_s=7.0)], [home])).model == "other"
    assert plan_of([busy, model("other", 1, 1.0, slack_s=-1.0)], [home]).decisions == ()


def test_throughput_first_waits_for_work_and_not_for_ever() -> None:
    few, many = model("few", 1, 1.0), model("many", 11, 1.0)
    idle = [worker("w0")]
    assert plan_of([few], idle, policy=THROUGHPUT_FIRST).decisions == ()
    assert only(plan_of([few], idle)).model == "few"
    assert only(plan_of([many], idle, policy=THROUGHPUT_FIRST)).model == "many"
    assert only(plan_of([replace(few, oldest_age_s=15.0)], idle, policy=THROUGHPUT_FIRST)).model == "few"


def test_a_hot_model_spreads_and_an_idle_copy_goes_first() -> None:
    hot = model("hot", 40, 5.0, rate_short=3.0, rate_long=2.0)
    rare = model("rare", rate_long=0.05)
    order = only(plan_of([hot, rare], [worker("w0", hot, running={"hot": 1}), worker("w1", rare)]))
    assert (order.worker, order.model) == ("w1", "hot")
    calm, wanted = model("hot", rate_long=0.1), model("new", 1, 0.5)
    order = only(plan_of([calm, rare, wanted], [worker("w0", calm), worker("w1", rare), worker("w2", calm)]))
    assert order.evict == ("hot",)


def test_one_that_waits_is_no_reason_for_a_second_worker() -> None:
    """Golden trace of a real run: "1 wait 1.0 s for 1 busy workers", and both workers loaded the same model."""
    lone = model("lone", 1, 0.0, service_s=0.4)
    fast = {"attach_bytes_per_s": 20e9}
    on_its_way = worker("w0", switching_to="lone", ready_in_s=0.4, slots=4, **fast)
    assert plan_of([lone], [on_its_way, worker("w1", **fast)]).decisions == ()
    here = worker("w0", lone, running={"lone": 2}, slots=4, **fast)
    few = replace(lone, waiting=2)  # both start in this moment
    assert plan_of([few], [here, worker("w1", **fast)]).decisions == ()
    many = replace(lone, waiting=9)
    assert only(plan_of([many], [here, worker("w1", **fast)])).worker == "w1"
    burst = replace(lone, waiting=4)  # fits into the slots of the one that switches, and two would do it sooner
    assert only(plan_of([burst], [on_its_way, worker("w1", **fast)])).worker == "w1"


def test_a_switch_that_takes_little_longer_than_a_request_needs_no_order() -> None:
    hot, rare, cold = model("hot", rate_long=4.0), model("rare", rate_long=0.1), model("cold", 1, 0.0, service_s=0.1)
    fast = {"attach_bytes_per_s": 8e9}  # 1.25 s, and the usual request takes 1 s
    homes = [worker("w0", hot, **fast), worker("w1", rare, running={"rare": 1}, **fast)]
    plan = plan_of([hot, rare, cold], homes)
    assert plan.decisions == ()
    assert plan.on_demand["cold"] == {name: OnDemandSwitch(1.25) for name in ("w0", "w1")}
    assert plan.on_demand["hot"]["w0"] == OnDemandSwitch(1.25)  # what it costs there after another one
    assert set(plan.planned["cold"]) == {"w0", "w1"}
    roomy = replace(homes[0], budget_bytes=20 * GB)
    assert plan_of([hot, rare, cold], [roomy]).on_demand["cold"] == {"w0": OnDemandSwitch(1.25, is_beside=True)}
    slow = [replace(home, attach_bytes_per_s=4e9) for home in homes]
    dear = plan_of([hot, rare, replace(cold, oldest_age_s=8.0)], slow)
    assert dear.on_demand == {}
    assert only(dear).model == "cold"
    unread = plan_of([hot, rare, cold], [replace(home, load_bytes_per_s=8e9) for home in homes], {"n": set()})
    assert "cold" not in unread.on_demand
    for by_hand in ({"is_frozen": True}, {"pinned": frozenset({"hot"})}, {"is_draining": True}):
        assert "w0" not in plan_of([hot, rare, cold], [replace(homes[0], **by_hand), homes[1]]).on_demand["cold"]
    assert plan_of([hot, rare, cold], homes, is_frozen=True).on_demand == {}


def test_a_worker_waits_for_what_comes_soon_rather_than_to_go_away_for_less() -> None:
    """There and back takes 11 s with one request: those for a model that comes every 5 s are more, and wait longer."""
    often, lone = model("often", rate_long=0.2), model("lone", 1, 1.0)
    home = worker("w0", often, idle_s=1.0)
    assert plan_of([often, lone], [home]).decisions == ()
    assert only(plan_of([often, replace(lone, waiting=3)], [home])).model == "lone"
    assert only(plan_of([replace(often, rate_long=0.05), lone], [home])).model == "lone"
    assert only(plan_of([often, lone], [replace(home, idle_s=6.0)])).model == "lone"  # none has come for long
    assert only(plan_of([often, replace(lone, oldest_age_s=11.0)], [home])).model == "lone"  # as long as they would
    elsewhere = worker("w1", often, running={"often": 1})
    assert only(plan_of([often, lone], [home, elsewhere])).worker == "w0"  # which has the time for all of them


def test_a_worker_with_nothing_to_lose_shares_a_queue_that_lasts_for_longer_than_its_switch() -> None:
    """It once had to be longer by a quarter, and seven requests for one model waited for one of two empty workers."""
    hot = model("hot", 2, 1.0, service_s=5.0)
    coming = worker("w0", switching_to="hot", ready_in_s=4.0)
    assert only(plan_of([hot], [coming, worker("w1", attach_bytes_per_s=1.2e9)])).worker == "w1"  # 8.3 s beside 9.5
    assert plan_of([hot], [coming, worker("w1", attach_bytes_per_s=1e9)]).decisions == ()
    both = worker("w1", switching_to="hot", ready_in_s=4.0)
    assert plan_of([hot], [coming, both, worker("w2", attach_bytes_per_s=2e9)]).decisions == ()  # one for each of them


def test_a_copy_that_would_come_too_late_is_not_made() -> None:
    hot = model("hot", 3, 1.0)
    assert plan_of([hot], [worker("w0", hot, running={"hot": 1}), worker("w1")]).decisions == ()


def test_an_idle_worker_prepares_for_what_is_wanted_twice_as_much() -> None:
    absent, here = model("absent", rate_long=0.5), model("here", rate_long=0.2)
    assert only(plan_of([absent, here], [worker("w0", here)])).model == "absent"
    near = replace(here, rate_long=0.3)
    assert plan_of([absent, near], [worker("w0", near)]).decisions == ()
    assert plan_of([absent, here], [worker("w0", here, idle_s=1.0)]).decisions == ()


def test_a_leaving_worker_hands_over_and_serves_meanwhile() -> None:
    wanted = model("wanted", rate_long=0.5)
    leaving = worker("w0", wanted, is_draining=True)
    plan = plan_of([wanted], [leaving, worker("w1")])
    assert only(plan).worker == "w1"
    assert plan.planned["wanted"] == ("w1", "w0")
    done = plan_of([wanted], [leaving, worker("w1", wanted)])
    assert done.decisions == ()
    assert done.planned["wanted"] == ("w1",)


def test_orders_by_hand_hold() -> None:
    cold, here = model("cold", 5, 99.0), model("here")
    assert plan_of([cold, here], [worker("w0", here, pinned=frozenset({"here"}))]).decisions == ()
    assert plan_of([cold, here], [worker("w0", here, is_frozen=True)]).decisions == ()
    assert plan_of([cold, here], [worker("w0", here)], is_frozen=True).decisions == ()
    order = only(plan_of([cold, here], [worker("w0", here, pinned=frozenset({"cold"}))]))
    assert (order.model, order.reason) == ("cold", "pinned to this worker by hand")
    both = frozenset({"cold", "here"})
    assert "does not fit" in plan_of([cold, here], [worker("w0", here, pinned=both)]).notes[0]


def test_a_failed_load_is_backed_off_and_reported_and_others_go_on() -> None:
    bad, good = model("bad", 5, 99.0, retry_in_s=3.0), model("good", 1)
    plan = plan_of([bad, good], [worker("w0")])
    assert only(plan).model == "good"
    assert plan.notes == ("bad: its load failed; tried again in 3.0 s",)


def test_what_fits_nowhere_is_said() -> None:
    plan = plan_of([model("huge", 1, own=90)], [worker("w0")])
    assert plan.decisions == ()
    assert "fit into no worker" in plan.notes[0]


def test_too_much_at_once_does_not_make_every_worker_switch() -> None:
    homes = [model(f"busy{number}", 50, 60.0) for number in range(8)]
    due = [model(f"due{number}", 1, 130.0, unstarted_s=130.0) for number in range(8)]
    plan = plan_of([*homes, *due], [worker(f"w{n}", each, running={each.id: 1}) for n, each in enumerate(homes)])
    assert 1 <= len(plan.decisions) <= 4


def test_throughput_first_lets_no_worker_idle_while_models_are_due() -> None:
    """It once let 48 of 64 idle: a quarter were on their way, and no model had work for a switch more."""
    due = [model(f"due{number}", 1, 60.0) for number in range(8)]
    busy = model("busy", 50, 60.0)
    idle = [worker(f"w{number}") for number in range(6)]
    working = [worker(f"x{number}", busy, running={"busy": 1}) for number in range(2)]
    plan = plan_of([busy, *due], [*idle, *working], policy=THROUGHPUT_FIRST)
    assert {order.worker for order in plan.decisions} == {each.id for each in idle}


def test_a_worker_above_its_budget_lets_the_least_wanted_go() -> None:
    hot, rare = model("hot", rate_long=1.0), model("rare")
    order = only(plan_of([hot, rare], [worker("w0", hot, rare, budget=15)]))
    assert (order.action, order.model, order.evict) == ("evict", "rare", ("rare",))
    hot, rare = replace(hot, rate_long=0.5), replace(rare, rate_long=0.01)
    full, other = worker("w0", hot, rare, budget=15), worker("w1", hot)
    assert only(plan_of([hot, rare], [full, other])).evict == ("hot",)  # the other worker has time for all of it


def test_workers_that_get_ready_for_a_free_model_share_what_waits_for_it() -> None:
    burst = model("burst", 3, 0.2, rate_long=1.0)
    coming = [worker("w0", switching_to="burst", ready_in_s=0.3), worker("w1", switching_to="burst", ready_in_s=0.9)]
    fast = [replace(each, attach_bytes_per_s=20e9) for each in coming]
    assert plan_of([burst], fast).on_demand["burst"] == {"w0": OnDemandSwitch(0.3), "w1": OnDemandSwitch(0.9)}
    late = replace(fast[1], ready_in_s=9.0)  # w0 would have served its part by then
    assert plan_of([burst], [fast[0], late]).on_demand["burst"] == {"w0": OnDemandSwitch(0.3)}


def test_what_waits_is_for_all_that_are_ready_before_their_part_of_it_would_be_done() -> None:
    names = ("w0", "w1", "w2", "w3")
    ready_in_s = dict(zip(names, (0.0, 0.05, 0.9, 1.1), strict=True))
    here = [
        worker("w0", model("a")),
        *(worker(name, switching_to="a", ready_in_s=ready_in_s[name]) for name in names[1:]),
    ]

    def starts(waiting: int, *coming: str) -> list[str]:
        state = cluster([model("a", waiting, service_s=0.5)], here)
        return list(waits_there(state, "a", coming))

    assert starts(6, *names) == ["w0", "w1", "w2"]  # 3 s of work for two that are there, and a third
    assert starts(5, *names) == ["w0", "w1"]
    assert starts(99, "w2", "w3") == []  # nobody is sent to where nobody can start
    assert starts(0, *names) == ["w0", "w1"]


def test_one_large_model_goes_rather_than_twenty_small_ones() -> None:
    """By harm alone the small ones went first, each a little less wanted, and cost twenty times as much together."""
    small = [model(f"s{number}", own=1, rate_short=0.02, rate_long=0.02, service_s=2.0) for number in range(20)]
    large = model("large", own=20, rate_short=0.021, rate_long=0.021, service_s=2.0)
    new = model("new", 5, 400.0, own=20, service_s=2.0)
    order = only(plan_of([*small, large, new], [worker("w0", large, *small, budget=40, fixed_switch_s=10.0)]))
    assert order.evict == ("large",)


@pytest.mark.parametrize("seed", range(200))
def test_what_goes_harms_least_of_all_choices(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"m{number}" for number in range(rng.randint(1, 7))]
    parts = {name: {f"own-{name}": rng.choice([1, 2, 4, 12])} | rng.choice([{}, {"shared": 6}]) for name in names}
    harms = {name: rng.choice([0.0, 0.1, 1.0, rng.random() * 10]) for name in names}
    budget = rng.randint(0, sum(sum(sizes.values()) for sizes in parts.values()))

    def fits(kept: Collection[str]) -> bool:
        return sum({key: size for name in kept for key, size in parts[name].items()}.values()) <= budget

    chosen = least_harm(harms, {name: sum(parts[name].values()) for name in names}, fits)
    subsets = [set(each) for num in range(len(names) + 1) for each in itertools.combinations(names, num)]
    best = min(sum(harms[name] for name in gone) for gone in subsets if fits([n for n in names if n not in gone]))
    assert chosen is not None
    assert fits([name for name in names if name not in chosen])
    assert sum(harms[name] for name in chosen) == pytest.approx(best)
