"""Flags of other trainers, typed from memory: ours are named, with the value, and they are those that compat prints."""

import re
import shlex

import pytest

from fastdiff.cli.compat.run import train_flags
from fastdiff.cli.main import main
from fastdiff.config.arguments import of_others
from fastdiff.config.arguments.of_others import answer
from fastdiff.config.command_line.train_flags import known_flags, parse
from fastdiff.config.presets import preset
from fastdiff.errors import ConfigError

_T2I = ["--pretrained_model_name_or_path", "org/model", "--dataset_name", "org/pictures", "--max_train_steps", "10"]
_DIT = ["--data-path", "/nowhere"]
_IDDPM = ["--data_dir", "/nowhere", "--lr_anneal_steps", "100"]
_SAME = [
    *(("t2i", _T2I, f"--{name}", value) for name, value in (
        ("learning_rate", "0.003"), ("max_grad_norm", "0.5"), ("adam_weight_decay", "0.02"), ("adam_epsilon", "1e-07"),
        ("lr_scheduler", "cosine"), ("seed", "7"), ("revision", "main"), ("variant", "fp16"), ("snr_gamma", "5.0"),
        ("noise_offset", "0.1"), ("input_perturbation", "0.1"), ("prediction_type", "v_prediction"),
        ("mixed_precision", "no"), ("mixed_precision", "bf16"), ("checkpointing_steps", "50"),
        ("checkpoints_total_limit", "3"), ("tracker_project_name", "mine"),
        ("output_dir", "/runs/x"), ("report_to", "wandb"), ("pretrained_model_name_or_path", "org/other"),
    )),
    ("t2i", [*_T2I, "--lr_scheduler", "linear"], "--lr_warmup_steps", "20"),
    ("t2i", _T2I, "--use_8bit_adam", ""), ("t2i", _T2I, "--allow_tf32", ""), ("t2i", _T2I, "--use_ema", ""),
    ("t2i", _T2I, "--gradient_checkpointing", ""), ("t2i", _T2I, "--enable_xformers_memory_efficient_attention", ""),
    ("t2i", _T2I, "--dream_training", ""),
    ("t2i-lora", _T2I, "--rank", "8"),
    ("dit", _DIT, "--global-batch-size", "64"), ("dit", _DIT, "--num-classes", "5"),
    ("dit", _DIT, "--global-seed", "3"),
    ("dit", _DIT, "--log-every", "7"), ("dit", _DIT, "--ckpt-every", "70"),
    ("iddpm", _IDDPM, "--batch_size", "8"), ("iddpm", _IDDPM, "--ema_rate", "0.99"),
    ("iddpm", _IDDPM, "--log_interval", "7"), ("iddpm", _IDDPM, "--save_interval", "70"),
    ("iddpm", _IDDPM, "--noise_schedule", "cosine"), ("iddpm", _IDDPM, "--diffusion_steps", "100"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "base", "flag", "value"), _SAME)
def test_the_answer_is_what_compat_prints(script: str, base: list[str], flag: str, value: str) -> None:
    printed = shlex.join(train_flags(script, [*base, flag, *([value] if value else [])])).replace("_", "-")
    if flag == "--seed":  # of the same name
        assert "--seed 7" in printed
        return
    said = answer(flag, [value], "train")
    assert said is not None
    found = re.search(rf"{flag} is (--.*)", said)
    assert found is not None, said
    for words in re.split(r" (?=--)", found[1]):
        name, *values = words.replace("_", "-").split()
        shown = re.search(rf"{re.escape(name)}( [^-]\S*)*", printed)
        assert shown is not None, printed
        given = shown[0].split()[1 : 1 + len(values)] if name != "--output.report-to" else shown[0].split()[-1:]
        assert [_number(each) for each in given] == [_number(each) for each in values], shown[0]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


