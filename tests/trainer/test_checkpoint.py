from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from astraflow.trainer import CheckpointMeta, latest_checkpoint, save_checkpoint


def meta(version: int) -> CheckpointMeta:
    return CheckpointMeta(model_id="p", version=version, consumed=tuple(f"b{i}" for i in range(version)), incarnation=3)


def fill(directory: Path) -> None:
    (directory / "weights").write_bytes(b"w" * 10)


def save(root: Path, version: int, keep: int = 2) -> None:
    save_checkpoint(root, meta(version), fill, keep=keep)


def versions(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def test_nothing_there(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "missing") is None


def test_what_was_saved_is_found_and_older_ones_go(tmp_path: Path) -> None:
    for version in (1, 2, 5):
        save(tmp_path, version)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.meta == meta(5)
    assert (found.directory / "weights").read_bytes() == b"w" * 10
    assert versions(tmp_path) == ["version-00000002", "version-00000005"]
    assert (tmp_path / "LATEST").read_text() == "version-00000005"


def test_a_write_that_fails_leaves_the_last_one_in_place(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def broken(directory: Path) -> None:
        fill(directory)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, meta(2), broken, keep=2)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.meta.version == 1
    save(tmp_path, 2)
    assert versions(tmp_path) == ["version-00000001", "version-00000002"]


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"version": 9}'])
def test_torn_ones_are_ignored(tmp_path: Path, content: bytes | None) -> None:
    save(tmp_path, 1)
    torn = tmp_path / "version-00000009"
    torn.mkdir()
    if content is not None:
        (torn / "checkpoint.json").write_bytes(content)
    (tmp_path / ".tmp-version-00000010").mkdir()
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.meta.version == 1


def test_a_version_saved_again_replaces_the_abandoned_one_and_what_followed_it(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        save(tmp_path, version, keep=5)
    save_checkpoint(tmp_path, meta(2), lambda directory: None, keep=5)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.meta.version == 2
    assert not (found.directory / "weights").exists()
    assert versions(tmp_path) == ["version-00000001", "version-00000002"]


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    scores = {1: 0.2, 2: 0.9, 3: 0.5, 4: 0.4, 5: None}
    for version, score in scores.items():
        save_checkpoint(tmp_path, msgspec.structs.replace(meta(version), score=score), fill, keep=2)
    assert versions(tmp_path) == ["version-00000002", "version-00000004", "version-00000005"]
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.meta.version == 5
