"""``make`` installs what the driver of the machine can run, or says what does not fit."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import install

ROOT = Path(__file__).parents[2]
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22)\n"
CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Sun Sep  7 11:00:00 UTC 2025\nGCC version:  gcc version 12.3.0"
)


def machine(root: Path, *, driver: str = "", text: str = OPEN, gpu: bool = False, cpu: bool = True) -> Path:
    """A file system with what the kernel tells of a driver and of PCI devices."""
    if driver:
        module = root / "proc/driver/nvidia/version"
        module.parent.mkdir(parents=True)
        module.write_text(text.format(driver))
    devices = {"0000:00:02.0": ("0x8086", "0x030000")}
    if gpu:
        devices |= {"0000:18:00.1": ("0x10de", "0x040300"), "0000:18:00.0": ("0x10de", "0x030200")}
    for name, (vendor, kind) in devices.items():
        folder = root / "sys/bus/pci/devices" / name
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    return root


@pytest.fixture(autouse=True)
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder first on the path, for an ``nvidia-smi``; as long as it is empty there is none."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    write_smi(folder, "exit 9")  # as without a driver
    return folder


def write_smi(folder: Path, text: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        ("525.60.13", "12"),
        ("535.183.01", "12"),
        ("579.99", "12"),
        ("580.65.06", "13"),
        ("595.44", "13"),
        ("1001.2", "13"),
    ],
)
@pytest.mark.parametrize("text", [OPEN, CLOSED], ids=["open", "closed"])
def test_the_driver_decides_on_the_cuda_version(tmp_path: Path, driver: str, expected: str, text: str) -> None:
    assert install.choose(machine(tmp_path / "root", driver=driver, text=text, gpu=True)) == expected


def test_nvidia_smi_tells_where_the_kernel_does_not(tmp_path: Path, smi: Path) -> None:
    """Under WSL, and in some sandboxes."""
    write_smi(smi, 'case "$*" in *driver_version*) echo 550.54.15 ;; *) echo 8.6; echo 7.5 ;; esac')
    root = machine(tmp_path / "root")
    assert install.choose(root) == "12"
    assert install.describe("12", root) == "NVIDIA driver 550.54.15: installing for CUDA 12 (constraints-cu12.txt)"


def test_a_machine_without_a_gpu_gets_what_a_cpu_needs(tmp_path: Path) -> None:
    root = machine(tmp_path / "root")
    assert install.choose(root) == "cpu"
    assert install.describe("cpu", root) == "no NVIDIA driver: installing for the CPU (constraints.txt)"


@pytest.mark.parametrize(
    ("driver", "gpu", "capability", "message"),
    [
        ("470.256.02", True, "8.0", "the NVIDIA driver is 470.256.02; expected 580 or newer for CUDA 13, 525 or newer"),
        ("", True, "", "the NVIDIA GPU 0000:18:00.0 has no driver; install version 580 or newer"),
        ("580.65.06", True, "6.1\n7.0", "the GPU has compute capability 7.0; torch and Triton need 7.5 or newer"),
    ],
)
def test_what_does_not_fit_is_said_with_the_remedy(
    tmp_path: Path, smi: Path, driver: str, gpu: bool, capability: str, message: str
) -> None:
    write_smi(smi, f'case "$*" in *compute_cap*) printf "{capability}\\n" ;; *) exit 9 ;; esac')
    with pytest.raises(install.Unfit, match=re.escape(message)) as error:
        install.choose(machine(tmp_path / "root", driver=driver, gpu=gpu))
    assert str(error.value).endswith("CUDA=cpu make")


def test_a_choice_that_the_driver_cannot_run_is_a_warning(tmp_path: Path) -> None:
    """It is a choice, and packages for forward compatibility exist."""
    root = machine(tmp_path / "root", driver="550.54.15")
    assert install.describe("13", root).endswith("warning: CUDA 13 needs driver 580 or newer")
    assert "warning" not in install.describe("12", root)


@pytest.mark.parametrize(("asked", "code"), [("14", 2), ("/usr/local/cuda", 2)])
def test_an_unknown_choice_is_refused_before_anything_is_installed(asked: str, code: int) -> None:
    command = [sys.executable, "install.py"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CUDA": asked}, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == f"install.py: CUDA={asked}: expected 13, 12, cpu, or nothing\n"


PYTHON = """
import os, pathlib, sys
here = pathlib.Path(sys.argv[0]).parent
with open({log!r}, "a") as file:
    file.write(" ".join([os.environ.get("PIP_CONSTRAINT", "-"), *sys.argv[1:]]) + "\\n")
print("2.13.0 1")
"""


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log of the commands that the Python of a new environment gets; nothing is installed."""
    log = tmp_path / "log"
    real = subprocess.run

    def run(command: list[str | Path], **options: object) -> object:
        words = [str(word) for word in command]
        if words[1:3] != ["-m", "venv"]:
            return real(words, **options)  # type: ignore[call-overload]
        real([*words, "--without-pip"], check=True, timeout=60)
        python = Path(words[-1]) / "bin" / "python"
        python.unlink()  # a link to the real one
        python.write_text(f"#!{words[0]}\n{PYTHON.format(log=str(log))}")
        python.chmod(0o755)
        return None

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(install, "_reachable", lambda host: False)
    return log


