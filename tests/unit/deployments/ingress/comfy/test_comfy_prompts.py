"""ComfyUI's routes: prompts, their errors, queue, history, files and descriptions."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from kit.waiting import until
from unit.deployments.ingress.comfy.comfy_fakes import (
    Comfy,
    Samplers,
    comfy_over,
    enlarged_workflow,
    inverted_workflow,
    plain_workflow,
    png,
    text_to_image,
)
from unit.deployments.ingress.http_fakes import CONFIG, Held, Replicas

from cluster.jobs.owner import JobOwner
from cluster.registry.directory import ModelRecord
from configs.access import AccessConfig
from deployments.ingress.access.keys import KeyEntry, add_key, hash_of
from deployments.ingress.service.service import Service
from deployments.records.errors import NoReplica, QueueFull

pytestmark = pytest.mark.usefixtures("quick_jobs")


def refusal(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error, after checking that it is in ComfyUI's form and tells nothing of the inside."""
    body = answer.json()
    assert (answer.status_code, set(body), set(body["error"])) == (
        status,
        {"error", "node_errors"},
        {"type", "message", "details", "extra_info"},
    ), answer.text
    assert "Traceback" not in answer.text
    for found in body["node_errors"].values():
        assert set(found) == {"errors", "dependent_outputs", "class_type"}
        assert all(set(one) == {"type", "message", "details", "extra_info"} for one in found["errors"])
    return dict(body)


async def test_a_prompt_leaves_a_history_with_its_images(comfy: Comfy) -> None:
    workflow = plain_workflow(0x0A141E)
    extra = {"extra_pnginfo": {"workflow": {"nodes": [1, 2]}}}
    id_ = await comfy.begin(workflow, client_id="me", extra_data=extra)
    assert str(uuid.UUID(id_)) == id_
    entry = await comfy.ended(id_)
    assert set(entry) == {"prompt", "outputs", "status", "meta"}
    number, prompt_id, prompt, extra_data, outputs = entry["prompt"]
    assert (prompt_id, prompt, outputs) == (id_, workflow, ["2"])
    assert extra_data["client_id"] == "me"
    assert extra_data["extra_pnginfo"] == extra["extra_pnginfo"]
    assert isinstance(number, int)
    assert entry["outputs"] == {"2": {"images": [{"filename": "made_00001_.png", "subfolder": "", "type": "output"}]}}
    assert (entry["status"]["status_str"], entry["status"]["completed"]) == ("success", True)
    assert [name for name, _ in entry["status"]["messages"]] == [
        "execution_start",
        "execution_cached",
        "execution_success",
    ]
    assert entry["meta"]["2"]["real_node_id"] == "2"
    image = await comfy.image(entry["outputs"]["2"]["images"][0])
    assert (image.size, image.getpixel((0, 0))) == ((16, 8), (0x0A, 0x14, 0x1E))
    assert json.loads(image.text["prompt"]) == workflow
    assert json.loads(image.text["workflow"]) == extra["extra_pnginfo"]["workflow"]
    again = await comfy.ended(await comfy.begin(workflow))
    assert again["outputs"]["2"]["images"][0]["filename"] == "made_00002_.png"
    assert again["prompt"][0] > number


async def test_the_first_workflow_of_every_page_runs(owner: JobOwner, tmp_path: Path) -> None:
    samplers = Samplers()
    async with comfy_over(samplers, owner, tmp_path / "files") as comfy:
        entry = await comfy.ended(await comfy.begin(text_to_image(steps=4)))
        assert entry["status"]["completed"], entry["status"]
        image = await comfy.image(entry["outputs"]["9"]["images"][0])
    assert (image.size, image.getpixel((3, 3))) == ((32, 16), (63, 63, 63))
    sampled, decoded = samplers.requests
    assert (sampled.model, sampled.prompt, sampled.seed, sampled.n) == ("flux", "a seven", 5, 1)
    assert (sampled.width, sampled.height, sampled.output) == (32, 16, "latent")
    assert (sampled.sampler.name, sampled.sampler.num_steps, sampled.sampler.sigmas[-1]) == ("euler", 4, 0.0)
    assert (decoded.model, decoded.output) == ("flux", "decoded")


