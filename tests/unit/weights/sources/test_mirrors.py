"""Mirrors that no model needs any more are told by URLs, and by paths in manifests of before."""

from __future__ import annotations

from pathlib import Path

from weights.sources.mirrors import locked, mirror_folder, unused_mirrors


def test_a_mirror_is_unused_when_neither_a_url_nor_a_path_leads_there(tmp_path: Path) -> None:
    urls = [f"s3://bucket/{name}" for name in ("by-url", "by-path", "by-none")]
    by_url, by_path, by_none = (mirror_folder(tmp_path, url) for url in urls)
    for folder in (by_url, by_path, by_none):
        with locked(folder):
            (folder / "file").write_text("")
    assert unused_mirrors(tmp_path, [urls[0], str(by_path / "file")]) == [by_none]
    assert unused_mirrors(tmp_path, urls) == []
    assert unused_mirrors(tmp_path, []) == sorted([by_url, by_path, by_none])
