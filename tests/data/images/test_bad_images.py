"""Broken and hostile image files: each has a reason and harms no other image."""

import random
import re
import zlib
from pathlib import Path

import numpy as np
import pytest

from fastdiff.data.images.decode import BadImage, Decoded, ImageTransform, open_decoder
from fastdiff.data.images.decode_dali import BATCH_IMAGES, DaliPixels, Job
from fastdiff.data.images.geometry import Placement
from tests.support.inputs import images
from tests.support.inputs.images import PIXELS, PLAIN, SIDE, SPECIAL
from tests.support.scripts import run_script

BAD = {
    "empty": (b"", "empty file"),
    "text": (b"not an image\n" * 20, "no picture of a kind that is read .*: it starts with b'not an image"),
    "heic": (b"\0\0\0\x18ftypheic" + bytes(90), "a HEIC file by its first bytes; convert it"),
    "tiff of floats": (images.encode(PIXELS[..., 0].astype(np.float32), "TIFF"), "floating-point levels"),
    "truncated tiff": (images.encode(PIXELS, "TIFF")[:-200], "cannot be decoded"),
    "gif header only": (images.encode(PIXELS, "GIF")[:8], "damaged GIF"),
    "bmp that ends early": (images.encode(PIXELS, "BMP")[:-200], "cannot be decoded"),
    "avif that ends early": (images.encode(PIXELS, "AVIF")[:400], "AVIF|cannot be decoded"),
    "jpeg of three bytes": (b"\xff\xd8\xff", "damaged JPEG"),
    "truncated jpeg": (PLAIN["jpeg"][:-200], "truncated"),
    "truncated progressive": (PLAIN["jpeg progressive"][:-200], "truncated"),
    "truncated png": (PLAIN["png"][:2000], "truncated"),
    "png header only": (PLAIN["png"][:20], "damaged PNG"),
    "png of a wrong crc": (images.damaged(PLAIN["png"]), "cannot be decoded"),
    "truncated webp": (PLAIN["webp"][:300], "damaged WebP"),
    "webp header only": (PLAIN["webp"][:25], "truncated WebP header"),
    "webp of another kind": (b"RIFF\0\0\0\0WEBPJUNK" + bytes(20), "first chunk is b'JUNK'"),
    "webp of damaged pixels": (images.damaged(PLAIN["webp lossless"], 0.03), "cannot be decoded"),
    "huge text": (images.png_of(PIXELS, before=[(b"zTXt", b"k\0\0" + zlib.compress(bytes(20_000_000)))]), "too large"),
    "too long": (images.png(40_000, 1, 1, 0, zlib.compress(bytes(5001))), "2560000x64 pixels after the resize"),
    "scans": (images.jpeg_of_scans(5000), "progressive JPEG of 50.. scans, more than 256"),
}  # fmt: skip


