"""Language models as text encoders, against the pipelines of diffusers on the same tiny weights."""

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM, Qwen3Model

from fastdiff.batch import from_stored, to_stored
from fastdiff.config.networks.pretrained import PretrainedConfig
from fastdiff.config.networks.unet import UNetConfig
from fastdiff.config.sections.data import DataConfig
from fastdiff.data.encoding import partition
from fastdiff.data.loading.training_set import check_provenance
from fastdiff.data.shards.format import DatasetInfo
from fastdiff.data.shards.reader import LatentReader
from fastdiff.errors import ConfigError
from fastdiff.models.encoders import language_model
from fastdiff.models.encoders.text_encoders import TextEncoders
from fastdiff.models.pretrained.pipeline import Pretrained
from fastdiff.models.pretrained.tiny_pipeline import build
from fastdiff.sampling.text import encode_prompts
from tests.support.inputs import text_pipelines
from tests.support.inputs.encoding import captioned, encode, encode_part, files

CAPTIONS = ["A small Cat ", "", "one two three four five six seven eight nine ten " * 9, "Été", "the red house"]
CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-6}
NEAR: dict[str, Any] = {"rtol": 0.0, "atol": 3e-6}


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pipelines") / "sd15")


Write = Callable[..., Path]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return captioned(tmp_path / "images", [CAPTIONS[number % 5] + str(number // 5) for number in range(30)])


@pytest.fixture
def write(tmp_path: Path, vae: Path) -> Write:
    return lambda pipeline, **parts: text_pipelines.write(tmp_path / pipeline, pipeline, parts, vae)


def double(part: text_pipelines.Part) -> text_pipelines.Part:
    """In fp64, where only conventions differ: attention without a scale enlarges the rounding of fp32."""
    return part[0].double(), part[1]


def text_of(pipeline: Path, max_tokens: int | None = None, dtype: torch.dtype = torch.float64) -> TextEncoders:
    return Pretrained(str(pipeline), flag="--pretrained", max_tokens=max_tokens).text(dtype=dtype)


def assert_equal(found: dict[str, Tensor], context: Tensor, mask: Tensor) -> None:
    """Compare with padded embeddings and their mask: exact masks, valid rows to 1e-6, zeros elsewhere."""
    assert found["context"].shape == context.shape
    assert torch.equal(found["context_mask"], mask.bool())
    torch.testing.assert_close(found["context"], context * mask[..., None], **CLOSE)


@pytest.mark.parametrize(("name", "tokens"), [("PixArtAlphaPipeline", 120), ("PixArtSigmaPipeline", 300)])
def test_t5_of_pixart(write: Write, name: str, tokens: int) -> None:
    import diffusers

    model, tokenizer = double(text_pipelines.t5())
    text = text_of(write(name, text_encoder=(model, tokenizer)))
    published = getattr(diffusers, name)(tokenizer, model, None, None, None)
    context, mask, null, null_mask = published.encode_prompt(CAPTIONS, device="cpu", clean_caption=False)
    assert context.shape[1] == tokens
    found = text(CAPTIONS)
    assert_equal(found, context, mask)
    assert found["context_mask"].sum(1).tolist() == [12, 1, tokens, 4, 14], "in lower case, without spaces at the ends"
    assert_equal({n: v[None] for n, v in text.null().items()}, null[:1], null_mask[:1])
    assert text.lost(CAPTIONS) == {tokens: len(CAPTIONS[2].strip()) + 1 - tokens}
    assert text.lost([CAPTIONS[0], ""]) == {}


def test_gemma_of_sana(write: Write) -> None:
    import inspect

    import diffusers

    model, tokenizer = text_pipelines.gemma()  # in fp64 transformers masks it into NaN
    pipeline = write("SanaPipeline", text_encoder=(model, tokenizer))
    published = diffusers.SanaPipeline(tokenizer, model, None, None, None)
    lines = inspect.signature(published.__call__).parameters["complex_human_instruction"].default
    long = [*CAPTIONS, "a red house " * 40]
    for tokens in (300, 24):
        text = text_of(pipeline, None if tokens == 300 else tokens, torch.float32)
        context, mask, null, null_mask = published.encode_prompt(
            long, device="cpu", max_sequence_length=tokens, complex_human_instruction=lines, negative_prompt="An Owl"
        )
        assert context.shape[1] == tokens
        assert_equal(text(long), context, mask)
        negative = {name: value.expand(6, *value.shape[1:]) for name, value in text.negative(["An Owl"]).items()}
        assert_equal(negative, null, null_mask)
        # The first token and the last one of the instruction come before those of a caption.
        assert text.lost(long) == {tokens: sum(max(0, 2 + len(each.strip()) - tokens) for each in long)}
    assert text.null()["context_mask"].sum() == 1
    unet = UNetConfig(cross_attention_dim=text_pipelines.WIDTH)
    _, unconditional = encode_prompts(Pretrained(str(pipeline)), ["a hut"], unet, negative="An Owl")
    torch.testing.assert_close(unconditional["context"][:6], text.negative(["An Owl"])["context"][0, :6], **NEAR)


def test_the_three_encoders_of_stable_diffusion_3(write: Write, tmp_path: Path) -> None:
    import diffusers

    one, two, three = (
        double(each) for each in (text_pipelines.clip(tmp_path), text_pipelines.clip(tmp_path), text_pipelines.t5(96))
    )
    with torch.no_grad():
        two[0].text_projection.weight.mul_(2)
    pipeline = write("StableDiffusion3Pipeline", text_encoder=one, text_encoder_2=two, text_encoder_3=three)
    text = text_of(pipeline)
    parts = {"transformer": None, "scheduler": None, "vae": None}
    for number, (model, tokenizer) in zip(("", "_2", "_3"), (one, two, three), strict=True):
        parts |= {f"text_encoder{number}": model, f"tokenizer{number}": tokenizer}
    published = diffusers.StableDiffusion3Pipeline(**parts)
    context, null, pooled, null_pooled = published.encode_prompt(CAPTIONS, None, None, device="cpu")
    found, empty = text(CAPTIONS), text.null()
    assert found["context"].shape == (5, 77 + 256, 96)
    torch.testing.assert_close(found["context"], context, **CLOSE)
    torch.testing.assert_close(found["pooled"], pooled, **CLOSE)
    torch.testing.assert_close(empty["context"], null[0], **CLOSE)
    torch.testing.assert_close(empty["pooled"], null_pooled[0], **CLOSE)
    assert text.lost(CAPTIONS).keys() == {77, 256}
    assert text.lost(["one two three four five six seven eight nine ten " * 3]).keys() == {77}, "T5 reads it whole"
    assert text.batches(CAPTIONS, 2) == [[0, 1], [2, 3], [4]], "padding is read, so lengths do not matter"


def test_the_rows_of_clip_are_not_tokens_of_t5(write: Write, source: Path, tmp_path: Path) -> None:
    parts = {"text_encoder": text_pipelines.clip(tmp_path), "text_encoder_2": text_pipelines.clip(tmp_path)}
    pipeline = write("StableDiffusion3Pipeline", **parts, text_encoder_3=text_pipelines.t5(96))
    encode(source, tmp_path / "out", pipeline, max_tokens=40)
    info, run = DatasetInfo.read(tmp_path / "out"), DataConfig(path=str(tmp_path / "out"))
    assert info.columns["context"].shape == (77 + 40, 96)
    check_provenance(PretrainedConfig(path=str(pipeline), max_tokens=40), run, info)
    with pytest.raises(ConfigError, match=r"of up to 40 tokens, and .* up to 256; give --pretrained\.max_tokens 40"):
        check_provenance(PretrainedConfig(path=str(pipeline)), run, info)


def test_qwen_of_z_image(write: Write) -> None:
    import diffusers

    model, tokenizer = double(text_pipelines.qwen3(Qwen3Model))
    text = text_of(write("ZImagePipeline", text_encoder=(model, tokenizer)))
    published = diffusers.ZImagePipeline(None, None, model, tokenizer, None)
    embeddings, negative = published.encode_prompt([*CAPTIONS], device="cpu")
    found, null = text(CAPTIONS), text.null()
    for number, expected in enumerate(embeddings):
        assert found["context_mask"][number].tolist() == [True] * len(expected) + [False] * (512 - len(expected))
        torch.testing.assert_close(found["context"][number, : len(expected)], expected, **CLOSE)
    torch.testing.assert_close(null["context"][null["context_mask"]], negative[0], **CLOSE)


def test_qwen_of_flux2_klein(write: Write) -> None:
    import diffusers

    model, tokenizer = double(text_pipelines.qwen3(Qwen3ForCausalLM, layers=28))
    text = text_of(write("Flux2KleinPipeline", text_encoder=(model, tokenizer)), 200)
    published = diffusers.Flux2KleinPipeline(None, None, model, tokenizer, None)
    context, _ = published.encode_prompt([*CAPTIONS], device="cpu", max_sequence_length=200)
    assert context.shape == (5, 200, 3 * text_pipelines.WIDTH)
    torch.testing.assert_close(text(CAPTIONS)["context"], context, **CLOSE)
    assert text.batches(CAPTIONS, 3) == [[0, 1, 2], [3, 4]], "what it makes of padding is returned"


def test_qwen_of_qwen_image(write: Write) -> None:
    import diffusers

    model, tokenizer = double(text_pipelines.qwen_vl())
    text = text_of(write("QwenImagePipeline", text_encoder=(model, tokenizer)))
    published = diffusers.QwenImagePipeline(None, None, model, tokenizer, None)
    context, mask = published.encode_prompt(CAPTIONS, device="cpu")
    rows = context.shape[1]
    found = text(CAPTIONS)
    assert found["context"].shape == (5, 1024, text_pipelines.WIDTH)
    assert not found["context_mask"][:, rows:].any()
    assert_equal({name: value[:, :rows] for name, value in found.items()}, context, mask)


def test_a_caption_is_embedded_alike_in_any_batch_and_with_any_padding(write: Write) -> None:
    pipeline = write("PixArtSigmaPipeline", text_encoder=text_pipelines.t5())
    text = text_of(pipeline)
    together = text(CAPTIONS)
    for number, caption in enumerate(CAPTIONS):
        alone = text([caption])
        torch.testing.assert_close(alone["context"][0], together["context"][number], **CLOSE)
    model, tokenizer = double(text_pipelines.t5())
    padded = tokenizer(CAPTIONS[0].lower().strip(), padding="max_length", max_length=300, return_tensors="pt")
    expected = model(padded.input_ids, attention_mask=padded.attention_mask).last_hidden_state[0, :12]
    torch.testing.assert_close(together["context"][0, :12], expected, **CLOSE)
    assert text.batches(CAPTIONS, 2) == [[2, 4], [0, 3], [1]], "captions of like length together"
    limited = text_of(pipeline, 8)
    assert limited(CAPTIONS)["context_mask"].sum(1).tolist() == [8, 1, 8, 4, 8]
    assert limited.lost(["the red house"]) == {8: 6}


def test_the_maximum_of_tokens_is_that_of_records_which_have_one(vae: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-tokens 8: captions of .* have the fixed length of CLIPTextModel"):
        text_of(vae, 8)


def test_a_vocabulary_of_sentencepiece_is_read(write: Write) -> None:
    """As published tokenizers of T5 have it, without tokenizer.json."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="an environment from before it was a dependency")
    vocabulary = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"a small cat sat on the red house {number}" for number in range(50)]),
        model_writer=vocabulary, vocab_size=60, hard_vocab_limit=False, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
        minloglevel=2,
    )  # fmt: skip
    pipeline = write("PixArtSigmaPipeline", text_encoder=text_pipelines.t5())
    folder = pipeline / "tokenizer"
    (folder / "tokenizer.json").unlink()
    (folder / "spiece.model").write_bytes(vocabulary.getvalue())
    settings = {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"extra_ids": 0}))
    index = json.loads((pipeline / "model_index.json").read_text())
    index["tokenizer"] = ["transformers", "T5Tokenizer"]
    (pipeline / "model_index.json").write_text(json.dumps(index))
    caption = "the red cat"
    expected = sentencepiece.SentencePieceProcessor(model_proto=vocabulary.getvalue()).encode(caption)
    assert text_of(pipeline)([caption])["context_mask"].sum() == len(expected) + 1 > 3


def test_a_vocabulary_that_cannot_be_read_is_told(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would ask for tiktoken, which does not read it."""
    pipeline = write("PixArtSigmaPipeline", text_encoder=text_pipelines.t5())
    (pipeline / "tokenizer" / "tokenizer.json").rename(pipeline / "tokenizer" / "spiece.model")
    monkeypatch.setattr(language_model, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"and sentencepiece is not installed; run `pip install 'sentencepiece>="):
        text_of(pipeline)


def test_records_are_found_by_the_class_of_the_pipeline(write: Write) -> None:
    pipeline = write("FluxPipeline", text_encoder=text_pipelines.t5())
    with pytest.raises(
        ConfigError,
        match=r"has text encoders of class T5EncoderModel in a FluxPipeline; expected T5EncoderModel in a "
        r"PixArtAlphaPipeline or T5EncoderModel in a PixArtSigmaPipeline, or install",
    ):
        text_of(pipeline)


def test_embeddings_may_have_a_dtype_that_numpy_lacks(write: Write, source: Path, tmp_path: Path) -> None:
    pipeline = write("PixArtSigmaPipeline", text_encoder=text_pipelines.t5())
    found: dict[str, list[Tensor]] = {}
    for dtype in ("float32", "float8_e4m3fn"):
        encode(source, tmp_path / dtype, pipeline, max_tokens=40, text_dtype=dtype)
        with LatentReader(tmp_path / dtype) as reader:
            assert (reader.info.columns["context"].dtype, reader.info.latent.dtype) == (dtype, "float16")
            for arrays in (reader.read(range(30)), reader.null()):
                context = torch.from_numpy(arrays["context"])
                found.setdefault(dtype, []).append(from_stored({"context": context})["context"])
    for exact, stored in zip(found["float32"], found["float8_e4m3fn"], strict=True):
        assert torch.equal(stored, exact.to(torch.float8_e4m3fn).bfloat16())


def test_a_number_that_float8_lacks_is_refused() -> None:
    stored = to_stored(torch.tensor([[448.0, -449.0, 1.0]]), "float8_e4m3fn")
    assert from_stored({"pooled": stored})["pooled"].isfinite().tolist() == [[True, False, True]]


def test_shards_hold_the_tokens_and_masks_of_captions(
    write: Write, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes after an interruption, and for any number of ranks, each of which encodes all in another order."""
    pipeline = write("PixArtSigmaPipeline", text_encoder=text_pipelines.t5())
    options: dict[str, Any] = {"max_tokens": 40, "dtype": "float32", "samples_per_shard": 10, "batch": 2}
    monkeypatch.setattr(partition, "_TEXT_BATCHES", 2)  # so that a shard has several groups of captions
    said = encode(source, tmp_path / "out", pipeline, **options)
    captions = [CAPTIONS[number % 5] + str(number // 5) for number in range(30)]
    expected = text_of(pipeline, 40)(captions)
    with LatentReader(tmp_path / "out") as reader:
        found = reader.read(range(30))
        null = reader.null()
    assert DatasetInfo.read(tmp_path / "out").columns["context"].shape == (40, text_pipelines.WIDTH)
    np.testing.assert_array_equal(found["context_mask"], expected["context_mask"].numpy())
    np.testing.assert_allclose(found["context"], expected["context"].numpy(), **NEAR)
    run = DataConfig(path=str(tmp_path / "out"))
    info = DatasetInfo.read(tmp_path / "out")
    check_provenance(PretrainedConfig(path=str(pipeline), max_tokens=40), run, info)
    with pytest.raises(ConfigError, match=r"up to 40 tokens, and .* up to 300; give --pretrained\.max_tokens 40"):
        check_provenance(PretrainedConfig(path=str(pipeline)), run, info)
    assert null["context_mask"].sum() == 1, "the end, so that no mask is zero"
    long = sum(len(caption.strip()) + 1 - 40 for caption in captions[2::5])
    told = [line for line in said if "caption" in line]
    assert told == [
        "  note: pictures with a caption that was cut: it is longer than the 40 tokens that the text encoder reads: 6 "
        "(first: 002.png, 007.png, 012.png)",
        f"  note: tokens beyond the first 40 of a caption, which were not read: {long} "
        "(first: 002.png, 007.png, 012.png)",
        "  20.0% of the pictures have a caption that was cut after 40 tokens",
    ]
    for rank, ranks in ((0, 1), (1, 2), (2, 3)):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setenv("RANK", str(rank))
        encode_part(source, tmp_path / f"by{ranks}", pipeline, 1, **options)
        monkeypatch.setenv("RANK", "0")
        encode(source, tmp_path / f"by{ranks}", pipeline, **options)
        assert files(tmp_path / f"by{ranks}") == files(tmp_path / "out")
