"""Online decoding and encoding of images during training.

Crops and flips are random, at the cost of running the frozen autoencoder and text encoder in every step. Random choices
are functions of the seed and the position. Posteriors and embeddings are rounded to 16 bits as in a shard, so the same
transform and encoders give the same batches as encoded shards. Captions that the text encoder cuts are counted as they
are drawn.
"""

import hashlib
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastdiff.batch import without_padding
from fastdiff.conditions import image_conditions, of_source, stored_dtype
from fastdiff.config.sections.data import DataConfig
from fastdiff.console import log
from fastdiff.data.encoding.autoencoder import LatentEncoder, require_side
from fastdiff.data.images.decode import BadImage, Crop, Decoded, ImageTransform, open_decoder
from fastdiff.data.images.items import BadItem, ImageItem
from fastdiff.data.images.masks import WITHOUT_ALPHA, MaskDecoder, on_latents, origin_of
from fastdiff.data.images.options import SourceOptions
from fastdiff.data.images.sources import open_source
from fastdiff.data.loading.batches import Batches, Tensors
from fastdiff.data.loading.cut_captions import CutCaptions
from fastdiff.data.loading.order import RankPositions, SampleOrder, subset
from fastdiff.data.selection import Counted, Selection
from fastdiff.data.shards.format import (
    LATENT,
    LOSS_MASK,
    Column,
    DatasetInfo,
    Provenance,
    ShardInfo,
    canonical_json,
    condition_columns,
    loss_mask_column,
)
from fastdiff.data.shards.remote import is_remote, shown
from fastdiff.errors import ConfigError, DataError, require
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.rng import Stream
from fastdiff_kernels import philox

_SHUFFLED_TOGETHER = 4096
_STORED: Final = "float16"
_ENCODED_TOGETHER = 8
"""Images that the autoencoder works on at once, so that its memory, beside that of a step, is known."""


