"""``fastdiff compat`` knows every flag of the scripts' own parsers, with its default, and translates or refuses it."""

import argparse
import re
from pathlib import Path

import pytest

from fastdiff.cli.compat import run as compat
from fastdiff.cli.compat.names import ALIASES, REFUSED, TITLES
from fastdiff.cli.compat.run import SCRIPTS, translate
from fastdiff.cli.compat.translation import Translation
from fastdiff.cli.main import main
from fastdiff.config.presets import PRESETS
from fastdiff.errors import ConfigError
from tests.cli.test_compat import T2I
from tests.support.inputs.images import encode, natural
from tests.support.inputs.script_flags import listed

KOHYA = [
    "--pretrained_model_name_or_path", "some/pipeline", "--train_data_dir", "{pictures}", "--output_dir", "out",
    "--resolution", "1024", "--max_train_steps", "100",
]  # fmt: skip
DREAMBOOTH = [
    "--pretrained_model_name_or_path", "some/pipeline", "--instance_data_dir", "{pictures}", "--instance_prompt",
    "a photo of sks dog", "--max_train_steps", "100",
]  # fmt: skip
BARE = {
    "train_text_to_image": T2I,
    "train_text_to_image_lora": T2I,
    "train_text_to_image_sdxl": T2I,
    "train_text_to_image_lora_sdxl": T2I,
    "train_dreambooth_lora_flux2_klein": DREAMBOOTH,
    "train_dreambooth_lora_z_image": DREAMBOOTH,
    "train_dreambooth_lora_sd3": DREAMBOOTH,
    "train_dreambooth_lora_qwen_image": DREAMBOOTH,
    "sdxl_train_network": [*KOHYA, "--network_module", "networks.lora", "--network_train_unet_only"],
    "sdxl_train": KOHYA,
}
"""The shortest command line of each script, by its file."""
_PRIOR = ["--with_prior_preservation", "--class_data_dir", "dogs", "--class_prompt", "a dog"]
OTHERWISE = {
    "train_dreambooth_lora_flux2_klein": [*_PRIOR, "--weighting_scheme", "logit_normal"],
    "train_dreambooth_lora_z_image": [*_PRIOR, "--weighting_scheme", "mode"],
    "train_dreambooth_lora_sd3": [*_PRIOR, "--lr_scheduler", "polynomial"],
    "train_dreambooth_lora_qwen_image": [*_PRIOR, "--lr_scheduler", "cosine_with_restarts"],
    "sdxl_train_network": ["--enable_bucket", "--shuffle_caption", "--lr_scheduler", "polynomial"],
    "sdxl_train": ["--caption_dropout_rate", "0.1", "--lr_scheduler", "cosine_with_restarts", "--deepspeed"],
    "train_text_to_image_sdxl": ["--timestep_bias_strategy", "range", "--timestep_bias_multiplier", "2"],
}
"""Flags beside which more of the others have an effect."""
WORDS = {
    "precondition_outputs": "0",
    "dataset_name": "./others", "resume_from_checkpoint": "latest", "prediction_type": "v_prediction",
    "lr_scheduler": "cosine", "report_to": "wandb", "learning_rate": "0.5", "timestep_bias_end": "900",
}  # fmt: skip
"""Values where the parser's kind does not say enough."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures in the layout of sd-scripts."""
    (tmp_path / "pictures" / "10_sks dog").mkdir(parents=True)
    (tmp_path / "pictures" / "10_sks dog" / "1.png").write_bytes(encode(natural(8, 8), "PNG"))
    return tmp_path / "pictures"


def actions(file: str) -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False)
    SCRIPTS[ALIASES.get(file, file)].add_flags(parser)
    return {action.option_strings[0].removeprefix("--"): action for action in parser._actions}


def test_every_script_has_a_title() -> None:
    assert SCRIPTS.keys() == TITLES.keys()
    assert {ALIASES.get(file, file) for file in BARE} <= SCRIPTS.keys()


@pytest.mark.parametrize("file", BARE)
def test_the_flags_and_defaults_are_those_of_the_parser(file: str) -> None:
    theirs, ours = listed(file), actions(file)
    assert ours.keys() == theirs.keys()
    for name, flag in theirs.items():
        assert ours[name].required == flag.get("required", False), name
        assert ours[name].default == flag.get("default"), name
        assert (ours[name].nargs == 0) == (flag["kind"] == "switch"), name
        if ours[name].nargs != 0:
            assert ours[name].nargs == flag.get("values"), name
        assert set(flag.get("choices", ())) <= set(ours[name].choices or flag.get("choices", ())), name


@pytest.mark.parametrize("file", BARE)
@pytest.mark.parametrize("beside", ["nothing", "others"])
def test_every_flag_is_translated_told_or_refused(
    file: str, beside: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each changes the commands, has its name in a note, or ends in an error about it."""
    monkeypatch.setattr(compat, "_check", lambda _: None)  # whether the trainer takes the values is tested elsewhere
    given = [word.format(pictures=folder) for word in BARE[file]]
    given += OTHERWISE.get(file, []) if beside == "others" else []
    base = translate(file, given, gpus=1)
    for name, flag in listed(file).items():
        if flag.get("required") or f"--{name}" in given:
            continue
        done = translated(file, [*given, *typed(name, flag)])
        if isinstance(done, str):
            assert re.search(rf"^(.*: argument )?--{name}(?![\w-])", done), (name, done)
            continue
        told = [note for note in (*done.notes, *base.notes) if re.search(rf"--{name}(?![\w-])", note)]
        assert done.commands != base.commands or told, name
        assert not any(compat._OTHERS_DECIDE in note for note in done.notes), name


def translated(file: str, flags: list[str]) -> Translation | str:
    """The translation, or the error."""
    try:
        return translate(file, flags, gpus=1)
    except ConfigError as error:
        return str(error)


def typed(name: str, flag: dict[str, object]) -> list[str]:
    """A flag with a value that is not its default."""
    if flag["kind"] == "switch":
        return [f"--{name}"]
    choices = flag.get("choices")
    if flag["kind"] == "bool":
        return [f"--{name}="]  # every other text is true for argparse
    if name in WORDS:
        return [f"--{name}", WORDS[name]]
    if isinstance(choices, list):
        return [f"--{name}", str(next(each for each in choices if each not in (flag["default"], None)))]
    return [f"--{name}={'3' if flag['kind'] in ('int', 'float', 'int_or_float') else 'other'}"]


@pytest.mark.parametrize("name", ["textual_inversion_sdxl", "train_controlnet.py", "train_dreambooth_lora_sdxl.py"])
def test_what_has_no_translation_is_refused_with_the_reason(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Presets in place of a script are ones that are there."""
    assert main(["compat", name, "--", "--learning_rate", "1"]) == 2
    assert REFUSED[name.removesuffix(".py")] in " ".join(capsys.readouterr().err.split())
    named = {preset for reason in REFUSED.values() for preset in re.findall(r"--preset ([\w-]+)", reason)}
    assert named <= set(PRESETS)


@pytest.mark.parametrize("name", [*ALIASES, "train_text_to_image_sdxl.py"])
def test_a_script_is_named_as_its_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"train": ["--data-path", "imagenet"], "image_train": ["--data_dir", "x"]}
    flags["super_res_train"] = [*flags["image_train"], "--small_size", "32"]
    assert main(["compat", name, "--", *flags.get(name, T2I)]) == 0
    assert " launch local " in capsys.readouterr().out
