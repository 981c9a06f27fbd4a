"""Object storage that refuses, vanishes, lies or is damaged: a typed error that says where, and nothing half done."""

from __future__ import annotations

import itertools
import random
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from unit.weights.small_disk import PAGE_BYTES, fill, free_pages

from weights.records.errors import StoreError, WeightsError
from weights.sources.bucket import Bucket, split_url
from weights.sources.object_storage import localized, mirror

pytestmark = pytest.mark.slow

PART = 1000


@pytest.fixture
def data(bucket) -> bytes:
    """Return the content of m/model.gguf in the bucket."""
    data = random.randbytes(6 * PART)
    bucket.put("m/model.gguf", data)
    return data


def refused(url: str, target: Path, options: Mapping[str, str], **more: Any) -> str:
    with pytest.raises(StoreError) as caught:
        mirror(url, target, options=options, part_bytes=PART, **more)
    message = str(caught.value)
    assert url.rstrip("/") in message
    assert "\n" not in message
    assert not [word for word in ("AKIAEXAMPLE", "sEcReT") if word in message + repr(caught.value.__cause__)]
    return message


def test_what_is_not_there_is_named(bucket, data: bytes, options: dict[str, str], tmp_path: Path) -> None:
    assert "no such object, and nothing below" in refused(bucket.url("x"), tmp_path / "copy", options)
    assert "404 Not Found (NoSuchBucket)" in refused("s3://no-such-bucket/m", tmp_path / "copy", options)
    bucket.put("n/picture.png", b"x")
    assert "none of its 1 objects is part of a checkpoint" in refused(bucket.url("n"), tmp_path / "copy", options)


def test_an_empty_bucket_is_told(bucket, options: dict[str, str], tmp_path: Path) -> None:
    assert "nothing below" in refused(bucket.url(), tmp_path / "copy", options)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("is_part", [False, True])
def test_refused_access_says_where_credentials_come_from(
    bucket, data: bytes, proxy, options: dict[str, str], tmp_path: Path, status: int, is_part: bool
) -> None:
    proxy.on_request = lambda _key, range_: status if bool(range_) == is_part else None
    message = refused(bucket.url("m"), tmp_path / "copy", options)
    assert str(status) in message
    assert "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in message


def test_a_passing_error_is_retried(bucket, data: bytes, proxy, options: dict[str, str], tmp_path: Path) -> None:
    faults = {0: 503, PART: "cut", 3 * PART: 500}
    proxy.on_request = lambda _key, range_: faults.pop(range_[0], None) if range_ else None
    mirror(bucket.url("m"), tmp_path / "copy", options=options, part_bytes=PART)
    assert not faults
    assert (tmp_path / "copy/model.gguf").read_bytes() == data


@pytest.mark.parametrize(("fault", "words"), [(503, "503 Service Unavailable"), ("cut", "model.gguf")])
def test_a_lasting_error_leaves_what_has_arrived(
    bucket, data: bytes, proxy, options: dict[str, str], tmp_path: Path, fault: Any, words: str
) -> None:
    proxy.on_request = lambda _key, range_: fault if range_ and range_[0] >= 4 * PART else None
    assert words in refused(bucket.url("m"), tmp_path / "copy", options, num_connections=1)
    assert not (tmp_path / "copy/model.gguf").exists()
    proxy.on_request = lambda _key, _range: None
    assert mirror(bucket.url("m"), tmp_path / "copy", options=options).fetched_bytes == 2 * PART
    assert (tmp_path / "copy/model.gguf").read_bytes() == data


def test_a_server_that_is_gone_is_told(bucket, data: bytes, tmp_path: Path) -> None:
    with socket.socket() as probe:  # bound, but nobody listens
        probe.bind(("127.0.0.1", 0))
        options = {"endpoint": f"http://127.0.0.1:{probe.getsockname()[1]}", "region": "us-east-1"}
        assert "error sending request" in refused(bucket.url("m"), tmp_path / "copy", options)


