"""Links to images: they open without a key, end by age and by room, and lead nowhere else."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image
from unit.deployments.ingress.http_fakes import CONFIG, IMAGE, Replicas, client_over, problem
from unit.deployments.serve_fakes import FakeHandle

from cluster.process.ray_calls import NamedActor
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import ClusterConfig, ImageLinksConfig
from configs.errors import ConfigError
from deployments.ingress.gate import _need_of
from deployments.ingress.http import create_http_app
from deployments.ingress.openai.image_files import PATH, ImageLinks
from deployments.ingress.service.service import Service
from deployments.records.errors import Overloaded

SERVER = "http://test/"


class FileClock:
    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s  # files have the times of the real clock


def links_in(folder: Path, clock: FileClock, **options: Any) -> ImageLinks:
    return ImageLinks(ImageLinksConfig(folder=folder, **options), "cluster", clock)


def name_of(link: str) -> str:
    return link.rpartition("/")[2]


def test_a_link_lasts_for_its_time(tmp_path: Path) -> None:
    clock = FileClock()
    links = links_in(tmp_path / "new", clock, ttl_s=60)
    first = links.keep_file(b"one", "png", SERVER)
    assert re.fullmatch(rf"http://test{PATH}[0-9a-f]{{32}}\.png", first)
    found = links.find(name_of(first))
    assert found is not None
    assert found[0].read_bytes() == b"one"
    assert 0 < found[1] <= 60
    clock.ahead_s = 61
    assert links.find(name_of(first)) is None


def test_ended_files_go_when_another_comes(tmp_path: Path) -> None:
    clock = FileClock()
    links = links_in(tmp_path, clock, ttl_s=60)
    first = tmp_path / name_of(links.keep_file(b"one", "png", SERVER))
    os.utime(first, (time.time() - 61,) * 2)
    clock.ahead_s = 2  # past the pause between two sweeps
    second = links.keep_file(b"two", "jpeg", SERVER)
    assert [path.name for path in tmp_path.iterdir()] == [name_of(second)]


def test_the_oldest_go_when_room_is_short(tmp_path: Path) -> None:
    clock = FileClock()
    links = links_in(tmp_path, clock, max_bytes=900)  # of three
    names = []
    for _ in range(5):
        names.append(name_of(links.keep_file(bytes(300), "webp", SERVER)))
        clock.ahead_s += 2  # past the pause between two sweeps
    left = {path.name for path in tmp_path.iterdir()}
    assert left == set(names[-3:])
    assert [links.find(name) is not None for name in names] == [False, False, True, True, True]


@pytest.mark.parametrize("name", ["", "..", "../secret", "%2e%2e/x", "0" * 32, "0" * 32 + ".gif", "A" * 32 + ".png"])
def test_other_names_lead_nowhere(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / ("0" * 32 + ".gif")).write_text("x")
    assert links_in(tmp_path, FileClock()).find(name) is None


def test_replicas_that_share_a_folder_serve_each_others_links(tmp_path: Path) -> None:
    link = links_in(tmp_path, FileClock(), base_url="https://pictures.example/base").keep_file(b"x", "png", SERVER)
    assert link.startswith("https://pictures.example/base" + PATH)
    assert links_in(tmp_path, FileClock()).find(name_of(link)) is not None


def test_a_folder_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(Overloaded, match=r"Not a directory|File exists"):
        links_in(tmp_path / "file" / "below", FileClock()).keep_file(b"x", "png", SERVER)


def test_the_config_wants_an_address(tmp_path: Path) -> None:
    for wrong in ("example.com", "ftp://example.com", "https://example.com/?q=1", "https://example.com/"):
        with pytest.raises((ConfigError, ValueError)):
            ImageLinksConfig(base_url=wrong)


@pytest.fixture
async def http_with_links(replicas: Replicas, as_described: Any, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    watch, handle = RegistrySnapshot(NamedActor(lambda: replicas)), FakeHandle(replicas)
    ingress = CONFIG.ingress.model_copy(update={"image_links": ImageLinksConfig(folder=tmp_path / "links", ttl_s=600)})
    config: ClusterConfig = CONFIG.model_copy(update={"ingress": ingress})
    app = create_http_app(Service(config, watch, handle, handle), config)
    async with client_over(app, SERVER, event_hooks=as_described(app)) as client:
        yield client
    watch.close()


async def test_a_client_opens_the_links_of_its_answer(http_with_links: httpx.AsyncClient) -> None:
    client = openai.AsyncOpenAI(api_key="none", base_url=f"{SERVER}v1", http_client=http_with_links, max_retries=0)
    found = await client.images.generate(**IMAGE, n=2, response_format="url", output_format="webp", size="24x16")
    assert found.data
    assert [item.b64_json for item in found.data] == [None, None]
    for place, item in enumerate(found.data):
        assert item.url
        answer = await http_with_links.get(item.url)
        image = Image.open(io.BytesIO(answer.content))
        assert (answer.headers["content-type"], image.format, image.size) == ("image/webp", "WEBP", (24, 16))
        assert abs(image.convert("RGB").getpixel((0, 0))[0] - 10 * place) <= 2  # type: ignore[index]
        assert answer.headers["cache-control"].startswith("private, max-age=5")


async def test_an_unknown_link_is_a_404(http_with_links: httpx.AsyncClient) -> None:
    answer = await http_with_links.get(f"{PATH}{'0' * 32}.png")
    assert answer.status_code == 404
    assert "links of answers end" in problem(answer)["message"]


def test_links_need_no_key() -> None:
    assert _need_of(f"{PATH}{'0' * 32}.png") == "nothing"
    assert _need_of("/files/other") == "admin"
