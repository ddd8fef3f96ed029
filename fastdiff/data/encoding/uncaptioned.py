"""Sources without captions: what is said of them, and which are refused because nothing could train on their shards."""

import os
import shlex

from fastdiff.data.encoding.options import EncodeOptions
from fastdiff.data.images.folder import without_repeats
from fastdiff.data.images.items import ImageSource
from fastdiff.errors import ConfigError
from fastdiff.models.pretrained.pipeline import Pretrained


def lacks_captions(source: ImageSource, pretrained: Pretrained) -> bool:
    """Return whether a pipeline has text encoders and the source nothing for them."""
    return not source.captioned and bool(pretrained.text_parts)


def require_captions(options: EncodeOptions, source: ImageSource) -> None:
    """Refuse a source without captions for a pipeline with text encoders, unless its classes may be meant.

    Classes are meant if there are several, whose names are not folders of kohya's sd-scripts, or by ``--classes-from``.
    ConfigError names what lies beside the images, and every way out.
    """
    names = source.class_names
    of_kohya = bool(names) and all(without_repeats(name) != name for name in names)
    if source.classes is not None and (options.classes_from != "auto" or (source.classes > 1 and not of_kohya)):
        return
    beside = [str(each) for each in source.selection.noted if "caption" in each.reason or "tables" in each.reason]
    found = f" ({'; '.join(beside)})" if beside else ""
    example = without_repeats(names[0]) if of_kohya else "a photo of sks dog"
    ways = [f"one caption for all with --caption {shlex.quote(example)}"]
    if names:
        ways.append("that of the folders with --caption-from folder")
    ways.append("a caption file beside each (NAME.txt)")
    own = f"{options.pretrained.rstrip('/')}/vae or " if os.path.isdir(options.pretrained) else ""
    classes = " (for a network of classes: --classes-from folder)" if names else ""
    raise ConfigError(
        f"{source.name} have no captions{found}, but {options.pretrained} has a text encoder, whose network trains on "
        f"captions; give {', '.join(ways[:-1])} or {ways[-1]}; for a network without text, give an autoencoder alone, "
        f"such as --pretrained {own}stabilityai/sd-vae-ft-ema{classes}"
    )


def told(source: ImageSource, *, in_pixels: bool, without_text: bool) -> str | None:
    """Return what to say of captions and classes before the encode; None: nothing."""
    if in_pixels and source.captioned:
        return f"warning: the captions of {source.name} are not read: a data set in pixel space has no embeddings"
    if source.classes is None and not source.captioned:
        return f"{source.name}: no captions and no classes, so this is an unconditional data set"
    if without_text:
        return (
            f"warning: no captions in {source.name}, so the data set has no text embeddings, which a UNet needs; a DiT "
            "trains on classes"
        )
    return None
