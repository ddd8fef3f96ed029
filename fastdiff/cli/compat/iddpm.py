"""Flags of openai/improved-diffusion's image_train.py and super_res_train.py, and their translation.

Flag names and defaults are theirs.
"""

import argparse
import os
from dataclasses import fields
from pathlib import PurePath

from fastdiff.cli.compat.translation import EXPORT_NOTE, GRAY_NOTE, CountImages, Translation, absolute, flag, training
from fastdiff.config.arguments.types import count, finite
from fastdiff.config.networks.adm import AdmConfig
from fastdiff.config.presets import preset
from fastdiff.errors import ConfigError

_CHANNEL_MULT = {256: (1, 1, 2, 2, 4, 4), 64: (1, 2, 3, 4), 32: (1, 2, 2, 2)}
_CLASSES = 1000
"""Number of classes of their class-conditional networks, for any data."""
_DENSITIES = {"uniform": "uniform", "loss-second-moment": "importance"}
_PRESETS = {256: "iddpm-lsun256", 64: "iddpm-imagenet64", 32: "iddpm-cifar10"}
"""Published run of each size; without --lr_anneal_steps a run takes as many steps, after the resumed ones."""

IDLE = {
    "fp16_scale_growth": "it belongs to --use_fp16",
    "microbatch": "it holds the whole batch, as without it",
    "num_heads_upsample": "it is --num_heads, as without it",
    "rescale_learned_sigmas": "it belongs to --learn_sigma without --use_kl, as in theirs",
    "sigma_small": "with --learn_sigma the variance is learned, as in theirs",
    "timestep_respacing": "these are all timesteps, as without it",
}
"""Why a flag changes nothing, where the others make it so."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of image_train.py."""
    _add_common(parser)
    parser.add_argument("--image_size", type=int, default=64)
    parser.add_argument("--sigma_small", type=_truth, default=False)


