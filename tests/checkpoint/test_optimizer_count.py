"""The step count of an optimizer in a checkpoint: the steps since it began."""

import shutil
from dataclasses import replace
from pathlib import Path

from fastdiff.config.run import RunConfig
from tests.support.forked import forked_ranks
from tests.support.runs import assert_same_checkpoint, launch, newest, tiny, train_losses


def copied(config: RunConfig, folder: Path, *, without_step: int) -> RunConfig:
    """The same run elsewhere, as if it had ended before a checkpoint."""
    shutil.copytree(config.output.folder, folder)
    shutil.rmtree(folder / "checkpoints" / f"step-{without_step:08d}")
    return replace(config, output=replace(config.output, folder=str(folder)))


def test_an_optimizer_that_is_changed_counts_from_then_on(digits: Path, tmp_path: Path) -> None:
    first = tiny(digits, tmp_path / "whole", steps=6, output__checkpoint_every=2, output__keep=9)
    forked_ranks(train_losses, replace(first, samples=first.samples // 3), launch(1), ranks=2)
    changed = replace(first, optim=replace(first.optim, name="adamw8bit"))
    forked_ranks(train_losses, changed, launch(1, allow_change=("optim.name", "samples")), ranks=2)
    assert newest(tmp_path / "whole").manifest["optimizer_steps"] == 4
    forked_ranks(train_losses, copied(changed, tmp_path / "resumed", without_step=6), launch(1), ranks=2)
    assert_same_checkpoint(tmp_path / "whole", tmp_path / "resumed")