class OnlineImages:
    """A source of images with its decoder and encoders, used in place of a reader of shards.

    Args:
        config: source, transform and threads.
        pretrained: the pipeline with the autoencoder and the text encoders.
        device: device of the encoders.
        dtype: dtype of their weights and activations.
        seed: of the run, which draws a random subset.
        takes: conditions that the network takes.

    Raises:
        ConfigError: the source has no captions or no random access, or the resolution does not fit the autoencoder.
        DataError: the source does not exist.
    """

    def __init__(
        self, config: DataConfig, pretrained: Pretrained, device: torch.device, dtype: torch.dtype, *,
        seed: int = 0, takes: Collection[str],
    ) -> None:  # fmt: skip
        self.folder = shown(config.path) if is_remote(config.path) else config.path
        space = pretrained.latent_space
        require(
            space.has_statistics,
            f"--data.online: the autoencoder of {pretrained.path} has no statistics of its latents, which `fastdiff "
            "encode` measures; encode the images, and train on the shards",
        )
        self.encoder = LatentEncoder(pretrained, device, dtype)
        require_side(self.encoder, config.resolution, "--data.resolution")
        if config.resolution % self.encoder.factor:
            raise ConfigError(
                f"--data.resolution {config.resolution}: expected a multiple of {self.encoder.factor}, the pixels per "
                f"latent of {pretrained.path}"
            )
        self.source = open_source(
            SourceOptions(
                source=config.path,
                samples_per_shard=_SHUFFLED_TOGETHER,
                image_column=config.image_column,
                caption_column=config.caption_column,
                max_samples=config.max_samples if config.subset == "first" else None,
                image_root=config.image_root,
                masks=config.masks,
                dataset_config=config.dataset_config,
            )
        )
        if not self.source.captioned:
            raise ConfigError(f"{self.folder} has no captions in {config.caption_column!r}; see --data.caption_column")
        self.tags = config.tags
        self._chosen = subset(seed, len(self.source), config.max_samples) if config.subset == "random" else None
        crop: Crop = "center" if config.center_crop else "random"
        transform = ImageTransform(config.resolution, crop, config.image_interpolation_mode)
        self.decoder = open_decoder(config.decode, transform, config.workers, device)
        masks = origin_of(config.masks)
        self.masks = MaskDecoder(masks, transform, config.workers) if masks else None
        self.readers = ThreadPoolExecutor(config.workers, thread_name_prefix="fastdiff-images")
        null = without_padding(self.encoder.null())
        self._null = {
            name: value.cpu().float().numpy().astype(stored_dtype(name, _STORED)) for name, value in null.items()
        }
        self.info = self._describe(config, pretrained, transform, of_source("image", takes))

    def null(self) -> dict[str, npt.NDArray[Any]]:
        """Return the embedding of the empty caption, by column."""
        return self._null

    def keys(self, sample_ids: npt.ArrayLike) -> list[str]:
        """Return the names of samples, for messages."""
        return [self.item(int(number)).name for number in np.asarray(sample_ids)]

    def __len__(self) -> int:
        """Return the number of images in use."""
        return len(self.source) if self._chosen is None else len(self._chosen)

    @property
    def selection(self) -> Selection:
        """What the listing, and headers of tars, show of the source that is not in use."""
        partitions = (self.source.found_in(partition) for partition in range(self.source.partitions))
        if not (undrawn := len(self.source) - len(self)):
            return self.source.selection.and_then(partitions)
        drawn = Counted(reason=f"beyond the --max-samples {len(self)} that --seed draws", count=undrawn)
        return self.source.selection.and_then([*partitions, Selection(left_out=(drawn,))])

    def item(self, number: int) -> ImageItem | BadItem:
        """Return an image in use by number; StorageError if the storage fails."""
        return self.source.item(number if self._chosen is None else int(self._chosen[number]))

    def encoder_bytes(self) -> int:
        """Return the bytes on the device of the encoders and of the images in the autoencoder, predicted."""
        return self.encoder.held_bytes(_ENCODED_TOGETHER, self.info.latent.shape[-1] * self.encoder.factor)

    def encode(self, pixels: Tensor) -> Tensor:
        """Return the latents of ``[B, H, W, 3]`` uint8 as ``LatentEncoder.encode``, a few images at a time."""
        return torch.cat([self.encoder.encode(part) for part in torch.split(pixels, _ENCODED_TOGETHER)])

    def close(self) -> None:
        """End the threads."""
        self.readers.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _describe(
        self, config: DataConfig, pretrained: Pretrained, transform: ImageTransform, of_image: Collection[str]
    ) -> DatasetInfo:
        """Describe the images as a data set whose shards are runs of consecutive samples."""
        side = config.resolution // self.encoder.factor
        provenance = Provenance(
            source=self.source.name,
            transform=f"{transform}, decoded by {self.decoder.name}, flip {config.random_flip}",
            autoencoder=pretrained.path,
            autoencoder_digest=pretrained.digest("vae"),
            text_encoder=pretrained.path,
            text_encoder_digest=pretrained.digest("text_encoder"),
            versions=pretrained.packages(text=True),
        )
        facts = [
            self.source.digest, provenance.transform, provenance.autoencoder_digest, provenance.text_encoder_digest,
        ]  # fmt: skip
        facts += [] if self._chosen is None else [self._chosen.tolist()]
        digest = hashlib.sha256(canonical_json(facts)).hexdigest()
        columns = {LATENT: Column(dtype=_STORED, shape=(self.encoder.channels, side, side))}
        columns |= condition_columns({name: value.shape for name, value in self._null.items()}, _STORED, of_image)
        if self.masks is not None:
            columns[LOSS_MASK] = loss_mask_column(columns[LATENT])
        count = len(self)
        runs = [min(_SHUFFLED_TOGETHER, count - start) for start in range(0, count, _SHUFFLED_TOGETHER)]
        return DatasetInfo(
            columns=columns,
            normalisation=self.encoder.normalisation,
            provenance=provenance,
            kind=self.encoder.kind,
            shards=tuple(
                ShardInfo(name=f"{number}", samples=size, bytes=1, sha256=digest, index_sha256="")
                for number, size in enumerate(runs)
            ),
            samples=count,
        )