def add_super_resolution_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of super_res_train.py."""
    _add_common(parser)
    parser.add_argument("--large_size", type=int, default=256)
    parser.add_argument("--small_size", type=count, default=64)
    parser.set_defaults(sigma_small=False)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for name in ("data_dir", "resume_checkpoint", "timestep_respacing"):
        add(f"--{name}", default="")
    add("--schedule_sampler", choices=tuple(_DENSITIES), default="uniform")
    add("--noise_schedule", choices=("linear", "cosine"), default="linear")
    add("--ema_rate", type=_rates, default="0.9999")
    add("--attention_resolutions", type=_resolutions, default="16,8")
    counts = {
        "batch_size": 1, "log_interval": 10, "save_interval": 10_000, "num_channels": 128, "num_res_blocks": 2,
        "num_heads": 4, "diffusion_steps": 1000,
    }  # fmt: skip
    for name, number in counts.items():
        add(f"--{name}", type=count, default=number)
    for name, number in {"lr_anneal_steps": 0, "microbatch": -1, "num_heads_upsample": -1}.items():
        add(f"--{name}", type=int, default=number)
    for name, value in {"lr": 1e-4, "weight_decay": 0.0, "fp16_scale_growth": 1e-3, "dropout": 0.0}.items():
        add(f"--{name}", type=float, default=value)
    switches = {
        "use_fp16": False, "learn_sigma": False, "class_cond": False, "use_kl": False, "predict_xstart": False,
        "rescale_timesteps": True, "rescale_learned_sigmas": True, "use_checkpoint": False,
        "use_scale_shift_norm": True,
    }  # fmt: skip
    for name, on in switches.items():
        add(f"--{name}", type=_truth, default=on)


def translate(flags: argparse.Namespace, gpus: int, _: CountImages) -> Translation:
    """Translate image_train.py: crop the images once, then train a UNet on their pixels."""
    size = flags.image_size
    if size not in _PRESETS:
        raise ConfigError(f"--image_size {size}: their script has networks for 32, 64 and 256 only")
    published = f"{_PRESETS[size]}-cond" if size == 64 and flags.class_cond else _PRESETS[size]
    return _translated(flags, gpus, "iddpm", published, _network(flags, size))


def translate_super_resolution(flags: argparse.Namespace, gpus: int, _: CountImages) -> Translation:
    """Translate super_res_train.py; the small images are computed from the large ones in every step, as in theirs."""
    large, small = flags.large_size, flags.small_size
    if large not in (64, 256):
        raise ConfigError(f"--large_size {large}: their script has networks for 64 and 256 only")
    if small >= large:
        raise ConfigError(f"--small_size {small}: smaller than --large_size {large}")
    return _translated(flags, gpus, "iddpm-sr", "iddpm-upsampler", _network(flags, large, low_res_size=small))


def _translated(flags: argparse.Namespace, gpus: int, script: str, published: str, network: AdmConfig) -> Translation:
    _check(flags)
    batch = flags.batch_size * gpus
    steps = flags.lr_anneal_steps or _steps_before(flags) + preset(published).steps
    name = f"{PurePath(flags.data_dir).name or 'images'}-{network.size}"
    shards, run = os.path.abspath(f"data/{name}"), os.path.abspath(f"runs/{script}-{name}")
    train = training(
        gpus,
        flag("preset", published),
        flag("samples", steps * batch),
        flag("seed", 0),
        _start(flags),
        _model(network),
        flag("data.path", shards),
        flag("data.random_flip", False),
        flag("batch.samples", batch),
        flag("batch.micro", _micro(flags)),
        _objective(flags),
        _optimizer(flags),
        flag("ema.rates", flags.ema_rate),
        flag("ema.warmup", False),
        flag("performance.precision", "fp16" if flags.use_fp16 else "fp32"),
        flag("performance.allow_tf32", True),
        flag("performance.recompute", flags.use_checkpoint),
        flag("output.folder", run),
        flag("output.log_every", flags.log_interval),
        flag("output.checkpoint_every", flags.save_interval),
        flag("output.keep", max(2, steps // flags.save_interval + 1)),
        flag("output.sample_every", 0),
    )
    done = Translation([_encode(flags, network.size, shards), train, _export(run), _sample(flags, network, run, steps)])
    _add_notes(done, flags, network, published, steps)
    return done


def _encode(flags: argparse.Namespace, size: int, shards: str) -> list[str]:
    return [
        "fastdiff", "encode", absolute("--data_dir", flags.data_dir), shards,
        "--autoencoder", "identity", "--resolution", str(size), "--crop", "adm", "--decode", "pillow",
        "--classes-from", "prefix" if flags.class_cond else "none",
    ]  # fmt: skip


def _export(run: str) -> list[str]:
    return ["fastdiff", "export", run, f"{run}-export", "--overwrite", "--format", "iddpm"]


def _sample(flags: argparse.Namespace, network: AdmConfig, run: str, steps: int) -> list[str]:
    """Return the equivalent of their image_sample.py and super_res_sample.py with their defaults.

    The name has the steps, because a file of an earlier end is not replaced.
    """
    return [
        "fastdiff", "sample", run,
        "--scheduler", "ddpm", "--respacing", str(flags.diffusion_steps),
        *(("--low-res", os.path.abspath("base.npz")) if network.low_res_size else ("--num", "10000")),
        "--npz", f"{run}/samples-{steps}.npz",
    ]  # fmt: skip


def _network(flags: argparse.Namespace, size: int, low_res_size: int = 0) -> AdmConfig:
    """Return the network of their create_model and sr_create_model."""
    multiples = _CHANNEL_MULT[size]
    factors = {size // resolution for resolution in flags.attention_resolutions}
    try:
        return AdmConfig(
            channels=3,
            size=size,
            width=flags.num_channels,
            channel_mult=multiples,
            res_blocks=flags.num_res_blocks,
            attention_resolutions=tuple(size >> level for level in range(len(multiples)) if 2**level in factors),
            heads=flags.num_heads,
            classes=_CLASSES if flags.class_cond else 0,
            dropout=flags.dropout,
            scale_shift_norm=flags.use_scale_shift_norm,
            low_res_size=low_res_size,
            learn_sigma=flags.learn_sigma,
        )
    except ConfigError as error:
        raise ConfigError(f"these flags describe a network that cannot be built: {error}") from None


def _check(flags: argparse.Namespace) -> None:
    if not flags.data_dir:
        raise ConfigError("--data_dir is missing: the folder of the images")
    if flags.num_heads_upsample not in (-1, flags.num_heads):
        raise ConfigError(
            f"--num_heads_upsample {flags.num_heads_upsample}: all levels have the same number of heads, --num_heads "
            f"{flags.num_heads}; leave it out, or give -1"
        )
    if flags.timestep_respacing not in ("", str(flags.diffusion_steps)):
        raise ConfigError(
            f"--timestep_respacing {flags.timestep_respacing} would train on these timesteps only, which is not "
            f"supported; leave it out, and draw with `fastdiff sample RUN --respacing {flags.timestep_respacing}`"
        )
    if flags.batch_size % _micro(flags):
        raise ConfigError(
            f"--batch_size {flags.batch_size} is not divisible by --microbatch {flags.microbatch}; theirs takes a "
            "smaller last one, here all are equal: give a --microbatch that divides it"
        )
    _check_resumed(flags)
    if flags.lr_anneal_steps < 0:
        raise ConfigError(f"--lr_anneal_steps {flags.lr_anneal_steps}: 0 or above")
    if 0 < flags.lr_anneal_steps <= _steps_before(flags):
        raise ConfigError(
            f"--lr_anneal_steps {flags.lr_anneal_steps}: no step is left after --resume_checkpoint, whose "
            f"file {_number(flags)} was written after {_steps_before(flags)} steps; give more, or 0 for a constant "
            "learning rate"
        )


def _check_resumed(flags: argparse.Namespace) -> None:
    file, number = flags.resume_checkpoint, _number(flags)
    if file and not file.endswith(".pt"):
        raise ConfigError(f"--resume_checkpoint {file}: expected a file of weights, modelNNNNNN.pt")
    if number and (number < 0 or PurePath(file).name != f"model{number:06d}.pt"):
        raise ConfigError(
            f"--resume_checkpoint {file}: theirs reads the step {number} from its name, and averages and Adam's state "
            "of that step from the same folder; rename it modelNNNNNN.pt, as their script writes it"
        )


def _micro(flags: argparse.Namespace) -> int:
    size = flags.batch_size if flags.microbatch <= 0 else min(flags.microbatch, flags.batch_size)
    return int(size)


def _microbatches(flags: argparse.Namespace) -> int:
    return int(flags.batch_size // _micro(flags))


def _number(flags: argparse.Namespace) -> int | None:
    """Return the step that their script reads from --resume_checkpoint, or None; at 0 it reads only the weights."""
    _, found, rest = flags.resume_checkpoint.rpartition("model")
    try:
        return int(rest.partition(".")[0]) if found else None
    except ValueError:
        return None


def _steps_before(flags: argparse.Namespace) -> int:
    """Return the number of steps of the resumed run; its file of step N was written after N + 1 steps."""
    number = _number(flags)
    return number + 1 if number else 0


def _start(flags: argparse.Namespace) -> list[str]:
    if not flags.resume_checkpoint:
        return []
    return [
        *flag("pretrained.path", absolute("--resume_checkpoint", flags.resume_checkpoint)),
        *flag("pretrained.weights", True),
        *flag("pretrained.training", _steps_before(flags) > 0),
    ]


def _model(network: AdmConfig) -> list[str]:
    words = [flag(f"model.{field.name}", getattr(network, field.name)) for field in fields(network)]
    return [word for some in words for word in some]


def _objective(flags: argparse.Namespace) -> list[str]:
    fixed = "fixed_small" if flags.sigma_small else "fixed_large"
    hybrid = "rescaled_mse" if flags.rescale_learned_sigmas else "mse"
    return [
        *flag("objective.schedule", flags.noise_schedule),
        *flag("objective.timesteps", flags.diffusion_steps),
        *flag("objective.rescale_timesteps", flags.rescale_timesteps),
        *flag("objective.prediction", "x0" if flags.predict_xstart else "epsilon"),
        *flag("objective.variance", "learned_range" if flags.learn_sigma else fixed),
        *flag("objective.loss", "rescaled_kl" if flags.use_kl else hybrid),
        *flag("objective.condition_dropout", 0.0),
        *flag("timesteps.density", _DENSITIES[flags.schedule_sampler]),
    ]


def _optimizer(flags: argparse.Namespace) -> list[str]:
    return [
        *flag("optim.name", "adamw"),
        *flag("optim.lr", flags.lr),
        *flag("optim.betas", (0.9, 0.999)),
        *flag("optim.eps", 1e-8 / _microbatches(flags)),  # of averaged gradients
        *flag("optim.weight_decay", flags.weight_decay),
        *flag("optim.clip", 0.0),
        *flag("optim.schedule", "linear" if flags.lr_anneal_steps else "constant"),
        *flag("optim.warmup_steps", 0),
    ]


def _add_notes(done: Translation, flags: argparse.Namespace, network: AdmConfig, published: str, steps: int) -> None:
    before = f"the {_steps_before(flags)} of --resume_checkpoint and " if _steps_before(flags) else ""
    done.note(
        not flags.lr_anneal_steps,
        f"without --lr_anneal_steps their run never ends; this one ends after {steps} steps, {before}those of "
        f"{published} (--samples, over --batch.samples); a second start with more --samples continues it",
    )
    done.notes += [
        "noise, timesteps, dropout and order come from the seed and the position in the run, the same on any number of "
        "GPUs; theirs have no seed, and give each process its own share of the images",
        "an epoch has all images; theirs drops an incomplete last batch",
        "the images are cropped once, into shards of 8-bit pixels; EXIF rotation is applied; images with a palette or "
        "alpha, of 1 bit or in CMYK become RGB before the resize, in theirs after it; "
        f"{GRAY_NOTE}; other kinds of pictures, such as WebP, are read as well",
        "the run is one folder that a second start continues, not $OPENAI_LOGDIR or a new folder each time; its "
        "checkpoint after N steps holds the weights, all averages and Adam's state; their files numbered N are "
        "written after N + 1 steps, the first ones after one step",
        "metrics.jsonl has loss and, with --learn_sigma, its parts mse and vb, each also by quarter (loss_q0), and "
        "grad_norm; with --use_kl the loss is vb alone",
        "--performance.allow_tf32: theirs is PyTorch's default, which allows TF32 in convolutions only",
    ]
    done.note(
        network.classes,
        f"the network has {_CLASSES} classes, as theirs, for any data: change it with --model.classes N",
    )
    done.note(
        _microbatches(flags) > 1,
        f"the gradients of the {_microbatches(flags)} microbatches are averaged; theirs are summed, so their grad_norm "
        "is larger by this factor; Adam takes the same steps, because --optim.eps is smaller by it",
    )
    done.note(
        _microbatches(flags) > 1 and _steps_before(flags) > 0,
        f"Adam's state in the opt file is that of summed gradients, {_microbatches(flags)} times as large, so for "
        "about 1000 steps the updates are smaller than theirs by up to this factor",
    )
    done.note(
        flags.use_fp16,
        "--use_fp16: all weights of the forward pass are in 16 bits, with fp32 masters (DeepSpeed); in theirs only the "
        "convolutions except the last; the loss scale is DeepSpeed's, so --fp16_scale_growth is not used",
    )
    done.note(not flags.use_fp16, "--performance.precision bf16 is faster on a GPU than their fp32")
    done.note(
        flags.schedule_sampler != "uniform",
        "a checkpoint holds the loss history of importance sampling; theirs is collected again by a resumed run; "
        "loss_q0 to loss_q3 are means over the importance weights; theirs are means of the weighted losses",
    )
    done.note(
        flags.schedule_sampler != "uniform" and _microbatches(flags) > 1,
        "the history is updated after each step; theirs after each microbatch",
    )
    done.notes += _notes_of_results(flags, network)
    factors = {2**level for level in range(len(network.channel_mult))}
    idle = [side for side in flags.attention_resolutions if network.size // side not in factors]
    done.note(idle, f"--attention_resolutions: no map has a side of {', '.join(map(str, idle))}; theirs skips it too")
    done.note(flags.resume_checkpoint, f"--resume_checkpoint {flags.resume_checkpoint}: {_describe_resumed(flags)}")


def _notes_of_results(flags: argparse.Namespace, network: AdmConfig) -> list[str]:
    """Return the notes on the commands after the training."""
    script = "super_res_sample.py" if network.low_res_size else "image_sample.py"
    notes = [
        EXPORT_NOTE,
        f"the last command is their {script} with its defaults, over all {flags.diffusion_steps} timesteps; without "
        "--scheduler and --respacing it takes 50 steps of DDIM; pixels are rounded, theirs truncated",
        "image_sample.py --use_ddim True --timestep_respacing ddim50 is --scheduler ddim --respacing ddim50; "
        "image_nll.py is `fastdiff evaluate RUN --nll`",
    ]
    if network.low_res_size:
        notes.append(
            "base.npz stands for their --base_samples; each of its images is enlarged once; theirs repeats them until "
            "there are --num_samples"
        )
    return notes


def _describe_resumed(flags: argparse.Namespace) -> str:
    if not _number(flags):
        why = "its name contains no step (modelNNNNNN.pt)" if _number(flags) is None else "its number is 0"
        return f"{why}, so only the weights are read, as in theirs, and steps count from 0"
    settings = "--weight_decay is" if flags.lr_anneal_steps else "--lr and --weight_decay are"
    return (
        f"weights, averages, Adam's state and the step are read from it and the other files of its folder; {settings} "
        "applied, whereas theirs silently keeps the values in the opt file"
    )


def _truth(text: str) -> bool:
    """Parse a boolean as their str2bool does."""
    if text.lower() in ("yes", "true", "t", "y", "1"):
        return True
    if text.lower() in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text}: expected True or False")


def _rates(text: str) -> tuple[float, ...]:
    return tuple(finite(part) for part in text.split(","))


def _resolutions(text: str) -> tuple[int, ...]:
    return tuple(count(part.strip()) for part in text.split(","))