def test_objects_that_never_hold_still_are_given_up(
    bucket, data: bytes, proxy, options: dict[str, str], tmp_path: Path
) -> None:
    def replace(_key: str, range_: tuple[int, int] | None) -> None:
        if range_ and range_[0] == 2 * PART:
            bucket.put("m/model.gguf", random.randbytes(len(data)))

    proxy.on_request = replace
    assert "'model.gguf' changed or vanished during each of 4 attempts" in refused(
        bucket.url("m"), tmp_path / "copy", options
    )


def test_an_object_deleted_midway_is_told(bucket, data: bytes, proxy, options: dict[str, str], tmp_path: Path) -> None:
    def delete(_key: str, range_: tuple[int, int] | None) -> None:
        if range_ and range_[0] == 2 * PART:
            bucket.client.delete_object(Bucket=bucket.name, Key="m/model.gguf")

    proxy.on_request = delete
    assert "nothing below" in refused(bucket.url("m"), tmp_path / "copy", options)


def test_a_flipped_bit_is_found(bucket, data: bytes, proxy, options: dict[str, str], tmp_path: Path) -> None:
    proxy.on_request = lambda _key, range_: "flip" if range_ and range_[0] == 2 * PART else None
    assert "the MD5 of what arrived" in refused(bucket.url("m"), tmp_path / "copy", options)
    assert sorted(file.name for file in (tmp_path / "copy").iterdir()) == [".mirror", ".mirror.lock"]
    mirror(bucket.url("m"), tmp_path / "unchecked", options={**options, "verify_md5": "false"}, part_bytes=PART)
    assert (tmp_path / "unchecked/model.gguf").read_bytes() != data
    proxy.on_request = lambda _key, _range: None
    mirror(bucket.url("m"), tmp_path / "copy", options=options)
    assert (tmp_path / "copy/model.gguf").read_bytes() == data


@pytest.mark.parametrize(
    "key", ["m/../evil.json", "m/a/../../evil.json", "m/a\\b.json", "m//evil.json", "m/.mirror.lock", "m/./evil.json"]
)
def test_a_key_that_leaves_the_folder_is_refused(
    bucket, data: bytes, proxy, options: dict[str, str], tmp_path: Path, key: str
) -> None:
    bucket.put(key, b"{}")
    refused(bucket.url("m"), tmp_path / "copy", options)
    assert proxy.ranges == []
    assert not list(tmp_path.rglob("*evil*"))


def test_an_absolute_key_is_refused(bucket, options: dict[str, str], tmp_path: Path) -> None:
    bucket.put("/evil.json", b"{}")
    assert "evil.json" in refused(bucket.url(), tmp_path / "copy", options)


def test_a_key_that_is_a_file_and_a_folder_is_refused(bucket, options: dict[str, str], tmp_path: Path) -> None:
    bucket.put("m/a.json", b"{}")
    bucket.put("m/a.json/b/c.json", b"{}")
    message = refused(bucket.url("m"), tmp_path / "copy", options)
    assert "'a.json' is an object and the folder of 'a.json/b/c.json'" in message


