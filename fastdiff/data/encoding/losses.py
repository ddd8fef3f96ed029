"""What an encode loses of an image and its captions; each kind is counted and told at the end."""

from collections.abc import Iterator

from fastdiff.conditions import of_source
from fastdiff.data.encoding.autoencoder import LatentEncoder, PixelEncoder
from fastdiff.data.images.decode import Decoded
from fastdiff.data.images.items import ImageItem
from fastdiff.data.shards.format import DatasetInfo


def losses(
    item: ImageItem, decoded: Decoded, info: DatasetInfo, encoder: LatentEncoder | PixelEncoder
) -> Iterator[str]:
    """Yield what is lost of an image, in words that a count follows."""
    height, width = decoded.pixels.shape[:2]
    if decoded.original_size[0] < height or decoded.original_size[1] < width:
        yield "pictures smaller than the resolution, so enlarged: they are blurred"
    if not of_source("caption", info.columns):
        return
    if item.captions[:1] == ("",):
        yield "pictures with an empty caption, trained as the empty prompt"
    if len(item.captions) > info.captions:
        yield f"pictures with more captions than the {info.captions} embedded; --captions all embeds all"
    limit = encoder.cut(item.captions[: info.captions])
    if limit is not None:
        yield f"pictures with a caption that was cut: it is longer than the {limit} tokens that the text encoder reads"
