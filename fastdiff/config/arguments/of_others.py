"""Names of flags in other trainers, as people type them from memory, and what they are here.

``fastdiff compat`` translates a whole command line; here one unknown flag is answered by ours, with the value as it was
typed. A test holds both together.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fastdiff.config.optimizers.registry import optimizers

PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}
"""Values of accelerate's ``--mixed_precision``."""
PREDICTIONS = {"epsilon": "epsilon", "v_prediction": "v", "sample": "x0"}
"""Values of diffusers' ``--prediction_type``."""
_DTYPES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
CHOICES = {
    "optim.schedule": ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"),
    "output.report-to": ("tensorboard", "wandb", "trackio"),
    "performance.device": ("auto", "cuda", "cpu"),
    "performance.precision": ("fp32", "bf16", "fp16"),
}
"""Values of our flags; another one has no counterpart."""
_OFF = "false|no|f|n"


@dataclass(frozen=True, slots=True)
class Ours:
    """What a flag of another trainer is here."""

    text: str
    """Words after the flag; ``{}`` is its values."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Our values by theirs, in lower case; others stay as they are."""
    cases: Mapping[str, str] = field(default_factory=dict)
    """Words in place of ``text`` for a value that a pattern matches whole, in lower case; with its groups."""
    separator: str = ""
    """Character between several values in one word."""
    choices: tuple[str, ...] = ()
    """All of our values, if they are few."""

    def of(self, *given: str) -> str:
        """Return the words with the values; without any, those of the flag alone."""
        given = tuple(part for value in given for part in self._split(value) if part)
        if not given:
            return re.sub(r"(--[\w.-]+) \{\}", r"\1", self.text).replace("{}", "...")
        for pattern, text in self.cases.items():
            if found := re.fullmatch(pattern, given[0].lower()):
                return found.expand(text)
        if "{}" not in self.text and re.fullmatch(_OFF, given[0].lower()):
            return "needs no flag to be off: leave it out"
        ours = [word for value in given for word in self.values.get(value.lower(), shlex.quote(value)).split("\0")]
        if self.choices and (other := [word for word in ours if word not in self.choices]):
            name = self.text.split()[1]
            return f"has no counterpart for {' and '.join(other)}: {name} takes {', '.join(self.choices)}"
        return self.text.replace("{}", " ".join(ours))

    def _split(self, value: str) -> list[str]:
        return value.split(self.separator) if self.separator else [value]


@dataclass(frozen=True, slots=True)
class _Optimizer(Ours):
    """``--optim.name``, to whose values installed packages add."""

    def of(self, *given: str) -> str:
        """Return the words with the names of all known optimizers as choices."""
        known = optimizers()
        names = {alias: name for name, family in known.items() for alias in (name, *family.aliases)}
        return Ours(self.text, names, choices=tuple(known)).of(*given)


def _flag(name: str, values: Mapping[str, str] | None = None, cases: Mapping[str, str] | None = None) -> Ours:
    return Ours(f"is --{name} {{}}", values or {}, cases or {}, choices=CHOICES.get(name, ()))


def _steps(name: str) -> Ours:
    """Return a number of steps, for which some programs take a share of the run, too."""
    return _flag(name, cases={r"0?\.\d+": f"counts a share of the run; --{name} counts steps"})


_SHARDS = "names pictures, which are encoded first: `fastdiff encode {} OUT`, then trained with --data.path OUT"
_BATCH = Ours("is --batch.micro {}, per GPU; --batch.samples is the batch of a step over all GPUs and accumulations")
_ENCODED = "belongs to `fastdiff encode`, or to --data.online: --data."
_AVERAGE = Ours("has no counterpart: averages are always fused, and ZeRO shards them over the GPUs")
_WORKERS = Ours(f"{_ENCODED}workers {{}}", {"0": "1"})
_UPLOAD = Ours("belongs to the end of a run: `fastdiff export RUN OUT --push-to-hub USER/NAME`")
_RESUME = Ours(
    "needs no flag: the same command continues the run in --output.folder; --resume must refuses to start a new one"
)
_PRECISE = {_OFF: "is --performance.precision fp32"}
_KEPT = _flag("output.keep", {"0": "1"})
_TRACKERS = Ours(
    "is --output.report-to {}",
    {"all": "tensorboard\0wandb"},
    {"none": "is --output.report-to without a value"},
    ",",
    CHOICES["output.report-to"],
)
_RECOMPUTED = Ours("is --performance.recompute", cases={_OFF: "is --performance.no-recompute"})
_LENGTH = _flag("steps", cases={r"0|-\d+": "is no length: give --steps N or --epochs N"})
_SIDE = {r"(\d+), ?\1": r"is \1 pixels, the side of a square: `fastdiff encode --resolution \1`"}
_RECTANGLE = {
    r"(\d+), ?(\d+)": "has no counterpart: pictures are square, or keep their shape with `fastdiff encode --buckets`"
}
_EPOCHS_TO_STEPS = "counts epochs; here "

