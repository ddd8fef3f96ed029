"""Reference pictures in Flux.2-klein, against diffusers' class with the packing of its pipeline."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastdiff.config.networks.flux2 import Flux2Config
from fastdiff.models.family import family_of
from fastdiff.models.transformers.flux2 import Flux2
from tests.support.references.transformer_families import FAMILIES, built, conditions, noisy, theirs
from tests.support.references.unet_reference import difference

_TIME = torch.tensor([0.1, 0.45, 0.98])


def config(references: int) -> Flux2Config:
    plain = FAMILIES["flux2"].config
    assert isinstance(plain, Flux2Config)
    return replace(plain, references=references)


def packed(model: Any, latents: Tensor, references: Tensor, context: Tensor) -> Tensor:
    """Evaluate diffusers' class as its pipeline does for each sample: tokens of the references behind the others."""
    from diffusers import Flux2KleinPipeline as Pipeline

    pictures = [references[:, number] for number in range(references.shape[1])]
    tokens = torch.cat([Pipeline._pack_latents(each) for each in (latents, *pictures)], dim=1)
    own = Pipeline._prepare_latent_ids(latents)
    of_each = [Pipeline._prepare_image_ids([each[:1] for each in pictures])] if pictures else []
    ids = torch.cat([own, *(each.expand(len(latents), -1, -1) for each in of_each)], dim=1)
    (out,) = model(
        tokens, context, _TIME, img_ids=ids, txt_ids=Pipeline._prepare_text_ids(context), guidance=None,
        return_dict=False,
    )  # fmt: skip
    return Pipeline._unpack_latents_with_ids(out[:, : own.shape[1]], own)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("references", "size"), [(1, (8, 8)), (3, (8, 8)), (2, (6, 12))])
def test_a_step_is_that_of_the_pipeline(references: int, size: tuple[int, int]) -> None:
    """Output and every gradient; a reference may have another size than the picture."""
    model = built(config(references))
    other = theirs(model.config, model.state_dict())
    latents, context = noisy(model.config), conditions(model.config)["context"]
    given = torch.randn(3, references, model.config.channels, *size, generator=torch.Generator().manual_seed(4))
    found = model(latents, _TIME, context=context, reference=given)
    expected = packed(other, latents, given, context)
    assert found.shape == latents.shape
    assert difference(found, expected) < 1e-5
    for each in (found, expected):
        each.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in other.named_parameters()}
    for name, parameter in model.named_parameters():
        assert difference(parameter.grad, gradients[name]) < 1e-4, name
    with torch.no_grad():
        assert difference(model(latents, _TIME, context=context, reference=given.roll(1, 0)), found) > 1e-3
        if references > 1:
            assert difference(model(latents, _TIME, context=context, reference=given.roll(1, 1)), found) > 1e-3
        alone = model(latents, _TIME, context=context)
        assert difference(alone, packed(other, latents, given[:, :0], context)) < 1e-5
        assert difference(alone, found) > 1e-3


def test_references_are_counted() -> None:
    """As tokens of the joint stream, in operations and in the attention's choice; not in the pipeline's file."""
    plain, two = config(0), config(2)
    assert two.conditions == {**plain.conditions, "reference": (2, 32, 8, 8)}
    assert "references" not in two.to_diffusers()
    assert Flux2Config.from_diffusers(two.to_diffusers()).completed(two) == two
    model = built(two)
    assert isinstance(model, Flux2)
    assert model.tokens(torch.Size((8, 8)), 9) == 3 * 64 + 9
    family = family_of(two)
    assert family.multiply_adds(two) > 2.3 * family.multiply_adds(plain)
