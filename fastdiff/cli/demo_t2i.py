"""Text-to-image demo: scans of digits with captions, and a pipeline small enough for two CPU cores.

``python -m fastdiff.cli.demo_t2i prepare data/digits-t2i`` writes ``images/`` (PNG files and metadata.jsonl) and
``pipeline/`` (a tiny Stable Diffusion pipeline: its autoencoder is fitted to the digits; its text encoder stays random,
which suffices to distinguish the captions). With ``--model dit`` it is a tiny PixArt pipeline with a random T5.
``python -m fastdiff.cli.demo_t2i train RUN -- FLAGS`` trains with a SIGKILL in the middle, and resumes.
``python -m fastdiff.cli.demo_t2i judge PIPELINE`` draws digits from their captions with diffusers and classifies them.
"""

from __future__ import annotations

import json
from argparse import REMAINDER, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fastdiff.cli.demo.training import Training, run_killed
from fastdiff.config.arguments.types import Parser, local_path, picture
from fastdiff.config.command_line.train_flags import parse
from fastdiff.config.networks.pixart import PixArtConfig
from fastdiff.config.presets.digits import text_dit
from fastdiff.console import show
from fastdiff.errors import report_any, require
from fastdiff.evaluation.digits import evaluate_digits, evaluation_labels, real_digits
from fastdiff.files import unfinished_folder
from fastdiff.models.pretrained import tiny_pipeline, tiny_pixart
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.outputs import write_output
from fastdiff.progress_bar import Bar
from fastdiff.sampling.image_grid import image_grid, save_picture

if TYPE_CHECKING:
    from PIL.Image import Image

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIZE = tiny_pipeline.IMAGE_SIZE
GUIDANCE = 4.0
_STEPS, _BATCH, _LR = 150, 32, 3e-3
_KL_WEIGHT = 1e-4
_PUBLISHED = PixArtConfig()


def caption(digit: int) -> str:
    """Return the caption of a digit: ``a handwritten seven``."""
    return f"a handwritten {WORDS[digit]}"


def _text_dit_pipeline(folder: Path) -> Path:
    """Write a PixArt pipeline whose T5 has a token for each word of the captions.

    The published initial weights of the caption projection, N(0, 0.02), suit widths of 4,096 and 1,152. The scale makes
    up for the narrow layers here: otherwise all captions would be nearly equal to the network for hundreds of steps.
    """
    model = cast(PixArtConfig, text_dit().model)
    narrower = _PUBLISHED.caption_dim * _PUBLISHED.hidden / (model.caption_dim * model.hidden)
    words = dict.fromkeys(" ".join(map(caption, range(len(WORDS)))).split())
    return tiny_pixart.build(folder, model=model, words=tuple(words), text_scale=narrower**0.5)


PIPELINES: Mapping[str, Callable[[Path], Path]] = {"unet": tiny_pipeline.build, "dit": _text_dit_pipeline}
"""Writers of the pipeline by the network of the demo."""


def prepare(folder: Path, network: str = "unet") -> float:
    """Write ``images`` and ``pipeline`` to a new folder, whole or not at all; ConfigError: it exists, or is written."""
    require(not folder.exists(), f"{folder} exists; choose another folder, or delete this one")
    with unfinished_folder(folder) as unfinished:
        write_images(unfinished / "images")
        return write_pipeline(unfinished / "pipeline", network)


