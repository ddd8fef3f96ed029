"""The promises of SECURITY.md about foreign inputs: nothing in them is executed, and claimed sizes are not trusted."""

import ast
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from fastdiff.data.images.hugging_face import HuggingFaceSource
from fastdiff.data.images.items import BadItem, ImageItem
from fastdiff.data.images.options import SourceOptions
from fastdiff.files import read_bounded
from tests.support.injected import hostile
from tests.support.injected.hostile_files import png
from tests.support.processes import ROOT
from tests.support.scripts import run_script

SOURCES = ("fastdiff", "kernels", "bench")
MESSAGES = {
    "pickled_weights": "holds more than tensors",
    "old_pickled_weights": "not a zip file",
    "repeated_weights": r"4000000000000 bytes, more than the \d+ of the file",
    "weights_of_bytearray": "holds more than tensors",
    "weights_named_from_the_stack": "holds more than tensors",
    "compressed_weights": "compressed, which torch.save never does",
    "pretrained_pickle": "has no diffusion_pytorch_model.safetensors",
    "pretrained_header": "header too large",
    "pretrained_values": "file not fully covered",
    "pretrained_json": "at most 67108864 are read",
    "shard_with_lying_array": r"key 000000000 \(latent.npy\), offset 512: the npy header",
    "shard_with_pickled_array": r"key 000000000 \(latent.npy\), offset 512: the npy header",
    "large_dataset_json": "at most 134217728 are read",
    "nested_dataset_json": "recursion limit",
    "dataset_json_with_path": "is not a valid shard name",
    "large_index": "at most 20480 are read",
    "large_index_of_large_shard": "at most 134217728 are read",
    "nested_index": "maximum recursion depth",
    "pipe_as_index": "it is not a file",
    "verified_tar": r"train-000000.tar, key .*train-000001.index.json is missing",
    "tar_with_link": "is a link",
    "tar_with_path": "there is no txt member",
    "tar_that_lies": "unexpected end of data",
    "tar_of_long_header": "at most 1048576",
    "long_caption": "10485760 bytes, expected at most 100000",
    "image_bomb": "50000x50000 pixels",
    "rows_that_point_elsewhere": "outside the data set",
    "yaml_of_aliases": "aliases .* are not supported",
    "yaml_with_code": "could not determine a constructor",
    "large_deepspeed_json": "at most 1048576 are read",
}  # fmt: skip
HARMLESS = {"tar_with_pickles"}
"""Inputs whose hostile part is skipped."""


