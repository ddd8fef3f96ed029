"""The texts that are embedded of each picture: its captions, or variants of each of them."""

from dataclasses import dataclass, field

from fastdiff.data.encoding.options import EncodeOptions
from fastdiff.data.images.items import ImageItem
from fastdiff.data.shards.format import MAX_VARIANTS
from fastdiff.errors import require
from fastdiff.tags import Tags


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedTexts:
    """Which texts of a picture are embedded; a function of its captions and its key."""

    captions: int = 1
    """Captions of a picture, at most; further ones are not embedded."""
    variants: int = 1
    """Variants of each caption."""
    tags: Tags = field(default_factory=Tags)
    """How a variant is made."""
    seed: int = 0

    @classmethod
    def asked(cls, options: EncodeOptions, captions: int) -> "EmbeddedTexts":
        """Return what options ask for, of up to so many captions of a picture; ConfigError: too many variants."""
        variants = options.shuffle_tags or 1
        require(
            captions * variants <= MAX_VARIANTS,
            f"--shuffle-tags {variants}: {captions * variants} variants of the {captions} captions of a picture, at "
            f"most {MAX_VARIANTS} are stored; use a smaller number, or --captions first",
        )
        return cls(captions=captions, variants=variants, tags=options.tags, seed=options.seed)

    def __call__(self, item: ImageItem) -> tuple[str, ...]:
        """Return the texts of a picture, the variants of its first caption first; at least one."""
        return tuple(
            self.tags.variant(caption, f"{self.seed}/{item.key}/{number}/{variant}")
            for number, caption in enumerate(self._captions(item))
            for variant in range(self.variants)
        )

    def whole(self, item: ImageItem) -> tuple[str, ...]:
        """Return the captions of a picture, each with all its tags in their order."""
        return tuple(map(self.tags.whole, self._captions(item)))

    def _captions(self, item: ImageItem) -> tuple[str, ...]:
        return (item.captions or ("",))[: self.captions]
