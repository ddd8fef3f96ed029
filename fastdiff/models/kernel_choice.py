"""Choice of the implementation of each op for a run on this machine."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pkgutil import resolve_name
from typing import Any

import torch

from fastdiff.config.optimizers.family import OptimizerFamily
from fastdiff.config.optimizers.registry import family_of
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.optim import OptimConfig
from fastdiff.config.sections.performance import PerformanceConfig
from fastdiff.console import log
from fastdiff.errors import ConfigError
from fastdiff.models import fp8
from fastdiff.models.build import Model, build_model
from fastdiff_kernels import dispatch, launch
from fastdiff_kernels.dispatch import Choice
from fastdiff_kernels.names import Backend
from fastdiff_kernels.short_attention import HEAD_DIMS, LONGEST

Row = tuple[str, Choice]
"""Name of a layer, or of another part of the run, and the choice for one of its ops."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compiles(performance: PerformanceConfig, device: torch.device) -> bool:
    """Whether ``torch.compile`` compiles the blocks of the model."""
    compiled = performance.compile
    return device.type == "cuda" if compiled is None else compiled


def prepare_blocks(model: Model, performance: PerformanceConfig, device: torch.device) -> None:
    """Convert and compile the blocks of a network as the run asks, in place, and choose those that are recomputed."""
    if performance.stored_blocks:
        model.store_blocks(performance.stored_blocks)
    if performance.fp8:
        fp8.convert(model, performance, device)
    if compiles(performance, device):
        model.compile_blocks(**compile_options(performance))


def compile_options(performance: PerformanceConfig) -> dict[str, Any]:
    """Return the options of ``compile_blocks``: a deterministic run compiles without benchmarks, whose results vary."""
    if not performance.deterministic:
        return {}
    from torch._inductor import config as inductor  # its import takes seconds

    return {"options": {"deterministic": True}} if hasattr(inductor, "deterministic") else {}


def backends(
    optim: OptimConfig, performance: PerformanceConfig, device: torch.device, optimizer_device: torch.device
) -> dict[str, Backend]:
    """Return the backends to force, by op: those of ``--performance.kernels``, and what offloading needs.

    The state of an optimizer that a GPU offloads to the host is updated by compiled code, where its op has some. Plain
    torch takes longer than the rest of the step. It compiles at the first call, for some ten seconds.
    """
    forced, family = performance.kernel_backends(), family_of(optim)
    if _is_offloaded(family, forced, device, optimizer_device) and _without_compiler(family) is None:
        forced[str(family.kernel)] = "compile"
    return forced


def compiles_any(
    optim: OptimConfig, performance: PerformanceConfig, device: torch.device, optimizer_device: torch.device
) -> bool:
    """Whether ``torch.compile`` compiles blocks of the model or an op."""
    return compiles(performance, device) or "compile" in backends(optim, performance, device, optimizer_device).values()


def _is_offloaded(
    family: OptimizerFamily, forced: Mapping[str, Backend], device: torch.device, optimizer_device: torch.device
) -> bool:
    """Whether an op that can be compiled updates on the host a network on a GPU, by no backend in particular."""
    chosen = family.without_compiler is not None and family.kernel not in forced
    return chosen and (device.type, optimizer_device.type) == ("cuda", "cpu")


def _without_compiler(family: OptimizerFamily) -> str | None:
    """Return why the optimizer's op cannot be compiled for the host; None if it can."""
    assert family.without_compiler is not None
    return resolve_name(family.without_compiler)()  # type: ignore[no-any-return]


def choices(
    config: RunConfig, device: torch.device, *, optimizer_device: torch.device | None = None, flat: bool = False
) -> list[Row]:
    """Return the implementation of each op in a run, forward and backward, with the reason.

    The model is built on the meta device, without memory.

    Args:
        config: configuration of the run.
        device: device of the model.
        optimizer_device: device of the optimizer step; None: ``device``.
        flat: the run has the flat engine, whose AdamW is an op.

    Raises:
        ConfigError: a forced implementation cannot run there; the message has the reason.
    """
    performance = config.performance
    flags = {"--performance.kernels": performance.kernels, "--performance.attention": performance.attention}
    given = " ".join(f"{flag} {value}" for flag, value in flags.items() if value != "auto")
    given = " ".join([given, "--performance.deterministic"]).strip() if performance.deterministic else given
    _require_gpu_for_triton(performance, device)
    try:
        with dispatch.forced(**performance.kernel_backends()):
            rows = list(_choices(config, device, optimizer_device or device, flat=flat))
    except RuntimeError as error:
        if not given:
            raise
        raise ConfigError(f"{given}: {error}") from None
    if performance.attention == "short":
        _require_short(rows)
    return rows


