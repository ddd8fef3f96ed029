"""Command lines: their meaning, and the messages of wrong ones; test_bad_input has the exit codes."""

import json
import os
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import fastdiff
from fastdiff.cli.main import main
from fastdiff.config import deepspeed as deepspeed_config
from fastdiff.config.arguments.types import local_path
from fastdiff.config.command_line import train_flags
from fastdiff.config.command_line.short_help import SHOWN
from fastdiff.config.presets import PRESETS, encode_command, preset
from fastdiff.config.run import RunConfig
from fastdiff.config.run_record import as_json
from fastdiff.config.sections.batch import BatchConfig
from fastdiff.config.sections.performance import Precision
from fastdiff.errors import ConfigError
from tests.support.processes import ROOT


def test_launcher_flags_come_first_and_presets_give_the_defaults() -> None:
    launch, config = train_flags.parse(["--local_rank=1", "--preset", "digits", "--optim.lr", "0.5", "--deepspeed"])
    assert config == replace(preset("digits"), optim=replace(preset("digits").optim, lr=0.5))
    assert launch.deepspeed is None


def test_the_home_folder_is_known_where_a_shell_leaves_its_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """In quotes, and behind ``--flag=``."""
    monkeypatch.setenv("HOME", "/home/me")
    assert local_path("~/x.npz") == Path("/home/me/x.npz")
    assert [local_path(text) for text in ("a~/x", "~nobody-of-this-name/x")] == [
        Path("a~/x"),
        Path("~nobody-of-this-name/x"),
    ]


def test_a_file_goes_over_the_preset_and_a_flag_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("optim: {lr: 0.25, betas: [0.8, 0.9]}\nseed: 3\n")
    _, config = train_flags.parse(["--preset", "digits", "--config", str(file), "--seed", "4"])
    assert (config.optim.lr, config.optim.betas, config.seed) == (0.25, (0.8, 0.9), 4)


def test_the_optimizer_of_a_flag_keeps_the_values_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("optim: {name: adamw8bit-bnb, lr: 0.25}\n")
    file = ["--preset", "digits", "--config", str(tmp_path / "run.yaml")]
    for flags, name in ((file, "adamw8bit-bnb"), ([*file, "--optim.name", "adamw8bit"], "adamw8bit")):
        optim = train_flags.parse(flags)[1].optim
        assert (optim.name, optim.lr, optim.schedule) == (name, 0.25, "cosine")


