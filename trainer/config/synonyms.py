"""Names of Hugging Face (TrainingArguments, run_mlm.py), Megatron and fairseq, and the settings that they mean here.

A wrong guess is worse than none: each name is answered with a setting, its unit and the conversion of its value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

ROWS_TO_TOKENS = "{value} sequences are {value} x data.sequence_length tokens"


class Synonym(NamedTuple):
    """Names that mean one setting.

    `advice` says what to do, with `{value}` for the value that was typed; an empty one takes the value as it is.
    """

    names: tuple[str, ...]
    setting: str
    unit: str
    advice: str = ""


SYNONYMS: tuple[Synonym, ...] = (
    # Optimizer and schedule
    Synonym(("learning_rate", "lr", "peak_lr", "max_lr"), "optimizer.learning_rate", "peak learning rate"),
    Synonym(("weight_decay", "wd"), "optimizer.weight_decay", "decoupled weight decay"),
    Synonym(("adam_beta1", "beta_1"), "optimizer.beta1", "decay rate"),
    Synonym(("adam_beta2", "beta_2"), "optimizer.beta2", "decay rate"),
    Synonym(("adam_epsilon", "adam_eps", "epsilon"), "optimizer.eps", "absolute"),
    Synonym(
        ("optim", "optimizer", "optimizer_type", "optimizer_name", "optim_args"),
        "optimizer.name",
        "adamw, stable_adamw, muon or module:function",
        "set optimizer.name to adamw, stable_adamw, muon or module:function",
    ),
    Synonym(
        ("max_grad_norm", "clip_grad", "grad_clip", "clip_grad_norm", "clip_norm", "gradient_clip_val"),
        "training.gradient_clipping",
        "global gradient norm",
    ),
    Synonym(
        ("lr_scheduler_type", "lr_scheduler", "lr_schedule", "lr_decay_style", "scheduler"),
        "schedule.name",
        "linear, cosine, one_minus_sqrt or warmup_stable_decay",
        "set schedule.name to linear, cosine, one_minus_sqrt or warmup_stable_decay",
    ),
    Synonym(
        ("warmup_steps", "num_warmup_steps", "lr_warmup_iters", "lr_warmup_steps", "warmup_updates"),
        "schedule.warmup_steps",
        "steps",
    ),
    Synonym(
        ("warmup", "warm_up", "num_warmup"),
        "schedule.warmup_steps, schedule.warmup_ratio",
        "steps, or share of the run's steps",
        "set schedule.warmup_steps (steps) or schedule.warmup_ratio (share of the run's steps) to {value}",
    ),
    Synonym(
        ("warmup_ratio", "warmup_proportion", "lr_warmup_fraction"), "schedule.warmup_ratio", "share of the run's steps"
    ),
    Synonym(
        ("lr_warmup_samples",),
        "schedule.warmup_steps",
        "optimizer steps",
        "set schedule.warmup_steps to {value} x data.sequence_length / training.global_batch_tokens (optimizer steps)",
    ),
    Synonym(
        ("lr_decay_iters", "lr_decay_steps", "lr_decay_samples", "total_num_update", "total_num_updates"),
        "training.max_steps",
        "optimizer steps",
        "remove it: linear and cosine decay end at training.max_steps",
    ),
    Synonym(("lr_wsd_decay_iters", "num_decay_steps"), "schedule.decay_steps", "steps of warmup_stable_decay"),
    Synonym(
        ("min_lr", "end_learning_rate", "lr_end"),
        "schedule.final_ratio",
        "share of the peak",
        "set schedule.final_ratio to {value} / optimizer.learning_rate (a share of the peak)",
    ),
    Synonym(("min_lr_rate", "min_lr_ratio"), "schedule.final_ratio", "share of the peak"),
    # Length of the run and batch sizes
    Synonym(
        (
            *("max_steps", "train_iters", "train_steps", "num_train_steps", "total_steps", "max_iters", "num_steps"),
            *("steps", "max_update", "max_updates"),
        ),
        "training.max_steps",
        "optimizer steps",
    ),
    Synonym(
        ("num_train_epochs", "num_epochs", "epochs", "max_epochs", "max_epoch", "n_epochs", "nb_epochs"),
        "training.max_steps",
        "optimizer steps, not epochs",
        "set training.max_steps (optimizer steps) to {value} x (training tokens of the data set) / "
        "training.global_batch_tokens; `clozeworks inspect DATA` prints the training tokens",
    ),
    Synonym(
        ("train_samples",),
        "training.max_steps",
        "optimizer steps, not samples",
        "set training.max_steps to {value} x data.sequence_length / training.global_batch_tokens",
    ),
    Synonym(
        ("tokens", "num_tokens", "total_tokens", "train_tokens", "training_tokens", "max_train_tokens"),
        "training.max_steps",
        "optimizer steps, not tokens",
        "set training.max_steps to {value} / training.global_batch_tokens (optimizer steps)",
    ),
    Synonym(
        (
            "per_device_train_batch_size",
            "per_gpu_train_batch_size",
            "micro_batch_size",
            "device_batch_size",
            "per_device_batch_size",
            "train_micro_batch_size_per_gpu",
            "max_sentences",
        ),
        "training.micro_batch_tokens",
        "tokens, not sequences",
        f"set training.micro_batch_tokens (tokens per forward pass of one rank): {ROWS_TO_TOKENS}",
    ),
    Synonym(
        ("global_batch_size", "train_batch_size", "total_batch_size"),
        "training.global_batch_tokens",
        "tokens, not sequences",
        f"set training.global_batch_tokens (tokens per optimizer step over all ranks): {ROWS_TO_TOKENS}",
    ),
    Synonym(
        ("batch_size", "bs"),
        "training.micro_batch_tokens, training.global_batch_tokens",
        "tokens, not sequences",
        "set training.micro_batch_tokens (tokens per forward pass of one rank) and training.global_batch_tokens "
        f"(tokens per optimizer step over all ranks): {ROWS_TO_TOKENS}",
    ),
    Synonym(
        ("max_tokens",),
        "training.micro_batch_tokens, training.max_steps",
        "tokens, or optimizer steps",
        "set training.micro_batch_tokens (tokens per forward pass of one rank); training.max_steps (optimizer steps) "
        "sets the length of the run",
    ),
    Synonym(
        (
            "gradient_accumulation_steps",
            "accumulate_grad_batches",
            "grad_accum",
            "grad_accum_steps",
            "accumulation_steps",
            "update_freq",
        ),
        "training.global_batch_tokens",
        "tokens; accumulation follows",
        "set training.global_batch_tokens to {value} x training.micro_batch_tokens x (number of ranks); gradient "
        "accumulation follows from them",
    ),
    Synonym(
        ("rampup_batch_size", "batch_size_rampup"),
        "training.batch_warmup",
        "{initial_tokens, steps}",
        "set training.batch_warmup={{initial_tokens: TOKENS, steps: STEPS}}",
    ),
    # Precision and memory
    Synonym(("bf16", "bf16_full_eval", "use_bf16"), "training.precision", "bf16", "write training.precision=bf16"),
    Synonym(
        ("fp16", "fp16_full_eval", "use_fp16", "memory_efficient_fp16"),
        "training.precision",
        "fp16",
        "write training.precision=fp16",
    ),
    Synonym(
        ("mixed_precision", "dtype", "torch_dtype", "params_dtype", "half_precision_backend", "tf32", "use_amp", "amp"),
        "training.precision",
        "auto, fp32, bf16 or fp16",
        "set training.precision to auto, fp32, bf16 or fp16",
    ),
    Synonym(
        (
            *("gradient_checkpointing", "checkpoint_activations", "recompute_activations", "recompute_granularity"),
            *("use_gradient_checkpointing", "recompute_method", "recompute_num_layers"),
        ),
        "training.activation_checkpointing",
        "true or false",
        "write training.activation_checkpointing=true",
    ),
    Synonym(
        ("torch_compile", "use_torch_compile", "torch_compile_backend", "torch_compile_mode", "torchdynamo"),
        "training.compile",
        "auto, true or false",
        "set training.compile to auto, true or false",
    ),
    Synonym(
        ("full_determinism", "deterministic_mode", "use_deterministic_algorithms"),
        "training.deterministic",
        "true or false",
        "write training.deterministic=true",
    ),
    Synonym(("seed", "data_seed", "random_seed"), "training.seed", "integer"),
    # Data
    Synonym(
        (
            *("max_seq_length", "max_seq_len", "seq_length", "seq_len", "block_size", "encoder_seq_length"),
            *("max_length", "model_max_length", "max_sequence_length", "context_length", "tokens_per_sample"),
        ),
        "data.sequence_length",
        "tokens, special ones included",
    ),
    Synonym(
        (
            *("train_file", "train_data", "train_data_path", "train_data_file", "train_dataset", "dataset_name"),
            *("dataset", "data_path", "data_dir", "dataset_path", "dataset_config_name"),
        ),
        "data.shards",
        "directory or URL of prepared shards",
        "prepare the text with `clozeworks tokenizer` and `clozeworks shards --input TEXT "
        "--tokenizer TOKENIZER --output DATA`, then set data.shards=DATA",
    ),
    Synonym(
        ("validation_file", "valid_data_path", "eval_file", "validation_split_percentage", "split", "eval_data_file"),
        "data.shards",
        "shards contain the valid split",
        "remove it: preparation puts a share of the documents into the valid split (shards.valid_fraction of "
        "its configuration)",
    ),
    Synonym(
        ("max_eval_samples", "eval_iters", "eval_samples"),
        "evaluation.max_tokens",
        "tokens",
        "set evaluation.max_tokens (tokens per evaluation; by default the whole valid split)",
    ),
    Synonym(
        ("dataloader_num_workers", "num_workers", "num_data_workers"), "data.num_workers", "worker processes per rank"
    ),
    Synonym(
        (
            *("dataloader_pin_memory", "dataloader_drop_last", "dataloader_prefetch_factor", "group_by_length"),
            *("pad_to_max_length", "line_by_line", "packing", "length_column_name", "remove_unused_columns"),
            *(
                "dataloader_persistent_workers",
                "ignore_data_skip",
                "streaming",
                "reset_position_ids",
                "dataloader_type",
                "sample_break_mode",
            ),
        ),
        "none",
        "",
        "remove it: documents are always packed into full sequences, and resuming is exact",
    ),
    Synonym(("preprocessing_num_workers",), "none", "", "give --workers {value} to `clozeworks shards`"),
    Synonym(
        (
            *("mlm_prob", "mask_prob", "mlm_probability", "masked_lm_prob"),
            *("masking_ratio", "masking_rate", "mask_rate", "mask_ratio"),
        ),
        "data.mlm_probability",
        "share",
    ),
    Synonym(("short_seq_prob",), "data.short_seq_probability", "share"),
    Synonym(
        ("whole_word_mask", "wwm", "whole_word_masking", "mask_whole_words"),
        "data.mask_unit",
        "word",
        "write data.mask_unit=word",
    ),
    Synonym(("random_token_prob",), "data.random_share", "share"),
    Synonym(
        ("leave_unmasked_prob",),
        "data.mask_share, data.random_share",
        "shares",
        "set data.mask_share and data.random_share so that {value} is what is left of 1",
    ),
    Synonym(
        ("nsp", "use_nsp", "next_sentence_prediction", "sop", "bert_no_binary_head", "bert_binary_head", "no_nsp"),
        "data.sentence_pairs",
        "none, next_sentence or sentence_order",
        "set data.sentence_pairs to none, next_sentence or sentence_order",
    ),
    Synonym(
        ("tokenizer", "tokenizer_name", "tokenizer_name_or_path", "tokenizer_model", "tokenizer_type", "vocab_file"),
        "data.tokenizer",
        "directory",
        "remove it: the shards contain their tokenizer (`clozeworks shards --tokenizer TOKENIZER`)",
    ),
    # Model
    Synonym(
        ("model_name_or_path", "pretrained_model_name_or_path", "pretrained_checkpoint", "from_pretrained"),
        "init_from",
        "directory, Hub name or models:/NAME@ALIAS",
    ),
    Synonym(
        ("model_type", "config_name", "config_overrides", "architecture", "arch"),
        "model.family",
        "bert, modernbert or custom",
        "set model.family to bert, modernbert or custom, and sizes such as model.hidden_size",
    ),
    Synonym(
        ("num_layers", "n_layer", "n_layers", "num_hidden_layers", "encoder_layers", "depth"),
        "model.num_hidden_layers",
        "blocks",
    ),
    Synonym(
        ("hidden_size", "d_model", "n_embd", "embed_dim", "encoder_embed_dim", "dim"), "model.hidden_size", "width"
    ),
    Synonym(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"),
        "model.num_attention_heads",
        "heads per block",
    ),
    Synonym(
        ("ffn_hidden_size", "intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_embed_dim"),
        "model.intermediate_size",
        "width",
    ),
    Synonym(("max_position_embeddings", "n_positions"), "model.max_position_embeddings", "tokens"),
    Synonym(("vocab_size", "padded_vocab_size"), "model.vocab_size", "tokens"),
    Synonym(("make_vocab_size_divisible_by",), "model.pad_vocab_size_to_multiple_of", "tokens"),
    Synonym(("hidden_dropout", "dropout", "resid_pdrop"), "model.hidden_dropout_prob", "probability"),
    Synonym(("attention_dropout", "attn_pdrop"), "model.attention_probs_dropout_prob", "probability"),
    Synonym(("init_method_std", "initializer_range", "init_std"), "model.initializer_range", "standard deviation"),
    Synonym(
        ("layernorm_epsilon", "norm_epsilon", "norm_eps", "layer_norm_epsilon"), "model.layer_norm_eps", "absolute"
    ),
    Synonym(("normalization",), "model.norm", "layernorm or rmsnorm", "set model.norm to layernorm or rmsnorm"),
    Synonym(("activation_function", "hidden_activation"), "model.hidden_act", "gelu, geglu or relu"),
    Synonym(
        ("position_embedding_type", "add_position_embedding"),
        "model.position_embedding",
        "learned, sinusoidal or rotary",
        "set model.position_embedding to learned, sinusoidal or rotary",
    ),
    Synonym(("rope_theta", "rotary_base"), "model.global_rope_theta", "base"),
    Synonym(
        ("attn_implementation", "use_flash_attn", "use_flash_attention", "attention_backend", "sdpa"),
        "none",
        "",
        "remove it: variable-length flash attention is used on CUDA, the reference attention elsewhere",
    ),
    # Checkpoints, evaluation, logging, tracking
    Synonym(
        ("save_steps", "save_interval", "save_interval_updates", "checkpoint_interval"),
        "checkpoint.every_steps",
        "steps",
    ),
    Synonym(
        ("save_total_limit", "keep_last_n", "keep_interval_updates", "keep_last_epochs"),
        "checkpoint.keep_last",
        "checkpoints",
    ),
    Synonym(
        ("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        "checkpoint.keep_best",
        "checkpoints",
        "set checkpoint.keep_best=1 and checkpoint.best_metric",
    ),
    Synonym(
        ("resume_from_checkpoint", "resume", "load", "auto_resume"),
        "none",
        "",
        "rerun the same command to resume; --resume-from STEP branches from an earlier checkpoint, and init_from gives "
        "initial weights",
    ),
    Synonym(("save", "output", "out_dir", "save_dir", "save_folder", "checkpoint_dir"), "output_dir", "directory"),
    Synonym(
        ("overwrite_output_dir", "save_strategy", "save_only_model", "save_safetensors", "no_save_optim"),
        "output_dir",
        "directory",
        "remove it: a run resumes from output_dir; for a new run set another output_dir",
    ),
    Synonym(("eval_steps", "eval_interval", "validate_interval_updates"), "evaluation.every_steps", "steps"),
    Synonym(
        (
            *("eval_strategy", "evaluation_strategy", "do_train", "do_eval", "do_predict", "validate_interval"),
            *("per_device_eval_batch_size", "eval_accumulation_steps"),
        ),
        "evaluation.every_steps",
        "steps",
        "remove it: every run trains, and evaluates each evaluation.every_steps steps with its micro-batch size",
    ),
    Synonym(("logging_steps", "log_interval", "log_every", "log_every_n_steps"), "logging.every_steps", "steps"),
    Synonym(
        ("logging_dir", "tensorboard_dir", "log_dir", "mlflow_tracking_uri", "tracking_uri"),
        "tracking.uri",
        "MLflow URI",
        "set tracking.uri to an MLflow URI such as sqlite:///mlflow.db (metrics go to MLflow, not TensorBoard)",
    ),
    Synonym(
        ("report_to", "logging_strategy", "logging_first_step", "disable_tqdm", "log_level"),
        "tracking.uri",
        "MLflow URI",
        "remove it: metrics go to MLflow at tracking.uri, and lines to the console each logging.every_steps steps",
    ),
    Synonym(("experiment_name", "mlflow_experiment_name", "wandb_project", "project"), "tracking.experiment", "name"),
    Synonym(("run_name", "wandb_exp_name", "exp_name"), "tracking.run_name", "name"),
    Synonym(
        ("push_to_hub", "hub_model_id", "hub_token", "hub_strategy"),
        "none",
        "",
        "remove it: `clozeworks export` writes a Hugging Face directory that `hf upload` takes",
    ),
    # Distribution
    Synonym(("deepspeed",), "--deepspeed_config", "DeepSpeed JSON"),
    Synonym(
        ("zero_stage", "zero", "zero_optimization", "use_distributed_optimizer", "fsdp", "fsdp_config"),
        "zero.stage",
        "0, 1, 2 or 3",
        "set zero.stage to 0, 1, 2 or 3",
    ),
    Synonym(
        ("cpu_offload", "optimizer_cpu_offload"),
        "zero.offload_optimizer",
        "true or false",
        "write zero.offload_optimizer=true",
    ),
    Synonym(("ddp_timeout", "nccl_timeout"), "distributed.timeout_seconds", "seconds"),
    Synonym(
        ("distributed_timeout_minutes",),
        "distributed.timeout_seconds",
        "seconds",
        "set distributed.timeout_seconds to {value} x 60",
    ),
    Synonym(
        (
            *("num_gpus", "nproc_per_node", "nnodes", "world_size", "num_processes", "no_cuda", "use_cpu"),
            *("ddp_backend", "distributed_backend", "distributed_world_size", "local_rank", "device"),
        ),
        "none",
        "",
        "remove it: the launcher decides (`deepspeed --num_gpus N launch/pretrain.py`; DS_ACCELERATOR=cpu for the CPU)",
    ),
    Synonym(
        (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
            *("sequence_parallel", "expert_model_parallel_size", "label_smoothing_factor", "neftune_noise_alpha"),
            *("auto_find_batch_size", "train_sampling_strategy", "layerdrop", "tie_word_embeddings"),
        ),
        "none",
        "",
        "remove it: it has no counterpart here",
    ),
    Synonym(("price_per_gpu_hour", "gpu_price"), "logging.gpu_hour_price", "price per device and hour"),
)

_BY_NAME = {name: synonym for synonym in SYNONYMS for name in synonym.names}
_BY_LETTERS = {name.replace("_", ""): synonym for name, synonym in _BY_NAME.items()}

LENGTH_NAMES = ("sequence_length", *_BY_NAME["seq_length"].names)
"""Names of data.sequence_length."""

_IN_STAGE = {
    "training.max_steps": "steps",
    "data.shards": "data.shards",
    "data.sequence_length": "sequence_length",
    "training.micro_batch_tokens": "micro_batch_tokens",
    "training.global_batch_tokens": "global_batch_tokens",
    "training.batch_warmup": "batch_warmup",
    "data.mlm_probability": "mlm_probability",
    "data.mask_unit": "mask_unit",
    "optimizer.learning_rate": "learning_rate",
    "optimizer.weight_decay": "weight_decay",
    **{f"schedule.{name}": f"schedule.{name}" for name in ("name", "warmup_steps", "warmup_ratio", "final_ratio")},
    "schedule.decay_steps": "schedule.decay_steps",
    "model.global_rope_theta": "global_rope_theta",
    "training.gradient_clipping": "gradient_clipping",
    "evaluation.every_steps": "evaluation.every_steps",
    "evaluation.max_tokens": "evaluation.max_tokens",
}
"""Settings of the run, and those of a stage that replace them."""


def explain_synonym(name: str, value: object, sequence_length: int | None = None) -> str | None:
    """Say as an imperative which setting of this project is meant by the last part of `name`; None if it is unknown.

    Args:
        name: dotted; inside `training.stages.N`, the settings of that stage are named.
        value: what was typed for it; anything but a scalar is shown as N.
        sequence_length: tokens of a sequence, if known: a number of sequences is then converted.
    """
    stage = re.match(r"training\.stages\.\d+\.", name)
    last = name.lstrip("-").rpartition(".")[2].replace("-", "_").lower()
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if not isinstance(value, str | int | float) or not text:
        text = "N"
    if stage is not None and last == "shards":
        return f"write {stage[0]}data.shards={text} (in YAML: `data: {{shards: {text}}}` in the stage)"
    is_common = last in ("steps", "tokens") and name.count(".") - name.startswith("training.") > 0
    synonym = None if is_common else _BY_LETTERS.get(last.replace("_", ""))
    if synonym is None:
        return None
    answer = _answer(synonym, text, sequence_length)
    if stage is None:
        return answer
    return re.sub(r"\b[a-z]+\.[a-z_]+\b", lambda found: _of_stage(found[0], stage[0]), answer)


_OFF = {
    "training.precision": "set training.precision to auto, fp32, bf16 or fp16",
    "data.mask_unit": "write data.mask_unit=token",
}
"""Answers to a switch of another project that is off, where the setting is no switch."""


def _answer(synonym: Synonym, text: str, sequence_length: int | None) -> str:
    if synonym.advice.endswith(ROWS_TO_TOKENS) and "," not in synonym.setting and sequence_length and text.isdecimal():
        tokens = int(text) * sequence_length
        return f"write {synonym.setting}={tokens} ({text} sequences x data.sequence_length={sequence_length} tokens)"
    if synonym.advice.startswith("write ") and text.lower() in ("false", "no", "off", "0"):
        return _OFF.get(synonym.setting) or f"write {synonym.setting}=false"
    if synonym.advice:
        return synonym.advice.format(value=text)
    unit = f" ({synonym.unit})" if synonym.unit else ""
    return f"write {synonym.setting}{' ' if synonym.setting.startswith('--') else '='}{text}{unit}"


def _of_stage(setting: str, prefix: str) -> str:
    """Return the setting of a stage that replaces one of the run; the same one if a stage has none."""
    return prefix + _IN_STAGE[setting] if setting in _IN_STAGE else setting


def markdown_table() -> Iterator[str]:
    """Yield the lines of a Markdown table of all names."""
    yield "| Hugging Face, Megatron, fairseq | here | unit | how |"
    yield "|---|---|---|---|"
    for names, setting, unit, advice in SYNONYMS:
        listed = ", ".join(f"`{name}`" for name in names)
        where = "-" if setting == "none" else ", ".join(f"`{each}`" for each in setting.split(", "))
        how = advice.format(value="N").replace("|", "\\|") if advice else "same value"
        yield f"| {listed} | {where} | {unit} | {how} |"