@pytest.mark.parametrize(
    ("flag", "values", "said"),
    [
        *((name, [value], f"is --output.report-to {ours}") for name, value, ours in (
            ("report_to", "all", "tensorboard wandb"), ("report_to", "tensorboard,wandb", "tensorboard wandb"),
            ("log_with", "all", "tensorboard wandb"), ("report_to", "none", "without a value"),
        )),
        ("report_to", ["comet_ml"], "has no counterpart for comet_ml: --output.report-to takes tensorboard, wandb"),
        ("report_to", ["tensorboard", "wandb"], "is --output.report-to tensorboard wandb"),
        ("ema_rate", ["0.9999,0.99"], "is --ema.rates 0.9999 0.99"),
        ("validation_prompts", ["a red shoe", "it's"], """is --validation.prompts 'a red shoe' 'it'"'"'s'"""),
        ("mixed_precision", ["fp8"], "is --performance.precision bf16 --performance.fp8"),
        ("dataloader_num_workers", ["0"], "belongs to `fastdiff encode`, or to --data.online: --data.workers 1"),
        ("num_workers", ["0"], "--data.online: --data.workers 1"),
        ("checkpoints_total_limit", ["0"], "is --output.keep 1"), ("save_total_limit", ["0"], "is --output.keep 1"),
        ("num_validation_images", ["0"], "is the same as no --validation.prompts"),
        ("max_steps", ["-1"], "is no length: give --steps N or --epochs N"),
        ("lr_anneal_steps", ["0"], "is a run without end, at a constant rate"),
        ("microbatch", ["-1"], "is off: leave --batch.micro out"),
        ("use_fp16", ["False"], "is --performance.precision fp32"), ("bf16", ["False"], "--performance.precision fp32"),
        ("use_checkpoint", ["False"], "is --performance.no-recompute"),
        ("torch_compile", [], "is --performance.compile T"),
        ("use_8bit_adam", ["False"], "needs no flag to be off: leave it out"),
        ("warmup_steps", ["0.1"], "counts a share of the run; --optim.warmup-steps counts steps"),
        ("save_steps", [".25"], "counts a share of the run; --output.checkpoint-every counts steps"),
        ("lr_scheduler_type", ["inverse_sqrt"], "has no counterpart for inverse_sqrt: --optim.schedule takes const"),
        ("optimizer_type", ["Lion"], "has no counterpart for Lion: --optim.name takes adamw, adamw8bit, adam"),
        ("optim", ["adamw_torch_fused"], "is --optim.name adamw"),
        ("optimizer", ["Muon"], "is --optim.name muon"), ("optimizer", ["torch.optim.Muon"], "is --optim.name muon"),
        ("optimizer", ["dion"], "has no counterpart for dion: --optim.name takes adamw, adamw8bit"),
        ("optim", ["MuonWithAuxAdam"], "is --optim.name muon"),
        ("adjust_lr_fn", ["original"], "is --optim.name muon --optim.scale keller"),
        ("adjust_lr", ["rms_norm"], "is --optim.name muon --optim.scale match_rms_adamw"),
        ("resolution", ["512,512"], "is 512 pixels, the side of a square: `fastdiff encode --resolution 512`"),
        ("resolution", ["512,768"], "has no counterpart: pictures are square, or keep their shape with"),
        ("dtype", ["bfloat16"], "is --performance.precision bf16"),
        ("device", ["cuda:1"], "is --performance.device cuda, with CUDA_VISIBLE_DEVICES=1"),
        ("model", ["DiT-XL/2"], "is --preset dit-xl-2-256"), ("model", ["DiT-B/4"], "is --preset dit-b-4-256"),
        ("vae", ["mse"], "belongs to `fastdiff encode --pretrained stabilityai/sd-vae-ft-mse`"),
    ],
)  # fmt: skip
def test_values_of_others_are_in_our_spelling(flag: str, values: list[str], said: str) -> None:
    answered = answer(f"--{flag}", values, "train")
    assert answered is not None
    assert said in answered
    printed = re.search(r" is (--[^,;]*)", answered)
    if printed is not None and "|" not in printed[1] and "without" not in printed[1]:
        pipeline = ["--pretrained.path", "org/model"] if "prompts" in said else []
        parse(["--preset", "sd15-lora", "--lora.rank", "0", *pipeline, *shlex.split(printed[1])])


def test_the_choices_in_the_answers_are_those_of_the_fields() -> None:
    for name, choices in of_others.CHOICES.items():
        with pytest.raises(ConfigError) as refused:
            parse(["--preset", "digits", f"--{name}", "nothing"])
        assert re.findall(r"'([^']*)'", str(refused.value).partition("one of")[2]) == [*choices]


