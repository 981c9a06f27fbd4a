"""Parameters that are there already see a component's bytes, as tensors made by `attach` would."""

from __future__ import annotations

import random
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from weights.externalize import externalize
from weights.loading import views
from weights.loading.external_memory import bytes_tensors
from weights.loading.views import Views, attach
from weights.manifest import Component
from weights.provider import LocalExtents
from weights.store import WeightStore
from weights.torch_dtypes import TORCH_DTYPES

Case = tuple[Component, dict[str, torch.Tensor]]


@pytest.fixture
def case(tmp_path: Path, write_pipeline) -> Case:
    """A component with every dtype, random shapes, a scalar, an empty tensor and tied ones."""
    chosen = random.Random()
    tensors = {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 7)}
    for number in range(40):
        shape = [chosen.randrange(1, 6) for _ in range(chosen.randrange(1, 5))]
        dtype = chosen.choice(list(TORCH_DTYPES.values()))
        tensors[f"t{number}"] = (torch.rand(shape) * 100).to(dtype)
    source = write_pipeline("p", {"unet": tensors})
    store = WeightStore(tmp_path / "store")
    manifest = externalize(store, "p", source)
    buffers = LocalExtents(store.packs).fetch(manifest.extents_of(["unet"]))
    return manifest.components["unet"], bytes_tensors(buffers)


def parameters_of(tensors: dict[str, torch.Tensor]) -> dict[str, nn.Parameter]:
    """Return empty parameters of the tensors' types, as a module has them that waits for weights."""
    blank = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}
    return {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in blank.items()}


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
    if expected.nbytes:
        assert found.data_ptr() == expected.data_ptr()


def test_parameters_become_the_tensors_that_attach_makes(case: Case) -> None:
    expected = attach(*case)
    parameters = parameters_of(expected)
    Views(*case).put_into(parameters)
    for name, tensor in expected.items():
        assert_same(parameters[name], tensor)
        assert not parameters[name].requires_grad


def test_no_tensor_is_made_for_plain_parameters(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    component, buffers = case
    expected = {name: tensor for name, tensor in attach(component, buffers).items() if tensor.nbytes}
    monkeypatch.setattr(views, "attach", None)
    parameters = parameters_of(expected)
    Views(component, buffers).put_into(parameters)
    assert_same(parameters["scalar"], expected["scalar"])


def test_parameters_of_another_type_and_unaligned_bytes_get_their_tensors(case: Case) -> None:
    component, buffers = case
    expected = attach(component, buffers)
    parameters = {name: nn.Parameter(torch.empty(3, dtype=torch.uint8), requires_grad=False) for name in expected}
    Views(component, buffers).put_into(parameters)
    for name, tensor in expected.items():
        assert_same(parameters[name], tensor)
    odd = {}
    for id_, base in buffers.items():
        memory = np.empty(base.numel() + 64, np.uint8)
        start = 1 - memory.ctypes.data % 64 + 64 * (memory.ctypes.data % 64 > 1)
        memory[start : start + base.numel()] = base.numpy()
        odd[id_] = torch.from_numpy(memory)[start : start + base.numel()]
    parameters = parameters_of(expected)
    Views(component, odd).put_into(parameters)
    for name, tensor in expected.items():
        assert parameters[name].shape == tensor.shape
        assert torch.equal(parameters[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_names_that_the_module_lacks_are_passed_over_and_missing_ones_are_told(case: Case) -> None:
    component, buffers = case
    expected = attach(component, buffers)
    few = parameters_of({"scalar": expected["scalar"]})
    Views(component, buffers).put_into(few)
    assert few["scalar"].item() == 2.5
    with pytest.raises(KeyError, match="absent"):
        Views(component, buffers).put_into({"absent": few["scalar"]})


def test_as_a_mapping_it_is_what_attach_returns(case: Case) -> None:
    expected, found = attach(*case), Views(*case)
    assert (set(found), len(found), found.device) == (set(expected), len(expected), torch.device("cpu"))
    for name, tensor in found.items():
        assert_same(tensor, expected[name])
    assert found["scalar"] is found["scalar"]


def test_memory_is_free_once_the_parameters_see_other_bytes(case: Case) -> None:
    component, buffers = case
    parameters = parameters_of(attach(component, buffers))
    memory = {id_: np.array(base.numpy()) for id_, base in buffers.items()}
    gone = [weakref.ref(array) for array in memory.values()]
    Views(component, bytes_tensors(memory)).put_into(parameters)
    memory.clear()
    assert all(ref() is not None for ref in gone)
    Views(component, buffers).put_into(parameters)
    assert all(ref() is None for ref in gone)
