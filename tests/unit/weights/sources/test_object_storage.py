"""Object storage -> folder: the bytes that were put, by ranges in parallel, each fetched once."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.waiting import wait_until

from weights.formats.tensors import FileTensor
from weights.operations.externalize import externalize
from weights.operations.intake import import_model
from weights.operations.maintenance import gc, remove_model
from weights.platform.durable import allocated_bytes
from weights.records.errors import FormatError, StoreError
from weights.sources.mirrors import SOURCES_FOLDER, locked, mirror_folder, remove_mirror
from weights.sources.object_storage import MirrorReport, localized, mirror
from weights.storage.store import WeightStore

pytestmark = pytest.mark.slow

PART = 1000
WAIT_S = 120  # only a failing test waits; a busy disk can hold an fsync for many seconds
MIRROR = """
import sys
from pathlib import Path
from weights.sources.object_storage import mirror
url, target, endpoint, num_connections = sys.argv[1:]
report = mirror(url, Path(target), options={"endpoint": endpoint, "region": "us-east-1"}, part_bytes=1000,
                num_connections=int(num_connections))
print(report.fetched_bytes)
"""


def files(folder: Path) -> dict[str, bytes]:
    found = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    return {name: data for name, data in found.items() if not name.startswith(".mirror")}


def parts(nbytes: int, part_bytes: int = PART) -> list[tuple[int, int]]:
    return [(start, min(start + part_bytes, nbytes)) for start in range(0, nbytes, part_bytes)]


def spawn(url: str, target: Path, endpoint: str, num_connections: int = 4) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MIRROR, url, str(target), endpoint, str(num_connections)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def pipeline(write_pipeline, bucket) -> Path:
    """A diffusers folder, also in the bucket below models/p."""
    source = write_pipeline("p", {"vae": {"w": torch.rand(700, 3)}, "unet": {"w": torch.rand(1000)}})
    bucket.put_folder(source, "models/p")
    return source


def test_a_folder_arrives_byte_for_byte(pipeline: Path, bucket, options: dict[str, str], tmp_path: Path) -> None:
    for name in ("models/p/sample.png", "models/p/pytorch_model.bin", "models/p-other/config.json", "models/p/vae/"):
        bucket.put(name, b"" if name.endswith("/") else b"not of this checkpoint")
    bucket.put("models/p/empty.txt", b"")
    report = mirror(bucket.url("models/p/"), tmp_path / "copy", options=options, part_bytes=PART)
    expected = files(pipeline) | {"empty.txt": b""}
    assert files(tmp_path / "copy") == expected
    nbytes = sum(map(len, expected.values()))
    assert report == MirrorReport(
        bucket.url("models/p"), tmp_path / "copy", len(expected), nbytes, nbytes, report.skipped, report.etags
    )
    md5s = {name: f'"{hashlib.md5(data).hexdigest()}"' for name, data in expected.items()}
    assert report.etags == md5s
    assert sorted(report.skipped) == ["pytorch_model.bin", "sample.png", "vae"]


def test_what_is_there_is_not_fetched_again(pipeline: Path, bucket, proxy, options, tmp_path: Path) -> None:
    mirror(bucket.url("models/p"), tmp_path / "copy", options=options)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "copy").rglob("*")}
    proxy.num_requests, proxy.ranges = 0, []
    assert mirror(bucket.url("models/p"), tmp_path / "copy", options=options).fetched_bytes == 0
    assert (proxy.num_requests, proxy.ranges) == (1, [])
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "copy").rglob("*")} == before  # the fingerprint's


def test_a_file_is_fetched_in_ranges_side_by_side(bucket, proxy, options, tmp_path: Path) -> None:
    data = random.randbytes(9 * PART + 1)
    bucket.put("m/model.gguf", data)
    together = threading.Barrier(5, timeout=WAIT_S)

    def meet(_key: str, range_: tuple[int, int] | None) -> None:
        if range_:
            together.wait()

    proxy.on_request = meet  # no request is answered before five have come
    mirror(bucket.url("m"), tmp_path / "copy", options=options, part_bytes=PART, num_connections=5)
    assert (tmp_path / "copy/model.gguf").read_bytes() == data
    assert proxy.requested("m/model.gguf") == parts(len(data))


def test_an_object_of_many_parts_has_no_md5_and_arrives(bucket, options, tmp_path: Path) -> None:
    data = [random.randbytes(2500), random.randbytes(70)]
    where = {"Bucket": bucket.name, "Key": "m/model.gguf"}
    upload = bucket.client.create_multipart_upload(**where)["UploadId"]
    tags = [
        {
            "PartNumber": number,
            "ETag": bucket.client.upload_part(**where, UploadId=upload, PartNumber=number, Body=part)["ETag"],
        }
        for number, part in enumerate(data, 1)
    ]
    bucket.client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload={"Parts": tags})
    mirror(bucket.url("m"), tmp_path / "copy", options=options, part_bytes=PART)
    assert (tmp_path / "copy/model.gguf").read_bytes() == b"".join(data)


@pytest.mark.drawn
@pytest.mark.parametrize("damaged", [(), (1,), (0, 3)])
def test_after_kill_9_only_missing_parts_are_requested(
    bucket, proxy, options, tmp_path: Path, damaged: tuple[int, ...]
) -> None:
    data = random.randbytes(9 * PART + 7)
    bucket.put("m/model.gguf", data)
    sixth_came, go_on = threading.Event(), threading.Event()

    def hold(_key: str, _range: tuple[int, int] | None) -> None:
        if len(proxy.ranges) == 6:
            sixth_came.set()
            go_on.wait(WAIT_S)

    proxy.on_request = hold
    with spawn(bucket.url("m"), tmp_path / "copy", proxy.url, num_connections=1) as process:
        assert sixth_came.wait(WAIT_S)
        process.send_signal(signal.SIGKILL)
    go_on.set()
    assert not (tmp_path / "copy/model.gguf").exists()
    with (tmp_path / "copy/model.gguf.part").open("r+b") as file:
        for part in damaged:
            file.seek(part * PART + 5)
            file.write(bytes([data[part * PART + 5] ^ 1]))
    proxy.ranges = []
    report = mirror(bucket.url("m"), tmp_path / "copy", options=options, part_bytes=77)  # parts keep their first size
    missing = [range_ for part, range_ in enumerate(parts(len(data))) if part >= 5 or part in damaged]
    assert proxy.requested("m/model.gguf") == missing
    assert report.fetched_bytes == sum(stop - start for start, stop in missing)
    assert (tmp_path / "copy/model.gguf").read_bytes() == data


@pytest.mark.parametrize("tail", [b'{"name": "model.gguf", "par', b"\xff\xfe\n", b'{"part": -1}\n[]\n'])
def test_a_torn_journal_costs_a_part_at_most(bucket, proxy, options, tmp_path: Path, tail: bytes) -> None:
    data = random.randbytes(4 * PART)
    bucket.put("m/model.gguf", data)
    proxy.on_request = lambda _key, _range: 500 if len(proxy.ranges) > 2 else None
    with pytest.raises(StoreError):
        mirror(bucket.url("m"), tmp_path / "copy", options=options, part_bytes=PART, num_connections=1)
    with (tmp_path / "copy/.mirror").open("ab") as journal:
        journal.write(tail)
    for allowed in (1, 9):  # what is appended after the torn line counts the next time
        proxy.ranges = []
        proxy.on_request = lambda _key, _range, n=allowed: 500 if len(proxy.ranges) > n else None
        if allowed == 1:
            with pytest.raises(StoreError):
                mirror(bucket.url("m"), tmp_path / "copy", options=options, part_bytes=PART, num_connections=1)
    mirror(bucket.url("m"), tmp_path / "copy", options=options, part_bytes=PART)
    assert proxy.requested("m/model.gguf") == parts(len(data))[3:]
    assert (tmp_path / "copy/model.gguf").read_bytes() == data


@pytest.mark.parametrize("name", ["../victim.json", "{folder}/victim.json"])
def test_a_damaged_journal_deletes_nothing_of_others(bucket, options, tmp_path: Path, name: str) -> None:
    bucket.put("m/config.json", b"{}")
    (tmp_path / "copy").mkdir()
    victim = tmp_path / "victim.json"
    victim.touch()
    record = {"name": name.format(folder=tmp_path), "etag": "x", "nbytes": 0, "part_bytes": 1, "done": True}
    (tmp_path / "copy/.mirror").write_text(json.dumps(record) + "\n")
    mirror(bucket.url("m"), tmp_path / "copy", options=options)
    assert victim.exists()
    assert files(tmp_path / "copy") == {"config.json": b"{}"}


@pytest.mark.parametrize("fault", [None, "ignore-if-match"])
def test_an_object_replaced_midway_is_fetched_anew(bucket, proxy, options, tmp_path: Path, fault: Any) -> None:
    old, new = random.randbytes(6 * PART), random.randbytes(6 * PART)
    bucket.put("m/model.gguf", old)
    bucket.put("m/config.json", b"{}")

    def replace(key: str, _range: tuple[int, int] | None) -> Any:
        if len(proxy.requested("m/model.gguf")) == 3 and key.endswith("gguf"):
            bucket.put("m/model.gguf", new)
        return fault

    proxy.on_request = replace
    mirror(bucket.url("m"), tmp_path / "copy", options=options, part_bytes=PART, num_connections=1)
    assert files(tmp_path / "copy") == {"config.json": b"{}", "model.gguf": new}
    assert len(proxy.requested("m/model.gguf")) == 3 + 6


def test_a_later_version_takes_the_place_of_the_one_before(bucket, options, tmp_path: Path) -> None:
    bucket.put("m/model.gguf", b"one")
    bucket.put("m/part/old.json", b"{}")
    mirror(bucket.url("m"), tmp_path / "copy", options=options)
    (tmp_path / "copy/mine.json").write_text("kept")
    bucket.put("m/model.gguf", b"two")
    bucket.client.delete_object(Bucket=bucket.name, Key="m/part/old.json")
    report = mirror(bucket.url("m"), tmp_path / "copy", options=options)
    assert report.fetched_bytes == 3
    assert files(tmp_path / "copy") == {"model.gguf": b"two", "mine.json": b"kept"}


def test_two_processes_fetch_everything_once(bucket, proxy, tmp_path: Path) -> None:
    data = random.randbytes(20 * PART)
    bucket.put("m/model.gguf", data)
    both = [spawn(bucket.url("m"), tmp_path / "copy", proxy.url) for _ in range(2)]
    fetched = sorted(int(process.communicate(timeout=WAIT_S)[0]) for process in both)
    assert fetched == [0, len(data)]
    assert proxy.requested("m/model.gguf") == parts(len(data))
    assert (tmp_path / "copy/model.gguf").read_bytes() == data


def test_a_bad_header_is_refused_before_the_tensors(bucket, proxy, options, tmp_path: Path, write_model) -> None:
    source = write_model("m", {f"layer.{number}.weight": torch.rand(40) for number in range(30)})
    good = (source / "model.safetensors").read_bytes()
    bucket.put_folder(source, "m")
    bucket.put("m/model.safetensors", good[:-4])
    with pytest.raises(FormatError, match=rf"{bucket.url('m')}/model\.safetensors: truncated: tensor"):
        mirror(bucket.url("m"), tmp_path / "copy", options=options, part_bytes=PART)
    header_bytes = 8 + int.from_bytes(good[:8], "little")
    assert header_bytes > PART
    assert proxy.requested("m/model.safetensors") == parts(len(good))[: -(-header_bytes // PART)]


@pytest.mark.parametrize("header_bytes", [2**63, 10**8, 4000])
def test_a_header_length_out_of_bounds_downloads_nothing_more(
    bucket, proxy, options, tmp_path: Path, header_bytes: int
) -> None:
    bucket.put("m/model.safetensors", header_bytes.to_bytes(8, "little") + bytes(3000))
    with pytest.raises(FormatError, match="header length"):
        mirror(bucket.url("m"), tmp_path / "copy", options=options, part_bytes=PART)
    assert proxy.requested("m/model.safetensors") == [(0, PART)]


def test_progress_goes_up_to_all(pipeline: Path, bucket, options, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        seen.append((done, total))

    report = mirror(bucket.url("models/p"), tmp_path / "copy", options=options, part_bytes=PART, progress=note)
    assert seen == sorted(seen)
    assert seen[-1] == (report.nbytes, report.nbytes)
    assert len(seen) > report.nbytes // PART
    seen.clear()
    mirror(bucket.url("models/p"), tmp_path / "copy", options=options, progress=note)
    assert seen == [(report.nbytes, report.nbytes)]


def localize(source: str | Path, sources: Path, **settings: Any) -> Path:
    with localized(source, sources, **settings) as local:
        return local.path


def test_a_mirror_externalizes_as_the_folder_does(pipeline: Path, bucket, options, tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")
    copy = localize(bucket.url("models/p"), tmp_path / "sources", options=options)
    assert copy == tmp_path / "sources" / bucket.name / "models%2Fp"
    ours, theirs = externalize(store, "ours", copy), externalize(store, "theirs", pipeline)
    assert ours.fingerprint == theirs.fingerprint
    assert ours.components == theirs.components
    assert ours.extents == theirs.extents
    assert files(store.skeleton(ours)) == files(store.skeleton(theirs))
    again = localize(bucket.url("models/p"), tmp_path / "sources", options=options)
    assert externalize(store, "ours", again) == ours


def test_paths_pass_through(tmp_path: Path) -> None:
    assert localize(tmp_path, tmp_path / "sources") == tmp_path
    assert localize("models/m", tmp_path / "sources") == Path("models/m")
    assert not (tmp_path / "sources").exists()


def test_a_url_may_name_one_object(bucket, options, tmp_path: Path) -> None:
    bucket.put("m/one.pt", b"pickle")
    bucket.put("m/config.json", b"{}")
    path = localize(bucket.url("m/one.pt"), tmp_path, options=options)
    assert path == tmp_path / bucket.name / "m%2Fone.pt" / "one.pt"
    assert path.read_bytes() == b"pickle"
    whole = localize(bucket.url("m"), tmp_path, options=options)
    assert files(whole) == {"config.json": b"{}"}
    shutil.rmtree(whole)
    assert path.exists()


def test_a_whole_bucket_may_be_one_checkpoint(bucket, options, tmp_path: Path) -> None:
    bucket.put("config.json", b"{}")
    bucket.put("dir with ü/a+b%20.json", b"[]")
    path = localize(bucket.url(), tmp_path, options=options)
    assert files(path) == {"config.json": b"{}", "dir with ü/a+b%20.json": b"[]"}


def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each tensor that is read from now on."""
    found: list[int] = []
    read = FileTensor.read

    def counted(tensor: FileTensor) -> bytes:
        found.append(tensor.nbytes)
        return read(tensor)

    monkeypatch.setattr(FileTensor, "read", counted)
    return found


