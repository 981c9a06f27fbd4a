"""/ws: what a client is told of its prompts, who may listen, and what a client cannot do to others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import websockets
from kit.waiting import until
from unit.deployments.ingress.comfy.comfy_fakes import (
    Comfy,
    Samplers,
    comfy_over,
    enlarged_workflow,
    heard_until_end,
    inverted_workflow,
    plain_workflow,
    preview_in,
    text_to_image,
)
from unit.deployments.ingress.http_fakes import CHAT, CONFIG, Held, Replicas

from cluster.jobs.owner import JobOwner
from cluster.registry.directory import ModelRecord
from configs.access import AccessConfig
from deployments.ingress.access.keys import KeyEntry, add_key, hash_of, revoke_key
from deployments.ingress.comfy import sockets, watching
from deployments.ingress.comfy.sockets import Socket, Sockets
from deployments.records.errors import RateLimited


@pytest.fixture(autouse=True)
def quick(quick_jobs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LOOK_S", 0.01)


async def refused(comfy: Comfy, **options: Any) -> int:
    """The status of the answer in place of a websocket."""
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with comfy.socket("me", **options):
            pass
    return caught.value.response.status_code


async def test_a_client_is_told_all_of_its_prompt_in_order(comfy: Comfy) -> None:
    async with comfy.socket("me") as socket:
        first = json.loads(await socket.recv())
        assert first == {"type": "status", "data": {"status": {"exec_info": {"queue_remaining": 0}}, "sid": "me"}}
        id_ = await comfy.begin(plain_workflow(), client_id="me")
        heard = await heard_until_end(socket, id_)
        entry = (await comfy.http.get(f"/history/{id_}")).json()[id_]  # it is there when the end is told
    names = [name for name in heard.names() if name != "progress_state"]
    assert names == [
        *("execution_start", "execution_cached", "executing", "executing", "executed", "execution_success"),
        "executing",
    ]
    assert all(data["prompt_id"] == id_ for name, data in heard.events if name != "status")
    assert [data["node"] for data in heard.data("executing")] == ["1", "2", None]
    (executed,) = heard.data("executed")
    assert (executed["node"], executed["output"]) == ("2", entry["outputs"]["2"])
    assert heard.data("execution_start")[0]["timestamp"] > 10**12
    states = heard.data("progress_state")[-1]["nodes"]
    assert {node: state["state"] for node, state in states.items()} == {"1": "finished", "2": "finished"}
    told = [(name, data) for name, data in heard.events if name.startswith("execution_")]
    kept = entry["status"]["messages"]
    for (name, data), (kept_name, kept_data) in zip(told, kept, strict=True):
        assert (name, data | {"timestamp": 0}) == (kept_name, kept_data | {"timestamp": 0})
    assert {"status": {"exec_info": {"queue_remaining": 1}}} in heard.data("status")


async def test_who_connects_after_its_prompt_hears_that_it_is_not_done(owner: JobOwner, tmp_path: Path) -> None:
    """Some clients send first, and take a first message with an empty queue for the end."""
    held = Held()
    held.states["x2"] = ModelRecord("x2", "ready", "upscaler", 1, "v", variant={"scale": 2})
    async with comfy_over(held, owner, tmp_path / "files") as comfy:
        async with comfy.socket("other") as first_of_key:
            await first_of_key.recv()
            id_ = await comfy.begin(enlarged_workflow("x2"), client_id="me")
            async with comfy.socket("me") as socket:
                told = json.loads(await socket.recv())["data"]
                assert told == {"status": {"exec_info": {"queue_remaining": 1}}, "sid": "me"}
                held.gate.set()
                heard = await heard_until_end(socket, id_)
        assert heard.names()[-2:] == ["execution_success", "executing"]
        await comfy.ended(id_)
        async with comfy.socket("me") as socket:
            assert json.loads(await socket.recv())["data"]["status"]["exec_info"]["queue_remaining"] == 0


async def test_a_prompt_is_not_over_when_the_owner_of_jobs_is_away(
    owner: JobOwner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, asked, watch = Held(), 0, JobOwner.watch_job
    held.states["x2"] = ModelRecord("x2", "ready", "upscaler", 1, "v", variant={"scale": 2})

    async def away_at_first(self: JobOwner, *arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise ConnectionError("it restarts")
        return await watch(self, *arguments)

    monkeypatch.setattr(JobOwner, "watch_job", away_at_first)
    async with comfy_over(held, owner, tmp_path / "files") as comfy, comfy.socket("me") as socket:
        id_ = await comfy.begin(enlarged_workflow("x2"), client_id="me")
        await until(lambda: asked > 2 and held.requests)
        held.gate.set()
        heard = await heard_until_end(socket, id_)
        assert heard.names()[-2:] == ["execution_success", "executing"]
        assert heard.names().count("execution_start") == 1
        assert id_ in (await comfy.http.get(f"/history/{id_}")).json()


async def test_the_number_of_unfinished_prompts_is_told_to_all_of_a_key(comfy: Comfy) -> None:
    async with comfy.socket("me") as mine, comfy.socket("other") as other:
        await comfy.ended(await comfy.begin(plain_workflow(), client_id="me"))

        async def until_none_is_left(socket: Any) -> list[str]:
            names, counts = list[str](), list[int]()
            async with asyncio.timeout(60):
                async for message in socket:
                    event = json.loads(message)
                    names.append(event["type"])
                    if event["type"] == "status":
                        counts.append(event["data"]["status"]["exec_info"]["queue_remaining"])
                    if counts[-2:] == [1, 0]:
                        return names
            raise AssertionError

        assert set(await until_none_is_left(other)) == {"status"}
        await until_none_is_left(mine)


async def test_previews_are_small_files_with_facts_for_who_takes_them() -> None:
    shown, image = Sockets(), np.random.default_rng(0).integers(0, 256, (600, 1200, 3), np.uint8)
    with shown.opened("", "me") as plain, shown.opened("", "me") as with_facts:
        with_facts.takes_facts = True
        facts = {"node_id": "3", "prompt_id": "p"}
        for socket in (plain, with_facts):
            socket.greet("hello")
            assert await socket.next() == "hello"
        shown.show("", "me", image, facts, to_all=True)
        for socket, expected in ((plain, None), (with_facts, facts | {"image_type": "image/jpeg"})):
            message = await socket.next()
            assert isinstance(message, bytes)
            preview, found = preview_in(message)
            assert (preview.format, preview.size, found) == ("JPEG", (512, 256), expected)
        await until(lambda: shown.of("", "me") and not shown.is_showing)
        shown.show("", "me", image, facts, to_all=False)
        assert isinstance(await with_facts.next(), bytes)
        plain.put("no preview came before")
        assert await plain.next() == "no preview came before"


@pytest.mark.parametrize("asks", ["prompt", "client", "nobody"])
async def test_steps_are_told_with_previews_for_who_asks(owner: JobOwner, tmp_path: Path, asks: str) -> None:
    async with comfy_over(Samplers(), owner, tmp_path / "files") as comfy, comfy.socket("me") as socket:
        if asks == "client":
            await socket.send(json.dumps({"type": "feature_flags", "data": {"supports_preview_metadata": True}}))
        extra = {"preview_method": "auto"} if asks == "prompt" else {}
        id_ = await comfy.begin(text_to_image(steps=4), client_id="me", extra_data=extra)
        heard = await heard_until_end(socket, id_)
    steps = [(data["value"], data["max"]) for data in heard.data("progress") if data["node"] == "3"]
    assert steps == sorted(steps)
    assert steps[-1] == (3, 4)  # the fakes tell no last step
    if asks == "nobody":
        assert heard.frames == []
        return
    assert heard.frames
    for frame in heard.frames:
        image, facts = preview_in(frame)
        assert image.size == (32, 16)
        assert (facts or {}).get("node_id") == (None if asks == "prompt" else "3")


async def test_features_are_told_to_who_tells_them(comfy: Comfy) -> None:
    async with comfy.socket() as socket:
        first = json.loads(await socket.recv())
        assert len(first["data"]["sid"]) == 32
        await socket.send(json.dumps({"type": "feature_flags", "data": {"supports_preview_metadata": True}}))
        answer = json.loads(await socket.recv())
        assert answer == {
            "type": "feature_flags",
            "data": {"supports_preview_metadata": True, "max_upload_size": 2**22},
        }


@pytest.mark.parametrize(
    "messages", [["{"], ["[" * 60_000], [b"\0\1"], ["null", '{"type": "feature_flags", "data": {}}'], ['{"type": 5}']]
)
async def test_senseless_messages_have_no_effect(comfy: Comfy, messages: list[str | bytes]) -> None:
    async with comfy.socket("me") as socket:
        for message in messages:
            await socket.send(message)
        heard = await heard_until_end(socket, await comfy.begin(plain_workflow(), client_id="me"))
        assert "feature_flags" not in heard.names()


async def test_a_failed_node_is_told(comfy: Comfy) -> None:
    async with comfy.socket("me") as socket:
        heard = await heard_until_end(socket, await comfy.begin(inverted_workflow("no.png"), client_id="me"))
    (error,) = heard.data("execution_error")
    assert (error["node_id"], error["node_type"], error["executed"]) == ("1", "LoadImage", [])
    assert "no.png" in error["exception_message"]
    assert "execution_success" not in heard.names()


async def test_an_interrupted_prompt_is_told(owner: JobOwner, tmp_path: Path) -> None:
    held = Held()
    held.states["x2"] = ModelRecord("x2", "ready", "upscaler", 1, "v", variant={"scale": 2})
    async with comfy_over(held, owner, tmp_path / "files") as comfy, comfy.socket("me") as socket:
        id_ = await comfy.begin(enlarged_workflow("x2"), client_id="me")
        await until(lambda: held.requests)
        await comfy.http.post("/interrupt", json={"prompt_id": id_})
        heard = await heard_until_end(socket, id_)
    assert [data["executed"] for data in heard.data("execution_interrupted")] == [["1", "3"]] or heard.data(
        "execution_interrupted"
    )


async def test_a_client_that_comes_back_hears_the_rest(owner: JobOwner, tmp_path: Path) -> None:
    held = Held()
    held.states["x2"] = ModelRecord("x2", "ready", "upscaler", 1, "v", variant={"scale": 2})
    async with comfy_over(held, owner, tmp_path / "files") as comfy:
        async with comfy.socket("me"):
            id_ = await comfy.begin(enlarged_workflow("x2"), client_id="me")
            await until(lambda: held.requests)
        async with comfy.socket("me") as socket:
            assert json.loads(await socket.recv())["type"] == "status"
            held.gate.set()
            heard = await heard_until_end(socket, id_)
    assert [data["node"] for data in heard.data("executed")] == ["2"]
    assert "execution_success" in heard.names()


async def test_a_prompt_that_runs_on_another_ingress_is_told_by_its_result(
    replicas: Replicas, owner: JobOwner, tmp_path: Path
) -> None:
    several = CONFIG.model_copy(update={"ingress": CONFIG.ingress.model_copy(update={"num_replicas": 2})})
    async with (
        comfy_over(replicas, owner, tmp_path / "files", several) as one,
        comfy_over(replicas, owner, tmp_path / "files", several, num_runners=0) as other,
        other.socket("me") as socket,
    ):
        cases = (plain_workflow(), "execution_success"), (inverted_workflow("no"), "execution_error")
        for workflow, expected in cases:
            id_ = await one.begin(workflow, client_id="me")
            heard = await heard_until_end(socket, id_)
            assert heard.names().count("execution_start") == 1
            assert expected in heard.names()
            entry = (await other.http.get(f"/history/{id_}")).json()[id_]
            assert {data["node"]: data["output"] for data in heard.data("executed")} == entry["outputs"]


async def test_a_websocket_needs_a_key_and_ends_with_others_unheard(
    replicas: Replicas, owner: JobOwner, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    keys = tmp_path / "keys"
    for name in ("mine", "yours"):
        add_key(keys, KeyEntry(name=name, sha256=hash_of(f"atl_{name}")))
    config = CONFIG.model_copy(update={"access": AccessConfig(keys_file=keys)})
    mine, yours = ({"Authorization": f"Bearer atl_{name}"} for name in ("mine", "yours"))
    async with comfy_over(replicas, owner, tmp_path / "files", config) as comfy:
        assert await refused(comfy) == 401
        assert await refused(comfy, additional_headers={"Authorization": "Bearer atl_no"}) == 401
        async with (
            comfy.socket("me", additional_headers=mine) as socket,
            comfy.socket("me", additional_headers=yours) as spying,
        ):
            body = {"prompt": plain_workflow(), "client_id": "me"}
            id_ = (await comfy.http.post("/prompt", json=body, headers=mine)).json()["prompt_id"]
            await heard_until_end(socket, id_)
            other = (await comfy.http.post("/prompt", json=body, headers=yours)).json()["prompt_id"]
            heard = await heard_until_end(spying, other)  # and nothing of the first one came before
            assert {data["prompt_id"] for name, data in heard.events if name != "status"} == {other}


async def test_open_websockets_take_none_of_the_requests_that_a_key_may_have(
    replicas: Replicas, owner: JobOwner, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    add_key(tmp_path / "keys", KeyEntry(name="mine", sha256=hash_of("atl_mine"), max_concurrent=1))
    config = CONFIG.model_copy(update={"access": AccessConfig(keys_file=tmp_path / "keys")})
    mine = {"Authorization": "Bearer atl_mine"}
    async with (
        comfy_over(replicas, owner, tmp_path / "files", config) as comfy,
        comfy.socket("me", additional_headers=mine) as socket,
        comfy.socket("me-too", additional_headers=mine) as other,
    ):
        await asyncio.gather(socket.recv(), other.recv())
        assert (await comfy.http.post("/v1/chat/completions", json=CHAT, headers=mine)).status_code == 200
        body = {"prompt": plain_workflow(), "client_id": "me"}
        id_ = (await comfy.http.post("/prompt", json=body, headers=mine)).json()["prompt_id"]
        assert "execution_success" in (await heard_until_end(socket, id_)).names()


async def test_a_revoked_key_hears_nothing_more(replicas: Replicas, owner: JobOwner, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    keys = tmp_path / "keys"
    for name in ("mine", "other"):
        add_key(keys, KeyEntry(name=name, sha256=hash_of(f"atl_{name}")))
    config = CONFIG.model_copy(update={"access": AccessConfig(keys_file=keys)})
    mine = {"Authorization": "Bearer atl_mine"}
    async with (
        comfy_over(replicas, owner, tmp_path / "files", config, num_runners=0) as comfy,
        comfy.socket("me", additional_headers=mine) as socket,
    ):
        await socket.recv()
        await comfy.http.post("/prompt", json={"prompt": plain_workflow(), "client_id": "me"}, headers=mine)
        revoke_key(keys, "mine")
        async with asyncio.timeout(60):
            await socket.wait_closed()
        assert socket.close_code == 1008


async def test_pages_of_others_get_no_websocket(comfy: Comfy) -> None:
    assert await refused(comfy, origin="https://evil.example") == 403
    address = f"ws://evil.example:{comfy.port}/ws"  # a name that its owner lets mean this machine
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with websockets.connect(address, host="127.0.0.1", port=comfy.port):
            pass
    assert caught.value.response.status_code == 403
    async with comfy.socket("me", origin=f"http://127.0.0.1:{comfy.port}") as socket:
        assert json.loads(await socket.recv())["type"] == "status"


async def test_other_paths_have_no_websocket(comfy: Comfy) -> None:
    for path in ("/", "/prompt", "/v1/models", "/ws/x", "/admin/live"):
        with pytest.raises(websockets.InvalidStatus):
            async with websockets.connect(f"ws://127.0.0.1:{comfy.port}{path}"):
                pass


async def test_a_key_has_so_many_websockets(comfy: Comfy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_OF_KEY", 2)
    async with comfy.socket(), comfy.socket() as second:
        assert await refused(comfy) == 403
        await second.close()
        await until(lambda: second.close_code is not None)

        async def opens() -> bool:
            try:
                async with comfy.socket("x") as third:
                    return bool(await third.recv())
            except websockets.InvalidStatus:
                return False

        await until(opens)


async def test_previews_wait_for_a_slow_client_and_no_more_than_two() -> None:
    socket = Socket("", "me")
    for number in range(5):
        socket.put(bytes([number]))
    socket.put("text")
    socket.greet("hello")
    assert [await socket.next() for _ in range(4)] == ["hello", b"\0", b"\1", "text"]
    socket.put(b"later")
    assert await socket.next() == b"later"


async def test_a_client_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "_MAX_WAITING", 3)
    socket = Socket("", "me")
    for _ in range(4):
        socket.put("text")
    assert await socket.next() is None


async def test_all_sockets_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_SOCKETS", 1)
    found = Sockets()
    with found.opened("a", "x"):
        assert len(found.of("a", "x")) == 1
        assert found.of("b", "x") == found.of("a", None) == []
        with pytest.raises(RateLimited), found.opened("b", "x"):
            pass
    with found.opened("b", "x"):
        assert found.of("a", "x") == []
