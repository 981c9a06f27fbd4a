"""The same tests on a simulated accelerator (the default) and on a card: `pytest tests/device --device cuda`.

A process meets one kind of device, because simulating one patches torch. So nothing here is collected when other tests
are to run in the same process.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.collector import collect_seldom
from kit.collector import frozen_imports as frozen_imports
from kit.unsynced import keep_folders_in_memory
from kit.waiting import wait_until

from configs.simulated import SimulatedConfig

SIMULATED = SimulatedConfig(num_devices=2, memory_bytes=256 * 2**20)
LEFT_S = 10.0
LEARNED = ("steps", "_known", "_texts", "_lock")  # of a book of footprints
_learned: dict[Any, dict[str, Any]] = {}  # by a book's device and bounds
_met: dict[str, str] = {}
gc.disable()  # until all is imported
keep_folders_in_memory()
torch.set_num_threads(1)  # on more, models this small are slower: their threads wait for each other


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("sim", "cuda"), default="sim", help="what the device tests run on")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "sim":
        from infra.sim import simulate

        simulate(SIMULATED)
    elif not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no CUDA device here (without the option: a simulated one)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    chosen = config.getoption("--device", None)  # None: this file was not loaded first, so others run here too
    if chosen is None:
        return True
    if chosen != "sim" and collection_path.name.startswith("test_simulated"):
        return True
    return None


def pytest_collection_finish() -> None:
    collect_seldom()


@pytest.fixture
def no_garbage() -> None:
    """Collect the garbage of other tests: it would be given back while a peak is taken."""
    gc.collect()


@pytest.fixture
def products_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host computes as a simulated device does, not in the compiled kernels, which round otherwise."""
    for module in ("llm.native_decoder", "nn.few_rows", "nn.packed_linear", "text.native_encoder"):
        monkeypatch.setattr(f"deployments.engines.{module}.load_kernels", lambda: None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["met"] = dict(_met)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take in what a process of pytest-xdist has met."""
    _met.update(getattr(node, "workeroutput", {}).get("met", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    met = ", ".join(f"{name} ({what})" for name, what in sorted(_met.items())) or "none"
    terminalreporter.write_line(f"devices met: {met}")


@pytest.fixture
def learned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the memory of forwards once: it is the same for all hosts on a device."""
    _share_books(monkeypatch, _learned)


@pytest.fixture
def learned_once_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, for the hosts of this test alone: steps of a language model depend on their limits."""
    _share_books(monkeypatch, {})


def _share_books(monkeypatch: pytest.MonkeyPatch, learned: dict[Any, dict[str, Any]]) -> None:
    from deployments.modules.footprints import FootprintBook

    plain = FootprintBook.__init__

    def init(book: Any, *settings: Any) -> None:
        plain(book, *settings)
        vars(book).update(learned.setdefault(settings, {name: vars(book)[name] for name in LEARNED}))

    monkeypatch.setattr(FootprintBook, "__init__", init)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The first device."""
    return _meet(request, 0)


@pytest.fixture
def second_device(request: pytest.FixtureRequest) -> torch.device:
    """Another one of the same kind; the test is skipped on a machine with one card."""
    return _meet(request, 1)


@pytest.fixture
def module(device: torch.device) -> Iterator[Any]:
    """torch.cuda or torch.sim; the test must leave as much allocated as it found."""
    found = torch.get_device_module(device)
    if found.memory_allocated(device):
        gc.collect()
    before = found.memory_allocated(device)
    yield found

    def is_as_before() -> bool:
        gc.collect()  # a thread that is just ending may have had it in its frames
        return bool(found.memory_allocated(device) <= before)  # what an earlier test left may have gone meanwhile

    if found.memory_allocated(device) > before:
        wait_until(is_as_before, f"{before} bytes allocated, as before", LEFT_S)


def _meet(request: pytest.FixtureRequest, index: int) -> torch.device:
    device = torch.device(request.config.getoption("--device"), index)
    module = torch.get_device_module(device)
    if index >= module.device_count():
        pytest.skip(f"there is no {device}")
    total_bytes = module.mem_get_info(device)[1]
    name = module.get_device_name(device) if device.type == "cuda" else f"simulated, {SIMULATED.link_gbps:g} GB/s"
    _met[str(device)] = f"{name}, {total_bytes / 2**30:.2f} GiB"
    return device
