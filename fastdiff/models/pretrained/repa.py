"""Checkpoints of REPA (Yu et al. 2024, arXiv:2410.06940): a SiT with projections to features of an image encoder."""

from collections.abc import Iterable
from pathlib import Path

from fastdiff.errors import require

_PROJECTIONS = "projectors."
_LEGACY = "decoder_blocks."
"""Blocks after the projections in the published files of the first version, whose blocks are numbered anew there."""


def refuse_repa(path: Path, names: Iterable[str]) -> None:
    """Refuse the weights of a REPA training by their name; ConfigError if some are of REPA."""
    found = [name for name in names if name.startswith((_PROJECTIONS, _LEGACY))]
    more = f" and {len(found) - 1} more weights" if len(found) > 1 else ""
    require(
        not found,
        f"{path} is a checkpoint of REPA: it has {min(found, default='')}{more} for its projections to the features of "
        "another encoder, which no network here has; save the weights under 'ema' without projectors.*, with the names "
        "of REPA's load_legacy_checkpoints, and use that file as a SiT with --objective.convention repa",
    )