async def test_all_routes_are_there_below_api_too(comfy: Comfy) -> None:
    answer = await comfy.http.post("/api/prompt", json={"prompt": plain_workflow()})
    id_ = answer.json()["prompt_id"]
    entry = await comfy.ended(id_)
    (file,) = entry["outputs"]["2"]["images"]
    for path in ("/view", "/api/view"):
        assert (await comfy.http.get(path, params=file)).headers["content-type"] == "image/png"
    for path in ("prompt", "queue", f"history/{id_}", "object_info/SaveImage", "features"):
        one, other = await comfy.http.get(f"/{path}"), await comfy.http.get(f"/api/{path}")
        assert (one.status_code, one.json()) == (200, other.json())
    assert (await comfy.http.get("/api/models")).json()[0] == "checkpoints"
    assert "flux" in (await comfy.http.get("/api/models/checkpoints")).json()
    assert (await comfy.http.get("/models")).json()["object"] == "list"  # OpenAI's, as clients of vLLM ask


async def test_a_body_is_json_whatever_its_type_says(comfy: Comfy) -> None:
    """As the scripts send it that ComfyUI comes with."""
    content = json.dumps({"prompt": plain_workflow()}).encode()
    headers = {"content-type": "application/x-www-form-urlencoded"}
    answer = await comfy.http.post("/prompt", content=content, headers=headers)
    assert (await comfy.ended(answer.json()["prompt_id"]))["status"]["completed"]


async def test_a_client_may_name_its_prompt_once(comfy: Comfy) -> None:
    id_ = str(uuid.uuid4())
    assert await comfy.begin(plain_workflow(1), prompt_id=id_) == id_
    assert await comfy.begin(plain_workflow(1), prompt_id=id_) == id_
    other = await comfy.http.post("/prompt", json={"prompt": plain_workflow(2), "prompt_id": id_})
    assert refusal(other, 409)["error"]["type"] == "conflict"
    entry = await comfy.ended(id_)
    assert entry["outputs"]["2"]["images"][0]["filename"] == "made_00001_.png"
    assert list((await comfy.http.get("/history")).json()) == [id_]


@pytest.mark.parametrize(
    ("change", "node", "type_"),
    [
        ({"1": {"class_type": "NoSuchNode", "inputs": {}}}, "1", "missing_node_type"),
        ({"1": {"class_type": "EmptyImage", "inputs": {"width": 8}}}, "1", "required_input_missing"),
        ({"2": {"class_type": "SaveImage", "inputs": {"images": ["7", 0]}}}, "2", "bad_linked_input"),
        ({"2": {"class_type": "SaveImage", "inputs": {"images": ["1", 5], "filename_prefix": "x"}}}, "2", None),
    ],
)
async def test_errors_are_told_by_node(comfy: Comfy, change: dict[str, Any], node: str, type_: str | None) -> None:
    body = refusal(await comfy.http.post("/prompt", json={"prompt": plain_workflow() | change}))
    assert body["error"]["type"] == "prompt_outputs_failed_validation"
    found = body["node_errors"][node]
    assert "2" in found["dependent_outputs"] or node == "2"
    if type_ is not None:
        assert type_ in [one["type"] for one in found["errors"]]
    assert (await comfy.http.get("/queue")).json() == {"queue_running": [], "queue_pending": []}


async def test_a_missing_file_is_refused_with_the_known_ones(comfy: Comfy) -> None:
    loader = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "dreams.safetensors"}}
    encoder = {"class_type": "CLIPTextEncode", "inputs": {"text": "x", "clip": ["1", 1]}}
    shown = {"class_type": "VAEDecode", "inputs": {"samples": ["4", 0], "vae": ["1", 2]}}
    empty = {"class_type": "EmptyLatentImage", "inputs": {"width": 16, "height": 16, "batch_size": 1}}
    saved = {"class_type": "SaveImage", "inputs": {"images": ["3", 0], "filename_prefix": "x"}}
    workflow = {"1": loader, "2": encoder, "3": shown, "4": empty, "5": saved}
    body = refusal(await comfy.http.post("/prompt", json={"prompt": workflow}))
    (error,) = body["node_errors"]["1"]["errors"]
    assert error["type"] == "value_not_in_list"
    assert error["details"].startswith("ckpt_name: 'dreams.safetensors'")
    assert "flux.safetensors" in error["details"]