def test_a_run_json_is_a_configuration(tmp_path: Path) -> None:
    given = replace(preset("digits"), seed=5)
    (tmp_path / "run.json").write_text(json.dumps({"config": as_json(given), "argv": []}))
    assert train_flags.parse(["--config", str(tmp_path / "run.json")])[1] == given


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim: {lrr: 1}", r"unknown field optim\.lrr; did you mean optim\.lr\?"),
        ("seed: seven", "seed: .*given 'seven'"),
        ("[1, 2]", "expected a mapping"),
        ("a: [", "not a readable YAML"),
        ("model: {hidden: 30, heads: 4}", r"model\.hidden 30 is not divisible by model\.heads 4"),
        ("model: {kind: adm, qkv_order: legacy}", r"model\.qkv_order: .*'head_major' or 'qkv_major', given 'legacy'"),
        ("model: {kind: unet, channels: x}", r"model\.channels: .*given 'x'"),
        ("model: {kind: vit}", r"model\.kind: .*given 'vit'"),
        ("model: 3", r"model: .*given 3"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        train_flags.parse(["--preset", "digits", "--config", str(tmp_path / "run.yaml")])


def test_a_missing_preset_lists_them() -> None:
    with pytest.raises(ConfigError, match="digits, digits-fast, digits-t2i, digits-t2i-dit, digits-adm"):
        train_flags.parse([])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--optim.lrr 3", "--optim.lrr: unknown flag, did you mean --optim.lr or "),
        ("--lr 3", "--lr: unknown flag, did you mean --optim.lr?"),
        ("--optim_lr=3", "--optim_lr: unknown flag, did you mean --optim.lr"),
        ("--stps 3", "--stps: unknown flag, did you mean --steps?"),
        ("--zzzzz", "--zzzzz: unknown flag; `fastdiff train --help` lists the flags"),
        ("stray", "stray: unexpected, it belongs to no flag"),
        (
            "--model.learn-sigma true",
            "true: unexpected, --model.learn-sigma takes no value; write --model.learn-sigma or --model.no-learn-sigma",
        ),
        ("--performance.compile true", "--performance.compile: expected one of "),
        ("--sampling.shift latents", "--sampling.shift: expected {None}|FLOAT|{latent}, given 'latents'"),
        (
            "--learning_rate 1e-4 --hiddn 3",
            "diffusers' --learning_rate is --optim.lr 1e-4; --hiddn: unknown flag, did ",
        ),
    ],
)
def test_an_unknown_flag_names_the_nearest(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        train_flags.parse(["--preset", "digits", *words.split()])


def test_help_lists_every_field_with_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train_flags.parse(["--preset", "digits", "--help-all"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    for flag in (
        "--samples",
        "--data.path",
        "--output.folder",
        "--batch.micro",
        "--optim.clip",
        "--ema.rates",
        "--objective.min-snr-gamma",
        "--performance.precision",
        "--performance.compile",
        "--performance.kernels",
        "--performance.attention",
    ):
        assert flag in text or flag.replace("-", "_").replace("__", "--") in text, flag
    assert "Samples per optimizer step" in text
    assert "--num_heads_upsample" in text, "no weights show it"


def test_help_with_a_preset_begins_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_flags.parse(["--preset", "digits", "--help-all"])
    text = capsys.readouterr().out
    about = [line.strip() for line in (PRESETS["digits"].__doc__ or "").splitlines() if line.strip()]
    places = [text.index(line) for line in about]
    assert places == sorted(places)
    assert places[-1] < text.index("--preset NAME") < text.index("--samples")
    assert "data/digits deepspeed" not in text, "two commands, on lines of their own"
    with pytest.raises(SystemExit):
        train_flags.parse(["--help-all"])
    assert about[0] not in capsys.readouterr().out


def test_the_short_help_shows_known_flags_with_the_values_of_the_preset(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train_flags.parse(["--preset", "digits", "--optim.lr", "1", "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert len(text.splitlines()) < 70
    assert re.search(r"--optim.lr +learning rate \[0.002\]", text)
    with pytest.raises(SystemExit):
        train_flags.parse(["--preset", "digits", "--help-all"])
    known = capsys.readouterr().out.replace("_", "-")
    shown = [flag.split()[0] for section in SHOWN.values() for flag in section]
    assert 25 <= len(shown) <= 40
    unknown = [flag for flag in shown if flag.replace("_", "-") not in known]
    assert unknown == ["--ranks"], "which `fastdiff train` takes itself"


@pytest.mark.parametrize(
    ("length", "samples"),
    [
        (["--steps", "3"], 192),
        (["--steps=3", "--batch.samples=10"], 30),
        (["--epochs", "2"], 3584),  # 56 steps of 64; two epochs are 56.2
        (["--epochs", "0.001"], 64),
        (["--samples", "192"], 192),
    ],
)
def test_the_length_of_a_run_in_every_unit(digits: Path, length: list[str], samples: int) -> None:
    _, config = train_flags.parse(["--preset", "digits", "--data.path", str(digits), *length])
    assert config.samples == samples


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (["--steps", "3", "--epochs", "1"], "--steps and --epochs: each is the length"),
        (["--samples", "64", "--steps", "1"], "--samples and --steps: each is the length"),
        (["--steps", "0"], "--steps: 0: expected a whole number"),
        (["--epochs", "-1"], "--epochs"),
        (["--epochs", "1", "--data.path", "nowhere"], "make the data set with `fastdiff encode digits nowhere`"),
        (["--epochs", "1e308", "--data.path", "DIGITS"], "--epochs 1e+308: more than 2147483647 steps"),
        (["--epochs", "1", "--data.path", "s3://a/b"], "not known here; use --steps"),
        (["--epochs", "1", "--data.online", "--data.path", "./none"], "images of ./none cannot be counted"),
    ],
)
def test_a_length_that_is_no_length_is_refused(digits: Path, length: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        train_flags.parse(["--preset", "digits", *(str(digits) if word == "DIGITS" else word for word in length)])


def test_every_preset_names_the_command_of_its_data() -> None:
    for name in PRESETS:
        command = encode_command(name, "some/where")
        assert command.startswith("make ") or "fastdiff encode " in command, name
        assert command.startswith("make ") or " some/where" in command, name


@pytest.mark.parametrize(
    ("batch", "ranks", "expected"),
    [
        (BatchConfig(samples=64, micro=8), 2, 4),
        (BatchConfig(samples=64), 4, 1),
        (BatchConfig(samples=6), 3, 1),
    ],
)
def test_accumulation(batch: BatchConfig, ranks: int, expected: int) -> None:
    assert batch.accumulation(ranks) == expected


def test_a_batch_that_does_not_divide_names_the_nearest_values() -> None:
    with pytest.raises(ConfigError, match=r"256 is not divisible by 24 .*nearest values: 240, 264"):
        BatchConfig(samples=256, micro=8).accumulation(3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch.samples", "0"], "at least 1"),
        (["--batch.micro", "0"], "at least 1"),
        (["--model.heads", "0"], "at least 1"),
        (["--model.patch", "0"], "at least 1"),
        (["--model.depth", "0"], "at least 1"),
        (["--optim.betas", "1.5", "0.9"], "from 0 to below 1"),
        (["--optim.eps", "-1"], "at least 1.2e-38"),
        (["--optim.eps", "0"], "at least 1.2e-38.* 1e-8 is usual"),
        (["--optim.eps", "1e-50"], "at least 1.2e-38"),
        (["--optim.lr", "inf"], "above 0"),
        (["--optim.lr", "nan"], "above 0"),
        (["--optim.clip", "nan"], "0 or above"),
        (["--optim.weight_decay", "-0.1"], "0 or above"),
        (["--optim.weight_decay", "1", "--optim.lr", "2"], "their product is below 1"),
        (["--ema.rates", "0.9", "1"], "between 0 and 1"),
        (["--ema.rates", "nan"], "between 0 and 1"),
        (["--model.mlp_ratio", "nan"], "above 0"),
        (["--model.mlp_ratio", "-4"], "above 0"),
        (["--lora.rank", "4", "--lora.alpha", "nan"], "above 0"),
        (["--output.sample_cfg", "nan"], "a finite number"),
        (["--output.pinned_gib", "inf"], "a finite number"),
        (["--optim.warmup_steps", "-5"], "0 or above"),
        (["--output.checkpoint_every", "-3"], "at least 0"),
        (["--output.sample_steps", "5000"], "at most --objective.timesteps 1000"),
        (["--objective.zero_terminal_snr", "--objective.prediction", "epsilon"], "prediction v or x0"),
        (["--seed", "-1"], "from 0"),
        (["--validation.data", "shards", "--validation.every", "0"], "never read; set --validation.every"),
        (["--performance.kernels", "auto,adalm=triton"], "'adalm' is none of the ops philox, noising"),
        (["--resume", "yes"], "--resume: yes: expected one of auto, must, never"),
    ],
)
def test_impossible_values_are_refused_at_once(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train_flags.parse(["--preset", "digits", *flags])


def test_samples_must_be_whole_steps() -> None:
    with pytest.raises(ConfigError, match=r"nearest value: 1024 \(4 steps\)"):
        RunConfig(samples=1000, batch=BatchConfig(samples=256))


@pytest.mark.parametrize("file", sorted((ROOT / "deepspeed_configs").glob("*.json")), ids=lambda f: f.stem)
def test_every_deepspeed_file_resolves_for_every_preset(file: Path) -> None:
    decided = {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}  # at the start, by memory
    for name, ranks in product(sorted(PRESETS), (1, 8)):
        config = preset(name)
        resolved = deepspeed_config.resolve(deepspeed_config.read(str(file)), config, ranks)
        assert resolved["train_batch_size"] == config.batch.samples, name
        assert resolved["bf16"]["enabled"] == (config.performance.precision == "bf16"), name
        left = {key for key, value in resolved.items() if value == "auto"}
        assert left == (decided if config.batch.micro == "auto" else set()), name
        assert json.dumps(resolved).count('"auto"') == len(left), name


def test_without_a_file_it_is_zero1() -> None:
    file = deepspeed_config.read(str(ROOT / "deepspeed_configs" / "zero1.json"))
    config = preset("digits")
    assert deepspeed_config.resolve(None, config, 2) == deepspeed_config.resolve(file, config, 2)


@pytest.mark.parametrize(("precision", "optimizer"), [("fp32", "adamw"), ("bf16", "adamw"), ("fp32", "adamw8bit")])
def test_one_rank_shards_nothing(precision: Precision, optimizer: str) -> None:
    """Where the losses are equal up to rounding; a given file is taken as it is."""
    config = preset("digits")
    config = replace(
        config,
        performance=replace(config.performance, precision=precision),
        optim=replace(config.optim, name=optimizer),
    )
    alone = deepspeed_config.resolve(None, config, 1)
    assert deepspeed_config.zero_stage(alone) == (0 if (precision, optimizer) == ("fp32", "adamw") else 1)
    file = ROOT / "deepspeed_configs" / "zero1.json"
    given, _ = train_flags.parse(["--preset", "digits", "--deepspeed_config", str(file)])
    assert deepspeed_config.zero_stage(deepspeed_config.resolve(given.deepspeed, config, 1)) == 1


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"train_batch_size": 32}, r'"train_batch_size": 32, but --batch.samples gives 64'),
        ({"bf16": {"enabled": True}}, r'"bf16.enabled": true, but --performance.precision gives false'),
        ({"optimizer": {"type": "Adam"}}, r"--optim\.\* decides"),
        ({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}, "which fastdiff does not fill"),
        *(({"zero_optimization": {"stage": s}}, "expected 0, 1, 2 or 3") for s in (4, True, "3", None, [1])),
        *(
            ({"zero_optimization": {"offload_param": o}}, 'offload_param": .*expected an object')
            for o in (3, "cpu", True)
        ),
        ({"zero_optimization": {"offload_optimizer": []}}, 'offload_optimizer": .*expected an object'),
        ({"bf16": True}, r'"bf16": true; expected an object'),
        ({"zero_optimization": True}, r'"zero_optimization": true; expected an object'),
        ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "not supported"),
        ({"zero_optimization": {"stage": 1, "round_robin_gradients": True}}, "would be wrong; remove it"),
    ],
)
def test_a_contradicting_deepspeed_file_is_refused(raw: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deepspeed_config.resolve(raw, preset("digits"), 1)


def test_a_missing_deepspeed_file_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*zero3\.json"):
        deepspeed_config.read(str(ROOT / "deepspeed_configs" / "zero-3.json"))


@pytest.mark.parametrize("columns", ["20", None])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--samples many", "--samples: expected a whole number, given 'many'"),
        ("--optim.lr", "--optim.lr: its value is missing"),
        ("--optim.name adamz", "--optim.name: not a known optimizer, given 'adamz'; expected adamw, adamw8bit, adamw"),
    ],
)
def test_a_wrong_value_is_one_line(
    words: str, message: str, columns: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a terminal of any width, without the boxes of the parser below; who catches it prints it."""
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}") as refused:
        train_flags.parse(["--preset", "digits", *words.split()])
    assert "\n" not in str(refused.value)
    assert capsys.readouterr() == ("", "")
    assert os.environ.get("COLUMNS") == columns


@pytest.mark.parametrize("flag", ["--deepspeed_config", "--deepspeed"])
def test_a_deepspeed_configuration_has_a_name(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any folder; a file is given by its path."""
    monkeypatch.chdir(tmp_path)
    launch, _ = train_flags.parse(["--preset", "digits", flag, "zero3"])
    assert launch.deepspeed == json.loads((ROOT / "deepspeed_configs" / "zero3.json").read_text())
    (tmp_path / "own").write_text('{"zero_optimization": {"stage": 2}}')
    launch, _ = train_flags.parse(["--preset", "digits", flag, "own"])
    assert launch.deepspeed == {"zero_optimization": {"stage": 2}}
    with pytest.raises(ConfigError, match=r"zero4: no such file; expected .* a name: ddp, zero1, zero2, zero3,"):
        train_flags.parse(["--preset", "digits", flag, "zero4"])


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        ("preset: digits\nsteps: 3\n", "", ("digits", 192, 64)),
        ("preset: digits\nepochs: 2\n", "", ("digits", 3584, 64)),
        ("preset: digits\nsteps: 3\nbatch: {samples: 10}\n", "", ("digits", 30, 10)),
        ("preset: digits\nsteps: 3\nbatch: {samples: 10}\n", "--batch.samples 7", ("digits", 21, 7)),
        ("preset: digits\nsteps: 3\n", "--epochs 1", ("digits", 1792, 64)),
        ("preset: digits\nepochs: 3\n", "--samples 640", ("digits", 640, 64)),
        ("preset: digits\nsamples: 640\n", "--steps 3", ("digits", 192, 64)),
        ("steps: 3\nbatch: {samples: 10}\n", "--preset digits", ("digits", 30, 10)),
        ("batch: {samples: 10}\n", "--preset digits --steps 3", ("digits", 30, 10)),
        ("preset: sd15-512\nsteps: 3\n", "--preset digits", ("digits", 192, 64)),
        ('{"$schema": "./fastdiff.json", "preset": "digits", "steps": 3}', "", ("digits", 192, 64)),
    ],
)
def test_a_file_names_preset_and_length_as_the_flags_do(
    digits: Path, tmp_path: Path, text: str, flags: str, expected: tuple[str, int, int]
) -> None:
    """A flag goes over the file, in whatever unit the length is."""
    (tmp_path / "run.yaml").write_text(text)
    words = ["--config", str(tmp_path / "run.yaml"), *flags.split(), "--data.path", str(digits)]
    launch, config = train_flags.parse(words)
    assert (launch.preset, config.samples, config.batch.samples) == expected
    if not flags:
        (tmp_path / "whole.yaml").write_text(f'{text}\ndata: {{path: "{digits}"}}' if text[0] != "{" else text)
        read = fastdiff.Config.from_file(tmp_path / "whole.yaml")
        assert (read.preset, read.samples, read.batch.samples) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("preset: digist", "preset digist: unknown; did you mean digits?"),
        ("preset: 3", "preset: expected the name of a preset, given 3"),
        ("steps: 0", "steps: expected a whole number from 1 to 2147483647, given 0"),
        ("steps: 1.5", "steps: expected a whole number from 1 to 2147483647, given 1.5"),
        ("steps: true", "steps: expected a whole number from 1 to 2147483647, given True"),
        ("epochs: many", "epochs: expected a number above 0, given 'many'"),
        ("epochs: .inf", "epochs: expected a finite number"),
        ("steps: 3\nepochs: 3", "steps and epochs: each is the length of the run; give one of them"),
        ("samples: 64\nsteps: 3", "samples and steps: each is the length of the run; give one of them"),
        # Numbers and names as YAML 1.1 has them, and other content that JSON lacks.
        ("seed: " + ":".join(["59"] * 3000), "seed: Input should be a valid integer"),
        ("seed: 1:30", "seed: Input should be a valid integer, given '1:30'"),
        ("seed: 010", "seed: Input should be a valid integer, given '010'"),
        ("seed: 0x10", "seed: Input should be a valid integer, given '0x10'"),
        ("seed: " + "9" * 400, "seed: expected a finite number of at most 300 digits"),
        ("seed: " + "9" * 5000, "not a readable YAML or JSON file"),
        ("seed: " + "9" * 30, "seed 999999999999999999999999999999: from 0 to 2**64 - 1"),
        ("seed: 2024-01-01", "seed: a date, expected a text or a number; put it in quotes"),
        ("optim: {lr: .inf}", "optim.lr: expected a finite number"),
        ("optim: {lr: .nan}", "optim.lr: expected a finite number"),
        ("optim: {lr: -1e400}", "optim.lr: expected a finite number"),
        ("optim: {lr: 1:30.5}", "optim.lr: Input should be a valid number, given '1:30.5'"),
        ("seed: 1\nseed: 2", "seed is given 2 times; leave out all but one"),
        ("optim: {lr: 1, lr: 2}", "lr is given 2 times; leave out all but one"),
        ("seed: &a 1\nsamples: *a", "aliases (*name) are not supported"),
        ("seed: " + "[" * 5000, "not a readable YAML or JSON file"),
        ("seed: " + "{a: " * 4000 + "1" + "}" * 4000, "not a readable YAML or JSON file"),
        ("seed:\t1\n\toptim: 3", "not a readable YAML or JSON file"),
        ("seed: 1\x00", "not a readable YAML or JSON file"),
        ("seed: 1\n---\nseed: 2", "not a readable YAML or JSON file"),
        ("1: 2", "1: expected the name of a field"),
        ("model: {3: 1}", "model.3: expected the name of a field"),
        ("model: {kind: [dit]}", "model.kind: expected the name of a network"),
        ("lora: {targets: !!set {a: null}}", "lora.targets: a set"),
        ("", "it is empty; expected fields of a run"),
        ("seed: !!binary aGVsbG8=", "seed: a bytes, expected a text or a number"),
        ("data: {path: 's3://key:SECRET@bucket/x'}\nseed: x", "seed: "),
    ],
)
def test_whatever_a_file_holds_is_one_line(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert main(["train", "--config", str(tmp_path / "run.yaml"), "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fastdiff: error: ")
    assert message in line
    assert len(line) < 800
    assert "SECRET" not in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs: 3", "epochs 3: the size of nowhere is unknown, it has no dataset.json; make the data set with"),
        ("optim: {lr: -1}", "optim.lr -1.0: above 0"),
        ("optim: {warmup_steps: 5, schedule: constant}", "optim.warmup_steps has no effect with optim.schedule const"),
        ("batch: {samples: 7}", "--samples 64000 is not divisible by batch.samples 7"),
    ],
)
def test_a_message_names_the_field_where_a_file_gives_it(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"preset: digits\ndata: {{path: nowhere}}\n{text}\n")
    with pytest.raises(ConfigError) as refused:
        train_flags.parse(["--config", str(file)])
    assert str(refused.value).startswith(f"--config {file}: {message}")
    assert "or use --steps" not in str(refused.value)


