"""Upscalers told by their tensors: three sets of names, nests of trainers, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from unit.deployments.engines.upscaler_files import as_esrgan, as_list, compact, rrdb

from weights.formats.checkpoint import read_checkpoint
from weights.formats.upscaler import COMPACT, RRDB, UpscalerNet, read_upscaler
from weights.operations.externalize import externalize
from weights.operations.layouts import write_inline
from weights.records.errors import FormatError
from weights.storage.store import WeightStore


def described(path: Path, **options: Any) -> UpscalerNet:
    checkpoint = read_checkpoint(path, **options)
    assert checkpoint.kind == "upscaler"
    (component,) = checkpoint.components
    assert checkpoint.class_name == component.class_name
    return read_upscaler(path, {name: tensor.shape for name, tensor in component.tensors.items()})


@pytest.mark.parametrize("named", [dict, as_esrgan, as_list])
@pytest.mark.parametrize(("ups", "scale"), [(0, 1), (1, 2), (2, 4), (3, 8)])
def test_rrdb_nets_by_all_their_names(tmp_path: Path, named: Any, ups: int, scale: int) -> None:
    tensors = rrdb(ups=ups)
    save_file(named(tensors), tmp_path / "x.safetensors")
    net = described(tmp_path / "x.safetensors")
    assert (net, net.scale) == (UpscalerNet(RRDB, 8, 2, scale, 1, 4), scale)
    (component,) = read_checkpoint(tmp_path / "x.safetensors").components
    assert set(component.tensors) == set(tensors)


def test_nets_that_read_blocks_of_pixels_and_compact_ones(tmp_path: Path) -> None:
    save_file(rrdb(num_read=12), tmp_path / "x2.safetensors")
    assert described(tmp_path / "x2.safetensors").scale == 2
    save_file({f"params_ema.{name}": one for name, one in compact().items()}, tmp_path / "c.safetensors")
    assert described(tmp_path / "c.safetensors") == UpscalerNet(COMPACT, 8, 3, 4)
    assert described(tmp_path / "c.safetensors").radius == 5  # of 3 + 2 layers of 3 x 3


def test_pickles_only_where_that_is_allowed(tmp_path: Path) -> None:
    good, other = rrdb(), rrdb(num_blocks=1)
    torch.save({"params": other, "params_ema": good}, tmp_path / "x.pth")
    with pytest.raises(FormatError, match="only read where that is allowed"):
        read_checkpoint(tmp_path / "x.pth")
    assert described(tmp_path / "x.pth", allow_torch=True).num_blocks == 2  # the averaged ones


def test_a_pickle_becomes_safetensors_that_are_served(tmp_path: Path) -> None:
    """The advice of docs/models.md for a .pth works."""
    tensors = rrdb()
    torch.save({"params": as_list(tensors)}, tmp_path / "x.pth")
    store = WeightStore(tmp_path / "store")
    externalize(store, "x", tmp_path / "x.pth", allow_torch=True)
    write_inline(store, "x", tmp_path / "written")
    [file] = (tmp_path / "written").glob("*.safetensors")
    assert (file.name, described(file).scale) == ("x.safetensors", 4)


def test_what_is_refused_says_the_tensor(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"

    def words_of(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, file)
        with pytest.raises(FormatError) as caught:
            read_checkpoint(file)
        return str(caught.value)

    tensors = rrdb()
    lacking = {name: one for name, one in tensors.items() if name != "conv_hr.bias"}
    assert "tensor 'conv_hr.bias' is missing in a RRDBNet of 2 blocks" in words_of(lacking)
    assert "tensor 'conv_odd.weight' has no place" in words_of(tensors | {"conv_odd.weight": torch.zeros(1)})
    assert "has shape [3, 8, 1, 1], expected [3, 8, 3, 3]" in words_of(
        tensors | {"conv_last.weight": torch.zeros(3, 8, 1, 1)}
    )
    assert "several tensors of an upscaler have one name" in words_of(tensors | {"params.conv_hr.bias": torch.zeros(8)})
    assert "make no network" in words_of(tensors | {"conv_first.weight": torch.zeros(8)})
    many = {"body.999999999.rdb1.conv1.weight": torch.zeros(1)}
    assert "1000000000 blocks" in words_of(tensors | many)
    assert "scales of 1 to 8 are known" in words_of(compact(scale=9))
    assert "blocks of 3 pixels" in words_of(rrdb(num_read=27))


def test_other_tensors_are_no_upscaler(tmp_path: Path) -> None:
    for tensors in ({"body.0.weight": torch.zeros(2)}, {"conv_first.weight": torch.zeros(2)}):
        save_file(tensors, tmp_path / "x.safetensors")
        assert read_checkpoint(tmp_path / "x.safetensors").kind == "tensors"
