"""A trained network opened by one process for sampling and evaluation: a run, or a published file of weights."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastdiff.batch import Condition
from fastdiff.checkpoint.manifest import committed, digest_of, step_of, verify
from fastdiff.checkpoint.reader import Checkpoint, snapshot_folder
from fastdiff.checkpoint.weights import select
from fastdiff.config.command_line.config_file import from_mapping
from fastdiff.config.networks.registry import ModelConfig, networks
from fastdiff.config.networks.user_defined import file_of
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json, require_run
from fastdiff.config.sections.data import DataConfig
from fastdiff.config.sections.sampler import SamplerConfig
from fastdiff.console import log
from fastdiff.data.shards.format import DatasetInfo, Normalisation
from fastdiff.errors import ConfigError, DataError, StorageError, require
from fastdiff.files import file_digest
from fastdiff.models.family import ModelFamily, family_of
from fastdiff.models.kernel_choice import DTYPES
from fastdiff.models.load import build_network, check_base, null_label, pretrained, resolve
from fastdiff.models.lora import switch
from fastdiff.models.pipeline_files import readable
from fastdiff.models.toolchain import require_compilers
from fastdiff.parallel.devices import select_device
from fastdiff.sampling.class_names import ClassChoice, ClassNames
from fastdiff.sampling.guidance import with_path_drop
from fastdiff.sampling.image_grid import image_grid, save_picture
from fastdiff.sampling.latent_statistics import open_autoencoder, statistics_in
from fastdiff.sampling.pipeline_sampler import (
    is_fine_tuned,
    pipeline_sampler,
    settings_of,
    usual_negative,
    with_scheduler,
)
from fastdiff.sampling.pixels import IDENTITY, autoencoder_of, shown
from fastdiff.sampling.solvers import grid_classes, sample
from fastdiff.sanitize import escape
from fastdiff_kernels import launch


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """Origin of a network; the fields are those of ``Run``."""

    config: RunConfig
    step: int | None
    digest: str
    classes: int | None
    class_names: Sequence[str]
    encoded_by: str | None
    statistics: Normalisation | None
    description: str
    weights: Mapping[str, Tensor] | None
    """Trained parameters; None: those of ``config.pretrained``."""


class Run:
    """A trained network, ready to draw: of a run the newest intact checkpoint, or the one of a given step; or a file.

    Args:
        folder: ``runs/NAME``, or the file.
        ema: decay rate of the average to use.
        ema_std: relative std of the power-function average to use, stored or reconstructed from snapshots. Without
            ``ema`` and ``ema_std``: the first average of the run, or the raw weights if there is none.
        step: None: the newest.
        device: of the model; None: the first GPU, or the CPU.
        published: configuration of the network in a file (``cli.published_weights``); None: a run.

    Raises:
        ConfigError: ``folder`` has no run, checkpoint or such average, or the base weights of its LoRA have changed; or
            the file belongs to another network, or cannot be read.
        StorageError: no checkpoint is intact.
    """

    def __init__(
        self,
        folder: Path,
        ema: float | None = None,
        ema_std: float | None = None,
        *,
        step: int | None = None,
        device: torch.device | None = None,
        published: RunConfig | None = None,
    ) -> None:
        device = device or select_device()  # before anything is read
        if published is None:
            found = _of_checkpoint(folder, ema, ema_std, step)
        else:
            refuse_selection(folder, ema=ema, ema_std=ema_std, step=step)
            found = _of_file(folder, resolve(published))
        self.folder, self.is_file = folder, published is not None
        self.config = found.config
        self.step = found.step
        """Optimizer steps; None for a file, which does not tell them."""
        self.digest = found.digest
        """Sha256 that identifies the configuration and every weight."""
        self.classes = found.classes
        """Number of classes of the data; None: data without classes."""
        self.class_names = ClassNames(self.known_classes, found.class_names if self.known_classes else ())
        """The classes that the model can draw."""
        self.encoded_by = found.encoded_by
        """Digest of the autoencoder that encoded the data; None: pixels, or unknown."""
        self.statistics = found.statistics
        """Statistics of the training latents; None: those of their autoencoder."""
        self.description = found.description
        """Step and weights in words, for messages."""
        # An attention backend forced for the training may be unavailable on this machine.
        anywhere = replace(self.config, performance=replace(self.config.performance, attention="auto"))
        dtype = drawing_dtype(self.config, device)
        self.model = build_network(anywhere, found.weights, frozen=dtype).to(device, dtype).eval()
        require_compilers(device, compiled=False, kernels=launch.triton is not None)

    def result(self, name: str) -> Path:
        """Return the path of a result: in the run folder, or beside a file, with its stem in front of the name."""
        return self.folder.with_name(f"{self.folder.stem}.{name}") if self.is_file else self.folder / name

    @property
    def family(self) -> ModelFamily[ModelConfig]:
        """Family of the network."""
        return family_of(self.config.model)

    @property
    def known_classes(self) -> int:
        """Number of classes that the model can draw; 0: none."""
        return self.classes or 0 if self.config.model.classes else 0

    def draw(self, labels: Tensor, sampler: SamplerConfig, *, progress: bool) -> Tensor:
        """Return ``[N, C, H, W]`` fp32 latents on the CPU, one per label (``[N]`` int64)."""
        return self.sample({"label": labels}, {"label": null_label(self.config.model)}, sampler, progress=progress)

    def draw_classes(
        self, path: Path, classes: ClassChoice | None, *, per_class: int, sampler: SamplerConfig
    ) -> list[str]:
        """Write a PNG with one column per class, and its name above the column.

        Returns:
            The names of the columns; empty if the classes have none.

        Raises:
            ConfigError: the model was not trained with these classes, or with prompts instead.
        """
        if self.config.model.text_conditional:
            raise ConfigError(f"{self.folder} was trained with captions; give prompts with --prompt")
        if self.config.model.low_res_size:
            raise ConfigError(f"{self.folder} was trained to enlarge images; give them with --low-res, and --npz")
        chosen = None if classes is None else self.class_names.numbers(classes)
        _require_picture(per_class * len(chosen or range(self.known_classes or 1)), "--per-class")
        columns = torch.tensor(chosen) if chosen else grid_classes(self.config.model, self.known_classes or None)
        condition = {"label": columns.repeat(per_class)}
        latents = self.sample(condition, {"label": null_label(self.config.model)}, sampler)
        titles = self.class_names.titles(columns.tolist())
        pixels = shown(self.config, latents, self.device, self.encoded_by, self.statistics)
        save_picture(path, image_grid(pixels, rows=per_class, titles=titles))
        return titles

    def draw_prompts(
        self,
        path: Path,
        prompts: Sequence[str],
        *,
        negative: str | None,
        per_prompt: int,
        sampler: SamplerConfig,
        references: Sequence[Path] = (),
        beside_base: bool = False,
    ) -> None:
        """Write a PNG with a column per prompt, decoded by the pipeline's autoencoder.

        ``beside_base`` puts the texts above, and the pictures of the base model from the same noise beside.

        Raises:
            ConfigError: as ``embedded``; ``beside_base`` of a network that was not fine-tuned, or the base weights
                cannot be read.
        """
        from fastdiff.sampling.captioned_grid import captioned_grid
        from fastdiff.sampling.text import as_bytes, repeated

        _require_picture(per_prompt * len(prompts) * (1 + beside_base), "--per-prompt")
        condition, null = self.embedded(prompts, negative=negative, references=references)
        autoencoder = open_autoencoder(pretrained(self.config.pretrained), self.device, self.statistics)

        def drawn() -> Tensor:
            return autoencoder.decode(self.sample(repeated(condition, per_prompt), null, sampler))

        if not beside_base:
            save_picture(path, image_grid(drawn(), rows=per_prompt))
            return
        with self._as_base():
            base = as_bytes(drawn())
        columns = {"base": base, f"step {self.step:,}": as_bytes(drawn())}
        save_picture(path, captioned_grid(prompts, columns)[0])

    @contextmanager
    def _as_base(self) -> Iterator[None]:
        """Let the run draw with the network that its fine-tuning started from."""
        if not is_fine_tuned(self.config):
            raise ConfigError(
                f"--beside-base: {self.folder} was not fine-tuned from a pipeline (--pretrained.weights); leave it out"
            )
        tuned = self.model
        if self.config.lora.rank:
            switch(tuned, on=False)
        else:
            dtype = drawing_dtype(self.config, self.device)
            self.model = build_network(self.config).to(self.device, dtype).eval()
        try:
            yield
        finally:
            self.model = tuned
            if self.config.lora.rank:
                switch(tuned, on=True)

    def embedded(
        self, prompts: Sequence[str], *, negative: str | None, references: Sequence[Path] = ()
    ) -> tuple[Condition, Condition]:
        """Return the conditions ``[N, ...]`` of prompts and of none, on the CPU; all refer to the same pictures.

        ConfigError: the run has classes or no pipeline, or takes no references, or another number.
        """
        from fastdiff.sampling.references import encode_references
        from fastdiff.sampling.text import encode_prompts

        if not self.config.model.text_conditional:
            raise ConfigError(f"{self.folder} was trained with classes, not captions; use --classes")
        if not self.config.pretrained.path:
            raise ConfigError(f"{self.folder} was trained without --pretrained.path: it has no text encoder")
        negative = usual_negative(self.config) if negative is None else negative
        pipeline, model = pretrained(self.config.pretrained), self.config.model
        require(
            len(references) in (0, model.references),
            f"{len(references)} pictures by --reference: {self.folder} was trained with {model.references or 'no'} "
            "references of each picture",
        )
        latents = encode_references(pipeline, references, model.size, self.statistics) if references else None
        return encode_prompts(pipeline, prompts, model, negative=negative, references=latents)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    @property
    def can_be_guided(self) -> bool:
        """Whether the model has learned an unconditional prediction, beside that of a condition."""
        # The weights that a fine-tuning started from may have learned the unconditional prediction.
        learned = self.config.drops_conditions or self.config.pretrained.weights
        return self.config.model.text_conditional or (bool(self.known_classes) and learned)

    def sampler(self, usual: SamplerConfig | None = None, **given: Any) -> SamplerConfig:
        """Return the run's own sampler (``--sampling.*``), with the options ``given`` before it.

        Args:
            usual: values of what neither says; None: those of the pipeline of a fine-tuned network, or the defaults of
                ``SamplerConfig``.
            given: fields of a ``SamplerConfig``; None: not given.

        Raises:
            ConfigError: a wrong value, or the pipeline cannot be read.
        """
        of_ours = given.get("respacing") or given.get("clip") or self.config.sampling.clip
        usual = usual or (None if of_ours else pipeline_sampler(self.config))
        found = self.config.sampler(usual, guided=self.can_be_guided, **given)
        return with_scheduler(found, self.config, shifted=given.get("shift") is not None)

    def decided(self, sampler: SamplerConfig) -> SamplerConfig:
        """Return ``sampler`` with guidance, clipping and shift resolved.

        ConfigError: guidance without classes or an unconditional prediction; guided channels or levels without
        guidance.
        """
        usual = settings_of(self.config).guidance
        if not self.config.model.text_conditional:
            usual = usual if self.known_classes and self.config.drops_conditions else 1.0
            if not self.known_classes and sampler.cfg not in (None, 1.0):
                raise ConfigError(f"--cfg {sampler.cfg:g}: {self.folder} has no classes to guide to; leave it out")
            if not self.can_be_guided and sampler.cfg not in (None, 1.0):
                raise ConfigError(
                    f"--cfg {sampler.cfg:g}: {self.folder} was trained with --objective.condition_dropout 0, so that "
                    "it has not learned the unconditional prediction that guidance needs; leave --cfg out, or train "
                    "with --objective.condition_dropout 0.1"
                )
        cfg = usual if sampler.cfg is None else sampler.cfg
        of_guidance = {"--cfg-channels": sampler.cfg_channels, "--cfg-interval": sampler.cfg_interval}
        for flag, value in of_guidance.items():
            if value is not None and cfg == 1.0:
                shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
                raise ConfigError(
                    f"{flag} {shown}: there is no guidance with --cfg 1"
                    f"{', the default of this model' if sampler.cfg is None else ''}; give another --cfg, or leave "
                    f"{flag} out"
                )
        clip = autoencoder_of(self.config) == IDENTITY if sampler.clip is None else sampler.clip
        return replace(sampler, cfg=cfg, clip=clip, shift=self.config.sampling_shift(sampler.shift))

    def sample(
        self,
        condition: Condition,
        null: Condition,
        sampler: SamplerConfig,
        *,
        first_index: int = 0,
        batch: int | None = None,
        progress: bool = True,
    ) -> Tensor:
        """Draw one image per entry of the condition.

        Args:
            condition: inputs of the model besides noisy latents and time, ``[N, ...]`` each.
            null: one unconditional sample of each input that guidance replaces.
            sampler: solver, steps, guidance and seed.
            first_index: number of the first image within a larger set.
            batch: images per forward pass; None: the default of the network family.
            progress: show a progress bar on standard error.

        Returns:
            ``[N, C, H, W]`` fp32 latents on the CPU.

        Raises:
            ConfigError: see ``decided`` and ``fastdiff.sampling.solvers.sample``.
        """
        model, sampler = self.config.model, self.decided(sampler)
        condition, null = with_path_drop(model, condition, null)
        return sample(
            self.model,
            self.config.objective,
            {name: value.to(self.device) for name, value in condition.items()},
            sampler,
            shape=(model.channels, model.size, model.size),
            teacher_width=model.teacher_width,
            null=null,
            batch=batch or self.family.sampling_batch,
            first_index=first_index,
            progress=progress,
        ).cpu()


def drawing_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """Return the dtype in which a network draws: fp32, or for one of a pipeline on a GPU that of its training.

    Pipelines draw in 16 bits, and in fp32 the largest need twice the memory of their training.
    """
    whole = device.type != "cuda" or not is_fine_tuned(config)
    return torch.float32 if whole else DTYPES[config.performance.precision]


def refuse_selection(path: Path, **given: object) -> None:
    """Raise ConfigError if one of the options that choose weights of a run is given for a file."""
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        require(value in (None, False), f"{flag}: {path} is a file of weights, not a run to choose from; leave it out")


def _of_checkpoint(folder: Path, ema: float | None, ema_std: float | None, step: int | None) -> _Source:
    saved = open_checkpoint(folder, step)
    saved.require("progress", "classes", "parameters", "ema_rates")
    config, steps = config_of(saved), int(saved.manifest["progress"]["steps"])
    check_base(config.pretrained, config.lora, saved.manifest.get("base"))
    chosen = select(saved, rate=ema, std=ema_std)
    return _Source(
        config=config,
        step=steps,
        digest=digest_of(saved.manifest),
        classes=saved.manifest["classes"],
        class_names=_class_names(saved, config.data),
        encoded_by=saved.manifest.get("autoencoder"),
        statistics=statistics_in(saved.manifest),
        description=f"step {steps}, {chosen.description}",
        weights={name: chosen.read(name) for name in saved.manifest["parameters"]},
    )


def _class_names(saved: Checkpoint, data: DataConfig) -> Sequence[str]:
    """Return the names of the classes; for a checkpoint older than the field those of its data, if they are here."""
    found = saved.manifest.get("class_names")
    if found is None and data.path and not data.online:
        with suppress(DataError, StorageError):
            info = DatasetInfo.read(data.path)
            found = list(info.class_names) if info.digest == saved.manifest.get("dataset") else None
    return found if found and len(found) == saved.manifest["classes"] else ()


def _of_file(path: Path, config: RunConfig) -> _Source:
    with readable(path):
        weights = file_digest(path)
    record = as_json(config)
    identity = {"model": record["model"], "objective": record["objective"], "weights": weights}
    return _Source(
        config=config,
        step=None,
        digest=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
        classes=config.model.classes or None,
        class_names=(),
        encoded_by=None,
        statistics=None,
        description=f"weights of {path.name}",
        weights=None,
    )


def _require_picture(images: int, flag: str) -> None:
    most = 10_000
    require(images <= most, f"{flag}: a picture of {images} images, at most {most}; for more, use --npz")


def open_checkpoint(folder: Path, step: int | None = None, *, snapshots: bool = False) -> Checkpoint:
    """Open the newest intact checkpoint of the run in ``folder``, or the one of ``step``.

    Args:
        folder: ``runs/NAME``.
        step: None: the newest.
        snapshots: accept a snapshot of the averages of ``step`` as well.

    Raises:
        ConfigError: ``folder`` has no run or no such checkpoint.
        StorageError: no checkpoint is intact.
    """
    require_run(folder)
    checkpoints = folder / "checkpoints"
    found = {step_of(path): path for path in committed(checkpoints)}
    if step is None:
        return _newest_intact(checkpoints, list(found.values()))
    kept = {step_of(path): path for path in committed(snapshot_folder(folder))}
    if step not in found and (step not in kept or not snapshots):
        raise ConfigError(f"{folder}: {_missing(step, sorted(found), sorted(kept), snapshots=snapshots)}")
    return _newest_intact(checkpoints, [found[step] if step in found else kept[step]])


def config_of(saved: Checkpoint) -> RunConfig:
    """Return the configuration recorded in a checkpoint; StorageError if it has none.

    A relative path of the pretrained weights counts from the folder in which the run was started.
    """
    saved.require("config")
    _require_plugin(saved)
    found = from_mapping(saved.manifest["config"], str(saved.folder))
    path = saved.manifest.get("pretrained")
    if path is None or Path(found.pretrained.path).exists() or not Path(path).exists():
        return found
    return replace(found, pretrained=replace(found.pretrained, path=path))


def _require_plugin(saved: Checkpoint) -> None:
    """Raise ConfigError if a run's network is code that is not named; warn of other code than it was trained with."""
    recorded = saved.manifest.get("versions", {}).get("plugin.network")
    if not isinstance(recorded, str) or " sha256 " not in recorded:  # of a package, which is installed or not
        return
    kind = str(saved.manifest["config"].get("model", {}).get("kind"))
    file, _, identity = recorded.rpartition(":")
    name = identity.partition(" ")[0]
    plugin = file_of(kind)
    if plugin is None and kind not in networks():
        raise ConfigError(
            f"{saved.folder}: its network {escape(kind)} is code of {escape(file)}, which a run folder cannot let run; "
            f"name it yourself: --plugin {escape(file)}:{escape(name)}, or fastdiff.Run(..., plugins=[...])"
        )
    if plugin is not None and plugin.identity != identity:
        log.warning(f"{saved.folder}: {plugin.text} differs from the code that trained it ({escape(recorded)})")


def _missing(step: int, checkpoints: Sequence[int], kept: Sequence[int], *, snapshots: bool) -> str:
    """Explain why a step cannot be opened, and list the steps that can."""
    there = ", ".join(map(str, checkpoints)) or "none"
    if step in kept:
        return (
            f"step {step} is a snapshot, which only --ema-std can use; steps with a checkpoint, which has all weights: "
            f"{there}"
        )
    if snapshots:
        of = ", ".join(map(str, kept)) or "none"
        return f"no checkpoint and no snapshot of step {step}; checkpoints: {there}; snapshots: {of}"
    return f"no checkpoint of step {step}; there are {there}"


def _newest_intact(checkpoints: Path, folders: Sequence[Path]) -> Checkpoint:
    damage = []
    for folder in folders:
        found = verify(folder)
        if not found:
            return Checkpoint(folder)
        log.warning(f"passing over a damaged checkpoint: {found[0]}")
        damage += found
    if damage:
        raise StorageError(f"{checkpoints}: no checkpoint is intact ({damage[0]}); restore one from a copy")
    raise ConfigError(f"{checkpoints}: no checkpoint yet; the run must reach its first one")
