"""The owner of uploads is killed between any two of its writes: models come from whole files or are not registered."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from kit.clock import Clock
from kit.drawing import seeds
from unit.cluster.jobs.test_killed_owner import Disk, Killed, writes_of

from cluster.jobs.disk import FILES
from cluster.jobs.file_book import MODEL_PURPOSE, SILENT_S, new_file_id
from cluster.jobs.files import Clocks
from cluster.jobs.owner import JobOwner
from cluster.registry.registrations import Registration, Registrations
from configs.jobs import JobsConfig
from configs.model import ModelConfig

KEY = "mine"


class SetClocks(Clocks):
    def __init__(self, unix: Clock) -> None:
        self.unix_s = unix  # type: ignore[method-assign]


class Uploader:
    """A client that uploads one model after the other and registers each. It outlives the owner, and goes on."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        self.contents: dict[str, bytes] = {}  # of the models that are known to be registered
        self._content = b""
        self._id: str | None = None

    async def work_on(self, owner: JobOwner, folder: Path) -> None:
        while True:
            await self.upload_one(owner, folder)

    async def upload_one(self, owner: JobOwner, folder: Path) -> None:
        if self._id is None:
            self._content = self._draws.randbytes(self._draws.randrange(1, 60))
            self._id = (await owner.files.begin_model(KEY, new_file_id(".gguf"), len(self._content))).id
        size = await owner.files.append_file(KEY, self._id, 0, b"")
        while size is not None and size < len(self._content):
            piece = self._content[size : size + self._draws.randrange(1, 30)]
            size = await owner.files.append_file(KEY, self._id, size, piece)
        assert size in (None, len(self._content)), "it is whole, or was ended before"
        ended = await owner.files.end_file(KEY, self._id, self._id, MODEL_PURPOSE, SILENT_S)
        assert ended is not None
        assert ended.num_bytes == len(self._content)
        name = f"m{len(self.contents)}"
        entry = ModelConfig(id=name, path=folder / FILES / self._id)
        Registrations(folder / "registrations").save(Registration(entry=entry))
        self.contents[name] = self._content
        self._id = None


@seeds(50)
async def test_a_model_is_registered_from_a_whole_file_and_other_uploads_end(seed: int, tmp_path: Path) -> None:
    draws, clock = random.Random(seed), Clock(1000.0)
    disk, client = Disk(tmp_path), Uploader(draws)

    def opened() -> JobOwner:
        registrations = disk.folder / "registrations"
        return JobOwner(disk.folder, JobsConfig(), clocks=SetClocks(clock), registrations=registrations)

    with writes_of(disk):
        for _ in range(8):
            disk.writes_left = draws.randrange(40)
            owner = opened()
            with pytest.raises(Killed):
                await client.work_on(owner, disk.folder)
        disk.writes_left = 10**9
        owner = opened()
        await client.upload_one(owner, disk.folder)
        await owner.files.begin_model(KEY, new_file_id(".gguf"), 1)  # and nothing comes
        clock.now_s += SILENT_S + 1
        await owner.files.begin_file(KEY, new_file_id())
        owner.close()
    found, damaged = Registrations(disk.folder / "registrations").read_registrations()
    assert damaged == {}
    assert found.keys() >= client.contents.keys()
    names = {model: Path(one.entry.path).name for model, one in found.items()}
    for model, content in client.contents.items():
        assert (disk.folder / FILES / names[model]).read_bytes() == content
    assert {path.name for path in (disk.folder / FILES).iterdir()} == set(names.values())
