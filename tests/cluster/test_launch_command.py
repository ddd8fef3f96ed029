"""``fastdiff launch``: real shells run its scripts, with stand-ins only for commands of a cluster.

A stand-in records the arguments that it was given, so nothing is believed of how a shell reads a line.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastdiff.cli.main import _parser, main
from fastdiff.cluster.launchers import hosts, kubernetes, slurm
from fastdiff.cluster.launchers.hostfile import Hosts, read_hostfile
from fastdiff.cluster.launchers.job import Job
from fastdiff.errors import ConfigError
from fastdiff.ledger.records import SUBMITTED
from tests.support.processes import BIN, ROOT, Finished, start, stop
from tests.support.waiting import wait_until

HOSTILE = (
    "$(touch pwned)", "`touch pwned`", "; touch pwned", "| touch pwned", "&& touch pwned", "it's", 'say "x"', "$HOME",
    "a\ntouch pwned\n", "a\n#SBATCH --nodes=9\n", "--node-rank", "*", "back\\slash", "", "ünï", "{braces}", "%n",
    "$(X)", "--master MASTER --port PORT",
)  # fmt: skip
JOB = Job(nodes=2, ranks_per_node=4, preflight=True, flags=("--preset", "digits", *HOSTILE))

_STAND_IN = """#!{python}
import glob, json, os, signal, subprocess, sys, time
name, record = os.path.basename(sys.argv[0]), os.environ["RECORD"]
with open(f"{{record}}/{{name}}-{{os.getpid()}}.json", "w") as file:
    json.dump({{"argv": sys.argv[1:], "cwd": os.getcwd(), "submitted": os.environ.get("{submitted}")}}, file)
"""
_BEHAVIOURS = {
    "scontrol": 'print("node-a\\nnode-b" if sys.argv[1] == "show" else "")',
    "squeue": 'print("2026-01-02T03:04:05" if "--format=%V" in sys.argv else os.environ.get("STATE", "RUNNING"))',
    "srun": """
def stop(number, _):
    open(f"{record}/signalled-{signal.Signals(number).name}", "w").close()
    sys.exit(75)
signal.signal(signal.SIGUSR1, stop)
signal.signal(signal.SIGTERM, stop)
words = sys.argv[1:]
command = words[next(place for place, word in enumerate(words) if not word.startswith("--")):]
for node in "01":
    subprocess.run(command, env={**os.environ, "SLURM_NODEID": node}, check=True)
open(f"{record}/srun-ready", "w").close()
time.sleep(float(os.environ.get("SRUN_SLEEP", "0")))
sys.exit(int(os.environ.get("SRUN_EXIT", "0")))
""",
    "ssh": """
if sys.argv[-2] == os.environ.get("UNREACHABLE"):
    while len(glob.glob(f"{record}/waiting-*")) < 2:  # the other two hosts
        time.sleep(0.01)
    sys.exit(255)
os.execv("/bin/sh", ["sh", "-c", sys.argv[-1]])  # as sshd gives it to the login shell
""",
    "py thon": """
if "UNREACHABLE" in os.environ:  # a supervisor that waits for the others
    sys.stdout.write("waiting\\n")
    sys.stdout.flush()
    open(f"{record}/waiting-{os.getpid()}", "w").close()
    sys.stdin.read()
    sys.exit(75)
""",
    "sbatch": 'print("4711;cluster")',
    "kubectl": 'print("job.batch/x created")',
}


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """An environment in whose PATH stand-ins come first; what they were given is in the folder RECORD."""
    folder, record = tmp_path / "bin", tmp_path / "record"
    folder.mkdir()
    record.mkdir()
    for name in (*_BEHAVIOURS, "deepspeed"):
        path = folder / name
        path.write_text(_STAND_IN.format(python=sys.executable, submitted=SUBMITTED) + _BEHAVIOURS.get(name, ""))
        path.chmod(0o755)
    return {"PATH": f"{folder}:{BIN}:{os.environ['PATH']}", "RECORD": str(record)}


def recorded(stand_ins: dict[str, str], name: str) -> list[dict[str, Any]]:
    files = sorted(Path(stand_ins["RECORD"]).glob(f"{name}-*.json"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(file.read_text()) for file in files]


def with_stand_ins(monkeypatch: pytest.MonkeyPatch, stand_ins: dict[str, str]) -> None:
    """Let commands that this process starts be stand-ins."""
    for name, value in stand_ins.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def work(tmp_path: Path, stand_ins: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder whose name needs quotes, with an interpreter that records."""
    folder = tmp_path / "it's $(touch pwned); here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "py thon"))
    return folder