def write_images(folder: Path) -> None:
    """Write the 1,797 scans, enlarged to 32 x 32 pixels, with their captions in metadata.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, (image, label) in enumerate(_enlarged()):
        name = f"{number:04d}.png"
        image.convert("RGB").save(folder / name)
        lines.append(json.dumps({"file_name": name, "text": caption(label)}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")


def write_pipeline(folder: Path, network: str = "unet", *, steps: int = _STEPS) -> float:
    """Write a pipeline, its autoencoder fitted to the digits; return its RMS error, for pixels in [-1, 1]."""
    from diffusers import AutoencoderKL

    PIPELINES[network](folder)
    vae = AutoencoderKL.from_pretrained(folder, subfolder="vae")
    pixels = _pixels()
    _fit(vae, pixels, steps)
    error, std = _reconstruct(vae, pixels[::4])
    vae.register_to_config(scaling_factor=1.0 / std)
    vae.save_pretrained(folder / "vae")
    return error


def judge(
    pipeline: Path, picture: Path, *, guidance: float = GUIDANCE, per_class: int = 20, seed: int = 0
) -> dict[str, float | int]:
    """Draw digits from their captions with diffusers' own pipeline, and measure them as ``fastdiff evaluate`` does."""
    from diffusers import DiffusionPipeline, DPMSolverMultistepScheduler

    pipe = DiffusionPipeline.from_pretrained(pipeline)
    pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config, timestep_spacing="trailing")
    pipe.set_progress_bar_config(desc="drawing", leave=False)
    labels = evaluation_labels(per_class)
    images = pipe(
        [caption(int(label)) for label in labels],
        num_inference_steps=20,
        guidance_scale=guidance,
        height=SIZE,
        width=SIZE,
        output_type="pt",
        generator=torch.Generator().manual_seed(seed),
        **Pretrained(str(pipeline)).network_config().diffusers_call,
    ).images
    gray = images.float().mean(dim=1, keepdim=True) * 2 - 1
    save_picture(picture, image_grid(gray[:80], rows=8, scale=1))
    return evaluate_digits(F.avg_pool2d(gray, SIZE // 8), labels)


def _pixels() -> Tensor:
    """Return all scans: ``[1797, 3, 32, 32]`` fp32 in [-1, 1]."""
    images = np.stack([np.asarray(image) for image, _ in _enlarged()])
    return torch.from_numpy(images).float()[:, None].expand(-1, 3, -1, -1) / 127.5 - 1


def _enlarged() -> Iterator[tuple[Image, int]]:
    """Yield every scan as a grey image of 32 x 32 pixels, with its class."""
    from PIL import Image as pillow

    scans, labels = real_digits()
    for scan, label in zip(scans, labels, strict=True):
        gray = pillow.fromarray(np.round(scan.reshape(8, 8) * 255).astype(np.uint8))
        yield gray.resize((SIZE, SIZE), pillow.Resampling.BICUBIC), int(label)


def _fit(vae: Any, pixels: Tensor, steps: int) -> None:
    """Minimise squared error plus a small KL divergence (Rombach et al. 2022, arXiv:2112.10752, section 3.1)."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=_LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LR, total_steps=steps)
    vae.train()
    with Bar("fitting the autoencoder", steps, "steps") as bar:
        for _ in bar.over(range(steps)):
            batch = pixels[torch.randint(len(pixels), (_BATCH,), generator=generator)]
            posterior = vae.encode(batch).latent_dist
            decoded = vae.decode(posterior.sample(generator)).sample
            loss = F.mse_loss(decoded, batch) + _KL_WEIGHT * posterior.kl().mean() / posterior.mean[0].numel()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    vae.eval()


@torch.no_grad()
def _reconstruct(vae: Any, pixels: Tensor) -> tuple[float, float]:
    """Return the root mean squared error of the reconstructions and the standard deviation of the latents."""
    means = vae.encode(pixels).latent_dist.mean
    decoded = vae.decode(means).sample
    return float((decoded - pixels).square().mean().sqrt()), float(means.std())


def train(folder: Path, flags: Sequence[str]) -> None:
    """Train with a SIGKILL at half of the steps, and resume; a run past its half has had it, and goes on.

    Raises:
        ConfigError: a flag is wrong.
        FastdiffError: the training failed.
    """
    steps = parse(flags)[1].steps
    training = Training(folder, flags, steps)
    if 2 * max(training.checkpoints(), default=0) < steps:
        show(run_killed(training))
        show("The same command again resumes.")
    training.require_done(training.run())


def _prepare(arguments: Namespace) -> None:
    error = prepare(arguments.folder, arguments.model)
    print(f"{arguments.folder}: 1797 captioned images and a pipeline; autoencoder's error {error:.3f} of [-1, 1]")


def _train(arguments: Namespace) -> None:
    train(arguments.folder, arguments.flags[arguments.flags[:1] == ["--"] :])


def _judge(arguments: Namespace) -> None:
    result = json.dumps(judge(arguments.folder, arguments.picture, guidance=arguments.guidance))
    write_output(arguments.picture.with_suffix(".json"), f"{result}\n".encode())
    print(result)


def main() -> int:
    """Run one of the commands."""
    parser = Parser(prog="python -m fastdiff.cli.demo_t2i", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    preparing, training, judging = (commands.add_parser(name) for name in ("prepare", "train", "judge"))
    for command, run in ((preparing, _prepare), (training, _train), (judging, _judge)):
        command.add_argument("folder", type=local_path)
        command.set_defaults(run=run)
    preparing.add_argument("--model", choices=PIPELINES, default="unet", help="network; default: %(default)s")
    training.add_argument("flags", nargs=REMAINDER, metavar="-- TRAIN FLAGS", help="flags of `fastdiff train`")
    judging.add_argument("--guidance", type=float, default=GUIDANCE, metavar="SCALE", help="default: %(default)s")
    judging.add_argument(
        "--picture",
        type=picture(),
        default=Path("digits-t2i.png"),
        help="PNG to write, with the figures in a JSON beside it",
    )
    arguments = parser.parse_args()
    try:
        arguments.run(arguments)
    except Exception as error:
        return report_any(error)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
