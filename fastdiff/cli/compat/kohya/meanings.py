"""What the flags of sd-scripts are, of those scripts that train Stable Diffusion XL."""

from typing import Any

from fastdiff.cli.compat.kohya import words
from fastdiff.cli.compat.table import SWITCH, Meaning, to
from fastdiff.cli.compat.translation import flag
from fastdiff.config.arguments.of_others import PRECISIONS
from fastdiff.config.arguments.types import count
from fastdiff.data.kohya.keys import KEYS
from fastdiff.data.kohya.parts import NO_UPSCALE

_DEVICES = (None, "cpu", "nvme")
_SAMPLERS = (
    "ddim", "pndm", "lms", "euler", "euler_a", "heun", "dpm_2", "dpm_2_a", "dpmsolver", "dpmsolver++", "dpmsingle",
    "k_lms", "k_euler", "k_euler_a", "k_dpm_2", "k_dpm_2_a",
)  # fmt: skip
_BACKENDS = (
    "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt", "onnxrt",
    "tensort", "ipex", "tvm",
)  # fmt: skip
_LOG = "how the program logs is not part of a run; see --quiet and --verbose"
_CARD = "the model card that `fastdiff export` writes has facts of the run alone; add it to OUT/README.md"
_SHARDS = "what `fastdiff encode` does: latents and embeddings are stored once"
_DDP = "of their launcher; DeepSpeed and the flat engine reduce gradients in their own way"
_MASTERS = "the weights of the passes are in 16 bits, with fp32 masters; theirs has no masters, and rounds each step"
_STATES = "every checkpoint has the whole state, and the same command resumes; see --output.keep"
_HUB = "--push-to-hub of `fastdiff export` replaces files in a repository of models"
_UNWEIGHTED = "captions are plain texts: leave weights such as (word:1.2) out of them"
_ONE_LOSS = "the error is squared; give a loss of your own as --objective.plugin PATH.py:FUNCTION"
_HUBER = "it belongs to --loss_type huber and smooth_l1"
_ALL_TIMES = "all timesteps are trained anyway"
_RESUME = "a run knows where it stopped: the same command resumes it"
_NO_SAMPLE = "no sample image is drawn"


def _of_key(name: str, kind: Any = str, **fields: Any) -> Meaning:
    """Return the meaning of a flag that is a key of data sets, too, which refuse it where they have it."""
    return Meaning(kind, refused=KEYS[name].refused, **fields)


def _told(text: str, kind: Any = str, **fields: Any) -> Meaning:
    return Meaning(kind, told=text, **fields)


def _refused(text: str, kind: Any = str, **fields: Any) -> Meaning:
    return Meaning(kind, refused=text, **fields)


