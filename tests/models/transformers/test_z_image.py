"""Z-Image: the positions of its rotary tables."""

import pytest
import torch

from fastdiff.errors import ConfigError
from tests.support.references.transformer_families import FAMILIES, built, conditions, noisy

CONFIG = FAMILIES["z-image"].config


@pytest.mark.parametrize(
    ("size", "tokens", "message"),
    [
        ((64, 66), 40, r"captions of 40 tokens and latents of 64 x 66: the rotary tables .* have 128 x 32 x 32 posi"),
        (
            (8, 8),
            97,
            r"captions of 97 tokens and latents of 8 x 8: .*; encode smaller pictures, or captions of at most 96 to",
        ),
    ],
)
def test_what_has_no_position_is_refused(size: tuple[int, int], tokens: int, message: str) -> None:
    """The class would read behind the end of its tables."""
    model, given = built(CONFIG), conditions(CONFIG)
    row = given["context"][:, :1]
    longer = {"context": row.expand(-1, tokens, -1), "context_mask": torch.ones(3, tokens, dtype=torch.bool)}
    with pytest.raises(ConfigError, match=message):
        model(noisy(CONFIG, size), torch.rand(3), **longer)


@torch.no_grad()
def test_the_largest_picture_and_the_longest_caption_are_read() -> None:
    model = built(CONFIG)
    given = {"context": torch.randn(1, 96, 24), "context_mask": torch.ones(1, 96, dtype=torch.bool)}
    assert model(noisy(CONFIG, (64, 64), 1), torch.rand(1), **given).isfinite().all()


@torch.no_grad()
def test_padding_is_read_as_published() -> None:
    """Its states are weights: a picture that needs none is the same whatever they are, another is not."""
    model = built(CONFIG)
    given, time = conditions(CONFIG), torch.rand(3)
    given["context"] = torch.randn(3, 32, 24)
    given["context_mask"] = torch.ones(3, 32, dtype=torch.bool)
    for size, padded in (((16, 8), False), ((8, 8), True)):
        before = model(noisy(CONFIG, size), time, **given)
        model.x_pad_token.add_(1)
        assert torch.equal(before, model(noisy(CONFIG, size), time, **given)) != padded
    before = model(noisy(CONFIG, (16, 8)), time, **given)
    given["context_mask"][1, 20:] = False
    model.cap_pad_token.add_(1)
    moved = (model(noisy(CONFIG, (16, 8)), time, **given) - before).flatten(1).abs().amax(1) > 1e-6
    assert moved.tolist() == [False, True, False]
