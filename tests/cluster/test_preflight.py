"""The pre-flight on real nodes, each a process: every node reports the problems of all nodes by name."""

import math
import os
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from itertools import combinations
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from fastdiff.checkpoint.manifest import committed
from fastdiff.cluster.preflight import bandwidth, run, single_node
from fastdiff.cluster.preflight.bandwidth import Exchange, pairings
from fastdiff.cluster.preflight.node_checks import checkpoint_bytes, examine_data, examine_devices
from fastdiff.cluster.preflight.report import NodeReport, as_error, compare
from fastdiff.config.command_line import train_flags
from fastdiff.errors import ConfigError, DataError, StorageError
from fastdiff.parallel.world import World
from fastdiff.training.loop import train
from tests.support.injected import preflight_node
from tests.support.injected.pretended_gpu import PRETENDED, PretendedGpu
from tests.support.injected.system_calls import strace
from tests.support.injected.tiny_disk import tiny_disk
from tests.support.processes import ON_CPU, ROOT, Finished, start, stop
from tests.support.scripts import COMMAND, Launcher, Script, run_with_forks
from tests.support.servers.ports import reserved_port

ANY_DEVICE = ("--preset", "digits", "--data.path", "digits", "--output.folder", "run")
FLAGS = (*ANY_DEVICE, *ON_CPU)


def one_store() -> TCPStore:
    return TCPStore("127.0.0.1", reserved_port(), 1, True, timedelta(seconds=60))


class Nodes:
    """Nodes of one pre-flight, each in a working folder of its own that holds links to what they share."""

    def __init__(self, folder: Path, digits: Path, count: int) -> None:
        self.folders = [folder / f"node{node}" for node in range(count)]
        self.environments: list[dict[str, str]] = [{} for _ in self.folders]
        self.ahead_s = [0.0] * count
        self.prefixes: list[list[str]] = [[] for _ in self.folders]
        self.machines: list[list[Path]] = [[] for _ in self.folders]
        self.flags: tuple[str, ...] = FLAGS
        (folder / "shared").mkdir()
        for own in self.folders:
            own.mkdir()
            (own / "digits").symlink_to(digits)
            (own / "run").symlink_to(folder / "shared")

    def run(self, *, timeout_s: float = 240) -> list[Finished]:
        """Run the pre-flight; a node with a prefix or packages of its own is a command, as for a supervisor."""
        port, count = str(reserved_port()), str(len(self.folders))
        with ExitStack() as stack:
            running: list[subprocess.Popen[str] | Script] = []
            for node, folder in enumerate(self.folders):
                arguments = [port, str(node), count, str(self.ahead_s[node]), *self.flags]
                if self.prefixes[node] or (self.environments[node] and not self.machines[node]):
                    environment = {"PYTHONPATH": _PATH, **self.environments[node]}
                    process = start([*self.prefixes[node], *_COMMAND, *arguments], folder, **environment)
                    stack.callback(stop, process)
                    running.append(process)
                else:
                    words = [*self.machines[node], preflight_node.__file__, *arguments]
                    own = self.environments[node]
                    script = Launcher(*words, cwd=folder, **own)
                    running.append(stack.enter_context(script))
            return [_finished(node, timeout_s) for node in running]


_PATH = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
_COMMAND = [sys.executable, "-m", preflight_node.__name__]


def _finished(node: subprocess.Popen[str] | Script, timeout_s: float) -> Finished:
    if isinstance(node, Script):
        return node.wait(timeout_s)
    output, _ = node.communicate(timeout=timeout_s)
    return Finished(node.returncode, output)


@pytest.fixture
def nodes(tmp_path: Path, digits: Path) -> Nodes:
    return Nodes(tmp_path, digits, 2)


def test_good_nodes_pass_and_leave_nothing(nodes: Nodes) -> None:
    first, second = nodes.run()
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert "host0" in first.output
    assert "host1" in first.output
    assert "GB/s" in first.output
    assert "host0" not in second.output, "the table is node 0's"
    assert not list((nodes.folders[0] / "run").resolve().glob("*"))


def test_a_node_whose_gpu_torch_cannot_use_is_named(nodes: Nodes, tmp_path: Path) -> None:
    """Node 1 has one, node 0 none. With --performance.device cpu neither matters; the bandwidth is that of gloo."""
    nodes.flags = ANY_DEVICE
    gpu = PretendedGpu(tmp_path / "gpu", driver="535.183.01").make()
    nodes.machines[1], nodes.environments[1] = [PRETENDED], gpu.environment(mounted=False)
    for done in nodes.run():
        assert done.code == 2, done.output
        assert (
            "node 1 (host1): this machine has an NVIDIA GPU that torch cannot use: its driver 535.183.01" in done.output
        )
        assert "node 0 (host0): no GPU is visible on this node; ask the scheduler for GPUs" in done.output
        assert "2 problems on 2 of 2 nodes" in done.output
    nodes.flags = FLAGS
    first, second = nodes.run()
    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert "GB/s" in first.output


