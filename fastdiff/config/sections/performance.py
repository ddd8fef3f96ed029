"""Device, precision, memory and kernels of a run."""

from dataclasses import dataclass
from typing import Literal, cast

from fastdiff.errors import require
from fastdiff_kernels.names import BACKENDS, OPS, AttentionBackend, Backend

Precision = Literal["fp32", "bf16", "fp16"]
Device = Literal["auto", "cuda", "cpu"]
SumOrder = Literal["ranks", "micro_batches"]
EngineName = Literal["auto", "deepspeed", "flat"]
_MOST_PROFILED = 50
"""Steps of a profile at most: the host holds all of its events until the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PerformanceConfig:
    """Device, precision, compilation, memory and kernels."""

    device: Device = "auto"
    """auto: a GPU where there is one, otherwise the CPU; cuda: a GPU, as the presets made for GPUs ask; cpu: the CPU,
    even where there is a GPU. A GPU that torch cannot use is an error, not a run on the CPU."""
    precision: Precision = "bf16"
    """Dtype of weights and activations in the forward and backward pass; master weights are always fp32."""
    compile: bool | None = None
    """torch.compile of each block. None: on with CUDA, off on a CPU."""
    recompute: bool = False
    """Activation checkpointing: recompute each block in the backward pass to save memory."""
    stored_blocks: int = 0
    """Blocks that keep their activations under --performance.recompute, which then costs less time and saves less
    memory: the last ones, whose activations the backward pass frees before it recomputes another block. fastdiff plan
    finds the largest number that fits a GPU."""
    grad_accum_dtype: Precision | None = None
    """Dtype in which the gradients of the micro-batches and ranks of a step are added up. None: fp32 in a new run, and
    in a resumed run the dtype that it has. The value of --performance.precision, bf16 or fp16, needs half the memory
    and traffic for them; bf16 sums of 256 micro-batches are 2 % off."""
    grad_accum_order: SumOrder = "ranks"
    """Order in which the gradients of a step are added up. ranks: each rank adds up its micro-batches, then the ranks
    add up their sums; losses on another number of ranks or at another ZeRO stage differ by rounding. micro_batches: one
    micro-batch after the other, so that a run and its resume are equal to the bit on any number of ranks and at any
    stage with the same --batch.micro. The ranks then exchange gradients after every micro-batch, as at ZeRO-2 and 3
    without it. On a GPU with --performance.deterministic."""
    engine: EngineName = "auto"
    """flat: gradients, weights and moments in flat buffers, updated in one pass per step without DeepSpeed, for ZeRO
    stage 0 (--deepspeed_config ddp); deepspeed: DeepSpeed, for every stage. auto: flat where it can train the run;
    a resumed run keeps its engine. Losses of the two differ by rounding, and checkpoints of both fit both."""
    cuda_graph: bool = False
    """Capture the forward and backward pass of a micro-batch, noise and losses included, in a CUDA graph in the third
    step, and the update in another: the host then launches two graphs instead of thousands of kernels, which matters
    where it is slower than the GPU (small micro-batches). Losses are the same; on more than two ranks, which add up
    their gradients behind the passes instead of beside them, up to the order of these sums. For GPUs, the flat engine
    (--deepspeed_config ddp) and micro-batches of one shape; everything else is refused."""
    allow_tf32: bool = False
    """Let fp32 matrix products and convolutions round their inputs to TF32 (Ampere and newer)."""
    fp8: bool = False
    """Multiply in FP8 (e4m3) in the linear layers of a DiT's blocks, with one scale per tensor from the maxima of the
    last 16 steps; the first 16 steps, validation and sampling multiply in bf16. Needs bf16 and a GPU of sm_89 (Ada,
    Hopper) or newer. A network of less than 1024 features per token gains nothing and is refused. A CPU emulates it,
    slowly."""
    fp8_weight_gradients: Literal["fp8", "bf16"] = "fp8"
    """Products for the gradients of the weights under --performance.fp8. fp8 should be faster; bf16 rounds less, but
    losses were the same where it was tried."""
    fp8_ends: int = 1
    """Blocks at each end of the network that stay in bf16 under --performance.fp8."""
    deterministic: bool = False
    """Add in a fixed order everywhere, so that also on a GPU a run and its resume on as many ranks are equal to the
    bit. Slower there; on a CPU it changes nothing. An operation without a fixed order ends the run."""
    kernels: str = "auto"
    """Backend of fastdiff's own ops: auto (Triton on a GPU, otherwise plain torch), triton, reference (plain torch) or
    compile (plain torch with torch.compile), then exceptions by op: auto,adaln=compile,loss=reference."""
    attention: AttentionBackend = "auto"
    """Backend of attention: auto (the fastest known for the GPU), sdpa (torch's choice), cudnn, flash, xformers,
    short (fastdiff's own for up to 256 tokens of one packed projection, head dims 64, 72 and 80; auto in other layers),
    or reference (matrix products and a softmax)."""
    profile: str = ""
    """FIRST:LAST: profile the steps after step FIRST, up to and including step LAST (0:3 are the first three), at most
    50, on every rank: <run folder>/profile/rank-N-from-STEP.json.gz, STEP the first one in it, for
    https://ui.perfetto.dev and, on a GPU, a snapshot of the memory. The steps are slower, and their losses the same. A
    run that is stopped before LAST writes none. Empty: none."""

    def __post_init__(self) -> None:
        self.kernel_backends()
        _ = self.profiled
        require(self.stored_blocks >= 0, f"--performance.stored_blocks {self.stored_blocks}: expected 0 or more blocks")
        require(
            self.recompute or not self.stored_blocks,
            f"--performance.stored_blocks {self.stored_blocks} changes nothing without recomputation: add "
            "--performance.recompute, or leave it out",
        )
        require(
            not self.fp8 or self.precision == "bf16",
            f"--performance.fp8 with --performance.precision {self.precision}: FP8 layers are part of a network in "
            "bf16; use --performance.precision bf16",
        )
        require(self.fp8_ends >= 0, f"--performance.fp8_ends {self.fp8_ends}: expected 0 or more blocks")
        require(
            self.fp8 or (self.fp8_weight_gradients, self.fp8_ends) == ("fp8", 1),
            f"--performance.fp8_weight_gradients {self.fp8_weight_gradients} and --performance.fp8_ends "
            f"{self.fp8_ends} change nothing in 16 bits: each needs --performance.fp8; add it, or leave them out",
        )
        require(
            self.grad_accum_dtype in (None, "fp32", self.precision),
            f"--performance.grad_accum_dtype {self.grad_accum_dtype} with --performance.precision {self.precision}: "
            f"{' or '.join(dict.fromkeys(['fp32', self.precision]))}",
        )

    @property
    def sums(self) -> Precision:
        """Dtype in which gradients are added up."""
        return self.grad_accum_dtype or "fp32"

    @property
    def in_order(self) -> bool:
        """Whether gradients are added up in the order of the micro-batches."""
        return self.grad_accum_order == "micro_batches"

    @property
    def profiled(self) -> range:
        """Numbers of steps taken before each profiled step; empty: none. ConfigError: no FIRST:LAST, or too long."""
        if not self.profile:
            return range(0)
        first, _, last = self.profile.partition(":")
        valid = first.isdecimal() and last.isdecimal() and int(first) < int(last)
        require(
            valid,
            f"--performance.profile {self.profile}: expected FIRST:LAST with FIRST below LAST, for example 10:13, the "
            "three steps after step 10",
        )
        steps = range(int(first), int(last))
        require(
            len(steps) <= _MOST_PROFILED,
            f"--performance.profile {self.profile}: {len(steps)} steps, expected at most {_MOST_PROFILED}, whose trace "
            f"the memory of the host can hold; for example {first}:{steps.start + 3}",
        )
        return steps

    def kernel_backends(self) -> dict[str, Backend]:
        """Return the backends that ``kernels`` forces, by op; ConfigError: unknown op or backend, or an op twice."""
        default, *exceptions = [part.strip() for part in self.kernels.split(",")]
        if "=" in default:
            default, exceptions = "auto", [default, *exceptions]
        named = [part.partition("=")[::2] for part in exceptions]
        for op, _ in named:
            require(op in OPS, f"{self._given()}: {op!r} is none of the ops {', '.join(OPS)}")
            require([o for o, _ in named].count(op) == 1, f"{self._given()}: {op} is named twice")
        chosen = dict.fromkeys(OPS, default) | dict(named)
        for backend in (default, *chosen.values()):
            require(
                backend in ("auto", *BACKENDS),
                f"{self._given()}: {backend!r} is none of auto, {', '.join(BACKENDS)}; "
                "write for example auto,adaln=compile",
            )
        return {op: cast(Backend, backend) for op, backend in chosen.items() if backend != "auto"}

    def _given(self) -> str:
        return f"--performance.kernels {self.kernels}"