def test_a_bucket_of_everything_is_refused(
    bucket, data: bytes, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weights.sources.bucket.MAX_OBJECTS", 2)
    for number in range(2):
        bucket.put(f"m/{number}.json", b"{}")
    assert "more than 2 objects" in refused(bucket.url("m"), tmp_path / "copy", options)


def test_a_full_disk_is_told_before_anything_is_fetched(
    bucket, data: bytes, proxy, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=len(data) - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    message = refused(bucket.url("m"), tmp_path / "copy", options)
    found = re.search(r"needs (\d+) more bytes", message)
    assert found
    assert len(data) <= int(found[1]) < 2 * len(data)  # with the journal's lines
    assert f"{len(data) - 1} bytes are free" in message
    assert proxy.ranges == []


def test_a_disk_that_fills_up_midway_gets_back_what_was_reserved(
    bucket, proxy, options: dict[str, str], disk: Path
) -> None:
    files = {f"m/{name}.gguf": random.randbytes(20 * PAGE_BYTES) for name in "abc"}
    for name, content in files.items():
        bucket.put(name, content)
    for left in (0, 1, 2, 59, 60):
        fill(disk, left)
        assert refused(bucket.url("m"), disk / "copy", options)
        assert free_pages(disk) >= left - 1  # the journal
    num_parts = itertools.count()

    def fill_midway(key: str, part: tuple[int, int] | None) -> None:
        if part and next(num_parts) == 20:  # reserved by now: nothing but the journal can fail
            fill(disk)

    (disk / "filler").unlink()
    proxy.on_request = fill_midway
    assert "No space left" in refused(bucket.url("m"), disk / "copy", options, num_connections=1)
    assert 45 <= free_pages(disk) <= 58
    proxy.on_request = lambda _key, _range: None
    (disk / "filler").unlink()
    report = mirror(bucket.url("m"), disk / "copy", options=options)
    assert report.nbytes - 70 * PART <= report.fetched_bytes <= report.nbytes - 15 * PART
    assert {f"m/{file.name}": file.read_bytes() for file in (disk / "copy").glob("*.gguf")} == files


def test_a_target_that_cannot_be_written_is_told(bucket, data: bytes, options: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "Not a directory" in refused(bucket.url("m"), tmp_path / "file/copy", options)


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(WeightsError, match=r"pip install 'atelier-serve\[s3\]'"):
        localized("s3://bucket/m", tmp_path).__enter__()


@pytest.mark.parametrize(
    "url",
    [
        *("s3://", "s3://b", "s3:///m", "gs://bucket/m", "s3://AKIA:sEcReT@bucket/m", "s3://bucket/m?token=sEcReT"),
        *("s3://bucket/../m", "s3://bucket/a//b", "s3://bucket/a\\b", "s3://bucket/a\0b", "s3://bucket/."),
    ],
)
def test_what_is_no_url_of_object_storage_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="expected s3://bucket/prefix") as caught:
        localized(url, tmp_path).__enter__()
    assert "sEcReT" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_url_is_split() -> None:
    assert split_url("s3://my.bucket-1/a/b c/") == ("my.bucket-1", "a/b c")
    assert split_url("s3://bucket") == split_url("s3://bucket/") == ("bucket", "")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"secret_access_key": "sEcReT"}, "known: endpoint, region, anonymous"),
        ({"anonymous": "maybe"}, "expected true or false"),
        ({"endpoint": "not a url"}, "endpoint is not"),
        ({"endpoint": "ftp://host"}, "endpoint is not"),
        ({"endpoint": "http://"}, "endpoint is not"),
        ({"endpoint": "http://host:99999"}, "endpoint is not"),
        ({"endpoint": "http://user:sEcReT@host"}, "endpoint is not"),
        ({"endpoint": "http://host/?sEcReT"}, "endpoint is not"),
        ({"endpoint": "http://127.0.0.1:1", "region": "a\nb"}, "region"),
    ],
)
def test_a_wrong_option_is_told(options: dict[str, str], words: str) -> None:
    with pytest.raises(StoreError, match=words) as caught:
        Bucket("s3://bucket/m", options)
    assert "sEcReT" not in str(caught.value)


def test_a_client_that_panics_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "not a url")
    with pytest.raises(StoreError, match="check the AWS_"):
        Bucket("s3://bucket/m", {"region": "us-east-1"}).objects()


def test_anonymous_requests_need_no_credentials(
    bucket, data: bytes, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    anonymous = {**options, "anonymous": "true"}
    assert "403 Forbidden" in refused(bucket.url("m"), tmp_path / "copy", anonymous)
    bucket.client.put_object_acl(Bucket=bucket.name, Key="m/model.gguf", ACL="public-read")
    mirror(bucket.url("m"), tmp_path / "copy", options=anonymous)
    assert (tmp_path / "copy/model.gguf").read_bytes() == data