def test_a_node_that_takes_no_part_leaves_the_others_to_measure() -> None:
    """Its partners neither wait for it nor fail, whatever GPUs they have."""
    store = one_store()
    deadline = time.monotonic() + 120
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(bandwidth.measure, store, node, 3, 0, 8, deadline) for node in (0, 1)]
        assert bandwidth.measure(store, 2, 3, None, 8, deadline) == []
        first, second = (each.result() for each in running)
    assert [exchange.partner for exchange in first + second] == [1, 0]
    assert all(exchange.bytes_per_s for exchange in first + second)
    keys = bandwidth._keys(store)
    for device in range(8):
        assert list(bandwidth._tournament(keys, 0, 2, device, "nccl")) == [], "node 1 has no GPU, or none for it"


def test_fewer_gpus_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdiff.cluster.preflight.node_checks.usable_gpus", lambda asked: 4)
    assert examine_devices(2, "auto") == 2, "the bandwidth of as many is measured"
    assert examine_devices(4, "cuda") == 4
    with pytest.raises(ConfigError, match=r"has 4 GPUs.*, none for its rank 4 of 8"):
        examine_devices(8, "auto")


def test_every_kind_of_bad_node_is_named_on_all_nodes_at_once(nodes: Nodes) -> None:
    """Its clock, a package, the source, the data and the output folder: five things, each on node 1."""
    bad = nodes.folders[1]
    nodes.ahead_s[1] = 5.0
    site = bad / "site"
    for package in ("fastdiff", "kernels/fastdiff_kernels"):
        shutil.copytree(ROOT / package, site / Path(package).name)  # with its compiled files
    with (site / "fastdiff" / "progress.py").open("a") as source:
        source.write("# mended on this node only\n")
    shutil.copytree(ROOT / "tests" / "support", site / "tests" / "support")
    metadata = site / "diffusers-0.42.99.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: diffusers\nVersion: 0.42.99\n")
    nodes.environments[1]["PYTHONPATH"] = str(site)
    (bad / "run").unlink()
    (bad / "run").mkdir()
    truncated = bad / "shards"
    shutil.copytree(bad / "digits", truncated)
    (bad / "digits").unlink()
    truncated.rename(bad / "digits")
    last = sorted((bad / "digits").glob("*.tar"))[-1]
    os.truncate(last, last.stat().st_size // 2)

    ended = nodes.run()
    assert [done.code for done in ended] == [2, 2], ended[0].output + ended[1].output
    for done in ended:
        message = done.output[done.output.index("fastdiff: error") :]
        assert "6 problems on 2 of 2 nodes" in message, message
        lines = message.splitlines()[1:]
        assert [line.split(":")[0].strip() for line in lines[:4]] == ["node 1 (host1)"] * 4, message
        assert "diffusers is 0.42.99, 0.42" in message
        assert "fastdiff's source is" in message
        assert "does not see the files of node 0 in run" in message
        assert f"shard {last.name}" in message
        # Of two clocks nobody can tell which is wrong.
        assert "node 0 (host0): its clock is -2.5 s from the median" in message
        assert "node 1 (host1): its clock is +2.5 s from the median" in message


@pytest.mark.nightly
def test_a_slow_node_is_named(tmp_path: Path, digits: Path) -> None:
    """Of three nodes one is slow with each of the others: whatever it sends waits for 10 ms."""
    nodes = Nodes(tmp_path, digits, 3)
    nodes.prefixes[2] = strace("writev:delay_enter=10000")  # gloo sends with it, the store does not
    for done in nodes.run():
        assert done.code == 2, done.output
        assert "1 problem on 1 of 3 nodes" in done.output, done.output
        assert "node 2 (host2): exchanges" in done.output
        assert "exclude the node" in done.output


def test_a_node_that_does_not_come_is_named(digits: Path, tmp_path: Path) -> None:
    store = one_store()
    config = train_flags.parse([*FLAGS, "--data.path", str(digits), "--output.folder", str(tmp_path / "run")])[1]
    with pytest.raises(ConfigError, match=r"of 3 nodes \(0 to 2\) these did not arrive: 1, 2"):
        run.run(store, 0, 3, config, ranks_per_node=1, timeout_s=1.0)


def test_a_disk_without_room_for_three_checkpoints(digits: Path, tmp_path: Path) -> None:
    """Room for two is not enough; three and a little is."""
    flags = ["--preset", "digits", "--data.path", str(digits), "--output.folder", str(tmp_path / "disk")]
    config = train_flags.parse(flags)[1]
    size = checkpoint_bytes(config)
    with tiny_disk(tmp_path / "disk", 2.5 * size / 2**20):
        with pytest.raises(StorageError, match=r"node 0 .*no space on .*disk: 3 checkpoints need .* 0 are there"):
            single_node.check(config)
        assert not list((tmp_path / "disk").iterdir())
    with tiny_disk(tmp_path / "disk", 3.5 * size / 2**20):
        single_node.check(config)


def test_all_problems_of_a_single_node_are_reported_and_nothing_is_left(tmp_path: Path) -> None:
    """The output folder is made later; the disk is that of its nearest parent."""
    with tiny_disk(tmp_path / "disk", 0.1) as disk:
        config = train_flags.parse([*FLAGS, "--data.path", "/nothing", "--output.folder", str(disk / "a" / "run")])[1]
        with pytest.raises(DataError, match=r"2 problems on 1 of 1 nodes\n  node 0 .*/nothing.*\n  node 0 .*no space"):
            single_node.check(config)
        assert not list(disk.iterdir())


def test_rank_0_checks_a_single_node(digits: Path, tmp_path: Path) -> None:
    """Before the first step, and only if asked to."""
    run_flags = ["--preset", "digits", "--data.path", str(digits), "--output.folder", str(tmp_path / "disk")]
    few_steps = ["--samples", "32", "--batch.samples", "16", "--output.sample_every", "0"]
    size = checkpoint_bytes(train_flags.parse(run_flags)[1])
    with tiny_disk(tmp_path / "disk", 2.5 * size / 2**20):
        command = [COMMAND, "launch", "local", "--ranks"]
        done = run_with_forks(*command, "2", "--", *run_flags, *few_steps)
        assert done.code == StorageError.exit_code, done.output
        assert done.output.count("pre-flight: 1 problem on 1 of 1 nodes\n  node 0 (") == 1, done.output
        assert "no space on" in done.output
        assert not (tmp_path / "disk" / "run.json").exists()
        done = run_with_forks(*command, "1", "--no-preflight", "--", *run_flags, *few_steps)
        assert done.code == 0, done.output


def test_the_size_of_a_checkpoint_is_foreseen(digits: Path, tmp_path: Path, world: World) -> None:
    flags = [
        "--preset", "digits", "--data.path", str(digits), "--output.folder", str(tmp_path / "run"),
        "--samples", "64", "--ema.power-stds", "0.05", "--optim.name", "adamw8bit", "--output.sample_every", "0",
    ]  # fmt: skip
    launch, config = train_flags.parse(flags)
    foreseen = checkpoint_bytes(config)
    train(config, launch, world)
    newest = committed(tmp_path / "run" / "checkpoints")[0]
    written = sum(path.stat().st_size for path in newest.iterdir())
    assert foreseen == pytest.approx(written, rel=0.1)
    assert checkpoint_bytes(train_flags.parse(flags)[1]) == pytest.approx(written, rel=0.01), "now it is read"


def test_damage_in_the_last_sample_is_found(digits: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(digits, copy)
    config = train_flags.parse(["--preset", "digits", "--data.path", str(copy)])[1]
    assert list(examine_data(config.data, config.validation)) == [str(copy)]
    shard = sorted(copy.glob("*.tar"))[-1]
    with tarfile.open(shard) as archive:
        latent = [member for member in archive if member.name.endswith("latent.npy")][-1]
    content = bytearray(shard.read_bytes())
    content[latent.offset_data + latent.size - 1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=rf"{shard.name}.*crc32"):
        examine_data(config.data, config.validation)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 17, 33, 100])
