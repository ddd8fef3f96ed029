"""License of the base model on the card of an export."""

from pathlib import Path

import pytest

from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.networks.sd3 import SD3Config
from fastdiff.config.run import RunConfig
from fastdiff.config.sections.objective import FlowConfig
from fastdiff.export.model_card import _license

PUBLISHED = "Stability AI Community License"


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("---\nlicense: apache-2.0\n---\n# Mine", "apache-2.0"),
        ("---\nlicense: other\nlicense_name: house-rules\nlicense_link: LICENSE\n---\n", "house-rules"),
        ("---\nlicense: [mit, mine]\n---\n", PUBLISHED),
        ("---\nlicense: 'mit** [x](y)'\n---\n", PUBLISHED),
        ("---\nlicense: 'broken\n---\n", PUBLISHED),
        ("# Without a header", PUBLISHED),
        (None, PUBLISHED),
    ],
)
def test_the_card_of_the_base_model_goes_before_its_family(tmp_path: Path, card: str | None, expected: str) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    base = PretrainedConfig(path=str(tmp_path), weights=True)
    config = RunConfig(model=SD3Config(), objective=FlowConfig(), pretrained=base)
    assert _license(config).endswith(f"The base model, as published, has the license {expected}.")