def test_a_mirror_that_was_fetched_again_is_the_same_source(
    pipeline: Path, bucket, options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, url = WeightStore(tmp_path / "store"), bucket.url("models/p")
    first = import_model(store, "m", url, options=options)
    assert first.source == url
    shutil.rmtree(store.path / SOURCES_FOLDER)
    read = reads(monkeypatch)
    assert import_model(store, "m", url, options=options) == first
    assert read == []
    bucket.put("models/p/model_index.json", (pipeline / "model_index.json").read_bytes() + b" ")
    assert import_model(store, "m", url, options=options).fingerprint != first.fingerprint


def test_gc_removes_the_mirrors_that_no_model_came_from(pipeline: Path, bucket, options, tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")
    bucket.put_folder(pipeline, "models/q")
    for model, prefix in (("p", "models/p"), ("twin", "models/p"), ("q", "models/q")):
        import_model(store, model, bucket.url(prefix), options=options)
    mirrors = {
        prefix: mirror_folder(store.path / SOURCES_FOLDER, bucket.url(prefix)) for prefix in ("models/p", "models/q")
    }
    nbytes = allocated_bytes(mirrors["models/q"])
    remove_model(store, "p")
    remove_model(store, "q")
    assert gc(store, grace_s=3600).removed == ()
    with locked(mirrors["models/q"]):  # it is being downloaded, or read, for another model
        gc(store)
        assert mirrors["models/q"].exists()
    assert (planned := gc(store, dry_run=True)).freed_bytes >= nbytes > 0
    assert mirrors["models/q"].exists()
    assert gc(store) == planned
    assert not mirrors["models/q"].exists()
    assert files(mirrors["models/p"]) == files(pipeline)
    remove_model(store, "twin")
    gc(store)
    assert list((store.path / SOURCES_FOLDER).iterdir()) == []
    import_model(store, "p", bucket.url("models/p"), options=options)


def test_a_mirror_that_goes_while_its_folder_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, is_dir = tmp_path / "b" / "p", Path.is_dir
    folder.mkdir(parents=True)

    def is_dir_no_more(path: Path) -> bool:
        if path == folder and not (folder / ".mirror.lock").exists():
            shutil.rmtree(folder, ignore_errors=True)
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", is_dir_no_more)
    with locked(folder):
        assert (folder / ".mirror.lock").exists()
    (tmp_path / "b" / "file").touch()
    with pytest.raises(FileExistsError), locked(tmp_path / "b" / "file"):
        pass


def test_who_waits_for_a_mirror_that_is_removed_begins_anew(tmp_path: Path) -> None:
    folder = tmp_path / "sources" / "b" / "p"
    got, removed = threading.Event(), threading.Event()

    def wait() -> None:
        with locked(folder):
            assert (folder / ".mirror.lock").exists()
            got.set()
            assert removed.wait(WAIT_S)
            (folder / "file").write_text("mine")

    with ThreadPoolExecutor() as pool:
        with locked(folder):
            waiting = pool.submit(wait)
            inode = (folder / ".mirror.lock").stat().st_ino
            wait_until(lambda: re.search(rf"-> .*:{inode} ", Path("/proc/locks").read_text()), "who waits", WAIT_S)
            shutil.rmtree(folder)  # as somebody does who holds the lock
        assert got.wait(WAIT_S)
        assert not remove_mirror(folder)
        removed.set()
        waiting.result()
    assert (folder / "file").read_text() == "mine"
    assert remove_mirror(folder)
    assert not folder.exists()
    assert not remove_mirror(folder)