def test_our_names_in_the_answers_are_flags() -> None:
    known = {flag.replace("_", "-") for name in ("digits", "sd15-lora") for flag in known_flags(preset(name))}
    known |= {
        "--ranks",
        "--model.kind",
        "--objective.zero-terminal-snr",
        "--push-to-hub",
        "--format",
        "--flip",
        "--shuffle-tags",
        "--caption-extension",
        "--regularisation",
    }
    known |= {"--optim.scale", "--buckets", "--resolution", "--data.", "--pretrained", "--performance.no-recompute"}
    for tables in of_others._OF_RUN.values():
        for theirs, ours in tables.items():
            for name in re.findall(r"--[a-z][\w.-]*", " ".join([ours.text, *ours.cases.values()])):
                assert name.rstrip(".") in known or name in known, (theirs, name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--learning_rate 1e-4", "diffusers' --learning_rate is --optim.lr 1e-4"),
        ("--learning-rate=1e-4", "diffusers' --learning-rate is --optim.lr 1e-4"),
        ("--batch-size 8", "--batch-size is --batch.samples 8"),
        ("--max_train_steps 100", "diffusers' --max_train_steps is --steps 100"),
        ("--num_train_epochs 3", "diffusers' --num_train_epochs is --epochs 3"),
        ("--resume_from_checkpoint latest", "diffusers' --resume_from_checkpoint needs no flag: the same command"),
        ("--mixed_precision no", "diffusers' --mixed_precision is --performance.precision fp32"),
        ("--output_dir runs/x", "diffusers' --output_dir is --output.folder runs/x"),
        ("--per_device_train_batch_size 4", "HF Trainer's --per_device_train_batch_size is --batch.micro 4, per GPU"),
        ("--network_dim 16", "kohya's --network_dim is --lora.rank 16"),
        ("--optimizer muon", "--optimizer is --optim.name muon"),
        ("--optimizer_type AdamW8bit", "kohya's --optimizer_type is --optim.name adamw8bit"),
        (
            "--train_data_dir pics",
            "diffusers' --train_data_dir names pictures, which are encoded first: `fastdiff encod",
        ),
        ("--push_to_hub", "diffusers' --push_to_hub belongs to the end of a run: `fastdiff export"),
        ("--gradient_accumulation_steps 4", "diffusers' --gradient_accumulation_steps follows here from --batch.samp"),
        ("--fp16", "HF Trainer's --fp16 is --performance.precision fp16"),
        ("--hub_token=hf_secret", "diffusers' --hub_token has no counterpart: log in with"),
        ("--train_data_dir https://u:pw@h/x", "diffusers' --train_data_dir names pictures, which are encoded first: "),
    ],
)
def test_a_flag_typed_from_memory_names_ours(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}") as refused:
        parse(["--preset", "digits", *words.split()])
    assert not {"hf_secret", "u:pw"} & set(re.split(r"[\s@/]+", str(refused.value)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "sample runs/x --num_inference_steps 5 --guidance_scale=3",
            "is --steps 5; diffusers' --guidance_scale is --cfg",
        ),
        ("sample --num_inference_steps 50 runs/x --grid a.png", "diffusers' --num_inference_steps is --steps 50"),
        ("encode --dataset_name a/b out", "--dataset_name is the first word: `fastdiff encode a/b OUT`"),
        ("encode pics data --train_batch_size 4", "diffusers' --train_batch_size is --batch 4"),
        ("encode pics data --output_dir x", "diffusers' --output_dir is the second word: `fastdiff encode SOURCE x`"),
        ("sample runs/x --classs 3", "--classs: unknown flag, did you mean --classes?"),
        ("watch --prot 3", "--prot: unknown flag, did you mean --port?"),
        ("plan --preset digits --gpu 1xH100", "--gpu: unknown flag, did you mean --gpus?"),
        ("train --preset digits --rnks 2", "--rnks: unknown flag, did you mean --ranks?"),
        (
            "launch local --ranks 2 --no-preflite -- --preset digits",
            "--no-preflite: unknown flag, did you mean ",
        ),
        ("ledger a b c d", "b: unexpected, it belongs to no flag"),
        ("encode a b --resolution 8 8", "8: unexpected, it belongs to no flag"),
        ("encode a b --flip true", "true: unexpected, --flip takes no value; write --flip, or leave it out"),
    ],
)
def test_every_command_says_it_in_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fastdiff: error: ")
    assert message in line
