"""Parameters and operations of published recipes, counted from their configurations: a plan is within 2 % of them.

The formulas are written out here from the papers' tables and the published configurations, without fastdiff's own.
"""

import json
from dataclasses import dataclass

import pytest

from fastdiff.cli.main import main

FREQUENCIES = 256
CLASSES = 1001
"""Of ImageNet, with that of no class."""
HEAD = 2048
"""Width inside of REPA's head."""


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A published configuration."""

    depth: int
    width: int
    head: int
    """Width of a head."""
    tokens: int = 256
    inputs: int
    """Numbers of a patch."""
    outputs: int
    swiglu: bool = False
    norm_weights: bool = False
    qk_norm: bool = False
    class_tokens: int = 0
    class_tokens_from: int = 0
    teacher: int = 0
    """Width of a class token of a teacher beside the patches; 0: none."""
    teacher_norm: bool = False
    value_residual: bool = False
    sparse: tuple[range, int] | None = None
    """Blocks of SPRINT that leave tokens out, and the tokens that they have."""
    aligned: int = 0
    """Width of the features of a teacher, to which a head of three layers projects all tokens; 0: no head."""
    bottleneck: int = 0
    text: tuple[int, int] | None = None
    """Tokens of a caption and width of their embeddings: one modulation for all blocks, and cross-attention."""

    @property
    def mlp(self) -> int:
        """Width inside of the MLP."""
        return int(2 / 3 * 4 * self.width) if self.swiglu else 4 * self.width

    @property
    def parameters(self) -> int:
        """Matrices and biases."""
        d = self.width
        block = linear(d, 3 * d) + linear(d, d)
        block += linear(d, (1 + self.swiglu) * self.mlp) + linear(self.mlp, d)
        block += 2 * d * self.norm_weights + 2 * self.head * self.qk_norm
        outside = linear(FREQUENCIES, d) + linear(d, d) + linear(d, self.outputs) + self.class_tokens * d
        outside += self.inputs * self.bottleneck + linear(self.bottleneck or self.inputs, d)
        outside += d * self.norm_weights + d * self.teacher_norm + (self.depth - 1) * self.value_residual
        outside += d + linear(2 * d, d) if self.sparse else 0
        outside += linear(d, HEAD) + linear(HEAD, HEAD) + linear(HEAD, self.aligned) if self.aligned else 0
        outside += linear(self.teacher, d) + linear(d, self.teacher) if self.teacher else 0
        if self.text is None:
            block += linear(d, 6 * d)
            outside += CLASSES * d + linear(d, 2 * d)
        else:
            block += 4 * linear(d, d) + 6 * d
            outside += linear(self.text[1], d) + linear(d, d) + linear(d, 6 * d) + 2 * d
        return self.depth * block + outside

    @property
    def flops(self) -> float:
        """Of a training step on one image: three forward passes, two operations per multiply-add."""
        d = self.width
        matrices = 4 * d * d + (3 if self.swiglu else 2) * d * self.mlp
        forward = 0
        for block in range(self.depth):
            tokens = self.tokens + bool(self.teacher) + (self.class_tokens if block >= self.class_tokens_from else 0)
            if self.sparse and block in self.sparse[0]:
                tokens = self.sparse[1]
            forward += tokens * matrices + 2 * tokens**2 * d
            if self.text is None:
                forward += 6 * d * d
            else:
                forward += 2 * tokens * d * d + 2 * self.text[0] * d * d + 2 * tokens * self.text[0] * d
        patch = self.inputs * self.bottleneck + (self.bottleneck or self.inputs) * d
        forward += self.tokens * (patch + d * self.outputs) + 2 * self.teacher * d + FREQUENCIES * d + d * d
        forward += (self.tokens + bool(self.teacher)) * 2 * d * d if self.sparse else 0
        forward += (self.tokens + bool(self.teacher)) * HEAD * (d + HEAD + self.aligned) if self.aligned else 0
        forward += 2 * d * d if self.text is None else self.text[0] * (self.text[1] * d + d * d) + 6 * d * d
        return 3.0 * 2.0 * forward


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


XL = {"depth": 28, "width": 1152, "head": 72}
PUBLISHED = {
    # SiT's models.py: SiT-XL/2 on 32 x 32 x 4 in patches of 2, with the outputs of a variance.
    "sit-xl-2-256": Transformer(**XL, inputs=16, outputs=32),
    # lightningdit_xl_vavae_f16d32.yaml: use_swiglu, use_rmsnorm, in_chans 32; use_qknorm off.
    "lightningdit-xl-1-256": Transformer(**XL, inputs=32, outputs=32, swiglu=True, norm_weights=True),
    # RiT-XL/16 of its model.py, on 384 channels of DINOv2-S, with use_cls.
    "rit-xl-256": Transformer(
        **XL, inputs=384, outputs=384, swiglu=True, norm_weights=True, qk_norm=True, class_tokens=32,
        class_tokens_from=8, teacher=384,
    ),
    # SR-DiT's models/sit.py: SiT-B/1 on 32 channels, with the class token and the features of DINOv2-B; a quarter of
    # 257 tokens in blocks 2 to 9.
    "sr-dit-b-1-256": Transformer(
        depth=12, width=768, head=64, inputs=32, outputs=32, qk_norm=True, teacher=768, teacher_norm=True,
        value_residual=True, sparse=(range(2, 10), 64), aligned=768,
    ),
    # JiT-B/16: patches of 16 x 16 x 3 through 128 channels.
    "jit-b-16-256": Transformer(
        depth=12, width=768, head=64, inputs=768, outputs=768, swiglu=True, norm_weights=True, qk_norm=True,
        class_tokens=32, class_tokens_from=4, bottleneck=128,
    ),
    # PixArt-Sigma's configuration at 256 px: T5-XXL with 300 tokens, learned sigma.
    "pixart-256": Transformer(**XL, inputs=16, outputs=32, text=(300, 4096)),
}  # fmt: skip
MILLIONS = {
    "sit-xl-2-256": 675, "lightningdit-xl-1-256": 675.26, "rit-xl-256": 676, "jit-b-16-256": 131, "pixart-256": 611,
    "sr-dit-b-1-256": 140,
}  # fmt: skip
"""As published: table 1 of arXiv:2401.08740, the training log of LightningDiT (with 0.3 M of fixed positions), the
table of RiT's README, that of arXiv:2511.13720, the README of SpeedrunDiT, the checkpoint PixArt-Sigma-XL-2-256x256."""


def planned(name: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, float]:
    fast = ("--batch.micro", "1", "--performance.recompute", "--deepspeed_config", "ddp")
    assert main(["plan", "--preset", name, "--data.path", "", "--gpus", "1xH100", *fast, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["network"]
    return found["trained"], found["flops_per_image"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_plan_counts_what_the_published_configuration_has(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parameters, flops = planned(name, capsys)
    assert parameters == PUBLISHED[name].parameters, "every matrix and bias, not only within 2 %"
    assert parameters / 1e6 == pytest.approx(MILLIONS[name], rel=0.02)
    assert flops == pytest.approx(PUBLISHED[name].flops, rel=0.02)


def test_the_count_of_a_dit_is_that_of_its_paper() -> None:
    """118.6 G multiply-adds of DiT-XL/2 (table 4 of arXiv:2212.09748)."""
    assert PUBLISHED["sit-xl-2-256"].flops == pytest.approx(6 * 118.64e9, rel=1e-3)