_DIFFUSERS = {
    "learning_rate": _flag("optim.lr"),
    "train_batch_size": _BATCH,
    "gradient_accumulation_steps": Ours(
        "follows here from --batch.samples, the batch of a step: GPUs x --batch.micro x accumulations"
    ),
    "max_train_steps": _LENGTH,
    "num_train_epochs": _flag("epochs"),
    "resume_from_checkpoint": _RESUME,
    "mixed_precision": _flag(
        "performance.precision", PRECISIONS, {"fp8": "is --performance.precision bf16 --performance.fp8"}
    ),
    "output_dir": _flag("output.folder"),
    "lr_scheduler": _flag("optim.schedule"),
    "lr_warmup_steps": _steps("optim.warmup-steps"),
    "adam_beta1": Ours("is the first value of --optim.betas {} 0.999"),
    "adam_beta2": Ours("is the second value of --optim.betas 0.9 {}"),
    "adam_weight_decay": _flag("optim.weight-decay"),
    "adam_epsilon": _flag("optim.eps"),
    "max_grad_norm": _flag("optim.clip"),
    "use_8bit_adam": Ours("is --optim.name adamw8bit"),
    "scale_lr": Ours("has no counterpart: multiply --optim.lr by --batch.samples"),
    "pretrained_model_name_or_path": _flag("pretrained.path"),
    "revision": _flag("pretrained.revision"),
    "variant": _flag("pretrained.variant"),
    "train_data_dir": Ours(_SHARDS),
    "dataset_name": Ours(_SHARDS),
    "dataset_config_name": Ours(f"{_ENCODED}dataset-config {{}}"),
    "image_column": Ours(f"{_ENCODED}image-column {{}}"),
    "caption_column": Ours(f"{_ENCODED}caption-column {{}}"),
    "resolution": Ours(f"{_ENCODED}resolution {{}}", cases=_SIDE | _RECTANGLE),
    "image_interpolation_mode": Ours(f"{_ENCODED}image-interpolation-mode {{}}"),
    "center_crop": Ours(f"{_ENCODED}center-crop"),
    "random_flip": Ours("is --data.random-flip, with `fastdiff encode --flip`"),
    "max_train_samples": Ours(f"{_ENCODED}max-samples {{}}"),
    "dataloader_num_workers": _WORKERS,
    "gradient_checkpointing": _RECOMPUTED,
    "allow_tf32": Ours("is --performance.allow-tf32"),
    "enable_xformers_memory_efficient_attention": Ours("is --performance.attention xformers"),
    "snr_gamma": _flag("objective.min-snr-gamma"),
    "noise_offset": _flag("objective.noise-offset"),
    "input_perturbation": _flag("objective.input-perturbation"),
    "prediction_type": _flag("objective.prediction", PREDICTIONS),
    "dream_training": Ours("is --objective.dream"),
    "dream_detail_preservation": _flag("objective.dream-detail-preservation"),
    "use_ema": Ours("is --ema.rates 0.9999 --ema.warmup"),
    "offload_ema": _AVERAGE,
    "foreach_ema": _AVERAGE,
    "non_ema_revision": Ours("has no counterpart: the UNet is taken from --pretrained.revision, too"),
    "rank": _flag("lora.rank"),
    "use_dora": Ours("is --lora.kind dora"),
    "validation_prompt": _flag("validation.prompts"),
    "validation_prompts": _flag("validation.prompts"),
    "num_validation_images": _flag(
        "validation.images-per-prompt", cases={"0": "is the same as no --validation.prompts"}
    ),
    "validation_epochs": Ours(f"{_EPOCHS_TO_STEPS}--validation.every counts steps"),
    "checkpointing_steps": _flag("output.checkpoint-every"),
    "checkpoints_total_limit": _KEPT,
    "report_to": _TRACKERS,
    "tracker_project_name": _flag("output.project"),
    "with_prior_preservation": Ours("is a second data set: --data.sets instance=PICTURES prior=CLASS"),
    "class_data_dir": Ours("is encoded first: `fastdiff encode {} CLASS`, then --data.sets PICTURES CLASS"),
    "logging_dir": Ours("has no counterpart: TensorBoard's files lie in tensorboard/ of --output.folder"),
    "cache_dir": Ours("is the environment variable HF_HOME={}"),
    "push_to_hub": _UPLOAD,
    "hub_model_id": _UPLOAD,
    "hub_token": Ours("has no counterpart: log in with `hf auth login`, as a token must not be on a command line"),
}
_HF_TRAINER = {
    "per_device_train_batch_size": _BATCH,
    "per_device_eval_batch_size": Ours("has no counterpart: validation takes the batch of the training"),
    "max_steps": _LENGTH,
    "lr_scheduler_type": _flag("optim.schedule"),
    "warmup_steps": _steps("optim.warmup-steps"),
    "warmup_ratio": Ours("counts a share; --optim.warmup-steps counts steps"),
    "weight_decay": _flag("optim.weight-decay"),
    "bf16": Ours("is --performance.precision bf16", cases=_PRECISE),
    "fp16": Ours("is --performance.precision fp16", cases=_PRECISE),
    "torch_compile": Ours("is --performance.compile True", cases={_OFF: "is --performance.compile False"}),
    "optim": _Optimizer("is --optim.name {}"),
    "save_steps": _steps("output.checkpoint-every"),
    "logging_steps": _steps("output.log-every"),
    "eval_steps": _steps("validation.every"),
    "save_total_limit": _KEPT,
    "run_name": Ours("is the name of --output.folder runs/{}"),
    "overwrite_output_dir": Ours("has no counterpart: name another --output.folder, or delete the run"),
}
_KOHYA = {
    "network_dim": _flag("lora.rank"),
    "network_alpha": _flag("lora.alpha"),
    "network_weights": _flag("lora.init"),
    "network_module": Ours(
        "has no counterpart: --lora.rank N is what makes a LoRA",
        cases={r"lycoris\..*": "is --lora.kind with --lora.rank N; its dora_wd=True is --lora.kind dora"},
    ),
    "unet_lr": _flag("optim.lr"),
    "optimizer_type": _Optimizer("is --optim.name {}"),
    "max_train_epochs": _flag("epochs"),
    "min_snr_gamma": _flag("objective.min-snr-gamma"),
    "save_every_n_steps": _flag("output.checkpoint-every"),
    "save_every_n_epochs": Ours(f"{_EPOCHS_TO_STEPS}--output.checkpoint-every counts steps"),
    "sample_every_n_steps": _flag("validation.every"),
    "sample_prompts": Ours("is --validation.prompts TEXT ..., the prompts themselves"),
    "output_name": Ours("is the name of --output.folder runs/{}"),
    "save_model_as": Ours("belongs to the end of a run: `fastdiff export RUN OUT --format NAME`"),
    "full_fp16": Ours("is --performance.precision fp16"),
    "full_bf16": Ours("is --performance.precision bf16"),
    "xformers": Ours("is --performance.attention xformers"),
    "sdpa": Ours("is what --performance.attention auto may choose"),
    "log_with": _TRACKERS,
    "v_parameterization": Ours("is --objective.prediction v"),
    "zero_terminal_snr": Ours("is --objective.zero-terminal-snr"),
    "enable_bucket": Ours("belongs to `fastdiff encode --buckets`"),
    "cache_latents": Ours("is what `fastdiff encode` does"),
    "caption_extension": Ours("belongs to `fastdiff encode --caption-extension {}`"),
    "dataset_config": Ours("is encoded first: `fastdiff encode {} OUT`, then trained with --data.path OUT"),
    "reg_data_dir": Ours("belongs to `fastdiff encode PICTURES OUT --regularisation {}`, then --data.path OUT"),
    "prior_loss_weight": Ours("is loss_weight of --data.sets, as in a=PICTURES b=CLASS:loss_weight={}"),
    "shuffle_caption": Ours("belongs to `fastdiff encode --shuffle-tags K`, or to --data.online: --data.shuffle-tags"),
    "keep_tokens": Ours(f"{_ENCODED}keep-tokens {{}}"),
    "keep_tokens_separator": Ours(f"{_ENCODED}keep-separator {{}}"),
    "caption_separator": Ours(f"{_ENCODED}tag-separator {{}}"),
    "caption_prefix": Ours(f"{_ENCODED}caption-prefix {{}}"),
    "caption_suffix": Ours(f"{_ENCODED}caption-suffix {{}}"),
    "caption_tag_dropout_rate": Ours(f"{_ENCODED}drop-tags {{}}"),
    "caption_dropout_rate": _flag("objective.condition-dropout"),
    "caption_dropout_every_n_epochs": Ours(
        "has no counterpart: a caption is dropped by chance; --objective.condition-dropout 1/{} drops as many"
    ),
    "max_data_loader_n_workers": _WORKERS,
}
_DIT = {
    "global_batch_size": _flag("batch.samples"),
    "data_path": Ours("is --data.path {} for encoded data; pictures are encoded first: `fastdiff encode {} OUT`"),
    "results_dir": _flag("output.folder"),
    "num_classes": _flag("model.classes"),
    "global_seed": _flag("seed"),
    "num_workers": _WORKERS,
    "log_every": _flag("output.log-every"),
    "ckpt_every": _flag("output.checkpoint-every"),
    "vae": Ours("belongs to `fastdiff encode --pretrained stabilityai/sd-vae-ft-{}`"),
    "image_size": Ours("is `fastdiff encode --resolution {}`; the network takes its size from the data set"),
}
_IDDPM = {
    "microbatch": _flag("batch.micro", cases={r"0|-\d+": "is off: leave --batch.micro out"}),
    "data_dir": Ours(_SHARDS),
    "lr_anneal_steps": Ours(
        "is --steps {} --optim.schedule linear",
        cases={"0": "is a run without end, at a constant rate: give --steps N --optim.schedule constant"},
    ),
    "ema_rate": Ours("is --ema.rates {}", separator=","),
    "log_interval": _flag("output.log-every"),
    "save_interval": _flag("output.checkpoint-every"),
    "use_fp16": Ours("is --performance.precision fp16", cases=_PRECISE),
    "use_checkpoint": _RECOMPUTED,
    "noise_schedule": _flag("objective.schedule"),
    "diffusion_steps": _flag("objective.timesteps"),
    "resume_checkpoint": Ours("is --pretrained.path {} --pretrained.weights"),
}
_ANY = {
    "optimizer": _Optimizer("is --optim.name {}"),
    "adjust_lr_fn": Ours("is --optim.name muon --optim.scale {}", {"original": "keller"}),
    "adjust_lr": Ours(
        "is --optim.name muon --optim.scale {}", {"spectral_norm": "dion", "rms_norm": "match_rms_adamw"}
    ),
    "gpus": _flag("ranks"),
    "num_gpus": _flag("ranks"),
    "nproc_per_node": _flag("ranks"),
    "num_processes": _flag("ranks"),
    "batch": _flag("batch.samples"),
    "batch_size": _flag("batch.samples"),
    "data": _flag("data.path"),
    "dataset": _flag("data.path"),
    "out": _flag("output.folder"),
    "output": _flag("output.folder"),
    "run_dir": _flag("output.folder"),
    "device": _flag(
        "performance.device",
        cases={r"(?:cuda:)?(\d+)": r"is --performance.device cuda, with CUDA_VISIBLE_DEVICES=\1 before the command"},
    ),
    "dtype": _flag("performance.precision", _DTYPES),
    "amp": Ours("is --performance.precision bf16"),
    "wandb": Ours("is --output.report-to wandb"),
    "model": Ours(
        "is --preset NAME, or --model.kind KIND",
        cases={r"dit-(s|b|l|xl)/([248])": r"is --preset dit-\1-\2-256", "sit-xl/2": "is --preset sit-xl-2-256"},
    ),
    "iterations": _flag("steps"),
    "flip": Ours("is --data.random-flip, with `fastdiff encode --flip`"),
}
_OF_RUN = {"diffusers": _DIFFUSERS, "HF Trainer": _HF_TRAINER, "kohya": _KOHYA, "DiT": _DIT, "iDDPM": _IDDPM, "": _ANY}

