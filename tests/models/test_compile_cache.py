"""Compiled code that is kept: its pack, its folders, and what is refused; code itself in tests/end_to_end/."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from fastdiff.models.compile_cache import cache as caches
from fastdiff.models.compile_cache import environment, node_folders, pack
from fastdiff.models.compile_cache.cache import CompileCache, NotWholeError, open_cache
from fastdiff.models.compile_cache.pack import DamagedPackError
from fastdiff.private_folders import cache_folder, private

FACTS = {"device": "cpu", "torch": "2"}


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    """A cache folder with a kernel of Inductor, one of Triton, a lock and a file that is being written."""
    folder = tmp_path / "node-a"
    for name in ("inductor/ab/k.main.so", "inductor/locks/k.lock", "triton/K/k.cubin", "triton/tmp.pid_1/k.cubin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode() * 100)
    listed = {"k.cubin": str(folder / "triton/K/k.cubin")}
    (folder / "triton/K/__grp__k.json").write_text(json.dumps({"child_paths": listed}))
    return folder


@pytest.fixture
def written(compiled: Path, tmp_path: Path) -> Path:
    """The pack of that folder."""
    path = tmp_path / "packs" / "key.zip"
    path.parent.mkdir()
    pack.write(path, compiled, pack.members(compiled), FACTS)
    return path


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cache folder and disk of the node in folders of the test; returns that of the packs."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("FASTDIFF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "cache" / "compiled"


def test_a_pack_brings_the_code_to_another_folder(written: Path, tmp_path: Path) -> None:
    """Locks stay behind, and Triton's list names the files where they are now."""
    there = tmp_path / "node-b"
    names = {"inductor/ab/k.main.so", "triton/K/k.cubin", "triton/K/__grp__k.json"}
    assert pack.unpack(written, there, FACTS) == (names, 3)
    assert pack.members(there) == names
    assert (there / "triton/K/k.cubin").read_bytes() == b"triton/K/k.cubin" * 100
    [listed] = json.loads((there / "triton/K/__grp__k.json").read_text())["child_paths"].values()
    assert listed == str(there / "triton/K/k.cubin")
    assert pack.unpack(written, there, FACTS) == (names, 0)
    assert written.stat().st_mode & 0o777 == 0o600


def tear(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[60] ^= 255
    path.write_bytes(content)


def link(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to(path.with_name("other"))


@pytest.mark.parametrize(
    ("harm", "why"),
    [(tear, "damaged"), (flip, "damaged"), (lambda path: path.chmod(0o620), "others can write")],
    ids=["torn", "flipped", "writable"],
)
def test_a_pack_that_may_not_be_trusted_is_refused(written: Path, tmp_path: Path, harm: Any, why: str) -> None:
    harm(written)
    with pytest.raises(DamagedPackError, match=why):
        pack.unpack(written, tmp_path / "node-b", FACTS)
    assert not list((tmp_path / "node-b").rglob("__grp__*")), "a list without its files"


def test_a_pack_of_another_user_a_link_and_other_facts_are_refused(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DamagedPackError, match="another machine"):
        pack.unpack(written, tmp_path / "b", {**FACTS, "torch": "3"})
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(DamagedPackError, match="of user"):
            pack.unpack(written, tmp_path / "b", FACTS)
    link(written)
    with pytest.raises(OSError, match="symbolic"):
        pack.unpack(written, tmp_path / "b", FACTS)


def test_a_pack_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "code.so").write_bytes(b"code")
    pack.write(tmp_path / "key.zip", tmp_path / "a", {"../code.so"}, FACTS)
    with pytest.raises(DamagedPackError, match=r"\.\./code"):
        pack.unpack(tmp_path / "key.zip", tmp_path / "b" / "c", FACTS)


def test_folders_that_others_can_change_are_refused(tmp_path: Path) -> None:
    assert private(tmp_path / "own").stat().st_mode & 0o777 == 0o700
    (tmp_path / "own").chmod(0o2700)
    assert private(tmp_path / "own") == tmp_path / "own", "below a folder whose group is handed down"
    (tmp_path / "own").chmod(0o750)
    with pytest.raises(PermissionError, match="chmod 700"):
        private(tmp_path / "own")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="a link"):
        private(tmp_path / "link")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError, match="others can replace it"):
        private(tmp_path / "open" / "own")