def opened(kind: str, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    done = run_script(Path(hostile.__file__), kind, folder)
    assert done.code == 0, done.output
    found: dict[str, Any] = json.loads(done.output.splitlines()[-1])
    return found


@pytest.mark.fault(28)
def test_hostile_inputs_end_in_clear_errors_without_running_anything_or_taking_memory(tmp_path: Path) -> None:
    small, large = opened("harmless", tmp_path / "a"), opened("hostile", tmp_path / "b")
    assert not (tmp_path / "b" / "executed").exists()
    assert not list(tmp_path.rglob("escaped.png"))
    assert large["ended"].keys() == hostile.HOSTILE.keys() == MESSAGES.keys() | HARMLESS
    for name, ended in large["ended"].items():
        if name in HARMLESS:
            assert ended == "nothing"
        else:
            assert re.match("(Config|Data)Error: ", ended), (name, ended)
            assert re.search(MESSAGES[name], ended, re.DOTALL), (name, ended)
        assert "\x1b" not in ended
    assert large["peak"] < 1.5 * small["peak"]


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    assert read_bounded(Path("/proc/self/stat"), 4096), "which is said to be empty"
    with pytest.raises(ValueError, match="more than 9 bytes"):
        read_bounded(Path("/proc/self/stat"), 9)
    fstat = os.fstat

    def grow(number: int) -> os.stat_result:
        found = fstat(number)
        with path.open("ab") as file:
            file.write(b"6")
        return found

    monkeypatch.setattr(os, "fstat", grow)
    with pytest.raises(ValueError, match="more than 5 bytes"):
        read_bounded(path, 100)


def test_rows_name_no_file_of_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a data set in somebody's home, or above it, lies what is none of its business."""
    import pyarrow
    import pyarrow.parquet

    secret, mine = tmp_path / "home" / "secret.png", tmp_path / "home" / "rows" / "mine.bin"
    mine.parent.mkdir(parents=True)
    for file in (secret, mine):
        file.write_bytes(png())
    table = pyarrow.table({"image": [{"bytes": None, "path": str(file)} for file in (secret, mine)], "text": ["a"] * 2})
    pyarrow.parquet.write_table(table, mine.parent / "train.parquet")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for home in (tmp_path / "home", tmp_path / "home" / "me"):
        monkeypatch.setenv("HOME", str(home))
        found = HuggingFaceSource(SourceOptions(source=str(mine.parent), samples_per_shard=1))
        refused, taken = found.item(0), found.item(1)
        assert isinstance(refused, BadItem)
        assert refused.reason.endswith("is outside the data set")
        assert isinstance(taken, ImageItem)


def test_a_payload_would_be_noticed(tmp_path: Path) -> None:
    """The other tests prove nothing if the payload cannot run at all."""
    import pickle

    from tests.support.injected.hostile_files import Payload

    pickle.loads(pickle.dumps(Payload(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


# --- the source ----------------------------------------------------------------------------------------------------


def unsafe_calls(source: str) -> Iterator[str]:
    """Calls that would run code from a file or a text, or write where an archive says."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name, given = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            if _is_unsafe(name, given):
                yield f"line {node.lineno}: {ast.unparse(node)[:100]}"


def _is_unsafe(name: str, given: dict[str | None, str]) -> bool:
    module, _, method = name.rpartition(".")
    if name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "shelve.open", "marshal.loads"):
        return True
    if method in ("load", "loads", "Unpickler") and module.rpartition(".")[2] in ("pickle", "dill", "joblib"):
        return True
    required = {
        "torch.load": ("weights_only", {"True"}),
        "np.load": ("allow_pickle", {"False"}),
        "numpy.load": ("allow_pickle", {"False"}),
        "yaml.load": ("Loader", {"_Loader", "yaml.SafeLoader"}),
    }
    if name in required:
        word, values = required[name]
        return given.get(word) not in values
    if method in ("extractall", "extract"):
        return given.get("filter") != "'data'"
    return given.get("shell", "False") != "False" or given.get("trust_remote_code", "False") != "False"


def test_the_source_holds_no_call_that_runs_what_it_reads() -> None:
    """But for the code that the user names, which one file runs."""
    found = {
        f"{path.relative_to(ROOT)}, {call}"
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*.py")
        for call in unsafe_calls(path.read_text())
    }
    assert len(found) == 2
    assert all(call.startswith("fastdiff/plugins/user_code.py, ") for call in found), found


def test_modules_that_run_what_they_read_are_not_imported() -> None:
    """``pickle`` is, for the name of an error; its functions are looked for above."""
    wrong = set()
    for folder in SOURCES:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
                module = node.module if isinstance(node, ast.ImportFrom) else None
                if {module, *names} & {"dill", "joblib", "shelve", "marshal", "cloudpickle"} or module == "pickle":
                    wrong.add(path)
    assert not wrong


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "pickle.load(file)",
        "pickle.loads(text)",
        "pickle.Unpickler(file).load()",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.load(text)",
        "eval(text)",
        "exec(text)",
        "os.system(command)",
        "subprocess.run(command, shell=True)",
        "subprocess.run(command, shell=given)",
        "archive.extractall(folder)",
        "archive.extractall(folder, filter='fully_trusted')",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_each_such_call_is_found(line: str) -> None:
    assert list(unsafe_calls(line))


@pytest.mark.parametrize(
    "line", ["torch.load(path, weights_only=True)", "model.eval()", "archive.extractall(folder, filter='data')"]
)
def test_others_are_not(line: str) -> None:
    assert not list(unsafe_calls(line))
