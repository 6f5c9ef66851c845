"""Where checkpoints lie: a folder or an object store, with one moment at which something becomes complete."""

from __future__ import annotations

import pytest

from stretto.checkpoint.manifest import NAME
from stretto.checkpoint.store import CHUNK, LocalStore, fill, open_store, place_of
from stretto.errors import Damaged, JobError


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    """A local store, and fsspec's in memory, which stands for an object store."""
    if request.param == "folder":
        yield LocalStore(tmp_path / "runs" / "one")
        return
    opened = open_store(f"memory://{tmp_path.name}/one")
    yield opened
    opened.files.rm(opened.root, recursive=True) if opened.files.exists(opened.root) else None


def written(store, name, content=b"0123456789"):
    temporary = store.temporary(name, "a1")
    store.write(f"{temporary}/data", [memoryview(content)])
    return temporary


def test_a_folder_is_complete_from_its_commit_on_and_not_before(store):
    assert store.folders() == [] and not store.complete("x")
    temporary = written(store, "x")
    assert not store.complete("x") and not store.complete(temporary)
    store.commit(temporary, "x", b"{}")
    assert store.complete("x") and store.folders() == ["x"]
    assert store.read("x/data") == b"0123456789" and store.size("x/data") == 10 and store.read(f"x/{NAME}") == b"{}"


def test_any_part_of_a_file_can_be_read_and_its_end_is_noticed(store):
    store.commit(written(store, "x"), "x", b"{}")
    with store.open("x/data") as file:
        view = memoryview(bytearray(4))
        fill(file, 3, view, "x/data")
        assert bytes(view) == b"3456"
        with pytest.raises(Damaged, match="x/data was cut short: 2 bytes"):
            fill(file, 8, view, "x/data")


def test_what_is_removed_or_renamed_is_gone_from_its_name(store):
    for name in ("x", "y"):
        store.commit(written(store, name), name, b"{}")
    store.remove("x")
    store.rename("y", "z")
    assert store.folders() == ["z"] and store.complete("z") and not store.complete("y")


def test_a_folder_half_removed_does_not_count_as_complete(tmp_path, monkeypatch):
    local = LocalStore(tmp_path)
    local.commit(written(local, "x"), "x", b"{}")

    def dies_half_way(path):
        (path / "data").unlink()
        raise OSError(5, "died")

    monkeypatch.setattr(local.disk, "remove", dies_half_way)
    with pytest.raises(OSError, match="died"):
        local.remove("x")
    assert [name for name in local.folders() if local.complete(name) and not name.endswith(".tmp")] == []


def test_large_files_are_written_in_chunks_whole(tmp_path):
    local = LocalStore(tmp_path)
    content = bytes(range(256)) * (CHUNK // 256) + b"end"
    local.write("f", [memoryview(content), memoryview(b"more")])
    assert (tmp_path / "f").read_bytes() == content + b"more"


def test_a_short_write_of_the_system_is_gone_on_with(tmp_path):
    local = LocalStore(tmp_path)
    whole = local.disk.write
    local.disk.write = lambda file, view: whole(file, view[:3])
    local.write("f", [memoryview(b"0123456789")])
    assert (tmp_path / "f").read_bytes() == b"0123456789"


def test_a_folder_and_a_url_are_taken_apart_alike(tmp_path):
    store, name = place_of(tmp_path / "a" / "step-1")
    assert name == "step-1" and store.path(name) == str(tmp_path / "a" / "step-1")
    store, name = place_of("memory://bucket/run/step-1/")
    assert name == "step-1" and store.path(name) == "memory://bucket/run/step-1"
    for wrong in ("memory://bucket", "/"):
        with pytest.raises(JobError, match="cannot be a checkpoint's folder"):
            place_of(wrong)
    with pytest.raises(JobError, match="nonsense://x"):
        open_store("nonsense://x/y")


def test_room_is_that_of_the_nearest_folder_there_is(tmp_path):
    assert LocalStore(tmp_path / "not" / "yet").free() == LocalStore(tmp_path).free() > 0