def test_the_cache_folder_is_the_users() -> None:
    assert cache_folder({"FASTDIFF_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/fastdiff")
    assert cache_folder({}) == Path.home() / ".cache" / "fastdiff"
    with pytest.raises(FileNotFoundError, match="set FASTDIFF_CACHE"):
        cache_folder({"FASTDIFF_CACHE": "~nobody-has-this-name/cache"})


def step(cache: CompileCache, *names: str) -> None:
    """Compile."""
    for name in names:
        (cache.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (cache.folder / name).write_bytes(name.encode())


def test_a_run_leaves_its_code_to_the_next_one_on_another_node(
    places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert caches.in_words() == f"none kept yet in {places}"
    with open_cache(FACTS, compiles=False) as first:
        assert first.source is None
        assert os.environ["TRITON_CACHE_DIR"] == str(first.folder / "triton")
        step(first, "inductor/ab/k.main.so")
        kept = first.keep()
        assert kept is not None
        assert (kept.kernels, kept.removed) == (1, 0)
        assert first.keep() is None, "nothing is new"
    assert "TRITON_CACHE_DIR" not in os.environ
    assert caches.in_words() == f"1 pack (0.0 MiB) in {places}"
    with open_cache(FACTS, compiles=False) as again:
        assert again.source == again.folder
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "other"))
    with open_cache(FACTS, compiles=False) as second:
        assert (second.source, second.kernels) == (places / second.pack.name, 1)
        assert second.keep() is None
    with open_cache({**FACTS, "torch": "3"}, compiles=False) as third:
        assert third.source is None


def test_a_run_goes_on_without_its_folder(places: Path) -> None:
    """Nodes clean their temporary folder."""
    with open_cache(FACTS, compiles=False) as cache:
        shutil.rmtree(cache.folder)
        assert cache.keep() is None


def test_a_file_that_is_being_linked_is_not_packed(places: Path) -> None:
    with open_cache(FACTS, compiles=False) as cache:
        step(cache, "inductor/ab/k.main.so", "inductor/locks/k.lock")
        with FileLock(cache.folder / "inductor/locks/k.lock"), pytest.raises(NotWholeError, match="was compiling"):
            cache.keep()
        assert cache.keep() is not None


def test_a_damaged_pack_is_told_and_replaced(places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_cache(FACTS, compiles=False) as first:
        step(first, "inductor/ab/k.main.so")
        first.keep()
    tear(first.pack)
    with open_cache(FACTS, compiles=False) as second:
        assert "it is damaged" in str(second.problem)
        assert second.keep() is not None
    with open_cache(FACTS, compiles=False) as third:
        assert third.problem is None


def test_old_packs_make_room(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private(places)
    for age, name in enumerate(("new", "old", "older")):
        (places / f"{name}.zip").write_bytes(b"0" * 1000)
        os.utime(places / f"{name}.zip", (10_000 - age, 10_000 - age))
    (places / "gone.zip.1-00000000.tmp").write_bytes(b"")
    os.utime(places / "gone.zip.1-00000000.tmp", (1, 1))
    monkeypatch.setattr(caches, "_MOST_BYTES", 2000)
    with open_cache(FACTS, compiles=False) as cache:
        step(cache, "inductor/ab/k.main.so")
        kept = cache.keep()
    assert kept is not None
    assert kept.removed == 2
    assert {path.name for path in places.iterdir()} == {"new.zip", cache.pack.name}


def test_a_pack_has_a_largest_size(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "LARGEST", 100)
    with open_cache(FACTS, compiles=False) as cache:
        step(cache, "inductor/ab/k.main.so")
        with pytest.raises(ValueError, match="larger than"):
            cache.keep()
    assert not cache.pack.exists()


def test_a_node_keeps_the_folders_that_were_used_last(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_folders, "_MOST_FOLDERS", 2)
    folders = []
    for number in range(3):
        with open_cache({**FACTS, "torch": str(number)}, compiles=False) as cache:
            folders.append(cache.folder)
        os.utime(cache.folder / ".users", (number + 1, number + 1))
    assert [folder.exists() for folder in folders] == [False, True, True]


def test_the_key_is_of_machine_versions_compilers_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = environment.describe(torch.device("cpu"))
    assert facts["torch"].startswith(torch.__version__)
    assert facts["C++"].split()[0].endswith("g++")
    keys = {environment.key_of(facts | {name: "other"}) for name in facts}
    assert len(keys | {environment.key_of(facts)}) == len(facts) + 1
    monkeypatch.setattr(environment, "_cpu", lambda: "flags: another instruction set")
    assert environment.describe(torch.device("cpu"))["cpu"] != facts["cpu"]