@pytest.mark.parametrize("decoder", ["pillow", "dali"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_has_a_reason(decoder: str, name: str) -> None:
    data, reason = BAD[name]
    (result,) = open_decoder(decoder, ImageTransform(SIDE, "center", "lanczos"), 1).decode([data])  # type: ignore[arg-type]
    assert isinstance(result, BadImage)
    assert re.search(reason, result.reason), result.reason
    assert "\n" not in result.reason


@pytest.mark.parametrize("name", ["pillow", "dali"])
def test_no_image_depends_on_its_batch_mates(name: str) -> None:
    """Neither on bad ones, which break a whole batch of DALI, nor on those of other sizes, nor on the threads."""
    transform = ImageTransform(96, "random", "lanczos")
    decoder, single = (open_decoder(name, transform, threads) for threads in (2, 1))  # type: ignore[arg-type]
    good = [images.encode(images.natural(80 + n, 200 - n, n), ("JPEG", "PNG", "WebP")[n % 3]) for n in range(24)]
    good += [PLAIN["png text"], *SPECIAL.values()]
    offsets = [(n / 60, 1 - (n + 1) / 60) for n in range(len(good))]
    alone = []
    for data, offset in zip(good, offsets, strict=True):
        (result,) = single.decode([data], [offset])
        assert isinstance(result, Decoded)
        alone.append(result)

    mixed: list[tuple[bytes, tuple[float, float], Decoded | None]] = []
    bad = [data for data, _ in BAD.values()]
    for number, entry in enumerate(zip(good, offsets, alone, strict=True)):
        mixed += [entry, *((data, (0.5, 0.5), None) for data in bad[number : number + 1]), entry, entry]
    random.Random(0).shuffle(mixed)
    assert BATCH_IMAGES < 3 * 25, "else DALI would have one batch"
    results = decoder.decode([data for data, _, _ in mixed], [offset for _, offset, _ in mixed])
    for result, (_, _, expected) in zip(results, mixed, strict=True):
        if expected is None:
            assert isinstance(result, BadImage)
        else:
            assert isinstance(result, Decoded)
            np.testing.assert_array_equal(result.pixels, expected.pixels)
            assert result.crop == expected.crop


def test_batches_of_dali_are_bounded_in_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdiff.data.images.decode_dali.BATCH_PIXELS", 3 * 2 * SIDE * SIDE)
    sizes: list[int] = []
    run = DaliPixels._run
    monkeypatch.setattr(DaliPixels, "_run", lambda self, batch: [sizes.append(len(batch)), run(self, batch)][1])
    place = Placement((SIDE, SIDE), (0, 0), (SIDE, SIDE))
    jobs = [Job(PLAIN["png"], (SIDE, SIDE), place)] * 4 + [Job(PLAIN["png"], (5 * SIDE, SIDE), place)]
    assert all(pixels is not None for pixels in DaliPixels("bicubic", 1).decode([*jobs, *jobs[:1]]))
    assert sizes == [3, 1, 1, 1]


BOMBS = {
    "png": (lambda: images.empty_png(50_000, 50_000), "50000x50000 pixels"),
    "jpeg": (lambda: images.jpeg_claiming(65_500, 65_500), "65500x65500 pixels"),
    "webp": (lambda: images.webp_claiming(16_383, 16_383), "16383x16383 pixels"),
    "text": (lambda: BAD["huge text"][0], "too large"),
    "long": (lambda: images.png(1, 400_000, 1, 0, zlib.compress(bytes(800_000))), "64x25600000 pixels after"),
}
CHILD = """
import resource, sys
from pathlib import Path
from fastdiff.data.images.decode import BadImage, Decoded, ImageTransform, open_decoder

decoder = open_decoder(sys.argv[1], ImageTransform(64, "center", "bicubic"), threads=2)
folder = Path(sys.argv[2])
assert isinstance(decoder.decode([(folder / "good").read_bytes()] * 4)[0], Decoded)
bombs = {path.name: path.read_bytes() for path in folder.glob("bomb-*")}
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 2**27
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name, data in bombs.items():
    (result,) = decoder.decode([data])
    print(name, result.reason if isinstance(result, BadImage) else "no reason")
print("grown", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
try:
    decoder.decode([(folder / "large").read_bytes()])
except MemoryError:
    print("the limit holds")
"""


@pytest.mark.nightly
@pytest.mark.fault(28)
@pytest.mark.parametrize("name", ["pillow", "dali"])
def test_a_decompression_bomb_costs_no_memory(name: str, tmp_path: Path) -> None:
    """Under a limit of 128 MiB more, which one image of the largest allowed size breaks."""
    (tmp_path / "good").write_bytes(PLAIN["png"])
    (tmp_path / "large").write_bytes(images.empty_png(11_000, 11_000))
    for kind, (build, _) in BOMBS.items():
        (tmp_path / f"bomb-{kind}").write_bytes(build())
        assert (tmp_path / f"bomb-{kind}").stat().st_size < 400_000
    (tmp_path / "child.py").write_text(CHILD)
    done = run_script(tmp_path / "child.py", name, tmp_path)
    assert done.code == 0, done.output
    lines = done.output.splitlines()
    for kind, (_, reason) in BOMBS.items():
        (line,) = (line for line in lines if line.startswith(f"bomb-{kind} "))
        assert reason in line
    (grown,) = (int(line.split()[1]) for line in lines if line.startswith("grown"))
    assert grown < 32
    assert "the limit holds" in lines