_LENGTH = {
    "max_train_steps": Meaning(count, words.length, idle="--max_train_epochs goes before it, as in theirs"),
    "max_train_epochs": Meaning(
        count, told="the training counts the samples of an epoch; theirs rounds each bucket up to whole batches"
    ),
    "seed": Meaning(int, to("seed")),
    "initial_epoch": _refused(_RESUME, int),
    "initial_step": _refused(_RESUME, int),
    "skip_until_initial_step": _told(_RESUME, SWITCH),
    "resume": _told(f"{_RESUME}; a state of theirs is read by theirs alone"),
    "resume_from_huggingface": _refused(_RESUME, SWITCH),
    "config_file": Meaning(),
    "output_config": _refused("it writes the flags into a file and ends, without a training; leave it out", SWITCH),
}
_WEIGHTS = {
    "pretrained_model_name_or_path": Meaning(str, lambda given, _: flag("pretrained.path", given.pipeline)),
    "vae": Meaning(told="the first command saves the pipeline with it"),
    "v2": _refused("it is for Stable Diffusion 2, and theirs refuses it for Stable Diffusion XL too", SWITCH),
    "tokenizer_cache_dir": _told("set the environment variable HF_HOME instead"),
    "disable_mmap_load_safetensors": _told("weights are read one at a time, whatever it says", SWITCH),
    "clip_skip": _told("Stable Diffusion XL takes the penultimate layers, in theirs too", int),
    "max_token_length": _refused(
        "captions of Stable Diffusion XL have 75 tokens here; shorten longer ones, or leave it out", int,
        choices=(None, 150, 225),
    ),
    "weighted_captions": _refused(_UNWEIGHTED, SWITCH),
}  # fmt: skip
_PICTURES = {
    "train_data_dir": Meaning(str, words.data),
    "reg_data_dir": Meaning(),
    "dataset_config": Meaning(),
    "in_json": Meaning(),
    "dataset_class": _refused("data sets of your own are Python's: see PATH.py:NAME of `fastdiff encode`"),
    "debug_dataset": _refused("it shows the pictures and trains nothing; see `fastdiff check`", SWITCH),
    "dataset_repeats": Meaning(int, idle="folders have their own repeats, as in theirs; it belongs to --in_json"),
    "resolution": Meaning(),
    "enable_bucket": Meaning(SWITCH),
    "bucket_reso_steps": Meaning(int, idle="it belongs to --enable_bucket"),
    "min_bucket_reso": Meaning(int, idle="it belongs to --enable_bucket"),
    "max_bucket_reso": Meaning(int, idle="it belongs to --enable_bucket"),
    "bucket_no_upscale": _told(NO_UPSCALE, SWITCH),
    "resize_interpolation": Meaning(choices=("lanczos", "nearest", "bilinear", "linear", "bicubic", "cubic", "area")),
    "flip_aug": Meaning(SWITCH),
    "color_aug": _of_key("color_aug", SWITCH),
    "random_crop": _of_key("random_crop", SWITCH),
    "face_crop_aug_range": _of_key("face_crop_aug_range"),
    "alpha_mask": Meaning(SWITCH),
    "masked_loss": _told("the loss is masked where pictures have masks, as those of --alpha_mask", SWITCH),
    "conditioning_data_dir": _refused(
        "a ControlNet cannot be trained; masks of the loss are given to `fastdiff encode` as --masks FOLDER"
    ),
    "prior_loss_weight": _told("it multiplies the loss of regularisation pictures", float),
    "cache_info": _told(_SHARDS, SWITCH),
    "cache_latents": _told(_SHARDS, SWITCH),
    "cache_latents_to_disk": _told(_SHARDS, SWITCH),
    "skip_cache_check": _told(_SHARDS, SWITCH),
    "cache_text_encoder_outputs": _told(_SHARDS, SWITCH),
    "cache_text_encoder_outputs_to_disk": _told(_SHARDS, SWITCH),
    "vae_batch_size": Meaning(count),
    "no_half_vae": _told("pictures are encoded in fp32 always", SWITCH),
    "max_data_loader_n_workers": _told("set --workers of `fastdiff encode`; shards are read by one thread", int),
    "persistent_data_loader_workers": _told("shards are read by one thread that lives as long as the run", SWITCH),
    "validation_split": _of_key("validation_split", float),
    "validation_seed": Meaning(int, idle="it belongs to --validation_split"),
    "validate_every_n_steps": Meaning(int, idle="it belongs to --validation_split"),
    "validate_every_n_epochs": Meaning(int, idle="it belongs to --validation_split"),
    "max_validation_steps": Meaning(int, idle="it belongs to --validation_split"),
}
_CAPTIONS = {
    "caption_extension": Meaning(kind=words.extension),
    "caption_extention": Meaning(kind=words.extension),
    "shuffle_caption": Meaning(SWITCH),
    "caption_separator": Meaning(idle="it belongs to --shuffle_caption"),
    "keep_tokens": Meaning(int, idle="it belongs to --shuffle_caption"),
    "keep_tokens_separator": Meaning(idle="it belongs to --shuffle_caption"),
    "secondary_separator": _of_key("secondary_separator"),
    "enable_wildcard": _of_key("enable_wildcard", SWITCH),
    "caption_prefix": Meaning(),
    "caption_suffix": Meaning(),
    "caption_dropout_rate": Meaning(float, words.dropout),
    "caption_dropout_every_n_epochs": _of_key("caption_dropout_every_n_epochs", int),
    "caption_tag_dropout_rate": Meaning(float),
    "token_warmup_min": Meaning(int, idle="it belongs to --token_warmup_step"),
    "token_warmup_step": _of_key("token_warmup_step", float),
}
_OBJECTIVE = {
    "v_parameterization": Meaning(SWITCH, lambda _, on: flag("objective.prediction", "v" if on else "epsilon")),
    "zero_terminal_snr": Meaning(SWITCH, lambda _, on: flag("objective.zero_terminal_snr", on or None)),
    "min_snr_gamma": Meaning(float, lambda _, gamma: flag("objective.min_snr_gamma", gamma or None)),
    "debiased_estimation_loss": Meaning(
        SWITCH, lambda _, on: flag("objective.weighting", "debiased" if on else None)
    ),
    "scale_v_pred_loss_like_noise_pred": Meaning(
        SWITCH, lambda _, on: flag("objective.weighting", "snr" if on else None)
    ),
    "v_pred_like_loss": _refused("a weight that adds to that of the error has no counterpart; leave it out", float),
    "loss_type": _refused(_ONE_LOSS, choices=("l1", "l2", "huber", "smooth_l1")),
    "huber_schedule": Meaning(idle=_HUBER, choices=("constant", "exponential", "snr")),
    "huber_c": Meaning(float, idle=_HUBER),
    "huber_scale": Meaning(float, idle=_HUBER),
    "noise_offset": Meaning(float, words.noise_offset),
    "noise_offset_random_strength": _refused("the offset has one strength; give its mean as --noise_offset", SWITCH),
    "adaptive_noise_scale": _refused("the offset does not depend on the latents; leave it out", float),
    "multires_noise_iterations": Meaning(
        int, words.multires,
        told="each resolution is half of the finer one, and the variance is 1 by the weights; theirs is smaller by 2 "
        "to 4 by chance, and divides by the deviation of the batch",
    ),
    "multires_noise_discount": Meaning(float, idle="it belongs to --multires_noise_iterations"),
    "ip_noise_gamma": Meaning(float, words.perturbation),
    "ip_noise_gamma_random_strength": _refused("it has one strength; give its mean as --ip_noise_gamma", SWITCH),
    "min_timestep": Meaning(int, words.timesteps(0), idle=_ALL_TIMES),
    "max_timestep": Meaning(int, words.timesteps(1000), idle=_ALL_TIMES),
}  # fmt: skip
_BATCH = {
    "gradient_accumulation_steps": Meaning(count, lambda given, _: flag("batch.samples", given.batch)),
    "train_batch_size": Meaning(count, lambda given, _: flag("batch.micro", given.pictures.micro)),
}
_OPTIMIZER = {
    "optimizer_type": Meaning(str, words.optimizer, idle="AdamW is the default, in theirs too"),
    "use_8bit_adam": Meaning(SWITCH),
    "use_lion_optimizer": Meaning(SWITCH),
    "learning_rate": Meaning(float, words.rate, idle="--unet_lr goes before it, as in theirs"),
    "optimizer_args": Meaning(str, words.arguments, several="*"),
    "max_grad_norm": Meaning(float, to("optim.clip")),
    "lr_scheduler": Meaning(str, words.schedule),
    "lr_warmup_steps": Meaning(words.int_or_share, words.warmup),
    "lr_decay_steps": Meaning(words.int_or_share, idle="no schedule here uses it"),
    "lr_scheduler_num_cycles": Meaning(int, words.cycles, idle="--lr_scheduler cosine_with_restarts alone uses it"),
    "lr_scheduler_power": Meaning(float, words.power, idle="--lr_scheduler polynomial alone uses it"),
    "lr_scheduler_timescale": Meaning(int, idle="no schedule here uses it"),
    "lr_scheduler_min_lr_ratio": Meaning(float, idle="no schedule here uses it"),
    "lr_scheduler_type": _refused("schedules are those of --lr_scheduler; classes are not imported"),
    "lr_scheduler_args": _refused("schedules have no further arguments", several="*"),
    "fused_backward_pass": _refused("it is for Adafactor, which is not known here; leave it out", SWITCH),
}
_PERFORMANCE = {
    "mixed_precision": Meaning(str, words.precision, choices=tuple(PRECISIONS)),
    "full_fp16": _told(_MASTERS, SWITCH),
    "full_bf16": _told(_MASTERS, SWITCH),
    "fp16_master_weights_and_gradients": _refused("master weights are fp32; leave it out", SWITCH),
    "gradient_checkpointing": Meaning(SWITCH, to("performance.recompute")),
    "torch_compile": Meaning(SWITCH, lambda _, on: flag("performance.compile", on or None)),
    "dynamo_backend": Meaning(idle="networks are compiled by inductor", choices=_BACKENDS),
    "xformers": Meaning(SWITCH, words.attention),
    "sdpa": _told("what --performance.attention auto may choose", SWITCH),
    "mem_eff_attn": _told("--performance.attention auto never stores the whole matrix", SWITCH),
    "lowram": _told("weights are read one at a time, whatever it says", SWITCH),
    "highvram": _told("nothing is moved to the host to make room, whatever it says", SWITCH),
    "ddp_timeout": _told(_DDP, int),
    "ddp_gradient_as_bucket_view": _told(_DDP, SWITCH),
    "ddp_static_graph": _told(_DDP, SWITCH),
    "deepspeed": Meaning(SWITCH, words.zero),
    "zero_stage": Meaning(int, idle="it belongs to --deepspeed", choices=(0, 1, 2, 3)),
    "offload_optimizer_device": Meaning(idle="it belongs to --deepspeed", choices=_DEVICES),
    "offload_optimizer_nvme_path": Meaning(idle="it belongs to --offload_optimizer_device nvme"),
    "offload_param_device": Meaning(idle="it belongs to --deepspeed", choices=_DEVICES),
    "offload_param_nvme_path": Meaning(idle="it belongs to --offload_param_device nvme"),
    "zero3_init_flag": _told("weights are always split while they are read", SWITCH),
    "zero3_save_16bit_model": _told("exports are whole at every stage; see --dtype of `fastdiff export`", SWITCH),
}
_SAMPLED = {
    "sample_every_n_steps": Meaning(int, words.samples, idle=_NO_SAMPLE),
    "sample_every_n_epochs": Meaning(int, idle=f"{_NO_SAMPLE} by it: see --sample_prompts and --sample_every_n_steps"),
    "sample_prompts": Meaning(idle="it needs --sample_every_n_steps or --sample_every_n_epochs, as in theirs"),
    "sample_at_first": _told("images of the network that the run begins with stand beside the others", SWITCH),
    "sample_sampler": _told(
        "images are drawn with the scheduler of the pipeline; see --sampling.scheduler", choices=_SAMPLERS
    ),
}
_OUTPUT = {
    "output_dir": Meaning(str, lambda given, _: [*flag("output.folder", given.run), *flag("output.log_every", 1)]),
    "output_name": Meaning(idle="theirs is called last without it, too"),
    "save_every_n_steps": Meaning(count, words.checkpoints),
    "save_every_n_epochs": Meaning(count, idle="--save_every_n_steps goes before it"),
    "save_n_epoch_ratio": _refused("give the interval, --save_every_n_epochs or --save_every_n_steps", int),
    "save_last_n_steps": Meaning(int, idle="it belongs to --save_every_n_steps"),
    "save_last_n_epochs": Meaning(int, idle="it belongs to --save_every_n_epochs"),
    "save_last_n_steps_state": _told(_STATES, int),
    "save_last_n_epochs_state": _told(_STATES, int),
    "save_state": _told(_STATES, SWITCH),
    "save_state_on_train_end": _told(_STATES, SWITCH),
    "save_state_to_huggingface": _told(_STATES, SWITCH),
    "save_precision": Meaning(choices=(None, "float", "fp16", "bf16")),
    "huggingface_repo_id": Meaning(),
    "huggingface_repo_type": _told(_HUB),
    "huggingface_path_in_repo": _told(_HUB),
    "huggingface_repo_visibility": Meaning(idle="it belongs to --huggingface_repo_id"),
    "huggingface_token": _told("log in with `hf auth login`; a token must not be on a command line"),
    "async_upload": _told(_HUB, SWITCH),
    "logging_dir": _told("TensorBoard's files are in tensorboard/ of the run folder"),
    "log_with": Meaning(words=words.trackers, choices=("tensorboard", "wandb", "all")),
    "log_prefix": _told(_LOG),
    "log_tracker_name": Meaning(str, to("output.project")),
    "log_tracker_config": _refused("trackers are set by their own environment variables, such as WANDB_ENTITY"),
    "log_config": _told("run.json has the whole configuration", SWITCH),
    "wandb_run_name": _told("set the environment variable WANDB_NAME instead"),
    "wandb_api_key": _told("log in with `wandb login`; a key must not be on a command line"),
    "console_log_level": _told(_LOG, choices=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")),
    "console_log_file": _told(_LOG),
    "console_log_simple": _told(_LOG, SWITCH),
    **{
        f"metadata_{name}": _told(_CARD)
        for name in (
            "title", "author", "description", "license", "tags", "usage_hint", "thumbnail", "merged_from",
            "trigger_phrase", "preprocessor", "is_negative_embedding",
        )
    },
}  # fmt: skip


MEANINGS: dict[str, Meaning] = {
    **_LENGTH, **_WEIGHTS, **_PICTURES, **_CAPTIONS, **_BATCH, **_OBJECTIVE, **_OPTIMIZER, **_PERFORMANCE, **_SAMPLED,
    **_OUTPUT,
}  # fmt: skip
"""By name; their words follow one another in this order."""