class OnlineBatches(Batches):
    """Micro-batches decoded and encoded by a thread ahead of the training step."""

    name: ClassVar[str] = "online"

    def __init__(self, images: OnlineImages, order: SampleOrder, own: RankPositions, **options: Any) -> None:
        super().__init__(images, order, own, **options)
        self.images = images
        self._cut = CutCaptions(images.encoder.lost, own.rank, own.ranks)
        self._without_alpha: set[str] = set()

    def release(self) -> None:
        """Say which share of the captions was cut, and how many pictures had no mask."""
        self._cut.tell()
        if self._without_alpha:
            log.warning(f"{WITHOUT_ALPHA}, of those drawn on rank 0: {len(self._without_alpha)}")

    def load(self, index: int) -> Tensors:
        """Read, decode and encode one micro-batch."""
        positions = self.positions(index)
        position = torch.from_numpy(positions)
        items = list(self.images.readers.map(self._item, self.order.samples(positions).tolist()))
        corners = philox.uniform(self.seed, int(Stream.CROP), position, 2, backend="reference")
        offsets = [(top, left) for top, left in corners.tolist()]
        decoded = self.images.decoder.decode([item.image for item in items], offsets)
        if self.images.masks is not None:
            decoded = self.images.masks.decode(items, decoded, offsets)
        images = [_good(item, found) for item, found in zip(items, decoded, strict=True)]
        flips = self.random_flip & (self.uniform(Stream.FLIP, position) < 0.5)
        mirrored = [image.pixels[:, ::-1] if flip else image.pixels for image, flip in zip(images, flips, strict=True)]
        pixels = np.stack(mirrored)  # B x [H, W, 3] -> [B, H, W, 3]
        tensors = {LATENT: self.images.encode(torch.from_numpy(pixels)).half().contiguous()}
        tensors |= self._embed(items, position)
        if self.images.masks is not None:
            self._note_unmasked(items, images)
            weights = [on_latents(image, self.images.encoder.factor) for image in images]
            turned = [mask[:, ::-1] if flip else mask for mask, flip in zip(weights, flips, strict=True)]
            tensors[LOSS_MASK] = torch.from_numpy(np.stack(turned)).to(self.device)  # B x [h, w] -> [B, h, w]
        self._require_finite(items, tensors)
        columns = self.images.info.columns
        sizes = [image_conditions(columns, i.original_size, i.crop, i.pixels.shape[:2]) for i in images]
        tensors |= {name: torch.tensor([each[name] for each in sizes]).to(self.device) for name in sizes[0]}
        return {"position": position.to(self.device), **tensors}

    def _note_unmasked(self, items: Sequence[ImageItem], images: Sequence[Decoded]) -> None:
        """Collect pictures without an alpha channel, and name the first; mask files are counted by the listing."""
        if self.images.masks is None or self.images.masks.origin != "alpha" or self.own.rank:
            return
        names = [item.name for item, image in zip(items, images, strict=True) if image.mask is None]
        if names and not self._without_alpha:
            log.warning(f"{names[0]} has no alpha channel, so it counts as a whole; their number is told at the end")
        self._without_alpha.update(names)

    def _require_finite(self, items: Sequence[ImageItem], tensors: Tensors) -> None:
        """Raise DataError for non-finite tensors; the wait for the device blocks only this thread."""
        finite = torch.stack([value.isfinite().flatten(1).all(1) for value in tensors.values()], 1)
        if not bool(finite.all()):
            row, column = (~finite).nonzero()[0].tolist()
            raise DataError(
                f"{items[row].name}: its {list(tensors)[column]} is not finite, because the autoencoder or the text "
                "encoder overflows; use --performance.precision bf16 or fp32"
            )

    def _item(self, number: int) -> ImageItem:
        item = self.images.item(number)
        if isinstance(item, BadItem):
            raise DataError(f"{item.name}: {item.reason}; repair it or remove it from {self.images.folder}")
        return item

    def _embed(self, items: Sequence[ImageItem], position: Tensor) -> Tensors:
        """Embed a text of one caption of each image; a text shared by several images is embedded once."""
        shares = self.uniform(Stream.CAPTION, position)
        # In fp64, as in the reader of shards: less than the number of captions for every share below 1.
        numbers = [int(share * len(item.captions)) for item, share in zip(items, shares.tolist(), strict=True)]
        captions = (item.captions[number] for item, number in zip(items, numbers, strict=True))
        draws = (f"{self.seed}/{number}" for number in position.tolist())
        chosen = list(map(self.images.tags.variant, captions, draws))
        self._cut.add([item.name for item in items], chosen)
        unique = list(dict.fromkeys(chosen))
        row = torch.tensor([unique.index(caption) for caption in chosen], device=self.device)
        embedded = without_padding(self.images.encoder.embed(unique))
        return {name: (value.half() if value.is_floating_point() else value)[row] for name, value in embedded.items()}


def _good(item: ImageItem, found: Decoded | BadImage) -> Decoded:
    if isinstance(found, BadImage):
        raise DataError(f"{item.name}: {found.reason}; repair it or remove it, or encode with `--bad skip`")
    return found