def _require_gpu_for_triton(performance: PerformanceConfig, device: torch.device) -> None:
    """Refuse Triton where no kernel of it can run, in the words of the command line."""
    asked = "triton" in performance.kernel_backends().values()
    if asked and device.type != "cuda" and launch.triton is not None and not launch.runs_on(torch.empty(0)):
        raise ConfigError(
            f"--performance.kernels {performance.kernels}: Triton kernels need a GPU, and this run is on the "
            f"{device.type.upper()}; leave the flag out, and plain torch computes the same"
        )


def _require_short(rows: Iterable[Row]) -> None:
    """Refuse the backend ``short`` for a network that has no layer for it; other layers fall back."""
    found = {name: choice for name, choice in rows if choice.op == "attention"}
    if any(choice.forward == "short" for choice in found.values()):
        return
    given = {choice.why: name for name, choice in reversed(found.items())}
    layers = "; ".join(f"{name}: {why}" for why, name in given.items()) or "it has no attention"
    raise ConfigError(
        f"--performance.attention short: no layer of the network can use it ({layers}), expected self-attention on a "
        f"packed projection of 1 to {LONGEST} tokens with head dim {', '.join(map(str, HEAD_DIMS))}; use auto"
    )


def _choices(config: RunConfig, device: torch.device, optimizer_device: torch.device, *, flat: bool) -> Iterator[Row]:
    with torch.device("meta"):
        model = build_model(config.model, attention=config.performance.attention)
    if config.performance.fp8:
        yield "linear", _fp8(config.performance, model, device)
    if compiles(config.performance, device):
        model.compile_blocks()
    # The model is on the meta device; an example tensor has the actual device.
    explained = dispatch.explain(model, torch.empty(0, device=device, dtype=DTYPES[config.performance.precision]))
    yield from ((name or "last norm", choice) for name, choice in explained)
    latents = torch.empty(0, device=device)
    for op in ("philox", "noising"):
        yield "objective", dispatch.choice(op, latents, differentiated=False)
    yield "objective", dispatch.choice("loss", latents)
    family = family_of(config.optim)
    if family.kernel is None or (family.kernel_in == "flat engine" and not flat):
        yield "optimizer", Choice(family.name, family.library, "-", "not an op of fastdiff")
    else:
        yield "optimizer", _of_optimizer(family, config.performance, device, optimizer_device)


def _fp8(performance: PerformanceConfig, model: Model, device: torch.device) -> Choice:
    on_gpu = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if on_gpu else None
    fp8.require_usable(capability, compiled=compiles(performance, device))
    count = len(fp8.inner_blocks(model, performance))
    weights = "" if performance.fp8_weight_gradients == "fp8" else ", gradients of weights in bf16"
    why = f"{'torch._scaled_mm' if on_gpu else 'emulated on a CPU'}{weights}"
    return Choice(f"products of {count} blocks", "fp8", "fp8", why)


def _of_optimizer(
    family: OptimizerFamily, performance: PerformanceConfig, device: torch.device, optimizer_device: torch.device
) -> Choice:
    op = str(family.kernel)
    found = dispatch.choice(op, torch.empty(0, device=optimizer_device), differentiated=False)
    if family.without_compiler is None or optimizer_device.type != "cpu":
        return found
    if _is_offloaded(family, performance.kernel_backends(), device, optimizer_device):
        why = _without_compiler(family)
        if why is None:
            return Choice(op, "compile", "-", "its state is on the host")
        log.warning(f"{op} on the host is plain torch, a multiple slower than compiled: {why}")
        return Choice(op, "reference", "-", "cannot be compiled here")
    if found.forward == "compile" and (why := _without_compiler(family)):
        raise RuntimeError(f"{op}, backend 'compile': {why}; use backend 'reference'")
    return found


def in_words(rows: Iterable[Row]) -> str:
    """Summarise: ``adaln, loss, noising by triton (on CUDA); attention by sdpa (cudnn) (first choice on sm_90)``.

    Attention that differs between layers is counted: ``attention of 5 of 16 layers by short (asked for)``.
    """
    ops: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    rows = list(rows)
    layers = Counter(choice for _, choice in rows if choice.op == "attention")
    for _, choice in rows:
        by = choice.forward if choice.backward in ("-", choice.forward) else f"{choice.forward}/{choice.backward}"
        some = f" of {layers[choice]} of {layers.total()} layers" if len(layers) > 1 and choice in layers else ""
        ops[by, choice.why][choice.op + some] = None
    return "; ".join(f"{', '.join(names)} by {by} ({why})" for (by, why), names in ops.items())
