"""Workload of a training benchmark: a preset with chosen batch, engine, precision and backends, on synthetic data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fastdiff.config import deepspeed as deepspeed_config
from fastdiff.config.command_line.config_file import from_mapping, with_optimizer
from fastdiff.config.deepspeed import DsConfig
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.presets import preset
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.data import DataConfig, ValidationConfig
from fastdiff.config.sections.output import OutputConfig
from fastdiff.errors import ConfigError
from fastdiff_bench import BenchError
from fastdiff_bench.measure.session import Fact

_STEPS = 1_000_000
"""Length of the run; no benchmark reaches it."""
_ALIGNMENT = 0.5
"""Weight of the alignment of a network that is given its head, that of REPA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training workload; None stands for the default of the preset or of fastdiff."""

    preset: str
    batch: int | None = None
    """Samples per optimizer step over all ranks."""
    micro: int | None = None
    """Samples per rank and forward pass; None: the preset's with its own batch, no accumulation with another batch."""
    deepspeed: str = "zero1"
    """Name of a DeepSpeed configuration, or the path of a file; the default is that of a run on several ranks."""
    precision: str | None = None
    compile: bool | None = None
    kernels: str | None = None
    attention: str | None = None
    optimizer: str | None = None
    recompute: bool | None = None
    deterministic: bool | None = None
    fp8: bool | None = None
    fp8_weight_gradients: str | None = None
    cuda_graph: bool | None = None
    grad_accum_order: str | None = None
    loader: str | None = None
    model: tuple[str, ...] = ()
    """``NAME=VALUE`` each: other values of the preset's network."""

    def config(self, data: Path, folder: Path) -> RunConfig:
        """Return the run on the shards in ``data``; it writes only temporary files to ``folder``.

        Raises:
            BenchError: a choice does not exist, or does not fit the preset.
        """
        try:
            return self._config(data, folder)
        except ConfigError as error:
            raise BenchError(str(error)) from None

    def _config(self, data: Path, folder: Path) -> RunConfig:
        base = preset(self.preset)
        samples = base.batch.samples if self.batch is None else self.batch
        micro = base.batch.micro if self.micro is None and self.batch is None else self.micro
        performance = _given(
            precision=self.precision, compile=self.compile, kernels=self.kernels, attention=self.attention,
            recompute=self.recompute, deterministic=self.deterministic, fp8=self.fp8,
            fp8_weight_gradients=self.fp8_weight_gradients, cuda_graph=self.cuda_graph,
            grad_accum_order=self.grad_accum_order,
        )  # fmt: skip
        config = replace(
            base,
            samples=_STEPS * samples,
            # Random weights suffice: their values do not affect the time.
            pretrained=PretrainedConfig(),
            data=DataConfig(path=str(data), **_given(loader=self.loader)),
            batch=replace(base.batch, samples=samples, micro=micro),
            optim=with_optimizer(base, self.optimizer or base.optim.name, "--optimizer").optim,
            performance=replace(base.performance, **performance),
            validation=ValidationConfig(),
            output=OutputConfig(folder=str(folder), checkpoint_every=0, sample_every=0, report_to=()),
        )
        fields, model = asdict(config), self._model()
        if model.get("aligned_width"):
            fields["objective"] |= {"alignment_weight": _ALIGNMENT}
        return from_mapping(fields | {"model": fields["model"] | model}, "bench")  # validates the choices

    def _model(self) -> dict[str, Any]:
        for text in self.model:
            if "=" not in text:
                raise BenchError(f"--model {text}: expected NAME=VALUE, such as depth=4")
        return {name: yaml.safe_load(value) for name, value in (text.split("=", 1) for text in self.model)}

    @property
    def network(self) -> str:
        """Name of the network in records: the preset, and what differs from it."""
        return " ".join((self.preset, *self.model))

    def deepspeed_json(self) -> DsConfig:
        """Return the given DeepSpeed JSON; BenchError if there is no such configuration."""
        try:
            return deepspeed_config.read(self.deepspeed)
        except ConfigError as error:
            raise BenchError(str(error)) from None

    def decided(self, facts: Mapping[str, Fact]) -> Workload:
        """Return the workload with the micro-batch that its run chose, if the preset leaves that open.

        Args:
            facts: of ``fastdiff_bench.trainers.ours``.
        """
        if self.config(Path(), Path()).batch.micro != "auto":
            return self
        return replace(self, micro=int(str(facts["micro"])))

    @property
    def case(self) -> str:
        """Name of the workload in records, shared with the baselines; "micro auto" before ``decided``."""
        micro = self.config(Path(), Path()).batch.micro
        return self._case(f"batch {self.samples}") + (f", micro {micro}" if micro else "")

    @property
    def case_of_any_batch(self) -> str:
        """Name for quantities that cover all batches."""
        return self._case("any batch")

    def _case(self, batch: str) -> str:
        config = self.config(Path(), Path())
        model = config.model
        shape = f"{model.channels}x{model.size}x{model.size}"
        return ", ".join([self.network, shape, batch, config.performance.precision])

    @property
    def samples(self) -> int:
        """Samples per optimizer step."""
        return self.config(Path(), Path()).batch.samples

    @property
    def provider(self) -> str:
        """Name of fastdiff's configuration in records."""
        choices = {
            "kernels": self.kernels, "attention": self.attention, "optim": self.optimizer, "loader": self.loader,
            "order": self.grad_accum_order,
        }  # fmt: skip
        parts = ["fastdiff", Path(self.deepspeed).stem]
        parts += [] if self.compile is None else ["compiled" if self.compile else "eager"]
        parts += ["recompute"] if self.recompute else []
        parts += ["deterministic"] if self.deterministic else []
        parts += ["fp8"] if self.fp8 else []
        parts += [] if self.fp8_weight_gradients is None else [f"dW in {self.fp8_weight_gradients}"]
        parts += ["graph"] if self.cuda_graph else []
        return " ".join([*parts, *(f"{name}={value}" for name, value in choices.items() if value is not None)])

    @property
    def facts(self) -> dict[str, Fact]:
        """The choices one by one, for records."""
        config = self.config(Path(), Path())
        return {
            "preset": self.preset,
            "batch": config.batch.samples,
            "micro": config.batch.micro,
            "deepspeed": Path(self.deepspeed).stem,
            "precision": config.performance.precision,
            "compile": config.performance.compile,
            "kernels": config.performance.kernels,
            "attention": config.performance.attention,
            "optimizer": config.optim.name,
            "recompute": config.performance.recompute,
            "deterministic": config.performance.deterministic,
            "fp8": config.performance.fp8,
            "fp8_weight_gradients": config.performance.fp8_weight_gradients,
            "cuda_graph": config.performance.cuda_graph,
            "grad_accum_order": config.performance.grad_accum_order,
            "loader": config.data.loader,
            **({"deepspeed_file": os.path.relpath(self.deepspeed)} if Path(self.deepspeed).suffix == ".json" else {}),
        }


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
