"""Run folders with known content, as a training writes them."""

import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from fastdiff.sampling.captioned_grid import LAYOUT, captioned_grid
from fastdiff.sampling.image_grid import encoded

BINS = 16


def record(step: int, **more: Any) -> dict[str, Any]:
    """A line of ``metrics.jsonl``."""
    by_level = {f"loss_snr_{n:02d}": 0.1 + n / step for n in range(BINS)}
    found = {"step": step, "samples": 16 * step, "loss": 1 / step, "lr": 1e-3, "grad_norm": 0.5, "samples_per_s": 100.0}
    found |= {"step_ms": 160.0, "data_wait_ms": 1.6, "peak_gib": 0.5, "mfu": None, "skipped": 0, "micro": 16}
    return found | by_level | more


def lines(records: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(one) + "\n" for one in records)


def run_folder(folder: Path, steps: Iterable[int] = range(10, 110, 10), **config: Any) -> Path:
    """A run of 200 steps of 16 samples, logged at ``steps``; ``config`` replaces sections of its configuration."""
    folder.mkdir(parents=True)
    sections = {
        "samples": 3200, "seed": 0, "batch": {"samples": 16}, "model": {"classes": 10, "kind": "dit"},
        "output": {"log_every": 10, "sample_every": 50, "folder": str(folder)}, "optim": {"lr": 1e-3},
        "validation": {"prompts": [], "images_per_prompt": 4, "every": 50}, "pretrained": {"path": ""},
    }  # fmt: skip
    about = {"config": sections | config, "argv": ["--preset", "digits"], "versions": {"torch": "2"}, "git": None}
    (folder / "run.json").write_text(json.dumps(about | {"device": "cpu", "deepspeed": {"zero": {"stage": 3}}}))
    (folder / "metrics.jsonl").write_text(lines(record(step) for step in steps))
    return folder


def picture(folder: Path, step: int, size: tuple[int, int] = (662, 530), shade: int = 90) -> Path:
    """A sample picture: a grid of ten columns and eight rows by default."""
    (folder / "samples").mkdir(exist_ok=True)
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize(size).point(lambda value: (value + shade) % 256).save(buffer, "PNG")
    path = folder / "samples" / f"step-{step:08d}.png"
    path.write_bytes(buffer.getvalue())
    return path


def labelled_picture(folder: Path, step: int, prompts: Sequence[str]) -> Path:
    """Two pictures of each prompt of one colour each: 40 times the prompt, 40 times the picture, and the step or 0."""
    (folder / "samples").mkdir(exist_ok=True)
    colours = [[40 * prompt, 40 * image] for image in (1, 2) for prompt in range(1, len(prompts) + 1)]
    columns = {}
    for label, blue in (("base", 0), (f"step {step}", step)):
        levels = torch.tensor([[*colour, blue] for colour in colours], dtype=torch.uint8)
        columns[label] = levels[..., None, None].expand(-1, -1, 96, 128)
    grid, layout = captioned_grid(prompts, columns)
    path = folder / "samples" / f"step-{step:08d}.png"
    path.write_bytes(encoded(grid, ".png", {LAYOUT: layout.as_text()}))
    return path


def validation(step: int, loss: float) -> dict[str, Any]:
    """A line of ``validation.jsonl``."""
    return {
        "step": step, "samples": 16 * step, "val_loss": loss, "val_loss_se": loss / 20, "val_count": 64,
        "val_loss_snr": [loss * (n + 1) / 8 for n in range(BINS)], "val_loss_snr_se": [loss / 30] * BINS,
        "val_count_snr": [4] * BINS, "unit": "squared error of v", "data": "0123456789ab",
    }  # fmt: skip


def ledger() -> list[dict[str, Any]]:
    """A start that is killed after step 60, and a second one from step 50 on that is done at step 100."""
    first = {"event": "start", "at": 1001.0, "step": 0, "began": 1000.0, "nodes": ["a", "a"], "samples": 16}
    spent = {"start": 4.0, "step": 20.0, "validation": 6.0}
    return [
        first,
        {"event": "resume", "at": 1002.0, "step": 0},
        {"event": "time", "from": 1000.0, "at": 1030.0, "step": 60, "seconds": {"start": 5.0, "step": 25.0}},
        {"event": "end", "at": 1032.0, "step": 60, "code": 137, "beat": 1030.0, "phase": "forward"},
        first | {"at": 1050.0, "began": 1050.0, "nodes": ["a"]},
        {"event": "resume", "at": 1052.0, "step": 50},
        {"event": "time", "from": 1050.0, "at": 1080.0, "step": 100, "seconds": spent},
        {"event": "end", "at": 1081.0, "step": 100, "outcome": "done"},
    ]  # fmt: skip