def run_script(path: Path, cwd: Path, stand_ins: dict[str, str], **more: str) -> Finished:
    environment = {**os.environ, **stand_ins, "SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "node-[a-b]", **more}
    done = subprocess.run(
        ["bash", str(path)], cwd=cwd, env=environment, timeout=240, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return Finished(done.returncode, done.stdout)


def test_a_progress_bar_is_shown_once_a_second() -> None:
    """Each piece up to a carriage return is not a line, and nothing of a line is lost."""
    reader, writer = os.pipe()
    os.write(writer, b"begin\n" + b"".join(b"\rstep %d" % step for step in range(1000)) + b"\nend\r\nlast")
    os.close(writer)
    with os.fdopen(reader, "rb") as source:
        assert list(hosts._lines(source)) == [b"begin", b"step 999", b"end", b"last"]


def test_the_cache_folder_is_forwarded() -> None:
    assert hosts.forwarded({"FASTDIFF_CACHE": "/shared/me", "FASTDIFF_PREFLIGHT": "1"}) == {
        "FASTDIFF_CACHE": "/shared/me"
    }


def test_devices_of_this_machine_are_not_forwarded() -> None:
    assert hosts.forwarded({"CUDA_VISIBLE_DEVICES": "3", "CUDA_HOME": "/cuda"}) == {"CUDA_HOME": "/cuda"}


def test_variables_of_trackers_are_forwarded_and_their_keys_are_named() -> None:
    given = {
        "WANDB_PROJECT": "mine", "WANDB_BASE_URL": "https://wandb.example", "TRACKIO_SPACE_ID": "me/space",
        "NETRC": "/home/me/netrc",
    }  # fmt: skip
    keys = {"WANDB_API_KEY": "0123456789", "TRACKIO_WRITE_TOKEN": "x", "HF_TOKEN": "hf_x"}
    assert hosts.forwarded({**given, **keys}) == given
    assert hosts.withheld({**given, **keys}) == list(keys)


def test_a_job_that_lacks_the_variables_of_a_tracker_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("TRACKIO_DIR", "/nowhere")
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    out = ["--output", str(tmp_path / "job")]
    flags = ["--", "--preset", "digits", "--output.report_to", "wandb"]
    sizes = ["--nodes", "2", "--ranks-per-node", "1", "--image", "i"]
    for target, told in (
        (["hosts", "--hostfile", str(tmp_path / "hosts")], "write them into ~/.deepspeed_env"),
        (["k8s", *sizes], "put them into a Secret"),
        (["k8s", *sizes, "--secret", "mine"], ""),
    ):
        assert main(["launch", *target, *out, *flags]) == 0
        said = capsys.readouterr().err
        named = re.findall(r"(WANDB_\w+(?:, WANDB_\w+)*): not [^\n]*" + re.escape(told), said)
        assert named == (["WANDB_MODE, WANDB_PROJECT"] if told else [])


# --- Slurm


def batch(**more: Any) -> slurm.Batch:
    return slurm.Batch(name="fastdiff", **more)


def test_the_batch_script_gives_every_word_literally_to_every_node(
    tmp_path: Path, work: Path, stand_ins: dict[str, str]
) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(slurm.script(JOB, batch()))
    subprocess.run(["bash", "-n", str(script)], check=True)
    done = run_script(script, tmp_path, stand_ins)
    assert done.code == 0, done.output
    first, second = recorded(stand_ins, "py thon")
    port = str(20_000 + 4242)
    for node, given in enumerate((first, second)):
        assert given["cwd"] == str(work)
        assert given["submitted"] == "2026-01-02T03:04:05", "for the ledger"
        assert given["argv"] == [
            "-u", "-m", "fastdiff.cluster.supervisor.main",
            "--node-rank", str(node), "--nodes", "2", "--ranks-per-node",
            "4", "--master", "node-a", "--port", port, "--", *JOB.flags,
        ]  # fmt: skip
    assert not list(tmp_path.rglob("pwned"))
    assert not [given for given in recorded(stand_ins, "scontrol") if given["argv"][0] == "requeue"]


def test_the_directives_of_the_batch_script(work: Path) -> None:
    lines = slurm.script(JOB, batch(time="1-12:00:00", partition="gpu,big", account="team.a", signal_before_s=300,
                                    options={"gpus-per-node": "8", "exclusive": ""})).splitlines()  # fmt: skip
    directives = [line.removeprefix("#SBATCH --") for line in lines[1 : lines.index("set -u") - 1]]
    assert lines[0] == "#!/bin/bash"
    assert directives == [
        "job-name=fastdiff", "nodes=2", "ntasks-per-node=1", "time=1-12:00:00", "partition=gpu,big", "account=team.a",
        "requeue", "open-mode=append", "signal=B:USR1@300", "gpus-per-node=8", "exclusive",
    ]  # fmt: skip


@pytest.mark.fault(12)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
@pytest.mark.parametrize(("state", "requeued"), [("RUNNING", 1), ("COMPLETING", 0)])
def test_the_batch_step_passes_signals_on_and_requeues_only_what_still_runs(
    tmp_path: Path, work: Path, stand_ins: dict[str, str], number: signal.Signals, state: str, requeued: int
) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(slurm.script(JOB, batch()))
    environment = stand_ins | {"SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "x", "STATE": state, "SRUN_SLEEP": "600"}
    process = start(["bash", script], tmp_path, **environment)
    try:
        wait_until((Path(stand_ins["RECORD"]) / "srun-ready").exists, "srun to start its tasks")
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
    finally:
        stop(process)
    assert process.returncode == 75, output
    signalled = [path.name for path in Path(stand_ins["RECORD"]).glob("signalled-*")]
    assert signalled == ["signalled-SIGUSR1"], "at SIGTERM srun ends its tasks"
    asked = [given["argv"] for given in recorded(stand_ins, "scontrol") if given["argv"][0] == "requeue"]
    assert asked == [["requeue", "4242"]] * requeued


@pytest.mark.parametrize("code", [2, 70])
def test_a_run_that_failed_is_not_requeued(tmp_path: Path, work: Path, stand_ins: dict[str, str], code: int) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(slurm.script(JOB, batch()))
    assert run_script(script, tmp_path, stand_ins, SRUN_EXIT=str(code)).code == code
    assert [given["argv"][0] for given in recorded(stand_ins, "scontrol")] == ["show"]


BAD_NAMES = ["", "a b", "a\nb", "$(touch pwned)", "a;b", "-a", "a'b", 'a"b', "ü", "a#b"]


@pytest.mark.parametrize("value", BAD_NAMES)
@pytest.mark.parametrize("field", ["name", "partition", "account", "time"])
def test_names_that_slurm_could_read_otherwise_are_refused(field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"--{field}"):
        slurm.Batch(**{"name": "fastdiff", field: value})


@pytest.mark.parametrize(
    "option", ["nodes=4", "signal=KILL@1", "wrap=x", "comment=a b", "x=$(touch pwned)", "A=1", "x=a\nb"]
)
def test_options_of_sbatch_are_checked(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*slurm_argv(tmp_path), "--sbatch", option, "--", "--preset", "digits"]
    assert main(argv) == 2
    assert "--sbatch" in capsys.readouterr().err
    assert not (tmp_path / "job").exists()


def slurm_argv(folder: Path) -> list[str]:
    return ["launch", "slurm", "--nodes", "2", "--ranks-per-node", "4", "--output", str(folder / "job")]


def test_slurm_writes_or_submits(
    tmp_path: Path, stand_ins: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = slurm_argv(tmp_path)
    with_stand_ins(monkeypatch, stand_ins)
    assert main([*argv, "--", "--preset", "digits", "--output.folder", "a b"]) == 0
    assert f"next: sbatch {tmp_path / 'job'}" in capfd.readouterr().out
    assert not recorded(stand_ins, "sbatch")
    assert "#SBATCH --gpus-per-node=4" in (tmp_path / "job").read_text()
    assert (tmp_path / "job").stat().st_mode & 0o077 == 0
    assert main([*argv, "--submit", "--", "--preset", "digits"]) == 0
    assert "submitted job 4711\n" in capfd.readouterr().out
    (given,) = recorded(stand_ins, "sbatch")
    assert given["argv"] == ["--parsable", str(tmp_path / "job")]


@pytest.mark.parametrize(
    ("options", "device", "asked"),
    [
        ([], [], ["gpus-per-node=4", "cpus-per-task=32"]),
        (["--gpus-per-node", "8", "--cpus-per-task", "64", "--exclusive"], [], [
            "gpus-per-node=8", "cpus-per-task=64", "exclusive",
        ]),
        (["--gpus-per-node", "0", "--cpus-per-task", "0"], [], []),
        ([], ["--performance.device", "cpu"], ["cpus-per-task=32"]),
        (["--sbatch", "gres=gpu:h100:4", "--sbatch", "cpus-per-gpu=12"], [], ["gres=gpu:h100:4", "cpus-per-gpu=12"]),
    ],
)  # fmt: skip
def test_slurm_is_asked_for_gpus_and_cores(
    tmp_path: Path, options: list[str], device: list[str], asked: list[str]
) -> None:
    """A run that asked for GPUs does not start without."""
    assert main([*slurm_argv(tmp_path), *options, "--", "--preset", "digits", *device]) == 0
    script = (tmp_path / "job").read_text()
    found = re.findall(r"^#SBATCH --((?:gpus|gres|cpus|exclusive)\S*)$", script, re.MULTILINE)
    assert found == asked
    assert ("--performance.device cuda" in script) == ("0" not in options and not device)
    assert ("--performance.device cpu" in script) == bool(device)


def test_a_data_set_that_is_not_here_is_a_warning_and_one_that_does_not_fit_an_error(
    tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--", "--preset", "dit-s-2-256", "--data.path"]
    assert main([*slurm_argv(tmp_path), *run, "no/where"]) == 0
    said = capsys.readouterr().err
    assert "warning: seen from this machine: --data.path no/where: no data set" in said
    assert "; each node looks again before the start" in said
    assert "`fastdiff encode IMAGENET no/where --pretrained stabilityai/sd-vae-ft-ema" in said
    (tmp_path / "job").unlink()
    assert main([*slurm_argv(tmp_path), *run, str(digits), "--model.size", "32", "--model.patch", "8"]) == 2
    assert "use --model.channels 1 --model.size 8" in capsys.readouterr().err
    assert not (tmp_path / "job").exists()


# --- the flags of the run


@pytest.mark.parametrize(
    ("target", "missing"),
    [("local", "--ranks"), ("hosts", "--hostfile"), ("slurm", "--nodes and --ranks-per-node"), ("k8s", "--image")],
)
def test_a_missing_flag_comes_with_a_complete_command(
    capsys: pytest.CaptureFixture[str], target: str, missing: str
) -> None:
    assert main(["launch", target, "--no-preflight"]) == 2
    said = capsys.readouterr().err
    assert missing in said
    (command,) = re.findall(r"for example: (fastdiff launch .+)", said)
    assert command.split()[2] == target
    own = command.split()[1 : command.split().index("--")]
    assert _parser().parse_args(own).target == target


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--", "--preset", "digist"], "did you mean digits"),
        (["--", "--preset", "digits", "--optim.lrr", "1"], "--optim.lr"),
        (["--", "--preset", "digits", "--batch.samples", "60", "--samples", "60"], "is not divisible by"),
        (["--", "--preset", "digits", "--performance.cuda_graph"], "there is none with ZeRO stage 1: "),
        (["--", "--preset", "digits", "--deepspeed_config", "none.json"], "none.json"),
        (["--preset", "digits"], None),
        ([], "the flags of the run go after a --"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str | None
) -> None:
    try:
        code = main([*slurm_argv(tmp_path), *flags])
    except SystemExit as stopped:  # of argparse
        code = stopped.code
    assert code == 2
    assert message is None or message in capsys.readouterr().err
    assert not (tmp_path / "job").exists()


# --- hosts


def test_hostfiles_are_read_as_deepspeed_reads_them(tmp_path: Path) -> None:
    from deepspeed.launcher.runner import _parse_hostfile

    text = "# ours\n\nnode-1.example slots=4\n  10.0.0.2   slots=4 # with a comment\n"
    (tmp_path / "hosts").write_text(text)
    found = read_hostfile(tmp_path / "hosts")
    assert found == Hosts(("node-1.example", "10.0.0.2"), 4)
    assert dict.fromkeys(found.names, found.slots) == dict(_parse_hostfile(text.splitlines()))


@pytest.mark.fault(28)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=4\nb slots=8\n", "b has slots=8, a slots=4"),
        ("a slots=4\na slots=4\n", "line 2: a is listed twice"),
        ("a\n", "expected a host and its ranks"),
        ("a slots=0\n", "expected a host and its ranks"),
        ("a slots=٣\n", "expected a host and its ranks"),
        ("", "no hosts"),
        *((f"{name} slots=1\n", "letters, digits, dots and dashes") for name in (
            "$(touch${IFS}pwned)", "a;b", "-oProxyCommand=touch", "a'b", 'a"b', "user@host", "a|b", "ünï", "`id`", ".a",
        )),
        ("a b slots=1\n", "expected a host and its ranks"),
        ("a\rb slots=1\n", "expected a host and its ranks"),
    ],
)  # fmt: skip
def test_bad_hostfiles_are_refused_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_hostfile(tmp_path / "hosts")


@pytest.mark.fault(28)
def test_the_remote_shell_gives_every_word_literally(
    tmp_path: Path, work: Path, stand_ins: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in stand_ins.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0 $(touch pwned)")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    found = Hosts(("node-1", "10.0.0.2"), 4)
    assert hosts.run(JOB, found, tmp_path / "ssh config") == 0
    connections = sorted(recorded(stand_ins, "ssh"), key=lambda given: given["argv"][-2])
    for given, host in zip(connections, sorted(found.names), strict=True):
        assert given["argv"][:-1] == [
            "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-F", str(tmp_path / "ssh config"), "--", host,
        ]  # fmt: skip
        assert "hf_secret" not in given["argv"][-1]
        assert "NCCL_SOCKET_IFNAME" in given["argv"][-1]
    ranks = set()
    for given in recorded(stand_ins, "py thon"):
        assert given["cwd"] == str(work)
        argv = given["argv"]
        assert argv[:4] == ["-u", "-m", "fastdiff.cluster.supervisor.main", "--end-with-input"]
        assert argv[4] == "--node-rank"
        ranks.add(argv[5])
        assert argv[6:12] == ["--nodes", "2", "--ranks-per-node", "4", "--master", "node-1"]
        assert argv[argv.index("--") + 1 :] == list(JOB.flags)
    assert ranks == {"0", "1"}
    assert not list(tmp_path.rglob("pwned"))


def test_when_one_host_is_out_of_reach_the_others_are_stopped(
    work: Path, stand_ins: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    for name, value in {**stand_ins, "UNREACHABLE": "node-2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hosts, "_GRACE_S", 1.0)
    assert hosts.run(JOB, Hosts(("node-1", "node-2", "node-3"), 4), None) == 255
    output, errors = capfdbinary.readouterr()
    assert sorted(output.splitlines()) == [b"node-1: waiting", b"node-3: waiting"]
    assert errors == b"fastdiff: node-2: ssh could not connect, or lost the connection (255)\n"


def test_the_script_for_deepspeed_gives_it_every_word(tmp_path: Path, stand_ins: dict[str, str]) -> None:
    (tmp_path / "hosts file").write_text("a slots=2\nb slots=2\n")
    script = tmp_path / "run.sh"
    flags = ["--preset", "digits", "--output.folder", "a folder"]
    argv = ["launch", "hosts", "--hostfile", str(tmp_path / "hosts file"), "--output", str(script), "--"]
    assert main([*argv, *flags]) == 0
    assert run_script(script, tmp_path, stand_ins).code == 0
    (given,) = recorded(stand_ins, "deepspeed")
    assert given["argv"][:3] == ["--hostfile", str(tmp_path / "hosts file"), "--master_port"]
    assert given["argv"][4:] == [str(ROOT / "fastdiff" / "train.py"), *flags]
    script.unlink()
    assert main([*argv, "--preset", "digits", "--output.folder", "$(touch pwned)"]) == 2
    assert not script.exists()


# --- here


# --- Kubernetes


def pods(**more: Any) -> kubernetes.Pods:
    return kubernetes.Pods(name="fastdiff", image="registry.example/team/fastdiff:1.0", **more)


def expanded(text: str, variables: dict[str, str]) -> str:
    """As Kubernetes expands arguments: $(NAME) if there is such a variable, and $$ is a dollar sign."""
    pattern = re.compile(r"\$(?:(\$)|\(([^)]*)\))")
    return pattern.sub(lambda found: "$" if found[1] else variables.get(found[2], found[0]), text)


def test_the_manifest_gives_every_word_literally() -> None:
    text = kubernetes.manifest(JOB, pods(namespace="team", volumes={"data": "/data", "runs": "/mnt/my runs"}))
    service, job = yaml.safe_load_all(text)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    words = [expanded(word, {"JOB_COMPLETION_INDEX": "1", "X": "pwned"}) for word in container["args"]]
    assert container["command"] == ["python", "-u", "-m", "fastdiff.cluster.supervisor.main"]
    assert words == [
        "--node-rank", "1", "--nodes", "2", "--ranks-per-node", "4", "--master", "fastdiff-0.fastdiff", "--port",
        "29500", "--", *JOB.flags,
    ]  # fmt: skip
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert (service["spec"]["clusterIP"], pod["subdomain"]) == ("None", service["metadata"]["name"])
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert pod["terminationGracePeriodSeconds"] >= 60
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "4"}}
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert [mount["mountPath"] for mount in container["volumeMounts"]][1:] == ["/data", "/mnt/my runs"]


def test_k8s_asks_for_resources_places_and_gives_no_rights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["launch", "k8s", "--nodes", "2", "--ranks-per-node", "4", "--image", "i", "--output", str(tmp_path / "job")]
    more = ["--secret", "hub", "--toleration", "nvidia.com/gpu:NoSchedule", "--toleration", "team=vision"]
    assert main([*argv, *more, "--node-selector", "gpu=h100", "--", "--preset", "digits"]) == 0
    assert "warning: without --pvc the run folder" in capsys.readouterr().err
    pod, container = pod_of(tmp_path / "job")
    assert container["resources"] == {
        "limits": {"nvidia.com/gpu": "4"}, "requests": {"cpu": "32", "memory": "128Gi"},
    }  # fmt: skip
    assert container["args"][-2:] == ["--performance.device", "cuda"]
    assert container["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert pod["nodeSelector"] == {"gpu": "h100"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "vision"},
    ]
    rights = pod["securityContext"]
    assert (rights["runAsNonRoot"], rights["runAsUser"], rights["fsGroup"]) == (True, 1000, 1000)
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert {"name": "HOME", "value": "/tmp"} in container["env"], "the image does not know the user"

    none = ["--gpus-per-node", "0", "--cpus", "0", "--memory", "0", "--user", "0", "--pvc", "data:/data"]
    assert main([*argv, *none, "--", "--preset", "digits"]) == 0
    assert "--pvc" not in capsys.readouterr().err
    pod, container = pod_of(tmp_path / "job")
    assert container["resources"] == {}
    assert "cuda" not in container["args"]
    assert not {"securityContext", "env", "envFrom"} & (container.keys() | pod.keys())


def pod_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    _, job = yaml.safe_load_all(path.read_text())
    pod = job["spec"]["template"]["spec"]
    return pod, pod["containers"][0]


def test_a_preempted_pod_starts_again_and_a_wrong_flag_does_not() -> None:
    _, job = yaml.safe_load_all(kubernetes.manifest(JOB, pods()))
    rules = job["spec"]["podFailurePolicy"]["rules"]
    by_code = {
        code: rule["action"] for rule in rules if "onExitCodes" in rule for code in rule["onExitCodes"]["values"]
    }
    assert by_code == {75: "Ignore", 2: "FailJob", 65: "FailJob", 70: "FailJob", 74: "FailJob"}
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never", "or Kubernetes refuses the policy"


@pytest.mark.fault(28)
@pytest.mark.parametrize(
    ("changed", "flag"),
    [
        *(({"name": value}, "--name") for value in ("", "A", "a_b", "a b", "a\nb", "-a", "a-", "9a", "a" * 53, "a: b")),
        *(({"image": value}, "--image") for value in ("", "a b", "a\nb", "$(x)", "a;b", "{a: b}")),
        *(({"namespace": value}, "--namespace") for value in ("", "A", "a.b", "a\nb", "a" * 64)),
        *(({"volumes": {claim: "/x"}}, "--pvc") for claim in ("", "A", "a b", "a\nb", "a..b")),
        *(({"volumes": {"a": path}}, "--pvc") for path in ("", "x", "/x:y", "/x\ny")),
        ({"volumes": {"a": "/x", "b": "/x"}}, "same path"),
        *(({"secrets": (name,)}, "--secret") for name in ("", "A", "a b", "a: b", "KEY=value")),
        *(({"tolerations": (taint,)}, "--toleration") for taint in ("", "a b", "a:Never", "a\nb", "{a}")),
        *(({"node_selector": {key: "x"}}, "--node-selector") for key in ("", "a b", "a\nb", "$(x)")),
        *(({"node_selector": {"a": value}}, "--node-selector") for value in ("a b", "a\nb", "a" * 64)),
    ],
)
def test_names_that_kubernetes_refuses_are_refused_here(changed: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        kubernetes.Pods(**{"name": "fastdiff", "image": "image", **changed})


def test_k8s_writes_or_submits(
    tmp_path: Path, stand_ins: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with_stand_ins(monkeypatch, stand_ins)
    argv = ["launch", "k8s", "--nodes", "2", "--ranks-per-node", "1", "--image", "i", "--output", str(tmp_path / "job")]
    assert main([*argv, "--pvc", "data:/data", "--", "--preset", "digits"]) == 0
    assert f"next: kubectl apply -f {tmp_path / 'job'}" in capfd.readouterr().out
    assert len(list(yaml.safe_load_all((tmp_path / "job").read_text()))) == 2
    assert main([*argv, "--submit", "--", "--preset", "digits"]) == 0
    assert "job.batch/x created" in capfd.readouterr().out
    (given,) = recorded(stand_ins, "kubectl")
    assert given["argv"] == ["apply", "-f", str(tmp_path / "job")]
    twice = main([*argv, "--pvc", "data:/a", "--pvc", "data:/b", "--", "--preset", "digits"])
    assert twice == 2
