"""Encode of one partition: batches of images through the encoder into one shard per bucket."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastdiff.batch import as_numbers, from_stored, to_stored
from fastdiff.conditions import CAPTIONED, REFERENCE, image_conditions, of_source
from fastdiff.data.encoding.autoencoder import LatentEncoder, PixelEncoder
from fastdiff.data.encoding.embedded_texts import EmbeddedTexts
from fastdiff.data.encoding.statistics import PartitionSums
from fastdiff.data.encoding.teacher_features import TeacherColumns
from fastdiff.data.images.decode import Decoded
from fastdiff.data.images.items import ImageItem
from fastdiff.data.images.masks import on_latents
from fastdiff.data.images.stream import Stopwatch
from fastdiff.data.shards.format import LATENT, LATENT_LIMITS, LOSS_MASK, DatasetInfo, ShardInfo
from fastdiff.data.shards.int8_latents import dequantised, quantised
from fastdiff.data.shards.sample_files import components, longest_caption
from fastdiff.data.shards.tar_writer import ShardTar
from fastdiff.errors import DataError

_CPU_IMAGES = 4
_TEXT_BATCHES = 8
"""Batches of images whose captions are embedded together, if the encoder pads a batch of captions to its longest; fewer
of captions with variants."""
_KEPT_EMBEDDINGS, _KEPT_BYTES = 1024, 2**30
"""Most captions in the cache of embeddings, and their bytes; the 1024 of SDXL have 0.3 GiB in 16 bits."""

Images = Sequence[tuple[ImageItem, Decoded]]
Arrays = dict[str, npt.NDArray[Any]]
Columns = tuple[Tensor, dict[str, Tensor]]


@dataclass
class _Batch:
    """A batch of images in computation on the device."""

    images: Images
    bucket: int
    latents: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Group:
    """Batches of images in computation whose captions are embedded together."""

    batches: list[_Batch] = field(default_factory=list)
    captions: dict[str, None] = field(default_factory=dict)
    """All captions in their order, as a set."""
    new: list[str] = field(default_factory=list)
    """Captions whose embeddings are not cached."""
    embeddings: list[tuple[list[str], dict[str, Tensor]]] = field(default_factory=list)
    """Captions of each pass, and their embeddings ``[N, ...]``."""
    events: list[tuple[str, Any, Any]] = field(default_factory=list)
    """Stage, begin and end event (CUDA only)."""


class PartitionEncoder:
    """The encoder of one partition: forms batches of one bucket each, and writes one shard per bucket.

    Batches follow the order of the images, and batches of captions the lengths of those of ``_TEXT_BATCHES`` batches,
    so the shards depend only on the partition. While the device computes a group of batches, the previous one is
    written.

    Raises:
        DataError: From every method: the embedding of a caption is not finite.
        OSError: From every method: a shard cannot be written.
    """

    def __init__(
        self,
        out: Path,
        info: DatasetInfo,
        partition: int,
        *,
        encoder: LatentEncoder | PixelEncoder,
        threads: Executor,
        batch: int,
        stopwatch: Stopwatch,
        bad: Callable[[str, str], None],
        sums: PartitionSums | None,
        texts: EmbeddedTexts,
        teacher: TeacherColumns | None = None,
    ) -> None:
        self._sums, self._texts, self._teacher = sums, texts, teacher
        self._out, self._info, self._partition = out, info, partition
        self._encoder, self._threads, self._batch = encoder, threads, batch
        self._stopwatch, self._bad = stopwatch, bad
        devices = (encoder.device, *([teacher.device] if teacher else []))  # pixels have no autoencoder
        self._on_cuda = any(device.type == "cuda" for device in devices)
        self._pending: defaultdict[int, list[tuple[ImageItem, Decoded]]] = defaultdict(list)  # by bucket
        self._open, self._computing = _Group(), _Group()
        masked = any(map(info.is_masked, info.columns))
        self._together = max(1, _TEXT_BATCHES // texts.variants) if masked else 1
        # An LRU cache by caption. Its content depends only on the partition, and so do the batches of captions and
        # their bytes.
        self._embeddings: OrderedDict[str, Arrays] = OrderedDict()
        each = sum(info.columns[name].nbytes for name in of_source("caption", info.columns))
        self._kept_embeddings = min(_KEPT_EMBEDDINGS, _KEPT_BYTES // max(1, each))
        self._tars: dict[int, ShardTar] = {}  # by bucket
        self.longest_caption: int | None = None
        """Rows of the longest caption of the images that are written."""

    def add(self, item: ImageItem, decoded: Decoded) -> None:
        """Append an image."""
        pending = self._pending[decoded.bucket]
        pending.append((item, decoded))
        if len(pending) == self._batch:
            self._compute(decoded.bucket)

    def finish(self) -> tuple[ShardInfo, ...]:
        """Encode the remaining images and publish the shards; none if all images are unusable."""
        for bucket in sorted(bucket for bucket, images in self._pending.items() if images):
            self._compute(bucket)
        self._embed()
        self._write()
        with self._stopwatch.measure("write"):
            shards = tuple(self._tars[bucket].publish() for bucket in sorted(self._tars))
        self._tars.clear()
        return shards

    def abandon(self) -> None:
        """Remove all unpublished files."""
        for tar in self._tars.values():
            tar.abandon()

    def _captions(self, item: ImageItem) -> tuple[str, ...]:
        """Return the texts of an image to embed."""
        return self._texts(item) if of_source("caption", self._info.columns) else ()

    def _compute(self, bucket: int) -> None:
        batch, group = _Batch(self._pending.pop(bucket), bucket), self._open
        images = batch.images
        group.batches.append(batch)
        for caption in dict.fromkeys(caption for item, _ in images for caption in self._captions(item)):
            group.captions[caption] = None
            if caption not in self._embeddings:
                group.new.append(caption)
            self._embeddings[caption] = self._embeddings.pop(caption, {})  # filled when the group is written
        with self._device_stage("VAE", group):
            pixels = torch.from_numpy(np.stack([decoded.pixels for _, decoded in images]))  # [B, H, W, 3]
            if self._on_cuda:
                pixels = pixels.pin_memory().to(self._encoder.device, non_blocking=True)
            self._add_latents(batch, pixels, mirrored=False)
            if self._info.flipped:
                self._add_latents(batch, pixels.flip(2), mirrored=True)  # along W
            if REFERENCE in self._info.columns:
                self._add_references(batch)
        if self._teacher is not None:
            with self._device_stage("teacher", group):
                self._add_features(batch, pixels, self._teacher)
        if len(group.batches) == self._together:
            self._embed()

    def _embed(self) -> None:
        """Embed the captions of the open group, and write the group before it."""
        group, self._open = self._open, _Group()
        if group.new:
            with self._device_stage("text", group):
                for numbers in self._encoder.batches(group.new, self._batch):
                    captions = [group.new[number] for number in numbers]
                    found = self._encoder.embed(captions)
                    group.embeddings.append((captions, {name: self._to_host(found[name], name) for name in found}))
        self._write()
        while len(self._embeddings) > max(self._kept_embeddings, len(group.captions)):
            self._embeddings.popitem(last=False)
        self._computing = group

    def _add_latents(self, batch: _Batch, pixels: Tensor, *, mirrored: bool) -> None:
        keys = [item.key for item, _ in batch.images]
        latents, columns = self._encode(pixels)
        latents = self._encoder.stored(latents, keys, mirrored=mirrored)
        if LATENT_LIMITS in self._info.columns:
            columns[LATENT], columns[LATENT_LIMITS] = quantised(latents)
        else:
            columns[LATENT] = latents
        for name, values in columns.items():
            batch.latents[self._info.variants(name)[mirrored]] = self._to_host(values, name)

    def _add_features(self, batch: _Batch, pixels: Tensor, teacher: TeacherColumns) -> None:
        for mirrored in (False, True) if self._info.flipped else (False,):
            for name, values in self._in_parts(teacher, pixels.flip(2) if mirrored else pixels).items():
                batch.latents[self._info.variants(name)[mirrored]] = self._to_host(values, name)

    def _add_references(self, batch: _Batch) -> None:
        """Add the latents of the references of a batch, ``[B, N, C, h, w]``; of a posterior the mean."""
        stacked = np.stack([pixels for _, decoded in batch.images for pixels in decoded.references])
        pixels = torch.from_numpy(stacked).to(self._encoder.device, non_blocking=True)
        for mirrored, name in enumerate(self._info.variants(REFERENCE)):
            latents = self._encoder.means(self._encode(pixels.flip(2) if mirrored else pixels)[0])
            each = latents.view(len(batch.images), -1, *latents.shape[1:])  # [B * N, C, h, w] -> [B, N, C, h, w]
            batch.latents[name] = self._to_host(each, REFERENCE)

    def _encode(self, pixels: Tensor) -> Columns:
        """Encode pixels ``[B, H, W, 3]``."""

        def columns(part: Tensor) -> dict[str, Tensor]:
            latents, others = self._encoder.encode_columns(part)
            return {LATENT: latents, **others}

        found = self._in_parts(columns, pixels)
        return found.pop(LATENT), found

    def _in_parts(self, model: Callable[[Tensor], dict[str, Tensor]], pixels: Tensor) -> dict[str, Tensor]:
        """Call a model; on a CPU with parts of the batch whose size does not depend on the number of threads."""
        if self._on_cuda:
            return model(pixels)
        parts = list(self._threads.map(model, torch.split(pixels, _CPU_IMAGES)))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _to_host(self, values: Tensor, column: str) -> Tensor:
        """Start the copy of a result to the host, in the dtype of its column."""
        values = to_stored(values, self._info.columns[column].dtype)
        if not values.is_cuda:
            return values
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)

    @contextmanager
    def _device_stage(self, stage: str, group: _Group) -> Iterator[None]:
        """Measure the time of a stage on the device; with CUDA, without waiting for it."""
        if not self._on_cuda:
            with self._stopwatch.measure(stage):
                yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        yield
        end.record()
        group.events.append((stage, begin, end))

    def _write(self) -> None:
        """Wait for the group in computation and append its batches to their shards."""
        group, self._computing = self._computing, _Group()
        for stage, begin, end in group.events:
            end.synchronize()
            self._stopwatch.seconds[stage] += begin.elapsed_time(end) / 1000
        with self._stopwatch.measure("write"):
            for captions, embeddings in group.embeddings:
                self._keep_embeddings(captions, embeddings)
            for batch in group.batches:
                self._append_all(batch)

    def _append_all(self, batch: _Batch) -> None:
        for number, (item, decoded) in enumerate(batch.images):
            found = {name: values[number] for name, values in batch.latents.items()}
            if all(bool(as_numbers(values).isfinite().all()) for values in found.values()):
                latents = {name: values.numpy() for name, values in found.items()}
                self._append(batch.bucket, item, decoded, latents)
                self._sum(batch.bucket, latents)
            else:
                self._bad(item.name, "its latent is not finite; if the autoencoder overflows, use --precision fp32")

    def _sum(self, bucket: int, arrays: Arrays) -> None:
        """Add the values of an image, as they will be read, to the sums."""
        if self._sums is None:
            return
        for name in (LATENT, *self._encoder.columns):
            variants = zip(self._info.variants(name), self._info.variants(LATENT_LIMITS), strict=True)
            for variant, limits in variants:
                values = as_numbers(torch.from_numpy(arrays[variant]))
                if name == LATENT and limits in arrays:
                    values = dequantised(values[None], torch.from_numpy(arrays[limits])[None])[0]
                self._sums.add(name, bucket, values.float().numpy())

    def _keep_embeddings(self, captions: Sequence[str], embeddings: Mapping[str, Tensor]) -> None:
        for number, caption in enumerate(captions):
            # Copied, because a view would keep the pinned memory of its whole batch.
            found = {name: values[number].numpy().copy() for name, values in embeddings.items()}
            self._embeddings[caption] = found
            taken = from_stored({name: values[number] for name, values in embeddings.items()})
            if not all(bool(value.isfinite().all()) for value in taken.values()):
                raise DataError(
                    f"the text encoder overflows for the caption {caption[:80]!r}; use --precision fp32 and --dtype "
                    "float32, or --text-dtype bfloat16"
                )

    def _append(self, bucket: int, item: ImageItem, decoded: Decoded, latents: Arrays) -> None:
        captions, info = self._captions(item), self._info
        arrays = dict(latents)
        for column in CAPTIONED:
            if column in info.columns:
                names = info.variants(column)
                arrays.update(
                    (name, self._embeddings[caption][column]) for name, caption in zip(names, captions, strict=False)
                )
        size = decoded.pixels.shape[0], decoded.pixels.shape[1]
        of_image = image_conditions(info.columns, decoded.original_size, decoded.crop, size)
        arrays |= {name: np.array(values, info.columns[name].dtype) for name, values in of_image.items()}
        if LOSS_MASK in info.columns:
            arrays[LOSS_MASK] = on_latents(decoded, self._encoder.factor)
        noted = self._texts.whole(item) if captions else ()
        meta = {"name": item.name, "captions": noted, "original_size": decoded.original_size, "crop": decoded.crop}
        count = len(captions) if info.captions > 1 else None
        content = components(info, bucket, item.key, arrays, item.label, captions=count, meta=meta)
        if (longest := longest_caption(arrays)) is not None:
            self.longest_caption = max(longest, self.longest_caption or 0)
        if bucket not in self._tars:
            self._tars[bucket] = ShardTar(self._out / info.shard_name(self._partition, bucket), bucket)
        self._tars[bucket].add(item.key, content)
