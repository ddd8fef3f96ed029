"""Encode of images into latents and text embeddings, or into pixels, on any number of ranks (``fastdiff encode``).

Rank r of W encodes the partitions r, r + W, ... of the source, then those of other ranks on which no living process
works. Partition k becomes the shards with number k. The files depend neither on W nor on killed ranks. The ranks
communicate only through ``plan.EncodeFolder``. Each of them ends with the complete data set: it waits for the
partitions that others have begun, and takes those of a process that dies.
"""

import dataclasses
import itertools
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastdiff.batch import to_stored, without_padding
from fastdiff.conditions import (
    FEATURES,
    OF_IMAGE,
    REFERENCE,
    TEACHER_TOKEN,
    StoredDtype,
    of_source,
    stored_dtype,
)
from fastdiff.console import log, show
from fastdiff.data.encoding.autoencoder import LatentEncoder, PixelEncoder, reproducible, require_side
from fastdiff.data.encoding.builtin import versions
from fastdiff.data.encoding.embedded_texts import EmbeddedTexts
from fastdiff.data.encoding.options import EncodeOptions, LatentDtype, cores_of, device_of
from fastdiff.data.encoding.partition import PartitionEncoder
from fastdiff.data.encoding.plan import BAD_IMAGES, LISTING_OPTIONS, BadRecord, EncodeFolder, PartitionRecord
from fastdiff.data.encoding.source_metadata import WatchedSource, compare
from fastdiff.data.encoding.statistics import PartitionSums, Statistics, choose, merged, sums_path
from fastdiff.data.encoding.teacher_features import BASIS_FILE, Basis, TeacherColumns
from fastdiff.data.encoding.uncaptioned import lacks_captions, require_captions, told
from fastdiff.data.images.decode import BadImage, Decoded, Decoder, ImageTransform, open_decoder
from fastdiff.data.images.geometry import Size, aspect_buckets, buckets_within
from fastdiff.data.images.items import BadItem, ImageItem, ImageSource
from fastdiff.data.images.masks import MaskDecoder, noted_masks, origin_of
from fastdiff.data.images.references import ReferenceDecoder
from fastdiff.data.images.sources import open_source
from fastdiff.data.images.stream import Chunk, Stopwatch, decoded_images
from fastdiff.data.images.webdataset_tars import WebDatasetSource
from fastdiff.data.selection import Selection, Tally
from fastdiff.data.shards.format import (
    LATENT,
    LATENT_LIMITS,
    LOSS_MASK,
    Column,
    DatasetInfo,
    Provenance,
    condition_columns,
    loss_mask_column,
)
from fastdiff.data.shards.sample_files import sample_bytes
from fastdiff.errors import ConfigError, DataError, Preempted, require
from fastdiff.models.encoders.teacher import Teacher
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.parallel.claims import in_turn
from fastdiff.parallel.devices import require_precision
from fastdiff.parallel.launcher import Place, place_in_any_job
from fastdiff.progress_bar import Bar
from fastdiff.tags import Tags

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CLASSES_SHOWN = 12
_SAMPLED_PARTITIONS = 16
"""Partitions with images to which the map of a teacher's features is fitted, of each the first ones."""
_CUT = "pictures with a caption that was cut"
_OF_BYTES = (
    "samples_per_shard", "image_column", "caption_column", "split", "max_samples", "pretrained", "resolution", "crop",
    "interpolation", "flip", "captions", "batch", "precision",
)  # fmt: skip
"""Options that affect the bytes as they are."""
_OF_TEXT = ("max_tokens", "text_dtype")
"""Those that do so if they are given."""


def encode_images(options: EncodeOptions, say: Callable[[str], None] = show) -> None:
    """Encode the source together with all other processes that do so, and publish the data set at the end.

    Args:
        options: Options, equal on all ranks; on resuming a killed encode ``bad`` and ``workers`` may change.
        say: Prints warnings and, at the end, a summary line with the time per stage.

    Raises:
        ConfigError: The options do not fit the source, the pipeline or an unfinished encode.
        DataError: The source is damaged, or an image is unusable and ``bad`` is fail.
        StorageError: A file cannot be read or written.
        Preempted: Interrupted by Ctrl-C, or shards are missing that this process cannot write.
    """
    encode = _ImageEncode(options, place_in_any_job(), say)
    try:
        encode.run()
    finally:
        encode.close()


