"""``fastdiff.Run``: a run folder as an object."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdiff.api import html
from fastdiff.api.config import Config
from fastdiff.checkpoint.manifest import committed, step_of
from fastdiff.config.command_line.config_file import from_mapping, refuse_code
from fastdiff.config.networks.user_defined import add_network
from fastdiff.config.run_record import read_record, require_run
from fastdiff.config.sections.performance import Precision
from fastdiff.config.sections.sampler import Labels, SchedulerName
from fastdiff.dashboard.pictures import pictures_of
from fastdiff.dashboard.run_metadata import glance
from fastdiff.errors import ConfigError, require
from fastdiff.json_lines import Record, read_records
from fastdiff.plugins.user_code import names_file

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from fastdiff.sampling.run import Run as OpenedRun

_OF_SAMPLER = "scheduler", "steps", "cfg", "seed"


class Run:
    """A run in its folder, complete or not; files are read when they are asked for.

    Args:
        path: the run folder, ``runs/NAME``.
        plugins: ``PATH.py:NAME`` of the network, if the run has that of a file; the file is executed. Also those of
            its objective and callbacks, for a configuration that trains with them. What the folder alone names is never
            executed.

    Raises:
        ConfigError: there is no run, or a plug-in cannot be executed.
    """

    def __init__(self, path: str | Path, *, plugins: Sequence[str] = ()) -> None:
        self.path = Path(path)
        """The run folder."""
        require_run(self.path)
        self._plugins = tuple(plugins)
        in_training = _code_of_training(self.record["config"]) if plugins else set()
        for text in plugins:
            require(names_file(text), f"plugins: {text}: expected PATH.py:NAME of a network")
            if text not in in_training:
                add_network(text, "plugins:")
        self._opened: tuple[object, OpenedRun] | None = None

    @property
    def record(self) -> dict[str, Any]:
        """Content of ``run.json``: ``config``, ``argv``, ``versions``, ``git``, ``device`` and ``deepspeed``."""
        return read_record(self.path)

    @property
    def config(self) -> Config:
        """Configuration of the run, as it was resolved by its last start.

        Raises:
            ConfigError: it has a network, an objective or a callback of a file that ``plugins`` does not name.
        """
        fields, source = self.record["config"], str(self.path / "run.json")
        refuse_code(fields, self._plugins, source, "name it: fastdiff.Run(path, plugins=[{text!r}])")
        return Config.of(from_mapping(fields, source))

    @property
    def class_names(self) -> list[str]:
        """Names of the classes in the order of their numbers; empty if the data had none."""
        found = self.record.get("class_names")
        return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []

    @property
    def checkpoints(self) -> list[int]:
        """Steps of the checkpoints that are there, ascending."""
        return sorted(map(step_of, committed(self.path / "checkpoints")))

    @property
    def grids(self) -> list[Path]:
        """Pictures that the training has drawn, the oldest first."""
        return [self.path / picture.name for picture in pictures_of(self.path)[0]]

    def metrics(self) -> list[Record]:
        """Return the records of ``metrics.jsonl``, a dict each; ``pandas.DataFrame(run.metrics())`` is their table."""
        return read_records(self.path / "metrics.jsonl")

    def validation(self) -> list[Record]:
        """Return the records of ``validation.jsonl``; empty without ``--validation.data``."""
        return read_records(self.path / "validation.jsonl")

    def ledger(self, *, price: float | None = None, watts: float | None = None) -> dict[str, Any]:
        """Return the account of the run's time, as ``fastdiff ledger --json`` prints it.

        Args:
            price: dollars per GPU-hour.
            watts: power of a GPU; None: as measured.

        Raises:
            ConfigError: the run has no account.
        """
        from fastdiff.ledger import report
        from fastdiff.ledger.reader import read_ledger

        sums = read_ledger(self.path)
        return report.as_json(self.path, sums, report.costs(sums, price, watts))

    def sample(
        self,
        num: int | None = None,
        *,
        classes: str | Sequence[int | str] | None = None,
        per_class: int | None = None,
        prompts: Sequence[str] = (),
        negative_prompt: str | None = None,
        per_prompt: int = 1,
        low_res: str | Path | None = None,
        labels: Labels | None = None,
        seed: int = 0,
        steps: int | None = None,
        scheduler: SchedulerName | None = None,
        cfg: float | None = None,
        ema: float | None = None,
        ema_std: float | None = None,
        step: int | None = None,
        batch: int = 64,
        precision: Precision = "fp32",
        autoencoder: str | None = None,
        progress: bool = True,
    ) -> list[Image]:
        """Draw images, with the pixels that ``fastdiff sample --npz`` writes for the same options.

        Args:
            num: number of images, whose classes ``labels`` chooses; None: it follows from the other arguments, or 8
                of each class.
            classes: classes to draw: a list of names and numbers, or a text such as ``flower,temple`` or ``0-9``. A
                number is the place of the class in ``class_names``. None: all.
            per_class: images of each class.
            prompts: captions, for a run that was trained with captions.
            negative_prompt: negative prompt of guidance.
            per_prompt: images of each prompt.
            low_res: npz of the images to enlarge, for super-resolution.
            labels: random or balanced classes of ``num`` images; None: as ``sampling.labels`` of the run says.
            seed: of the noise and of the drawn classes.
            steps: denoising steps; None: ``sampling.steps`` of the run, or 50.
            scheduler: name of the solver; None: ``sampling.scheduler`` of the run, or ddim.
            cfg: scale of classifier-free guidance; None: as ``fastdiff sample`` decides.
            ema: decay rate of the average to draw with; None: the first average of the run.
            ema_std: relative std of a power-function average instead.
            step: of the checkpoint; None: the newest.
            batch: images per forward pass.
            precision: of the network.
            autoencoder: decoder of the latents; None: that of the training data.
            progress: show a bar.

        Returns:
            PIL images, gray or RGB; ``pixels`` returns them as one tensor.

        Raises:
            ConfigError: the run cannot draw these images.
        """
        drawn = self._drawn(dict(locals()))
        from PIL import Image as pillow

        return [pillow.fromarray(image[:, :, 0] if image.shape[2] == 1 else image) for image in drawn]

    def pixels(self, num: int | None = None, **options: Any) -> Tensor:
        """Draw images as ``sample`` does, and return them as one tensor: ``[N, C, H, W]`` uint8 on the CPU."""
        import torch

        drawn = self._drawn({**_defaults_of_sample(), **options, "num": num})
        return torch.from_numpy(drawn).permute(0, 3, 1, 2).contiguous()

    def _drawn(self, given: dict[str, Any]) -> Any:
        """Draw ``[N, H, W, C]`` uint8."""
        from fastdiff.sampling.conditions import SampleRequest
        from fastdiff.sampling.sample_set import draw_in_memory

        unknown = sorted(given.keys() - _defaults_of_sample().keys() - {"num", "self"})
        require(not unknown, f"unknown arguments {', '.join(unknown)}; images are drawn by those of Run.sample")
        low_res = given["low_res"]
        request = SampleRequest(
            num=given["num"],
            classes=given["classes"],
            per_class=given["per_class"],
            labels=given["labels"],
            prompts=tuple(given["prompts"]),
            negative=given["negative_prompt"],
            per_prompt=given["per_prompt"],
            low_res=None if low_res is None else Path(low_res),
        )
        run = self._open(given["ema"], given["ema_std"], given["step"], given["precision"])
        sampler = run.sampler(**{name: given[name] for name in _OF_SAMPLER})
        computation = {name: given[name] for name in ("batch", "precision", "autoencoder", "progress")}
        return draw_in_memory(run, request, sampler, **computation)

    def _open(
        self, ema: float | None = None, ema_std: float | None = None, step: int | None = None, precision: str = "fp32"
    ) -> OpenedRun:
        """Open the network; the last one stays open for the next call."""
        from fastdiff.sampling.run import Run as OpenedRun

        newest = self.checkpoints[-1:] if step is None else [step]
        key = (ema, ema_std, tuple(newest), precision)
        if self._opened is None or self._opened[0] != key:
            self._opened = None  # before the next one takes memory
            self._opened = key, OpenedRun(self.path, ema=ema, ema_std=ema_std, step=step)
        return self._opened[1]

    def evaluate(
        self,
        reference: str | Path | None = None,
        *,
        samples: str | Path | None = None,
        num: int | None = None,
        features: str = "inception",
        metrics: Sequence[str] = (),
        ema: float | None = None,
        ema_std: float | None = None,
        seed: int = 0,
        **options: Any,
    ) -> dict[str, Any]:
        """Measure the images of the run, as ``fastdiff evaluate`` does.

        Without ``reference``: the built-in evaluation of the digits, which also writes ``evaluation.json``. With it:
        FID, KID, precision and recall.

        Args:
            reference: npz file or folder of real images, or npz file of their statistics.
            samples: npz file or folder of images that are drawn already; None: draw ``num``.
            num: number of images to draw; None: 5000.
            features: inception, pixels or ``PATH.py:FUNCTION``, which is executed.
            metrics: further measures of the features: ``PATH.py:FUNCTION``, which is executed, or installed plug-ins.
            ema: decay rate of the average to draw with; None: the first average of the run.
            ema_std: relative std of a power-function average instead.
            seed: of the noise, of the drawn classes and of the subsets of KID.
            options: further arguments of ``sample``.

        Raises:
            ConfigError: the run has no such evaluation, or a plug-in breaks a promise.
            DataError: the reference is damaged.
        """
        if reference is None:
            from fastdiff.evaluation.digits import evaluate_run

            given = {"samples": samples, "num": num, "metrics": metrics or None, **options}
            unused = [name for name, value in given.items() if value is not None]
            require(not unused, f"evaluate: {', '.join(unused)} need a reference")
            return evaluate_run(self._open(ema, ema_std))
        from fastdiff.evaluation.image_comparison import ImageComparisonOptions, evaluate_images

        chosen = ImageComparisonOptions(features=features, metrics=tuple(metrics), seed=seed)
        if samples is not None:
            return evaluate_images(Path(samples), Path(reference), chosen)
        from fastdiff.sampling.npz import save_npz

        chosen_weights = {"ema": ema, "ema_std": ema_std}
        drawn = self._drawn({**_defaults_of_sample(), **options, **chosen_weights, "num": num or 5000, "seed": seed})
        with tempfile.TemporaryDirectory(prefix="fastdiff-api-") as folder:
            path = Path(folder) / "samples.npz"
            save_npz(path, drawn)
            return evaluate_images(path, Path(reference), chosen)

    def likelihood(
        self,
        *,
        samples: int = 1000,
        data: str | None = None,
        ema: float | None = None,
        ema_std: float | None = None,
        progress: bool = True,
    ) -> dict[str, Any]:
        """Return the bound on the negative log-likelihood of data, as ``fastdiff evaluate --nll`` writes it.

        Args:
            samples: number of samples, spread evenly over the data.
            data: folder of latent shards; None: the training data.
            ema: decay rate of the average; None: the first average of the run.
            ema_std: relative std of a power-function average instead.
            progress: show a bar.

        Raises:
            ConfigError: the run has no likelihood.
            DataError: the data are damaged.
        """
        from fastdiff.evaluation.likelihood import NllOptions, evaluate_nll

        options = NllOptions(samples=samples, data=data or "")
        result, _ = evaluate_nll(self._open(ema, ema_std), options, progress=progress)
        return dict(result)

    def export(
        self,
        path: str | Path,
        format: str,
        *,
        ema: float | None = None,
        ema_std: float | None = None,
        raw: bool = False,
        dtype: Precision = "fp32",
        step: int | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write the weights in the format of another library, with a model card, as ``fastdiff export`` does.

        Args:
            path: folder to write.
            format: diffusers, single-file, lora, lora-diffusers, lora-native, lora-kohya, dit, dit-training, iddpm,
                safetensors, or one of the network's own.
            ema: decay rate of the average; None: the first average of the run.
            ema_std: relative std of a power-function average instead.
            raw: the raw weights instead of an average.
            dtype: of the weights.
            step: of the checkpoint; None: the newest.
            overwrite: replace an earlier export in ``path``, when the new one is complete.

        Returns:
            ``path``.

        Raises:
            ConfigError: the folder exists, or the run has no such format.
            StorageError: a file cannot be read or written.
        """
        from fastdiff.export.run import Choice, export

        choice = Choice(format=format, ema=ema, ema_std=ema_std, raw=raw, dtype=dtype, step=step)
        export(self.path, Path(path), choice, overwrite=overwrite)
        return Path(path)

    def __repr__(self) -> str:
        metadata = ", ".join(f"{name} {value}" for name, value in self._metadata().items() if name != "folder")
        return f"<Run {self.path}: {metadata}>"

    def _repr_html_(self) -> str:
        """Return metadata, loss and newest picture, which a notebook shows; of them what can be read."""
        return html.card(str(self.path), self._metadata(), self.path)

    def _metadata(self) -> Mapping[str, object]:
        """Return what a glance should tell; nothing of a plug-in is executed for it."""
        found = glance(self.path)
        last, steps = found["last"], found["steps"]
        reached = "none recorded" if last["step"] is None else f"{last['step']:,.0f}"
        metadata: dict[str, object] = {"error": found["message"]} if found["message"] else {}
        metadata |= {
            "network": found["network"] or "unknown",
            "objective": found["objective"] or "unknown",
            "steps": f"{reached} of {steps:,}" if steps else reached,
            "state": found["text"],
        }
        if isinstance(last["loss"], float):
            metadata["loss"] = f"{last['loss']:.4f}"
        if isinstance(last["samples_per_s"], float):
            metadata["samples/s"] = f"{last['samples_per_s']:,.1f}"
        try:
            metadata["checkpoints"] = ", ".join(map(str, self.checkpoints)) or "none"
        except (ConfigError, OSError) as error:
            metadata["checkpoints"] = str(error)
        return metadata


def _code_of_training(fields: Mapping[str, Any]) -> set[object]:
    """Return the names of objective and callbacks in a record; nothing is executed."""
    objective, output = fields.get("objective"), fields.get("output")
    callbacks = output.get("callbacks") if isinstance(output, dict) else None
    texts = [objective.get("plugin") if isinstance(objective, dict) else None]
    return {text for text in [*texts, *(callbacks if isinstance(callbacks, list) else [])] if isinstance(text, str)}


def _defaults_of_sample() -> dict[str, Any]:
    """Return the defaults of the keyword arguments of ``Run.sample``."""
    return dict(Run.sample.__kwdefaults__ or {})