def test_a_set_is_installed_with_its_constraints_and_its_extras(tmp_path: Path, pip: Path) -> None:
    for name in ("12", "13", "cpu"):
        install.install(name, tmp_path / name)
    lines = [line for line in pip.read_text().splitlines() if "pip" in line]
    editable = "-m pip install --quiet --editable"
    assert lines == [
        "constraints-cu12.txt -m pip install --quiet torch triton",
        f"constraints-cu12.txt {editable} .[cuda12,all]",
        "constraints.txt -m pip install --quiet torch triton",
        f"constraints.txt {editable} .[cuda13,all]",
        "constraints.txt -m pip install --quiet torch triton",
        f"constraints.txt {editable} .[cuda13,all]",
    ]


def test_the_tools_of_the_developers_are_installed_for_them_alone(tmp_path: Path, pip: Path) -> None:
    """And without them again for the demo, the mark of the tests stays as old as it is."""
    environment = tmp_path / "venv"
    install.install("13", environment)
    assert not (environment / "developing").exists()
    install.install("13", environment, developers=True)
    assert pip.read_text().splitlines()[-2].endswith("--editable .[cuda13,all,docs,dev]")
    assert (environment / "developing").read_text() == (environment / "installed").read_text() == "13\n"


def test_the_cpu_takes_small_wheels_where_their_index_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_reachable", lambda host: True)
    first, second = install.commands("cpu", Path("python"))
    assert first[-4:] == ["--extra-index-url", install.CPU_WHEELS, "torch", "triton"]
    assert "--extra-index-url" not in [*second, *install.commands("13", Path("python"))[0]]


@pytest.mark.parametrize(("mark", "kept"), [(None, False), ("", False), ("12 12\n", False), ("13\n", True)])
def test_an_environment_of_an_unknown_set_is_replaced(
    tmp_path: Path, pip: Path, capsys: pytest.CaptureFixture[str], mark: str | None, kept: bool
) -> None:
    """An older Makefile touched the mark; nothing tells which CUDA its packages are for."""
    environment = tmp_path / "venv"
    (environment / "lib").mkdir(parents=True)
    (environment / "lib" / "old").touch()
    if mark is not None:
        (environment / "installed").write_text(mark)
    install.install("13", environment)
    assert (environment / "lib" / "old").exists() == kept
    assert ("is made anew" in capsys.readouterr().out) != kept
    assert pip.exists()