def test_in_the_tournament_each_meets_each_once(count: int) -> None:
    rounds = pairings(count)
    played = [pair for pairs in rounds for pair in pairs]
    assert len(set(played)) == len(played)
    assert set(played) <= set(combinations(range(count), 2))
    assert len(rounds) <= bandwidth.ROUNDS
    for pairs in rounds:
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
        assert len(pairs) == count // 2
    if count <= bandwidth.ROUNDS:
        assert len(played) == math.comb(count, 2)


def reports(speeds: dict[tuple[int, int], float], count: int) -> list[NodeReport]:
    found = [NodeReport(node, f"host{node}", {}) for node in range(count)]
    for pair, speed in speeds.items():
        for node in pair:
            found[node].exchanges.append(Exchange(0, sum(pair) - node, speed, "" if speed else "timed out"))
    return found


def test_one_slow_pair_is_no_bad_node_and_a_dead_node_is_one() -> None:
    good = dict.fromkeys(combinations(range(4), 2), 1e9)
    assert not compare(reports(good, 4))
    assert not compare(reports(good | {(0, 1): 1e7}, 4)), "both are fast with the others"
    dead = reports(good | {pair: 0.0 for pair in good if 3 in pair}, 4)
    (problem,) = compare(dead)
    assert str(problem) == "node 3 (host3): all exchanges with other nodes failed (timed out)"


def test_another_data_set_on_one_node_is_a_data_error() -> None:
    found = reports({}, 3)
    for report in found:
        report.data["shards"] = "a" * 64 if report.node == 1 else "b" * 64
    error = as_error(compare(found), 3)
    assert error.exit_code == 65
    assert (
        "node 1 (host1): shards is a different data set (digest aaaaaaaaaaaa, bbbbbbbbbbbb on node 0 and 1 others"
        in str(error)
    )
