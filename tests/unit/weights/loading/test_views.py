"""Parameters that are there already see a component's bytes, as tensors made by `attach` would."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.seeding import seeded_random
from torch import nn

from weights.loading import views
from weights.loading.modules import find_places
from weights.loading.provider import LocalExtents
from weights.loading.views import Views, attach, bytes_tensors, setters_of, view_of
from weights.operations.externalize import externalize
from weights.platform.torch_dtypes import TORCH_DTYPES
from weights.records.dtypes import BLOCK_SIZES
from weights.records.errors import WeightsError
from weights.records.manifest import Component, TensorRef
from weights.storage.store import WeightStore

Case = tuple[Component, dict[str, torch.Tensor]]


@pytest.fixture
def case(tmp_path: Path, write_pipeline) -> Case:
    """A component with every dtype, random shapes, a scalar, an empty tensor and tied ones."""
    chosen = seeded_random()
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


def put(views: Views, parameters: dict[str, nn.Parameter]) -> bool:
    return views.put_into(setters_of(parameters))


def is_plain(tensor: torch.Tensor) -> bool:
    return tensor.nbytes > 0


def test_parameters_become_the_tensors_that_attach_makes(case: Case) -> None:
    expected = {name: tensor for name, tensor in attach(*case).items() if is_plain(tensor)}
    parameters = parameters_of(expected)
    assert put(Views(*case), parameters)
    for name, tensor in expected.items():
        assert_same(parameters[name], tensor)
        assert not parameters[name].requires_grad


def test_no_tensor_is_made_for_plain_parameters(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    component, buffers = case
    expected = {name: tensor for name, tensor in attach(component, buffers).items() if is_plain(tensor)}
    monkeypatch.setattr(views, "attach", None)
    parameters = parameters_of(expected)
    assert put(Views(component, buffers), parameters)
    assert_same(parameters["scalar"], expected["scalar"])


def unaligned(buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same bytes at odd addresses."""
    odd = {}
    for id_, base in buffers.items():
        memory = np.empty(base.numel() + 64, np.uint8)
        start = 1 - memory.ctypes.data % 64 + 64 * (memory.ctypes.data % 64 > 1)
        memory[start : start + base.numel()] = base.numpy()
        odd[id_] = torch.from_numpy(memory)[start : start + base.numel()]
    return odd


def test_what_has_no_plain_view_is_told_and_sees_what_it_saw(case: Case) -> None:
    component, buffers = case
    expected = attach(component, buffers)
    wide = {name: tensor for name, tensor in expected.items() if is_plain(tensor) and tensor.itemsize > 1}
    for views_, tensors in (
        (Views(component, buffers), {"empty": expected["empty"]}),
        (Views(component, buffers), {"absent": expected["scalar"]}),
        (Views(component, buffers), {"scalar": expected["scalar"].to(torch.uint8)}),
        (Views(component, unaligned(buffers)), wide),
    ):
        parameters = parameters_of(tensors)
        assert not put(views_, parameters)
        assert all(parameter.shape == (0,) for parameter in parameters.values())