def test_a_message_names_the_flag_where_a_flag_gives_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("preset: digits\ndata: {path: nowhere}\nepochs: 3\n")
    with pytest.raises(ConfigError, match=r"^--epochs 2: the size of nowhere .* or use --steps$"):
        train_flags.parse(["--config", str(file), "--epochs", "2"])
    with pytest.raises(ConfigError, match=r"^--optim\.lr -1\.0: above 0"):
        train_flags.parse(["--config", str(file), "--steps", "2", "--optim.lr", "-1"])


def test_a_file_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"seed: \xff\xfe1")
    with pytest.raises(ConfigError, match="not a readable YAML or JSON file"):
        train_flags.parse(["--preset", "digits", "--config", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize(
    ("text", "lr"), [("1e-4", 1e-4), ("1E-4", 1e-4), ("1_000.5", 1000.5), (".5", 0.5), ("5.", 5.0), ("1_000", 1000.0)]
)
def test_numbers_of_a_file(tmp_path: Path, text: str, lr: float) -> None:
    (tmp_path / "run.yaml").write_text(f"optim: {{lr: {text}}}\nseed: 1_000")
    _, config = train_flags.parse(["--preset", "digits", "--config", str(tmp_path / "run.yaml")])
    assert (config.optim.lr, config.seed) == (lr, 1000)


@pytest.mark.parametrize(
    ("fields", "flags", "message"),
    [
        ("optim: {schedule: constant, warmup_steps: 5}", "--optim.schedule constant_with_warmup", ""),
        ("optim: {schedule: constant, warmup_steps: 5}", "--optim.warmup-steps 0", ""),
        ("batch: {samples: 48}", "--batch.samples 64", ""),
        ("batch: {samples: 48}", "--steps 2", ""),
        ("batch: {samples: 0}", "--epochs 2", "FILE: batch.samples 0: at least 1"),
        ("batch: {samples: 48}", "--seed 1", "FILE: --samples 64000 is not divisible by batch.samples 48"),
        ("seed: 1", "--batch.samples 48", "--samples 64000 is not divisible by --batch.samples 48"),
        ("optim: {betas: [0.9, x]}", "--optim.betas 0.9 0.95", "FILE: optim.betas.1: Input should be a valid number"),
        ("optim: {lr: 1.0e-3}", "--optim.lrr 3", "--optim.lrr: unknown flag, did you mean --optim.lr"),
    ],
)
def test_flags_mend_a_file_before_its_values_are_checked(
    fields: str, flags: str, message: str, digits: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(fields)
    words = ["--preset", "digits", "--data.path", str(digits), "--config", str(path), *flags.split()]
    if not message:
        assert train_flags.parse(words)[1].output.folder
        return
    with pytest.raises(ConfigError, match=f"^{re.escape(message.replace('FILE', f'--config {path}'))}"):
        train_flags.parse(words)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--performance.cuda_graph", "--deepspeed_config", "zero1"), "there is none with ZeRO stage 1: "),
        (
            ("--performance.engine", "flat", "--deepspeed_config", "zero3"),
            "--performance.engine flat with ZeRO stage 3",
        ),
        (("--performance.precision", "fp16", "--deepspeed_config", "ddp"), "fp16 with ZeRO stage 0: "),
    ],
)
def test_a_dry_run_refuses_what_no_engine_can_train(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a start would, which has a GPU."""
    assert main(["train", "--preset", "digits", *flags, "--dry-run"]) == 2
    found = capsys.readouterr()
    assert message in found.err
    assert found.out == ""