_SAMPLES = "is --grid PNG, --npz FILE or --pngs FOLDER"
_OF_SAMPLE = {
    "diffusers": {
        "num_inference_steps": _flag("steps"),
        "guidance_scale": _flag("cfg"),
        "num_images_per_prompt": _flag("per-prompt"),
        "prompts": _flag("prompt"),
        "validation_prompt": _flag("prompt"),
        "output_dir": Ours("is --pngs {}, or --grid {}/grid.png"),
    },
    "DiT": {
        "cfg_scale": _flag("cfg"),
        "num_sampling_steps": _flag("steps"),
        "num_fid_samples": _flag("num"),
        "per_proc_batch_size": _flag("batch"),
        "ckpt": Ours("is the first word: `fastdiff sample {} --preset NAME`"),
    },
    "iDDPM": {
        "num_samples": _flag("num"),
        "batch_size": _flag("batch"),
        "timestep_respacing": _flag("respacing"),
        "use_ddim": Ours("is --scheduler ddim"),
        "model_path": Ours("is the first word: `fastdiff sample {} --preset NAME`"),
    },
    "": {"output": Ours(_SAMPLES), "out": Ours(_SAMPLES)},
}
_OF_ENCODE = {
    "diffusers": {
        "pretrained_model_name_or_path": _flag("pretrained"),
        "train_data_dir": Ours("is the first word: `fastdiff encode {} OUT`"),
        "dataset_name": Ours("is the first word: `fastdiff encode {} OUT`"),
        "dataset_config_name": _flag("dataset-config"),
        "output_dir": Ours("is the second word: `fastdiff encode SOURCE {}`"),
        "train_batch_size": _flag("batch"),
        "mixed_precision": Ours("is --precision {}", PRECISIONS, choices=CHOICES["performance.precision"]),
        "center_crop": Ours("is --crop center"),
        "random_flip": Ours("is --flip"),
        "max_train_samples": _flag("max-samples"),
        "dataloader_num_workers": _flag("workers", {"0": "1"}),
        "image_interpolation_mode": _flag("interpolation"),
    },
    "kohya": {
        "enable_bucket": Ours("is --buckets"),
        "bucket_reso_steps": _flag("bucket-step"),
        "min_bucket_reso": Ours("is the first number of --bucket-sides MIN MAX"),
        "max_bucket_reso": Ours("is the second number of --bucket-sides MIN MAX"),
        "dataset_config": Ours("is the first word: `fastdiff encode {} OUT`"),
        "reg_data_dir": _flag("regularisation"),
        "flip_aug": Ours("is --flip"),
        "alpha_mask": Ours("is --masks alpha"),
        "conditioning_data_dir": _flag("masks"),
        "masked_loss": Ours("follows from --masks: data with masks train a masked loss"),
        "class_tokens": _flag("caption"),
    },
    "DiT": {
        "image_size": _flag("resolution"),
        "vae": Ours("is --pretrained stabilityai/sd-vae-ft-{}"),
        "num_workers": _flag("workers", {"0": "1"}),
    },
    "iDDPM": {"batch_size": _flag("batch")},
    "": {"size": _flag("resolution"), "out": Ours("is the second word: `fastdiff encode SOURCE {}`")},
}
_OF_COMMAND = {"train": _OF_RUN, "sample": _OF_SAMPLE, "encode": _OF_ENCODE}


def answer(flag: str, values: Sequence[str], command: str) -> str | None:
    """Return what a flag of another trainer is here, ``diffusers' --learning_rate is --optim.lr 1e-4``.

    Args:
        flag: as typed, with its hyphens.
        values: as typed.
        command: ``train``, ``sample`` or ``encode``; others have no such table.

    Returns:
        None for a flag that no table has.
    """
    name = flag.lstrip("-").replace("-", "_").lower()
    for program, table in _OF_COMMAND.get(command, {}).items():
        if (ours := table.get(name)) is not None:
            whose = f"{program}'{'' if program.endswith('s') else 's'} " if program else ""
            return f"{whose}{flag} {ours.of(*values)}"
    return None
