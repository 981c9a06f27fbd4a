"""/admin/uploads: parts that go on where they broke off, bounds, and what ends with its time or stays with a model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from kit.seeding import seeded_random
from unit.deployments.ingress.http_fakes import CONFIG, Replicas
from unit.deployments.ingress.jobs.job_fakes import config_with_jobs, ingress_over, owner_in

from cluster.jobs.owner import JobOwner
from configs.access import AccessConfig
from deployments.ingress.access.keys import KeyEntry, add_key, hash_of
from deployments.ingress.admin import uploads

UPLOADS = "/admin/uploads"


@pytest.fixture
def owner(tmp_path: Path) -> Any:
    owner = owner_in(tmp_path, max_models_bytes=10_000)
    yield owner
    owner.close()


@pytest.fixture
async def http(
    as_described: Any, replicas: Replicas, owner: JobOwner, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setattr(uploads, "PIECE_BYTES", 1000)  # so that a part has several
    config = config_with_jobs(max_models_bytes=10_000, max_file_bytes=4096)
    async with ingress_over(replicas, owner, as_described, config, num_runners=0) as client:
        yield client


async def begun(http: httpx.AsyncClient, name: str = "ink.safetensors", num_bytes: int = 5000) -> str:
    answer = await http.post(UPLOADS, json={"name": name, "bytes": num_bytes})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def added(http: httpx.AsyncClient, id_: str, offset: int, part: bytes) -> int:
    answer = await http.put(f"{UPLOADS}/{id_}", params={"offset": offset}, content=part)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["bytes"])


async def test_a_file_is_sent_in_parts_and_goes_on_where_it_broke_off(
    http: httpx.AsyncClient, owner: JobOwner, tmp_path: Path
) -> None:
    draws = seeded_random()
    content = draws.randbytes(draws.randrange(3000, 9000))
    id_ = await begun(http, "Ink.SafeTensors", len(content))
    size = 0
    while size < len(content):
        part = content[size : size + draws.randrange(1, 2500)]
        before, size = size, await added(http, id_, size, part)
        assert size == before + len(part)
        assert await added(http, id_, before, part) == size, "the same again changes nothing"
        assert await added(http, id_, size + 7, b"far") == size
        early = await http.post(f"{UPLOADS}/{id_}", params={"bytes": size + 1})
        assert (early.status_code, early.json()["error"]["code"]) == (409, "upload_not_whole")
        assert (await http.get(f"{UPLOADS}/{id_}")).json()["bytes"] == size
    for _ in range(2):
        whole = (await http.post(f"{UPLOADS}/{id_}", params={"bytes": len(content)})).json()
        assert (whole["bytes"], whole["is_whole"]) == (len(content), True)
    assert whole == (await http.get(f"{UPLOADS}/{id_}")).json()
    path = Path(whole["path"])
    assert path == CONFIG.store.path.expanduser() / "jobs" / CONFIG.name / "files" / id_
    assert path.suffix == ".safetensors"
    assert (tmp_path / "jobs" / "files" / id_).read_bytes() == content
    changed = await http.put(f"{UPLOADS}/{id_}", params={"offset": len(content)}, content=b"more")
    assert changed.status_code == 404, "what is whole does not change"


async def test_bounds_say_what_is_allowed(http: httpx.AsyncClient) -> None:
    for body, status, said in (
        ({"name": "x.ckpt", "bytes": 1}, 400, "expected one that ends with .safetensors or .gguf"),
        ({"name": "x.gguf", "bytes": 0}, 400, "bytes"),
        ({"name": "x.gguf", "bytes": 10_001}, 413, "at most 10000 are allowed"),
        ({"bytes": 1}, 400, "name"),
    ):
        answer = await http.post(UPLOADS, json=body)
        assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text
    id_ = await begun(http, num_bytes=9000)
    for part in range(3):
        await added(http, id_, part * 3000, bytes(3000))
    too_many = await http.put(f"{UPLOADS}/{id_}", params={"offset": 9000}, content=bytes(1001))
    assert (too_many.status_code, "10000 of 10000 bytes" in too_many.json()["error"]["message"]) == (429, True)
    full = await http.post(UPLOADS, json={"name": "x.gguf", "bytes": 1001})
    assert (full.status_code, "jobs.max_models_bytes" in full.json()["error"]["message"]) == (429, True)
    large = await http.put(f"{UPLOADS}/{id_}", params={"offset": 9000}, content=bytes(2**17))
    assert large.status_code == 413
    wrong = await http.put(f"{UPLOADS}/{id_}", params={"offset": -1}, content=b"x")
    assert wrong.status_code == 400
    assert (await http.delete(f"{UPLOADS}/{id_}")).json() == {"id": id_, "deleted": True}
    for call in (http.get, http.delete):
        assert (await call(f"{UPLOADS}/{id_}")).status_code == 404
    assert (await http.put(f"{UPLOADS}/{id_}", params={"offset": 0}, content=b"x")).status_code == 404
    assert (await http.post(f"{UPLOADS}/{id_}", params={"bytes": 1})).status_code == 404


async def test_uploads_need_an_admin_key_and_belong_to_it(replicas: Replicas, owner: JobOwner, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for name, is_admin in (("user", False), ("mine", True), ("yours", True)):
        add_key(tmp_path / "keys", KeyEntry(name=name, sha256=hash_of(f"atl_{name}"), admin=is_admin))
    config = CONFIG.model_copy(update={"access": AccessConfig(keys_file=tmp_path / "keys", allowed_hosts=["test"])})
    user, mine, yours = ({"Authorization": f"Bearer atl_{name}"} for name in ("user", "mine", "yours"))
    body = {"name": "x.gguf", "bytes": 3}
    async with ingress_over(replicas, owner, lambda _: {}, config, num_runners=0) as http:
        assert (await http.post(UPLOADS, json=body, headers=user)).status_code == 403
        id_ = (await http.post(UPLOADS, json=body, headers=mine)).json()["id"]
        assert (await http.get(f"{UPLOADS}/{id_}", headers=mine)).status_code == 200
        assert (await http.get(f"{UPLOADS}/{id_}", headers=yours)).status_code == 404