async def test_one_good_output_is_enough(comfy: Comfy) -> None:
    workflow = plain_workflow() | {"3": {"class_type": "PreviewImage", "inputs": {"images": ["8", 0]}}}
    answer = await comfy.http.post("/prompt", json={"prompt": workflow})
    assert list(answer.json()["node_errors"]) == ["3"]
    entry = await comfy.ended(answer.json()["prompt_id"])
    assert list(entry["outputs"]) == ["2"]
    assert entry["prompt"][4] == ["2"]


async def test_a_client_may_ask_for_some_outputs(comfy: Comfy) -> None:
    workflow = plain_workflow() | {"3": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}}}
    entry = await comfy.ended(await comfy.begin(workflow, partial_execution_targets=["3"]))
    assert list(entry["outputs"]) == ["3"]
    (file,) = entry["outputs"]["3"]["images"]
    assert file["type"] == "temp"
    assert (await comfy.image(file)).size == (16, 8)


@pytest.mark.parametrize(
    ("body", "type_"),
    [
        ({}, "no_prompt"),
        ({"prompt": {}}, "no_prompt"),
        ({"prompt": {"1": 5}}, "invalid_prompt"),
        ({"prompt": {"1": {"class_type": "SaveImage", "inputs": []}}}, "invalid_prompt"),
        ({"prompt": []}, "invalid_value"),
        ({"prompt": plain_workflow(), "client_id": 5}, "invalid_value"),
        ({"prompt": plain_workflow(), "client_id": "x" * 129}, "invalid_value"),
        ({"prompt": plain_workflow(), "prompt_id": "../x"}, "invalid_value"),
        ({"prompt": plain_workflow(), "prompt_id": "x" * 65}, "invalid_value"),
        ({"prompt": plain_workflow(), "extra_data": []}, "invalid_value"),
        ({"prompt": {"1": {"class_type": "EmptyImage", "inputs": {}}}}, "prompt_no_outputs"),
        (b"{", "invalid_json"),
        (b"[" * 100_000, "invalid_value"),
        (b'{"prompt": ' + b'{"a":' * 1000 + b"1" + b"}" * 1001, "invalid_value"),
    ],
)
async def test_a_hostile_body_is_refused(comfy: Comfy, body: Any, type_: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await comfy.http.post("/prompt", content=content)
    assert refusal(answer, answer.status_code)["error"]["type"] in (type_, "request_too_large")
    assert answer.status_code in (400, 413)


async def test_a_failed_node_is_in_the_history(comfy: Comfy) -> None:
    id_ = await comfy.begin(inverted_workflow("gone.png"))
    entry = await comfy.ended(id_)
    status = entry["status"]
    assert (status["status_str"], status["completed"], entry["outputs"]) == ("error", False, {})
    name, error = status["messages"][-1]
    assert (name, error["node_id"], error["node_type"]) == ("execution_error", "1", "LoadImage")
    assert "gone.png" in error["exception_message"]
    assert error["traceback"] == []
    job = (await comfy.http.get("/v1/jobs")).json()["data"][0]
    assert (job["endpoint"], job["status"]) == ("/prompt", "failed")
    assert "gone.png" in job["error"]["message"]


async def test_an_uploaded_image_is_worked_on(comfy: Comfy) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (12, 20, 3), np.uint8)
    upload = await comfy.http.post("/upload/image", files={"image": ("photo.png", png(pixels))})
    assert upload.json() == {"name": "photo.png", "subfolder": "", "type": "input"}
    entry = await comfy.ended(await comfy.begin(inverted_workflow("photo.png")))
    (file,) = entry["outputs"]["3"]["images"]
    found = np.asarray(await comfy.image(file)).astype(int)
    assert np.abs(found - (255 - pixels.astype(int))).max() <= 1
    described = (await comfy.http.get("/object_info/LoadImage")).json()["LoadImage"]
    assert described["input"]["required"]["image"] == [["photo.png"], {"image_upload": True}]
    kept = {"filename": "photo.png", "type": "input"}
    assert np.array_equal(np.asarray(await comfy.image(kept)), pixels)