def test_the_python_that_makes_the_environment_is_none_of_its_own(
    tmp_path: Path, pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder comes first on the path of ``make``, so that ``python3`` there runs ``install.py``."""
    environment = tmp_path / "venv"
    install.install("13", environment)
    own = environment / "bin" / "python3-of-make"
    own.symlink_to(Path(sys.executable).resolve())
    monkeypatch.setattr(sys, "executable", str(own))
    install.install("12", environment)
    assert not own.exists()
    assert (environment / "installed").read_text() == "12\n"
    assert pip.exists()


def test_an_installation_that_fails_is_not_marked_as_done_and_leaves_no_packages_to_another_set(
    tmp_path: Path, pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = tmp_path / "venv"
    install.install("13", environment)
    with monkeypatch.context() as offline:
        offline.setattr(
            install, "commands", lambda name, python, **options: [["touch", str(python.parent / name)], ["false"]]
        )
        for name, asked in (("13", ""), ("12", "12")):
            with pytest.raises(subprocess.CalledProcessError):
                install.install(name, environment, asked)
            assert not (environment / "installed").exists()
            assert (environment / "bin" / name).exists()
    assert not (environment / "bin" / "13").exists()
    assert install.recorded(environment) == ["12", "12"], "the choice survives as well"
    install.install("12", environment)
    assert (environment / "bin" / "12").exists(), "what pip has installed already"
    install.install("13", environment)
    assert not (environment / "bin" / "12").exists()
    assert pip.exists()


def touch_packages(root: Path) -> None:
    """Create the other files on which an installation depends."""
    for name in ("kernels/pyproject.toml", "fastdiff/version.py", "kernels/fastdiff_kernels/__init__.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


MAKE = {name: value for name, value in os.environ.items() if name not in ("CUDA", "MAKEFLAGS", "MAKELEVEL")}


def test_make_installs_anew_for_another_choice_only(tmp_path: Path) -> None:
    """What ``make`` would run, by its own dry run, in a folder whose environment is newer than all else."""
    for name in ("Makefile", "install.py", "pyproject.toml", *(path.name for path in ROOT.glob("constraints*.txt"))):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    touch_packages(tmp_path)
    (tmp_path / ".venv").mkdir()
    for name in ("cuda", "installed", "developing"):
        (tmp_path / ".venv" / name).write_text("12 12\n")
    newer = max(path.stat().st_mtime for path in tmp_path.rglob("*") if path.is_file()) + 10
    for name in ("installed", "developing"):
        os.utime(tmp_path / ".venv" / name, (newer, newer))

    def installs(*words: str) -> bool:
        command = ["make", "--dry-run", "lint", *words]
        done = subprocess.run(command, cwd=tmp_path, env=MAKE, capture_output=True, text=True, timeout=60, check=True)
        assert "ruff check" in done.stdout
        return "install.py" in done.stdout

    assert [installs(), installs("CUDA=12"), installs("CUDA=13"), installs("CUDA=cpu")] == [False, False, True, True]
    os.utime(tmp_path / "constraints-common.txt", (newer + 10, newer + 10))
    assert installs()


@pytest.mark.parametrize("target", ["demo", "demo-t2i"])
@pytest.mark.parametrize(
    ("recorded", "given", "on_the_cpu"),
    [
        ("cpu", [], False),  # chosen where there is no driver
        ("cpu", ["CUDA=cpu"], True),
        ("cpu cpu", [], True),
        ("cpu cpu", ["CUDA=13"], False),
        ("13 13", [], False),
    ],
)
def test_the_demos_run_beside_a_gpu_on_the_cpu_if_it_was_asked_for(
    tmp_path: Path, target: str, recorded: str, given: list[str], on_the_cpu: bool
) -> None:
    """The flag, because DeepSpeed's launcher names devices to its ranks; the variable, for the other commands."""
    shown = 'show:\n\t@echo "[$$CUDA_VISIBLE_DEVICES]"\n'
    (tmp_path / "Makefile").write_text(f"{(ROOT / 'Makefile').read_text()}\n{shown}")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "cuda").write_text(f"{recorded}\n")

    def make(*words: str) -> str:
        command, environment = ["make", *given, *words], MAKE | {"CUDA_VISIBLE_DEVICES": "0"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout

    assert make("show") == ("[]\n" if on_the_cpu else "[0]\n")
    for name in ("install.py", "pyproject.toml", *(path.name for path in ROOT.glob("constraints*.txt"))):
        (tmp_path / name).touch()
    touch_packages(tmp_path)
    device = "--performance.device cpu"
    ordinary, on_cpu = {
        "demo": ("fastdiff demo", f"fastdiff demo -- {device}"),
        "demo-t2i": (train := "fastdiff train --preset digits-t2i --deepspeed_config zero3", f"{train} {device}"),
    }[target]
    (line,) = (line.rstrip() for line in make("--dry-run", target).splitlines() if line.startswith(ordinary))
    assert line == (on_cpu if on_the_cpu else ordinary)


def constraints(name: str) -> dict[str, str]:
    """Return the exact version of every package of a file, with those of the files that it names."""
    found: dict[str, str] = {}
    for line in (ROOT / name).read_text().splitlines():
        if line.startswith("-c "):
            found |= constraints(line.removeprefix("-c "))
        elif line and not line.startswith("#"):
            package, _, version = line.partition("==")
            assert re.fullmatch(r"[\w.+]+", version), line
            assert package.lower() not in found, f"{package}: twice"
            found[package.lower()] = version
    return found


def test_both_sets_pin_what_differs_and_the_ranges_contain_it() -> None:
    """And the set for CUDA 12 has all that the project uses on a GPU."""
    sets = {name: constraints(versions.constraints) for name, versions in install.SETS.items()}
    assert (sets["13"]["torch"], sets["12"]["torch"]) == ("2.13.0", "2.10.0")
    assert {"torch", "triton", "xformers", "nvidia-dali-cuda120", "bitsandbytes", "deepspeed"} <= sets["12"].keys()
    assert not any(name.endswith(("cu13", "cuda130")) for name in sets["12"])
    assert not any(name.endswith(("cu12", "cuda120")) for name in sets["13"])
    assert "xformers" not in sets["13"], "its wheel is built for CUDA 12"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {re.split(r"[<>=;\[ ]", text)[0]: text for text in project["dependencies"]}
    assert ranges["torch"].startswith("torch>=2.10,")
    extras = project["optional-dependencies"]
    assert set(extras["dali"]) < set(extras["cuda13"])
    for versions in install.SETS.values():
        assert {versions.extra, install.EXTRAS, *install.DEVELOPERS.split(",")} <= extras.keys()


def test_the_demo_installs_no_tools_of_the_developers(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    for name in ("install.py", "pyproject.toml", *(path.name for path in ROOT.glob("constraints*.txt"))):
        (tmp_path / name).touch()
    touch_packages(tmp_path)
    for target, developers in (("demo", False), ("demo-t2i", False), ("test", True), ("lint", True), ("bench", True)):
        command = ["make", "--dry-run", target]
        done = subprocess.run(command, cwd=tmp_path, env=MAKE, capture_output=True, text=True, timeout=60, check=True)
        (line,) = (line for line in done.stdout.splitlines() if "install.py" in line)
        assert line.endswith("install.py --dev") == developers, target
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    ours = {name for texts in extras.values() for name in texts if name not in extras["dev"]}
    assert not {re.split(r"[<>=;\[ ]", text)[0] for text in ours} & {"pytest", "hypothesis", "ruff", "mypy", "moto"}
