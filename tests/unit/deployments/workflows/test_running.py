"""Runs and checks over a fake cluster: what is reached runs, once; branches, lists, faults and cancelling."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from kit.seeding import seeded_rng
from kit.workflows import FakeBackend, Told, png_file, workflow_of

from deployments.records.errors import InvalidRequest
from deployments.workflows.checking import check, dependent_outputs
from deployments.workflows.evaluation import Evaluation, Listed, outputs_of
from deployments.workflows.kinds import Kind, Output, link
from deployments.workflows.records import WorkflowError
from deployments.workflows.running import NodeFailed, run
from deployments.workflows.table import KINDS

SIZE = {"width": 16, "height": 16, "batch_size": 1, "color": 0x80FF00}
SAVE = {"filename_prefix": "out"}


async def test_an_image_goes_through_the_vae_and_is_saved_truncated() -> None:
    pixels = seeded_rng().integers(0, 256, (19, 24, 3), dtype=np.uint8)
    backend, told = FakeBackend({"in.png": png_file(pixels)}), Told()
    workflow = workflow_of(
        vae=("VAELoader", {"vae_name": "ae.safetensors"}),
        load=("LoadImage", {"image": "in.png"}),
        encode=("VAEEncode", {"pixels": ("load", 0), "vae": ("vae", 0)}),
        decode=("VAEDecode", {"samples": ("encode", 0), "vae": ("vae", 0)}),
        save=("SaveImage", {"images": ("decode", 0), **SAVE}),
    )
    assert check(workflow, backend).errors == ()
    shown = await run(workflow, backend, told)
    assert shown == {"save": {"images": [{"filename": "out_00001_.png", "subfolder": "", "type": "output"}]}}
    # The middle 16 rows of 19 are read, from the second one on; a square of 8 becomes its mean.
    means = (pixels[1:17].astype(np.float64) / 255).reshape(2, 8, 3, 8, 3).mean((1, 3))
    expected = np.floor(means * 255).repeat(8, 0).repeat(8, 1)
    assert np.abs(backend.saved[0][2] - expected).max() <= 1
    assert told.events[-1] == ("executed", "save", shown["save"])


async def test_only_what_an_output_reaches_runs_and_each_node_once() -> None:
    workflow = workflow_of(
        image=("EmptyImage", SIZE),
        twice=("ImageBatch", {"image1": ("image", 0), "image2": ("image", 0)}),
        unused=("ImageInvert", {"image": ("image", 0)}),
        broken=("ImageInvert", {}),
        save=("SaveImage", {"images": ("twice", 0), **SAVE}),
        again=("PreviewImage", {"images": ("twice", 0)}),
    )
    backend, told = FakeBackend(), Told()
    assert check(workflow, backend).outputs == ("save", "again")
    await run(workflow, backend, told)
    assert told.ran == ["image", "twice", "save", "again"]
    assert [(kind, prefix) for kind, prefix, _ in backend.saved] == [("output", "out")] * 2 + [
        ("temp", "ComfyUI_temp")
    ] * 2
    assert (backend.saved[0][2] == (0x80, 0xFF, 0x00)).all()


@pytest.mark.parametrize("switch", [True, False])
async def test_a_switch_runs_and_checks_the_chosen_branch_only(switch: bool) -> None:
    workflow = workflow_of(
        on=("PrimitiveBoolean", {"value": switch}),
        good=("EmptyImage", SIZE),
        bad=("LoraLoaderModelOnly", {"lora_name": "none.safetensors"}),
        switch=("ComfySwitchNode", {"switch": ("on", 0), "on_true": ("good", 0), "on_false": ("bad", 0)}),
        save=("SaveImage", {"images": ("switch", 0), **SAVE}),
    )
    backend, told = FakeBackend(), Told()
    found = check(workflow, backend)
    assert found.outputs == (("save",) if switch else ())
    if switch:
        await run(workflow, backend, told)
        assert told.ran == ["on", "good", "switch", "save"]
    else:
        assert {error.node for error in found.errors} == {"bad"}


async def test_a_switch_over_an_image_is_decided_when_it_is_there() -> None:
    pixels = np.zeros((8, 24, 3), np.uint8)
    workflow = workflow_of(
        load=("LoadImage", {"image": "in.png"}),
        size=("GetImageSize", {"image": ("load", 0)}),
        wide=("ComfyMathExpression", {"expression": "a > b", "values.a": ("size", 0), "values.b": ("size", 1)}),
        inverted=("ImageInvert", {"image": ("load", 0)}),
        switch=("ComfySwitchNode", {"switch": ("wide", 2), "on_true": ("inverted", 0), "on_false": ("load", 0)}),
        save=("SaveImage", {"images": ("switch", 0), **SAVE}),
    )
    for shape, expected in ((pixels, 255), (pixels.swapaxes(0, 1), 0)):
        backend = FakeBackend({"in.png": png_file(np.ascontiguousarray(shape))})
        assert not check(workflow, backend).errors
        await run(workflow, backend, Told())
        assert (backend.saved[0][2] == expected).all()


def test_a_list_runs_its_consumer_for_each_element_and_shorter_ones_repeat_their_last() -> None:
    kinds = {
        "Letters": Kind("Letters", (), (Output("STRING", is_list=True),), lambda: (["a", "b", "c"],)),
        "Digits": Kind("Digits", (), (Output("STRING", is_list=True),), lambda: (["1", "2"],)),
        "Join": Kind("Join", (link("x", "*"), link("y", "*")), (Output("STRING"),), lambda x, y: (x + y,)),
        "All": Kind("All", (link("x", "*"),), (Output("STRING"),), lambda x: ("".join(x),), takes_lists=True),
    }
    workflow = workflow_of(
        x=("Letters", {}),
        y=("Digits", {}),
        join=("Join", {"x": ("x", 0), "y": ("y", 0)}),
        all=("All", {"x": ("join", 0)}),
    )
    walk = Evaluation(workflow, kinds, FakeBackend(), ["all"])
    values = {}
    for ready in walk.ready():
        values[ready.node.id] = outputs_of(ready.kind, [ready.kind.function(**one) for one in ready.calls])
        walk.give(ready.node.id, values[ready.node.id])
    assert values["join"] == (Listed(("a1", "b2", "c2")),)
    assert values["all"] == ("a1b2c2",)


FAULTS = [
    ("required_input_missing", "invert", "image", {}),
    ("bad_linked_input", "invert", "image", {"image": ("nowhere", 0)}),
    ("bad_linked_input", "invert", "image", {"image": ("empty", 7)}),
    ("bad_linked_input", "invert", "image", {"image": "a text"}),
    ("return_type_mismatch", "invert", "image", {"image": ("mask", 0)}),
    ("value_smaller_than_min", "empty", "width", {"width": 0}),
    ("value_bigger_than_max", "empty", "width", {"width": 20_000}),
    ("invalid_input_type", "empty", "width", {"width": "wide"}),
    ("value_not_in_list", "vae", "vae_name", {"vae_name": "none.safetensors"}),
    ("value_not_in_list", "scale", "upscale_method", {"upscale_method": "magic"}),
]


@pytest.mark.parametrize(("type", "node", "name", "changes"), FAULTS)
def test_faults_are_told_by_node_input_and_type(type: str, node: str, name: str | None, changes: dict) -> None:
    nodes = {
        "mask": ("SolidMask", {"value": 1.0, "width": 8, "height": 8}),
        "empty": ("EmptyImage", dict(SIZE)),
        "invert": ("ImageInvert", {"image": ("empty", 0)}),
        "scale": (
            "ImageScale",
            {"image": ("invert", 0), "upscale_method": "area", "width": 8, "height": 8, "crop": "disabled"},
        ),
        "save": ("SaveImage", {"images": ("scale", 0), **SAVE}),
        "vae": ("VAELoader", {"vae_name": "ae.safetensors"}),
        "encode": ("VAEEncode", {"pixels": ("scale", 0), "vae": ("vae", 0)}),
        "decode": ("VAEDecode", {"samples": ("encode", 0), "vae": ("vae", 0)}),
        "preview": ("PreviewImage", {"images": ("decode", 0)}),
        "fine": ("MaskPreview", {"mask": ("mask", 0)}),
    }
    kind, inputs = nodes[node]
    nodes[node] = (kind, {**inputs, **changes} if changes else {})
    found = check(workflow_of(**nodes), FakeBackend())
    assert [(error.type, error.node, error.input) for error in found.errors] == [(type, node, name)]
    assert found.outputs == (("save", "fine") if node == "vae" else ("fine",))
    assert node in str(found.errors[0])


def test_a_circle_is_told_and_does_not_end_in_one() -> None:
    workflow = workflow_of(
        a=("ImageInvert", {"image": ("b", 0)}),
        b=("ImageInvert", {"image": ("a", 0)}),
        save=("SaveImage", {"images": ("a", 0), **SAVE}),
    )
    assert [error.type for error in check(workflow, FakeBackend()).errors] == ["dependency_cycle"]


def test_a_chain_of_thousands_is_no_recursion() -> None:
    chain = {"n0": ("EmptyImage", SIZE)}
    chain |= {f"n{at}": ("ImageInvert", {"image": (f"n{at - 1}", 0)}) for at in range(1, 3000)}
    workflow = workflow_of(**chain, save=("SaveImage", {"images": ("n2999", 0), **SAVE}))
    assert check(workflow, FakeBackend()).outputs == ("save",)


def test_unknown_nodes_are_named_and_run_nothing() -> None:
    workflow = workflow_of(
        evil=("ExecuteAnything", {"code": "print(1)"}), save=("SaveImage", {"images": ("evil", 0), **SAVE})
    )
    (error,) = check(workflow, FakeBackend()).errors
    assert (error.type, error.node, error.kind) == ("missing_node_type", "evil", "ExecuteAnything")
    assert dependent_outputs(workflow, "evil") == ["save"]
    end = workflow_of(
        image=("EmptyImage", SIZE),
        save=("SaveImage", {"images": ("image", 0), **SAVE}),
        sound=("SaveSound", {"images": ("image", 0)}),
    )
    found = check(end, FakeBackend())
    assert (found.outputs, [one.node for one in found.errors]) == (("save",), ["sound"])
    with pytest.raises(WorkflowError, match="no outputs") as caught:
        check(workflow_of(evil=("ExecuteAnything", {})), FakeBackend())
    assert [one.kind for one in caught.value.errors] == ["ExecuteAnything"]


async def test_a_failure_while_it_runs_names_the_node() -> None:
    workflow = workflow_of(
        load=("LoadImage", {"image": "lost.png"}), save=("SaveImage", {"images": ("load", 0), **SAVE})
    )
    with pytest.raises(NodeFailed, match=r"node load, LoadImage: no uploaded file 'lost.png'") as caught:
        await run(workflow, FakeBackend(), Told())
    assert isinstance(caught.value.__cause__, InvalidRequest)
    for file in (b"no image", png_file(np.zeros((8, 8, 3), np.uint8))[:40]):
        with pytest.raises(NodeFailed, match="no image that can be read"):
            await run(workflow, FakeBackend({"lost.png": file}), Told())


async def test_cancelling_ends_what_the_cluster_does() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    class Slow(FakeBackend):
        async def decode(self, model: str, latents: np.ndarray) -> np.ndarray:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return latents

    workflow = workflow_of(
        vae=("VAELoader", {"vae_name": "ae.safetensors"}),
        image=("EmptyImage", SIZE),
        encode=("VAEEncode", {"pixels": ("image", 0), "vae": ("vae", 0)}),
        decode=("VAEDecode", {"samples": ("encode", 0), "vae": ("vae", 0)}),
        save=("SaveImage", {"images": ("decode", 0), **SAVE}),
    )
    backend = Slow()
    running = asyncio.create_task(run(workflow, backend, Told()))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()
    assert not backend.saved


async def test_a_value_of_another_type_through_a_switch_is_told() -> None:
    workflow = workflow_of(
        text=("PrimitiveString", {"value": "no image"}),
        switch=("ComfySwitchNode", {"switch": True, "on_true": ("text", 0)}),
        none=("ComfySwitchNode", {"switch": False, "on_true": ("text", 0)}),
        save=("SaveImage", {"images": ("switch", 0), **SAVE}),
        other=("SaveImage", {"images": ("none", 0), **SAVE}),
    )
    found = check(workflow, FakeBackend())
    assert [(one.node, one.type) for one in found.errors] == [
        ("save", "return_type_mismatch"),
        ("other", "required_input_missing"),
    ]


async def test_what_takes_anything_takes_none() -> None:
    nodes = {
        "nothing": ("ComfyPassOrNoneNode", {}),
        "not": ("ComfyNotNode", {"value": ("nothing", 0)}),
        "all": ("ComfyAndNode", {"values.value0": ("not", 0), "values.value1": ("nothing", 0)}),
        "image": ("SaveImage", {"images": ("nothing", 0), **SAVE}),
    }
    shows = {f"show {name}": ("PreviewAny", {"source": (name, 0)}) for name in ("nothing", "not", "all")}
    workflow = workflow_of(**nodes, **shows, literal=("PreviewAny", {"source": None}))
    backend, told = FakeBackend(), Told()
    found = check(workflow, backend)
    assert [(error.node, error.type) for error in found.errors] == [("image", "required_input_missing")]
    shown = await run(workflow, backend, told, found.outputs)
    assert {node: one["text"] for node, one in shown.items()} == {
        "show nothing": ["None"],
        "show not": ["True"],
        "show all": ["False"],
        "literal": ["None"],
    }


def test_values_that_nobody_reads_any_more_are_let_go() -> None:
    size = 16 * 16 * 3 * 4
    chain = {"n0": ("EmptyImage", SIZE)}
    chain |= {f"n{at}": ("ImageInvert", {"image": (f"n{at - 1}", 0)}) for at in range(1, 50)}
    last = {"image1": ("n49", 0), "image2": ("n0", 0)}
    walk = Evaluation(workflow_of(**chain, end=("ImageBatch", last)), KINDS, FakeBackend(), ["end"], max_bytes=4 * size)
    ran = []
    for ready in walk.ready():
        ran.append(ready.node.id)
        walk.give(ready.node.id, ready.kind.function(**ready.calls[0]))
    assert len(ran) == len(set(ran)) == 51


def test_a_check_calls_nothing_that_may_take_long() -> None:
    slow = {"string": "a" * 60 + "!", "regex_pattern": "(a|a)*$"}
    slow |= {"case_insensitive": True, "multiline": False, "dotall": False}
    nodes = {f"n{at}": ("RegexMatch", slow) for at in range(500)}
    shows = {f"s{at}": ("PreviewAny", {"source": (f"n{at}", 0)}) for at in range(500)}
    assert len(check(workflow_of(**nodes, **shows), FakeBackend()).outputs) == 500


def test_values_of_a_run_are_bounded_together() -> None:
    nodes = {f"n{at}": ("EmptyImage", SIZE) for at in range(3)}
    batch = ("BatchImagesNode", {f"images.image{at}": (f"n{at}", 0) for at in range(3)})
    walk = Evaluation(workflow_of(**nodes, batch=batch), KINDS, FakeBackend(), ["batch"], max_bytes=3 * 16 * 16 * 3 * 4)
    ran: list[str] = []

    def go() -> None:
        for ready in walk.ready():
            ran.append(ready.node.id)
            walk.give(ready.node.id, ready.kind.function(**ready.calls[0]))

    with pytest.raises(MemoryError, match="GiB together"):
        go()
    assert ran == ["n0", "n1", "n2", "batch"]