async def test_uploads_have_names_folders_and_types(comfy: Comfy) -> None:
    async def upload(shade: int, name: str, **fields: str) -> dict[str, str]:
        file = png(np.full((4, 4, 3), shade, np.uint8))
        answer = await comfy.http.post("/upload/image", files={"image": (name, file)}, data=fields)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    assert (await upload(1, "a.png"))["name"] == "a.png"
    assert (await upload(1, "a.png"))["name"] == "a.png"
    assert (await upload(2, "a.png"))["name"] == "a (1).png"
    assert (await upload(3, "a.png", overwrite="true"))["name"] == "a.png"
    assert await upload(4, "C:\\x\\b.png", subfolder="day", type="temp") == {
        "name": "b.png",
        "subfolder": "day",
        "type": "temp",
    }
    image = await comfy.image({"filename": "b.png", "subfolder": "day", "type": "temp"})
    assert image.getpixel((0, 0)) == (4, 4, 4)


@pytest.mark.parametrize(
    ("files", "fields"),
    [
        ({"image": ("a.png", b"no image")}, {}),
        ({"other": ("a.png", b"no image")}, {}),
        ({"image": ("..", png(np.zeros((2, 2, 3), np.uint8)))}, {}),
        ({"image": ("a.png", png(np.zeros((2, 2, 3), np.uint8)))}, {"subfolder": "../x"}),
        ({"image": ("a.png", png(np.zeros((2, 2, 3), np.uint8)))}, {"type": "models"}),
    ],
)
async def test_a_bad_upload_is_refused(comfy: Comfy, files: Any, fields: Any, tmp_path: Path) -> None:
    refusal(await comfy.http.post("/upload/image", files=files, data=fields))
    assert not [path for path in (tmp_path / "files").rglob("*") if path.is_file()]


async def test_a_mask_becomes_the_transparency_of_an_image(comfy: Comfy) -> None:
    pixels = np.random.default_rng(4).integers(0, 256, (6, 8, 3), np.uint8)
    alpha = np.random.default_rng(5).integers(0, 256, (6, 8), np.uint8)
    await comfy.http.post("/upload/image", files={"image": ("a.png", png(pixels))})
    painted = png(np.dstack([np.zeros_like(pixels), alpha]))
    fields = {"original_ref": json.dumps({"filename": "a.png", "type": "input"}), "subfolder": "clipspace"}
    answer = await comfy.http.post("/upload/mask", files={"image": ("m.png", painted)}, data=fields)
    kept = answer.json()
    image = await comfy.image({"filename": kept["name"], "subfolder": kept["subfolder"], "type": kept["type"]})
    assert np.array_equal(np.asarray(image), np.dstack([pixels, alpha]))
    for reference in ("", "[]", '{"filename": "no.png"}', '{"filename": "../a.png", "type": "input"}', "{" * 5000):
        answer = await comfy.http.post(
            "/upload/mask", files={"image": ("m.png", painted)}, data={"original_ref": reference}
        )
        refusal(answer, 404 if "no.png" in reference else 400)


async def test_an_image_is_shown_in_parts(comfy: Comfy) -> None:
    pixels = np.random.default_rng(6).integers(0, 256, (6, 8, 4), np.uint8)
    await comfy.http.post("/upload/image", files={"image": ("a.png", png(pixels))})
    kept = {"filename": "a.png", "type": "input"}
    assert np.array_equal(np.asarray(await comfy.image(kept)), pixels)
    assert np.array_equal(np.asarray(await comfy.image(kept, channel="rgb")), pixels[:, :, :3])
    assert np.array_equal(np.asarray(await comfy.image(kept, channel="a"))[:, :, 3], pixels[:, :, 3])
    for preview, format_ in (("webp;90", "WEBP"), ("jpeg", "JPEG"), ("gif;x", "WEBP")):
        shown = await comfy.image(kept, preview=preview)
        assert (shown.format, shown.size) == (format_, (8, 6))


@pytest.mark.parametrize("params", [{}, {"filename": "../x"}, {"filename": "a", "type": "x"}])
async def test_what_names_no_file_is_refused(comfy: Comfy, params: dict[str, str]) -> None:
    refusal(await comfy.http.get("/view", params=params))


async def test_a_file_that_is_not_kept_is_not_found(comfy: Comfy) -> None:
    await comfy.http.post("/upload/image", files={"image": ("a.png", png(np.zeros((2, 2, 4), np.uint8)))})
    error = refusal(await comfy.http.get("/view", params={"filename": "no.png", "type": "input"}), 404)["error"]
    assert (error["type"], error["message"]) == (
        "file_not_found",
        "no input file 'no.png' is kept for this key (known: a.png)",
    )