class _ImageEncode:
    """The encode of one rank's partitions."""

    def __init__(self, options: EncodeOptions, place: Place, say: Callable[[str], None]) -> None:
        self._options, self._place, self._say = options, place, say
        self._device = device_of(place)
        require_precision(options.precision, self._device, "--precision")
        self._source: ImageSource = open_source(options)
        self._in_pixels = options.in_pixels
        self._embeds_captions = self._source.captioned and not self._in_pixels
        pretrained = Pretrained(
            options.pretrained, options.revision, options.variant, "--pretrained", options.max_tokens
        )
        self._embeds_nothing = not self._in_pixels and lacks_captions(self._source, pretrained)
        if self._embeds_nothing:
            require_captions(options, self._source)
        require(
            not self._embeds_captions or bool(pretrained.text_parts),
            f"{self._source.name} have captions, but {options.pretrained} has no text encoder; give a pipeline that "
            "has one, or leave the captions of a folder out: --classes-from folder, or none",
        )
        self._require_captions_asked_for()
        self._encoder, self._statistics = self._opened_encoder(pretrained)
        self._transform = _transform(options, self._encoder)
        self._decoder: Decoder = open_decoder(options.decode, self._transform, options.workers, self._device)
        self._references = ReferenceDecoder(
            self._transform,
            lambda transform: open_decoder(options.decode, transform, options.workers, self._device),
        )
        masks = origin_of(options.masks)
        self._masks = MaskDecoder(masks, self._transform, options.workers) if masks else None
        self._teacher = self._opened_teacher()
        self._of_image = _taken_of_image(pretrained) if self._embeds_captions else ()
        self._autoencoder_digest = None if self._in_pixels else pretrained.digest("vae")
        self._text_digest = pretrained.digest("text_encoder") if self._embeds_captions else None
        self._packages = {} if self._in_pixels else pretrained.packages(text=self._embeds_captions)
        self._stopwatch = Stopwatch()
        self._threads = ThreadPoolExecutor(cores_of(place), thread_name_prefix="autoencoder")
        self._watched = WatchedSource(self._source)
        self._folder = EncodeFolder(
            options.out,
            self._plan(),
            self._source.partitions,
            self._captions_per_image,
            self._say_that_we_wait,
            partial(compare, self._source),
            say,
            self._fitted_basis,
        )
        if self._teacher is not None and not self._folder.published:
            self._teacher.basis = Basis.read(options.out)
        self._texts = EmbeddedTexts.asked(options, self._folder.captions)
        self._images = 0
        self._encoded: set[int] = set()
        self._took_over = False
        self._bad: list[BadRecord] = []  # of this rank, earlier attempts included

    def _require_captions_asked_for(self) -> None:
        options = self._options
        for flag, given in (("--max-tokens", options.max_tokens), ("--text-dtype", options.text_dtype)):
            require(
                given is None or self._embeds_captions,
                f"{flag} {given}: {self._source.name} have no captions; leave it out",
            )
        require(
            options.tags == Tags() or self._embeds_captions,
            f"{self._source.name} have no captions, whose variants or prefix were asked for; leave these options out",
        )

    def _opened_encoder(self, pretrained: Pretrained) -> tuple[LatentEncoder | PixelEncoder, Statistics | None]:
        """Return the encoder and, of an autoencoder, the statistics of its latents, which it says once."""
        if self._in_pixels:
            return PixelEncoder(), None
        options = self._options
        statistics = choose(options.statistics, pretrained.latent_space)
        encoder = LatentEncoder(
            pretrained, self._device, _PRECISIONS[options.precision], statistics=statistics, posterior=options.posterior
        )
        if not self._place.rank:
            log.info(f"loading the autoencoder of {options.pretrained}; statistics of its latents: {statistics.shown}")
        return encoder, statistics

    def _opened_teacher(self) -> TeacherColumns | None:
        options, encoder = self._options, self._encoder
        if not options.teacher:
            return None
        require(
            not (options.teacher_token and TEACHER_TOKEN in encoder.columns),
            f"--teacher-token: the autoencoder of {options.pretrained} gives a class token already; leave it out",
        )
        side = options.teacher_side or max(1, options.resolution // encoder.factor // 2)
        teacher = Teacher(options.teacher, side, self._device, _PRECISIONS[options.precision])
        return TeacherColumns(teacher, options.teacher_width, token=options.teacher_token)

    def _fitted_basis(self) -> dict[str, bytes]:
        """Return the file of the map of the teacher's features: that of another data set, or one of a sample."""
        if self._teacher is None:
            return {}
        if (given := self._options.teacher_basis) != "":
            basis = Basis.read(Path(given))
            self._teacher.require_basis(basis, given)
        else:
            with reproducible():
                basis = self._teacher.fit(self._sample())
            self._say(
                f"--teacher-width {self._teacher.width}: the map keeps {basis.kept:.1%} of the squared norm of the "
                f"features of {self._options.teacher}"
            )
        return {BASIS_FILE: basis.content}

    def _sample(self) -> Iterator[Tensor]:
        """Yield the pixels of images spread over the source, ``[B, H, W, 3]`` uint8."""
        count = min(self._source.partitions, _SAMPLED_PARTITIONS)
        spread = sorted({number * self._source.partitions // count for number in range(count)})
        for partition in spread:
            stream = decoded_images(self._source, self._decoder, [partition], Stopwatch(), start=lambda: None)
            with closing(stream):
                chunk = next(stream, None)
            pixels = [d.pixels for _, d in chunk.images if not isinstance(d, BadImage)] if chunk else []
            for start in range(0, len(pixels), self._options.batch):
                yield torch.from_numpy(np.stack(pixels[start : start + self._options.batch])).to(self._device)

    def run(self) -> None:
        """Encode all missing partitions, publish and report."""
        if self._folder.published:
            unseen = f"; whether {self._source.name} was edited since cannot be seen" if self._folder.unseen else ""
            self._say(f"{self._options.out} is already complete{unseen}")
            return
        if self._place.rank == 0:
            words = told(self._source, in_pixels=self._in_pixels, without_text=self._embeds_nothing)
            if words is not None:
                self._say(words)
        own = range(self._place.rank, self._source.partitions, self._place.size)
        kept = {partition: record for partition in own if (record := self._folder.record(partition)) is not None}
        for record in kept.values():
            for bad in record.bad:
                self._refuse(bad, self._bad)
        self._expected = _Expectation(self._source, self._options.samples_per_shard, own, kept)
        with reproducible(), self._threads, self._enough_memory(), self._told_what_is_kept():
            self._encode_all()
        self._report(sum(record.images for record in kept.values()))

    def close(self) -> None:
        """Let other processes know that this one has ended."""
        self._folder.close()

    def _encode_all(self) -> None:
        """Encode until all partitions are finished, by whichever process, and publish the data set."""
        while True:
            every = in_turn(self._place.rank, self._place.size, self._source.partitions)
            partitions = filter(self._folder.claim, every)
            try:
                if (first := next(partitions, None)) is not None:
                    self._encode(itertools.chain([first], partitions))
            finally:
                self._folder.release_all()
            missing = self._folder.publish(self._finished_info, lambda: self._null)
            if not missing:
                return
            others = self._folder.unfinished()
            if not self._encoded.isdisjoint(others):
                raise self._preempted(f"{missing} of {self._source.partitions} shards are missing")
            if others:  # otherwise another process has just finished the last one
                self._say(f"rank {self._place.rank}: waiting for {len(others)} shards that other processes write")
                self._folder.wait(others[0])

    @contextmanager
    def _told_what_is_kept(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            kept = self._source.partitions - len(self._folder.unfinished())
            raise self._preempted(f"interrupted; {kept} of {self._source.partitions} shards are kept") from None

    def _preempted(self, what: str) -> Preempted:
        place = self._place
        told = f" (by {place.told_by} this process is rank {place.rank} of {place.size})" if place.size > 1 else ""
        return Preempted(f"{what} in {self._options.out}; the same command goes on from there{told}")

    def _encode(self, partitions: Iterable[int]) -> None:
        """Encode partitions, each of which is claimed when it is drawn."""
        self._encoder.load(text=self._embeds_captions)
        expected = self._expected
        device, info = self._device, self._info()
        self._tell_size(info)
        on_gpu = device.type == "cuda"
        stream = decoded_images(
            self._watched,
            self._decoder,
            partitions,
            self._stopwatch,
            start=lambda: torch.cuda.set_device(device) if on_gpu else None,  # the device is set per thread
            complete=self._complete,
        )
        description = "encode" if self._place.size == 1 else f"encode, rank {self._place.rank}"
        bar = Bar(description, expected.images, "images", done=expected.done, alone=self._place.size == 1)
        with closing(stream), bar, self._stopwatch.measure("all"):
            for partition, chunks in itertools.groupby(stream, key=lambda chunk: chunk.partition):
                if partition % self._place.size != self._place.rank:
                    self._take_over(partition)
                    bar.total = expected.images
                record = self._encode_one(partition, info, chunks, bar)
                self._folder.finish(partition, record, self._watched.metadata(partition))
                self._encoded.add(partition)
                expected.add(record)
                bar.total = expected.images

    def _complete(self, chunk: Chunk) -> Chunk:
        """Decode what belongs to the images of a chunk: references and masks."""
        chunk = self._references.add(chunk)
        return chunk if self._masks is None else self._masks.add(chunk)

    def _tell_size(self, info: DatasetInfo) -> None:
        """Say how large the data set becomes, and warn if there is less room; once, on one rank."""
        if self._place.rank or self._encoded:
            return
        each, partitions = sample_bytes(info), self._source.partitions
        about = "at most" if any(map(info.is_masked, info.columns)) else "about"  # captions of full length are counted
        images = None if isinstance(self._source, WebDatasetSource) else len(self._source)
        if (variants := self._texts.variants) > 1:
            one = sample_bytes(replace(info, captions=self._texts.captions))
            log.info(
                f"--shuffle-tags {variants}: {about} {each / 2**10:.1f} KiB for each picture, "
                f"{each / one:.1f} times the {one / 2**10:.1f} KiB of one variant"
            )
        if images is None:
            log.info(f"{self._options.out}: {partitions} shards, {about} {each / 2**10:.1f} KiB for each picture")
            return
        missing = each * images * len(self._folder.unfinished()) // max(1, partitions)
        log.info(f"{self._options.out}: {images} pictures, {about} {each * images / 2**20:,.1f} MiB")
        free = shutil.disk_usage(self._options.out).free
        if missing > free:
            log.warning(
                f"{self._options.out} needs {about} {missing / 2**20:,.1f} MiB more, and {free / 2**20:,.1f} MiB are "
                "free there; free some space, or stop and choose another folder"
            )

    def _take_over(self, partition: int) -> None:
        """Note a partition of another rank; say so at the first one."""
        self._expected.take(partition)
        if not self._took_over:
            place = self._place
            self._say(
                f"rank {place.rank} of {place.size} (by {place.told_by}): goes on with shards of other ranks on which "
                "no process works"
            )
        self._took_over = True

    @contextmanager
    def _enough_memory(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"--batch {self._options.batch} needs more memory than {self._encoder.device} has "
                f"({str(error).splitlines()[0]}); delete {self._options.out} and use a smaller --batch, or --precision "
                "bf16",
                everywhere=False,
            ) from None

    def _encode_one(self, partition: int, info: DatasetInfo, chunks: Iterable[Chunk], bar: Bar) -> PartitionRecord:
        bad: list[BadRecord] = []
        tally = Tally()

        def leave_out(name: str, reason: str) -> None:
            self._refuse(BadRecord(name, reason), bad)

        sums = None
        if self._measured and self._statistics:
            sums = PartitionSums(self._statistics.unit, posterior=info.kind == "posterior")
        shards = PartitionEncoder(
            self._options.out,
            info,
            partition,
            encoder=self._encoder,
            threads=self._threads,
            batch=self._options.batch,
            stopwatch=self._stopwatch,
            bad=leave_out,
            sums=sums,
            texts=self._texts,
            teacher=self._teacher,
        )
        try:
            for chunk in chunks:
                for item, decoded in chunk.images:
                    if isinstance(item, BadItem) or isinstance(decoded, BadImage):
                        leave_out(item.name, decoded.reason if isinstance(decoded, BadImage) else "")
                    else:
                        for loss, count in losses(item, decoded, info, self._encoder, self._texts):
                            tally.add(loss, PurePath(item.name).name, count)
                        for mask in noted_masks(decoded, self._options.masks):
                            tally.add(mask, PurePath(item.name).name)
                        with self._folder.storage():
                            shards.add(item, decoded)
                    self._images += 1
                    bar.update()
            with self._folder.storage():
                published = shards.finish()
                if sums and published:
                    sums.write(sums_path(self._options.out, partition))
        finally:
            shards.abandon()
        self._bad += bad
        noted = Selection(noted=tally.counted())
        selection = self._source.found_in(partition).and_then([noted])
        return PartitionRecord(published, tuple(bad), selection, shards.longest_caption)

    def _refuse(self, bad: BadRecord, found: list[BadRecord]) -> None:
        """Apply the policy for bad images: raise DataError, or add to ``found``."""
        if self._options.bad == "fail":
            raise DataError(
                f"{bad.name} cannot be used: {bad.reason}. Repair it and run the same command again, or skip bad "
                f"images with --bad skip, which lists them in {self._options.out / BAD_IMAGES}"
            )
        found.append(bad)

    def _captions_per_image(self) -> int:
        """Return the largest number of captions to embed per image."""
        if self._options.captions == "first" or not self._embeds_captions:
            return 1
        with Bar("counting captions", self._source.partitions, "shards") as bar:
            return max(1, *map(self._source.most_captions, bar.over(range(self._source.partitions))))

    def _say_that_we_wait(self) -> None:
        does = "counts the captions of" if self._options.captions == "all" else "looks at"
        self._say(f"rank {self._place.rank}: waiting while another rank {does} {self._source.name}")

    def _listing_options(self) -> dict[str, Any]:
        """Return the given options that choose what the source lists; its digest holds what they chose."""
        fields = EncodeOptions.__dataclass_fields__
        names = (
            "classes_from", "image_root", "dataset_config", "references", "reference_column", "caption", "caption_from",
            "masks",
            "caption_extension",
        )  # fmt: skip
        given = {name: getattr(self._options, name) for name in names}
        given = {name: value for name, value in given.items() if value != fields[name].default}
        return {LISTING_OPTIONS: given} if given else {}

    def _plan(self) -> dict[str, Any]:
        """Return all options and digests that affect the bytes, except versions and hardware."""
        return {
            "source": self._source.name,
            "source_listing": self._source.digest,
            "autoencoder_digest": self._autoencoder_digest,
            "text_encoder_digest": self._text_digest,
            "buckets": self._transform.buckets,
            "decode": self._decoder.name,
            "dtype": self._dtype,
            **{name: getattr(self._options, name) for name in _OF_BYTES},
            **({"image_conditions": OF_IMAGE} if self._of_image is None else {}),
            **{name: given for name in _OF_TEXT if (given := getattr(self._options, name)) is not None},
            **self._plan_of_variants(),
            **({REFERENCE: self._source.references} if self._source.references else {}),
            **(self._statistics.plan if self._statistics else {}),
            **({"posterior": self._options.posterior} if self._options.posterior != "each-step" else {}),
            **({"masks": origin_of(self._options.masks)} if self._masks else {}),
            **self._plan_of_teacher(),
        } | self._listing_options()

    def _plan_of_teacher(self) -> dict[str, Any]:
        if self._teacher is None:
            return {}
        found = {"teacher": self._teacher.digest, "columns": self._teacher.shapes}
        if (given := self._options.teacher_basis) != "":
            found["basis"] = Basis.read(Path(given)).matrix_digest
        return {"teacher": found}

    def _plan_of_variants(self) -> dict[str, Any]:
        """Return the options of the variants of captions; nothing of captions as they are."""
        options = self._options
        if options.tags == Tags():
            return {}
        return dataclasses.asdict(options.tags) | {"shuffle_tags": options.shuffle_tags, "seed": options.seed}

    @property
    def _dtype(self) -> LatentDtype | Literal["uint8"]:
        return "uint8" if self._in_pixels else self._options.dtype

    @property
    def _text_dtype(self) -> StoredDtype:
        return self._options.text_dtype or self._floating

    @property
    def _floating(self) -> StoredDtype:
        """Dtype of what is stored beside the latents."""
        return "float16" if self._options.dtype == "int8" else self._options.dtype

    @property
    def _null(self) -> dict[str, npt.NDArray[Any]]:
        """The stored embedding of the empty prompt, by column; empty without captions."""
        if not self._embeds_captions:
            return {}
        return {
            name: to_stored(value.float(), stored_dtype(name, self._text_dtype)).cpu().numpy()
            for name, value in without_padding(self._encoder.null()).items()
        }

    @property
    def _measured(self) -> tuple[str, ...]:
        """The columns that are normalised by statistics of this data set."""
        found = self._statistics
        if found is None:
            return ()
        others = tuple(name for name in self._encoder.columns if name not in found.columns)
        return (LATENT, *others) if found.known is None else others

    def _finished_info(self) -> DatasetInfo:
        """Return the content of dataset.json without the shards, after all partitions."""
        info, statistics = self._info(), self._statistics
        if statistics is None or not self._measured:
            return info
        every = ((partition, self._folder.record(partition)) for partition in range(self._source.partitions))
        paths = (sums_path(self._options.out, partition) for partition, record in every if record and record.shards)
        found = merged(paths, self._measured, statistics.variance_eps)
        # Without any shard the publication fails with a message of its own.
        latent = found.pop(LATENT, info.x0_normalisation)
        return replace(
            info,
            normalisation=latent.of_posterior if info.kind == "posterior" else latent,
            normalisations=info.normalisations | found,
        )

    def _info(self) -> DatasetInfo:
        """Return the content of dataset.json without the shards."""
        options, encoder = self._options, self._encoder
        pixels = self._transform.buckets or ((options.resolution, options.resolution),)
        sizes = tuple((height // encoder.factor, width // encoder.factor) for height, width in pixels)
        columns = {LATENT: Column(dtype=self._dtype, shape=(encoder.channels, *sizes[0]))}
        captioned = {name: value.shape for name, value in self._null.items()}
        if self._dtype == "int8":
            columns[LATENT_LIMITS] = Column(dtype="float32", shape=(2, encoder.channels))
        columns |= condition_columns(
            captioned, self._text_dtype, OF_IMAGE if self._of_image is None else self._of_image
        )
        columns |= condition_columns(encoder.columns, self._floating)
        if references := self._source.references:
            channels = encoder.channels // (2 if encoder.kind == "posterior" else 1)
            shape = (references, channels, *sizes[0])
            columns |= condition_columns({REFERENCE: shape}, self._floating)
        normalisations = {}
        if self._statistics:
            known = self._statistics.columns
            normalisations = {name: known[name] for name in encoder.columns if name in known}
        if self._teacher is not None:
            columns |= condition_columns(self._teacher.shapes, self._floating)
            normalisations[FEATURES] = self._teacher.basis.normalisation
        if self._masks is not None:
            columns[LOSS_MASK] = loss_mask_column(columns[LATENT])
        packages = ("pillow",) if self._in_pixels else ("torch", "diffusers", "transformers", "pillow")
        return DatasetInfo(
            columns=columns,
            normalisation=encoder.normalisation,
            normalisations=normalisations,
            provenance=Provenance(
                source=self._source.name,
                transform=self._described_transform(),
                autoencoder=options.pretrained or "identity",
                autoencoder_digest=self._autoencoder_digest,
                text_encoder=options.pretrained if self._embeds_captions else None,
                text_encoder_digest=self._text_digest,
                teacher=options.teacher or None,
                teacher_digest=self._teacher.digest if self._teacher else None,
                statistics=self._statistics.described if self._statistics else "",
                versions=versions(*packages) | self._packages,
            ),
            classes=self._source.classes,
            class_names=self._source.class_names,
            kind=encoder.kind,
            buckets=sizes if options.buckets else (),
            flipped=options.flip,
            captions=self._texts.captions * self._texts.variants,
            selection=self._source.selection,
        )

    def _described_transform(self) -> str:
        """Describe the transform of the images; the digest of the plan comes last."""
        options = self._options
        buckets = f"{len(self._transform.buckets)} buckets of " if options.buckets else ""
        filters = "box and bicubic" if options.crop == "adm" else options.interpolation
        latents = "pixels in uint8, x0 = pixel / 127.5 - 1"
        if not self._in_pixels:
            found = self._described_latents()
            latents = f"pixel / 127.5 - 1; {found} in {options.precision}, batches of {options.batch}"
        return (
            f"resize to {buckets}{options.resolution} pixels ({filters}), {options.crop} crop, decoded by "
            f"{self._decoder.name}; {latents}; plan {self._folder.plan_digest}"
        )

    def _described_latents(self) -> str:
        if self._options.posterior != "each-step":
            return "posterior's mean" if self._options.posterior == "mean" else "one sample of the posterior"
        return "latents" if self._encoder.kind == "mean" else "posterior's mean and standard deviation"

    def _report(self, kept: int) -> None:
        seconds = dict(self._stopwatch.seconds)
        total = seconds.pop("all", 0.0)
        text = f"rank {self._place.rank}: {self._images} images in {total:.1f} s"
        if total:
            models = [*([] if self._in_pixels else ["VAE", "text"]), *(["teacher"] if self._teacher else [])]
            stages = ("read", "decode", *models, "write")
            busy = ", ".join(
                f"{stage} {seconds.get(stage, 0.0):.1f} s ({seconds.get(stage, 0.0) / total:.0%})" for stage in stages
            )
            text += f", {self._images / total:.1f} images/s; concurrent stages: {busy}"
        if kept:
            text += f"; {kept} more were already encoded"
        if self._bad:
            text += f"; {len(self._bad)} bad images skipped, listed in {self._options.out / BAD_IMAGES}"
        if by_pillow := self._decoder.by_pillow:
            text += f"; {by_pillow} of them decoded by pillow, as {self._decoder.name} would give other pixels or none"
        self._say(text)
        if self._folder.has_written:  # one of all processes
            self._describe()

    def _describe(self) -> None:
        """Say what the data set holds, and what it lacks of the source."""
        info = DatasetInfo.read(self._options.out)
        for line in info.selection.lines(info.samples) if info.selection else ():
            self._say(line)
        for line in _share_cut(info):
            self._say(line)
        if info.class_names:
            self._say(_described_classes(info.class_names))
        check = shlex.join(["fastdiff", "verify", str(self._options.out)])
        self._say(f"{self._options.out} is complete: {info.samples} samples; check it with `{check}`")


class _Expectation:
    """The expected number of this rank's images, for the progress bar."""

    def __init__(self, source: ImageSource, per_partition: int, own: range, kept: dict[int, PartitionRecord]) -> None:
        self._per_partition = per_partition
        self._partitions = self._images = 0
        self._finished = len(kept)
        self.done = sum(record.images for record in kept.values())
        # A tar source would have to read all headers.
        self._total = None if isinstance(source, WebDatasetSource) else len(source)
        for partition in own:
            self.take(partition)

    def take(self, partition: int) -> None:
        """Count a partition that is to be encoded."""
        self._partitions += 1
        if self._total is not None:
            self._images += min(self._per_partition, self._total - partition * self._per_partition)

    @property
    def images(self) -> int | None:
        """The exact or estimated number; None: unknown."""
        if self._total is not None or not self._finished:
            return None if self._total is None else self._images
        return round(self.done / self._finished * self._partitions)

    def add(self, record: PartitionRecord) -> None:
        """Count a finished partition."""
        self._finished += 1
        self.done += record.images


def _taken_of_image(pretrained: Pretrained) -> tuple[str, ...] | None:
    """Return the conditions of an image that the network of the pipeline takes; None: the network is unknown."""
    with suppress(ConfigError):
        return of_source("image", pretrained.network_config().conditions)
    return None


def _transform(options: EncodeOptions, encoder: LatentEncoder | PixelEncoder) -> ImageTransform:
    """Return the resize and crop to sizes that the autoencoder takes."""
    factor = encoder.factor
    require_side(encoder, options.resolution, "--resolution")
    require(encoder.side is None or not options.buckets, "--buckets: the autoencoder takes one size; leave it out")
    if not options.buckets:
        if wrong := options.resolution % factor:
            near = max(options.resolution - wrong, factor)
            raise ConfigError(
                f"--resolution {options.resolution}: expected a multiple of {factor}, the autoencoder's factor; use "
                f"{near} or {near + factor}"
            )
        return ImageTransform(options.resolution, options.crop, options.interpolation)
    step = options.bucket_step or 8 * factor
    require(step % factor == 0, f"--bucket-step {step}: expected a multiple of {factor}, the autoencoder's factor")
    try:
        buckets: tuple[Size, ...] = (
            buckets_within(options.resolution, step, options.bucket_sides)
            if options.bucket_sides
            else aspect_buckets(options.resolution, step)
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return ImageTransform(options.resolution, options.crop, options.interpolation, buckets)


def _described_classes(names: Sequence[str]) -> str:
    """Describe the numbers of the classes; of many, only the first and last ones."""
    shown = [f"{number} = {name}" for number, name in enumerate(names)]
    if len(shown) > _CLASSES_SHOWN:
        shown = [*shown[: _CLASSES_SHOWN - 2], "...", shown[-1]]
    return f"  {len(names)} class{'es' if len(names) != 1 else ''}: {', '.join(shown)}"


def losses(
    item: ImageItem,
    decoded: Decoded,
    info: DatasetInfo,
    encoder: LatentEncoder | PixelEncoder,
    texts: EmbeddedTexts,
) -> Iterator[tuple[str, int]]:
    """Yield what is lost of an image, in words that a count follows, and the count of this image."""
    height, width = decoded.pixels.shape[:2]
    if decoded.original_size[0] < height or decoded.original_size[1] < width:
        yield "pictures smaller than the resolution, so enlarged: they are blurred", 1
    if not of_source("caption", info.columns):
        return
    whole = texts.whole(item)
    if item.captions and not whole[0]:
        yield "pictures with an empty caption, trained as the empty prompt", 1
    elif emptied := texts(item).count(""):
        yield "variants of captions that lost all tags, trained as the empty prompt", emptied
    if len(item.captions) > len(whole):
        yield f"pictures with more captions than the {texts.captions} embedded; --captions all embeds all", 1
    for limit, tokens in encoder.lost(whole).items():
        yield f"{_CUT}: it is longer than the {limit} tokens that the text encoder reads", 1
        if tokens:
            yield f"tokens beyond the first {limit} of a caption, which were not read", tokens


def _share_cut(info: DatasetInfo) -> Iterator[str]:
    """Yield the share of the pictures whose caption was cut, as lines."""
    for each in info.selection.noted if info.selection else ():
        if each.reason.startswith(_CUT):
            limit = each.reason.removeprefix(f"{_CUT}: it is longer than the ").partition(" ")[0]
            yield f"  {each.count / info.samples:.1%} of the pictures have a caption that was cut after {limit} tokens"
