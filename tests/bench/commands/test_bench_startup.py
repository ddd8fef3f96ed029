"""``bench startup``: real starts of fastdiff and of the script, in turns."""

from pathlib import Path

import pytest

from fastdiff.models.pretrained import tiny_pipeline
from fastdiff_bench.__main__ import main
from fastdiff_bench.commands import startup
from fastdiff_bench.measure.first_step import Start
from fastdiff_bench.measure.warm_start import Compilation
from fastdiff_bench.records import record
from fastdiff_bench.trainers import images
from tests.support.processes import run

STEP_AND_NOTE = f"""
import pathlib, sys
from {startup.SCRIPT_MODULE} import main
main(sys.argv[2:])
pathlib.Path(sys.argv[1]).write_text("\\n".join(sys.modules))
"""


@pytest.mark.nightly
def test_everything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["startup", "t2i-lora", "--smoke", "--out", str(tmp_path)]) == 0, capsys.readouterr().err
    found = record.read(tmp_path / "startup.jsonl")
    assert not found.failures
    starts = {(row.provider, row.quantity): row for row in found.measurements if "/" not in row.quantity}
    assert {name for name, _ in starts} == {*startup.OURS, startup.SCRIPT, startup.SCRIPT_LAUNCHED}
    assert all(row.n == 2 for row in found.measurements)
    for name in {name for name, _ in starts}:
        parts = [starts[name, quantity].value for quantity in startup.REHEARSAL if (name, quantity) in starts]
        assert len(parts) == (2 if name in startup.OURS else 0)
        assert all(0 < part < starts[name, "time to the first step"].value for part in parts)
    processes = {name: row.facts["processes"] for (name, _), row in starts.items()}
    assert processes[startup.SCRIPT] == processes["fastdiff, python"] == 1
    assert processes["fastdiff, launch local"] == 2, "the supervisor is the process of the command"


@pytest.mark.nightly
def test_the_script_takes_its_step_and_imports_nothing_of_fastdiff(tmp_path: Path) -> None:
    """Its start is compared with that of fastdiff."""
    tiny_pipeline.build(tmp_path / "pipeline")
    images.write(tmp_path / "images", 4, tiny_pipeline.IMAGE_SIZE)
    programs = startup._programs("t2i-lora", tmp_path, tmp_path / "runs")
    program = next(one for one in programs if one.name == startup.SCRIPT)
    python, *module, case, mark = program.command[:5]
    assert module == ["-m", startup.SCRIPT_MODULE]
    done = run([python, "-c", STEP_AND_NOTE, str(tmp_path / "imported"), case, mark, *program.command[5:]])
    assert done.code == 0, done.output
    assert program.mark.exists()
    imported = {name.partition(".")[0] for name in (tmp_path / "imported").read_text().split()}
    assert {"fastdiff_bench", "datasets", "diffusers", "peft", "torch"} <= imported
    assert not {"fastdiff", "fastdiff_kernels"} & imported


def test_ratios_are_of_one_round() -> None:
    def starts(*cpu: float) -> list[Start]:
        return [Start(1.0, seconds, 1) for seconds in cpu]

    given = {"fastdiff, python": starts(1.0, 9.0), startup.SCRIPT: starts(2.0, 18.0)}
    [ratio] = [row for row in startup._measurements("t2i", given, 1) if "/" in row.quantity]
    assert (ratio.provider, ratio.value, ratio.p20, ratio.p80) == ("fastdiff, python", 0.5, 0.5, 0.5)


@pytest.mark.nightly
def test_a_warm_start_on_another_node_compiles_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["startup", "dit-s-2", "--smoke", "--out", str(tmp_path)]) == 0, capsys.readouterr().err
    found = {(row.provider, row.quantity): row.value for row in record.read(tmp_path / "startup.jsonl").measurements}
    for quantity in ("processes of compilers", "parts of graphs compiled"):
        assert found[startup.COLD, quantity] > 0
        assert found[startup.WARM, quantity] == 0
    assert found[startup.WARM, "kernels compiled by Triton"] == 0


def test_counts_are_the_largest_and_the_ratio_is_of_one_round() -> None:
    def compilation(cpu: float, compilers: int) -> Compilation:
        return Compilation(cpu, compilers, triton=0, graphs=1, anew=2, kernels=6)

    pairs = [(compilation(20.0, 40), compilation(5.0, 0)), (compilation(40.0, 41), compilation(10.0, 1))]
    found = {(row.provider, row.quantity): row.value for row in startup._compared("dit-s-2", pairs)}
    assert found[startup.WARM, "processes of compilers"] == 1, "one round that compiled is not hidden by the others"
    assert found[startup.WARM, "processor time / cold"] == 0.25


def test_the_rehearsal_has_rows_of_its_own() -> None:
    """Of the programs that have one."""
    ours = [Start(9.0, 8.0, 1, rehearsal=(wall, cpu)) for wall, cpu in ((1.0, 0.5), (3.0, 2.5))]
    given = {"fastdiff, python": ours, startup.SCRIPT: [Start(1.0, 2.0, 1)] * 2}
    found = [row for row in startup._measurements("t2i", given, 1) if row.quantity in startup.REHEARSAL]
    assert [(row.provider, row.value) for row in found] == [("fastdiff, python", 2.0), ("fastdiff, python", 1.5)]


def test_an_unknown_case_is_refused(tmp_path: Path) -> None:
    assert main(["startup", "nonesuch", "--out", str(tmp_path)]) == 2
    assert not list(tmp_path.iterdir())