async def test_the_queue_shows_what_runs_and_what_waits(replicas: Replicas, owner: JobOwner, tmp_path: Path) -> None:
    async with comfy_over(replicas, owner, tmp_path / "files", num_runners=0) as comfy:
        first = await comfy.begin(plain_workflow(), client_id="me")
        second = await comfy.begin(plain_workflow())
        queue = (await comfy.http.get("/queue")).json()
        assert queue["queue_running"] == []
        assert [item[1] for item in queue["queue_pending"]] == [first, second]
        number, _, prompt, extra, outputs = queue["queue_pending"][0]
        assert (prompt, extra["client_id"], outputs) == (plain_workflow(), "me", ["2"])
        assert number < queue["queue_pending"][1][0]
        assert (await comfy.http.get("/prompt")).json() == {"exec_info": {"queue_remaining": 2}}
        assert (await comfy.http.get(f"/history/{first}")).json() == {}
        assert (await comfy.http.get("/history")).json() == {}
        assert (await comfy.http.post("/queue", json={"delete": [first, "no"]})).content == b""
        assert [item[1] for item in (await comfy.http.get("/queue")).json()["queue_pending"]] == [second]
        await comfy.http.post("/queue", json={"clear": True})
        assert (await comfy.http.get("/queue")).json()["queue_pending"] == []


async def test_a_running_prompt_is_interrupted(owner: JobOwner, tmp_path: Path) -> None:
    held = Held()
    held.states["x2"] = ModelRecord("x2", "ready", "upscaler", 1, "v", variant={"scale": 2})
    workflow = enlarged_workflow("x2")
    async with comfy_over(held, owner, tmp_path / "files") as comfy:
        ids = [await comfy.begin(workflow) for _ in range(3)]
        await until(lambda: len(held.requests) == 3)
        assert {item[1] for item in (await comfy.http.get("/queue")).json()["queue_running"]} == set(ids)
        await comfy.http.post("/queue", json={"delete": ids})  # of those that wait
        assert (await comfy.http.post("/interrupt", json={"prompt_id": ids[1]})).content == b""
        entry = await comfy.ended(ids[1])
        assert (entry["status"]["status_str"], entry["status"]["completed"]) == ("error", False)
        assert [name for name, _ in entry["status"]["messages"]] == ["execution_interrupted"]
        assert {item[1] for item in (await comfy.http.get("/queue")).json()["queue_running"]} == {ids[0], ids[2]}
        await comfy.http.post("/interrupt")
        for id_ in ids:
            assert not (await comfy.ended(id_))["status"]["completed"]
        assert list((await comfy.http.get("/history", params={"max_items": 2})).json()) == ids[1:]


async def test_the_history_is_read_in_parts_and_forgotten(comfy: Comfy) -> None:
    ids = [await comfy.begin(plain_workflow(number)) for number in range(5)]
    for id_ in ids:
        await comfy.ended(id_)

    async def listed(**params: int) -> list[str]:
        return list((await comfy.http.get("/history", params=params)).json())

    assert await listed() == ids
    assert await listed(max_items=2) == ids[3:]
    assert await listed(max_items=2, offset=1) == ids[1:3]
    assert await listed(max_items=2, offset=0) == ids[:2]
    await comfy.http.post("/history", json={"delete": [ids[0], ids[3]]})
    assert await listed() == [ids[1], ids[2], ids[4]]
    await comfy.http.post("/history", json={"clear": True})
    assert await listed() == []
    assert (await comfy.http.get(f"/history/{ids[1]}")).json() == {}