class Bare(nn.Module):
    """A module with a parameter for each tensor."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(torch.empty_like(tensor), requires_grad=False))


def test_a_module_gets_all_tensors_however_they_lie_and_whatever_types_it_had(case: Case) -> None:
    component, buffers = case
    expected = attach(component, buffers)
    module = Bare(expected)
    binding = find_places(module, expected.keys())
    rounds = [
        {name: tensor.to(torch.complex128) for name, tensor in expected.items()},
        Views(component, buffers),
        Views(component, buffers),
        Views(component, unaligned(buffers)),
    ]
    for named in rounds:
        binding.put_tensors(named)
        for name, tensor in named.items():
            found = getattr(module, name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        binding.clear()


def test_names_that_the_module_lacks_are_passed_over_and_missing_ones_are_told(case: Case) -> None:
    component, buffers = case
    expected = attach(component, buffers)
    few = parameters_of({"scalar": expected["scalar"]})
    assert put(Views(component, buffers), few)
    assert few["scalar"].item() == 2.5
    module = Bare({"absent": expected["scalar"]})
    binding = find_places(module, ["absent"])
    binding.put_tensors({"absent": expected["scalar"]})
    with pytest.raises(KeyError, match="absent"):
        binding.put_tensors(Views(component, buffers))


def test_as_a_mapping_it_is_what_attach_returns(case: Case) -> None:
    expected, found = attach(*case), Views(*case)
    assert (set(found), len(found), found.device) == (set(expected), len(expected), torch.device("cpu"))
    for name, tensor in found.items():
        assert_same(tensor, expected[name])
    assert found["scalar"] is found["scalar"]


def test_memory_is_free_once_the_parameters_see_other_bytes(case: Case) -> None:
    component, buffers = case
    expected = {name: tensor for name, tensor in attach(component, buffers).items() if is_plain(tensor)}
    parameters = parameters_of(expected)
    del expected
    memory = {id_: np.array(base.numpy()) for id_, base in buffers.items()}
    gone = [weakref.ref(array) for array in memory.values()]
    assert put(Views(component, bytes_tensors(memory)), parameters)
    memory.clear()
    assert all(ref() is not None for ref in gone)
    assert put(Views(component, buffers), parameters)
    assert all(ref() is None for ref in gone)


def test_a_part_of_a_tensor_is_a_view_of_the_whole_one(case: Case) -> None:
    component, buffers = case
    whole, chosen = attach(component, buffers), seeded_random()
    parts, expected = {}, {}
    for name, tensor in whole.items():
        if tensor.dim() and tensor.numel():
            dimension = chosen.randrange(tensor.dim())
            start = chosen.randrange(tensor.shape[dimension])
            stop = chosen.randint(start + 1, tensor.shape[dimension])
            parts[name] = (dimension, start, stop)
            expected[name] = tensor.narrow(dimension, start, stop - start)
    sliced = component.sliced(parts)
    found = attach(sliced, buffers)
    one_by_one = {name: view_of(buffers[ref.extent], ref) for name, ref in sliced.tensors.items()}
    parameters = parameters_of(expected)
    assert put(Views(sliced, buffers), parameters)
    for name, part in expected.items():
        for seen in (found[name], one_by_one[name], parameters[name]):
            assert_same(seen, part)
        assert sliced.tensors[name].nbytes == part.nbytes
    assert_same(found["scalar"], whole["scalar"])


def test_parts_have_identities_of_their_own(case: Case) -> None:
    component, _ = case
    name, ref = next((name, ref) for name, ref in component.tensors.items() if ref.shape and ref.shape[0] > 1)
    first, other = (component.sliced({name: (0, start, start + 1)}) for start in (0, 1))
    again = component.sliced({name: (0, 0, 1)})
    assert first.module_key == again.module_key
    assert len({component.module_key, first.module_key, other.module_key}) == 3
    assert first.tensors[name].sha256 != ref.sha256


@pytest.mark.parametrize("part", [(0, 0, 100), (0, -1, 1), (0, 2, 1), (64, 0, 1), (-1, 0, 1)])
def test_what_is_no_part_is_refused(case: Case, part: tuple[int, int, int]) -> None:
    component, _ = case
    name = next(name for name, ref in component.tensors.items() if ref.shape)
    with pytest.raises(WeightsError, match=r"is no part of \["):
        component.sliced({name: part})


@pytest.mark.parametrize("dtype", ["Q4_0", "Q6_K"])
def test_a_part_of_blocks_has_whole_ones(dtype: str) -> None:
    elements, nbytes = BLOCK_SIZES[dtype]
    rows, blocks, chosen = 7, 5, seeded_random()
    base = torch.randint(0, 256, (3 + rows * blocks * nbytes,), dtype=torch.uint8)
    shape = (rows, blocks * elements)
    whole = TensorRef(extent="e", offset=3, nbytes=len(base) - 3, dtype=dtype, shape=shape, sha256="0" * 64)
    stored = base[3:].view(rows, blocks * nbytes)
    start = chosen.randrange(rows)
    stop = chosen.randint(start + 1, rows)
    of_rows = whole.part(0, start, stop)
    assert torch.equal(view_of(base, of_rows), stored[start:stop])
    start = chosen.randrange(blocks)
    stop = chosen.randint(start + 1, blocks)
    of_columns = whole.part(1, start * elements, stop * elements)
    found = view_of(base, of_columns)
    assert torch.equal(found, stored[:, start * nbytes : stop * nbytes])
    assert found.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert (of_columns.nbytes, of_columns.shape) == (found.numel(), (rows, (stop - start) * elements))
    with pytest.raises(WeightsError, match=f"1 to {elements} of {dtype} is no part: its blocks have {elements} el"):
        whole.part(1, 1, elements)