async def test_prompts_and_files_are_those_of_a_key(replicas: Replicas, owner: JobOwner, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    keys = tmp_path / "keys"
    for name in ("mine", "yours"):
        add_key(keys, KeyEntry(name=name, sha256=hash_of(f"atl_{name}")))
    config = CONFIG.model_copy(update={"access": AccessConfig(keys_file=keys)})
    mine, yours = ({"Authorization": f"Bearer atl_{name}"} for name in ("mine", "yours"))
    async with comfy_over(replicas, owner, tmp_path / "files", config) as comfy:
        for method, path in (("POST", "/prompt"), ("GET", "/queue"), ("GET", "/api/history"), ("GET", "/view")):
            refusal(await comfy.http.request(method, path), 401)
        answer = await comfy.http.post("/prompt", json={"prompt": plain_workflow()}, headers=mine)
        id_ = answer.json()["prompt_id"]
        entry = await comfy.ended(id_, headers=mine)
        (file,) = entry["outputs"]["2"]["images"]
        assert (await comfy.http.get("/view", params=file, headers=mine)).status_code == 200
        refusal(await comfy.http.get("/view", params=file, headers=yours), 404)
        assert (await comfy.http.get(f"/history/{id_}", headers=yours)).json() == {}
        assert (await comfy.http.get("/history", headers=yours)).json() == {}
        await comfy.http.post("/history", json={"clear": True, "delete": [id_]}, headers=yours)
        assert list((await comfy.http.get("/history", headers=mine)).json()) == [id_]
        again = await comfy.http.post("/prompt", json={"prompt": plain_workflow(9), "prompt_id": id_}, headers=yours)
        assert again.json()["prompt_id"] == id_  # another one of the same name
        assert (await comfy.ended(id_, headers=yours))["prompt"][2] == plain_workflow(9)


async def test_a_busy_cluster_lets_a_prompt_wait(
    comfy: Comfy, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A temporary refusal within a run is tried again, as that of any job."""
    replicas.states["x2"] = ModelRecord("x2", "ready", "upscaler", 1, "v", variant={"scale": 2})
    replicas.enlarges_by = 2
    answers, answer = [QueueFull("the queue is full"), NoReplica("no worker")], Service.generate

    async def busy(self: Service, request: Any) -> Any:
        if answers:
            raise answers.pop()
        return await answer(self, request)

    monkeypatch.setattr(Service, "generate", busy)
    entry = await comfy.ended(await comfy.begin(enlarged_workflow("x2")))
    assert entry["status"]["completed"]
    assert (await comfy.image(entry["outputs"]["2"]["images"][0])).size == (32, 16)
    assert not answers


async def test_kinds_are_described(comfy: Comfy) -> None:
    described = (await comfy.http.get("/object_info")).json()
    loader = described["CheckpointLoaderSimple"]
    assert set(loader) == {
        *("input", "input_order", "output", "output_is_list", "output_name", "name", "display_name"),
        *("description", "python_module", "category", "output_node"),
    }
    (names, _) = loader["input"]["required"]["ckpt_name"]
    assert {"flux", "flux.safetensors"} <= set(names)
    assert loader["output"] == ["MODEL", "CLIP", "VAE"]
    assert described["SaveImage"]["output_node"] is True
    width = described["EmptyImage"]["input"]["required"]["width"]
    assert width[0] == "INT"
    assert width[1]["default"] == 512
    for name, one in described.items():
        assert one["name"] == name
        assert list(one["input"]["required"]) == one["input_order"]["required"]
    assert (await comfy.http.get("/object_info/NoSuch")).json() == {}


async def test_the_server_describes_itself(comfy: Comfy) -> None:
    stats = (await comfy.http.get("/system_stats")).json()
    assert stats["system"]["comfyui_version"]
    assert stats["system"]["ram_total"] > stats["system"]["ram_free"] > 0
    (device,) = stats["devices"]
    assert device["type"] == "cpu"
    assert device["vram_total"] == device["vram_free"] == CONFIG.worker.resident_bytes
    features = (await comfy.http.get("/features")).json()
    assert features == {"supports_preview_metadata": True, "max_upload_size": 2**22}
    assert (await comfy.http.post("/free", json={"unload_models": True})).status_code == 200
    refusal(await comfy.http.get("/api/models/nothing"))


async def test_the_routes_may_be_left_out(replicas: Replicas, owner: JobOwner, tmp_path: Path) -> None:
    compat = CONFIG.http.compat.model_copy(update={"comfyui": False})
    config = CONFIG.model_copy(update={"http": CONFIG.http.model_copy(update={"compat": compat})})
    async with comfy_over(replicas, owner, tmp_path / "files", config) as comfy:
        refusal(await comfy.http.post("/prompt", json={"prompt": plain_workflow()}), 404)
