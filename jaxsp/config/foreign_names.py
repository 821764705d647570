"""Option names of other training systems, with the fields of jaxsp that replace them.

Names are those of TRL and transformers, Axolotl, LLaMA-Factory, ms-swift, DeepSpeed, Accelerate,
torchtitan, MaxText and Megatron. A name that is the same in jaxsp (weight_decay) is not listed.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

_NOT_NEEDED = "not needed"
_NOT_OFFERED = "not offered"

_LIST_ENTRY = re.compile(r"^data\.(train|eval)\.(\d+)(?=\.|$)")
"""The entry of a list of data sets, at the start of a dotted name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counterpart:
    """The counterpart in jaxsp of one or more options of other systems."""

    names: tuple[str, ...]
    """Names of the options: lower case, with underscores. A dotted name counts in that section
    only, and a name that ends with * stands for all names with that prefix."""
    field: str | None = None
    """The dotted field, or field=value to write; None if there is nothing to set."""
    note: str = ""
    """Difference in meaning, or the reason why nothing is set."""
    takes_value: bool = False
    """True if the field means the same, so that the value is kept if the field accepts it."""

    @property
    def field_name(self) -> str | None:
        """The dotted field without a value."""
        return None if self.field is None else self.field.partition("=")[0]

    @property
    def is_not_needed(self) -> bool:
        """True if jaxsp always does what the option requests."""
        return self.note.startswith(_NOT_NEEDED)

    def with_list_entry(self, name: str) -> "Counterpart":
        """This counterpart for a name inside a list of data sets, with that list's entry."""
        place = _LIST_ENTRY.match(name)
        if place is None or self.field is None:
            return self
        return dataclasses.replace(self, field=_LIST_ENTRY.sub(place.group(), self.field))


def find(name: str) -> Counterpart | None:
    """Returns the counterpart of an option, or None if the name is not known.

    Ignores case and leading dashes, and reads `-` as `_`. The longest known end of a dotted name
    counts.
    """
    words = normalize(_LIST_ENTRY.sub("data.train.0", name)).split(".")
    for start in range(max(len(words) - _MAX_WORDS, 0), len(words)):
        end = ".".join(words[start:])
        if end in _BY_NAME and (start == 0 or end not in _TOP_LEVEL_ONLY):
            return _BY_NAME[end].with_list_entry(name)
    prefix = next((prefix for prefix in _PREFIXES if words[-1].startswith(prefix)), None)
    return None if prefix is None else _BY_NAME[f"{prefix}*"].with_list_entry(name)


def flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the options in a section of another system, with dotted names.

    A section for which jaxsp has no field is one option.
    """
    counterpart = find(name)
    has_no_field = counterpart is not None and counterpart.field is None
    if not isinstance(value, dict) or not value or has_no_field:
        yield name, value
        return
    for inner, inner_value in value.items():
        yield from flatten(f"{name}.{inner}", inner_value)


_TOP_LEVEL_ONLY = ("model", "data", "attention", "optimizer", "scheduler", "devices", "trl")
"""Names that mean something else inside a section: MaxText's mesh.model is an axis."""

_OFF_VALUES = (False, 0, "no", "none", "off", "false")


def is_off(value: Any) -> bool:
    """True if a value turns an option off."""
    return (value.lower() if isinstance(value, str) else value) in _OFF_VALUES


_VALUES = {
    "optimizer.name": {
        "adamw": "adam adam_w adamw_hf adamw_torch adamw_torch_fused adamw_apex_fused fused_adam "
        "fusedadam adam_pax deepspeedcpuadam cpuadam paged_adamw paged_adamw_32bit",
        "adamw8bit": "adam8bit adamw_8bit adamw_bnb_8bit paged_adamw_8bit adamw_torch_8bit",
        "lion": "lion_32bit paged_lion_32bit paged_lion fusedlion",
        "sgd": "momentum",
        "adafactor": "adafactor_torch",
    },
    "optimizer.schedule": {
        "cosine": "cosine_with_min_lr cosine_annealing warmupcosinelr",
        "linear": "linear_with_warmup warmupdecaylr",
        "constant": "constant_with_warmup warmuplr",
        "wsd": "warmup_stable_decay",
        "inverse_sqrt": "inverse_square_root",
    },
    "optimizer.decay_shape": {"sqrt": "minus_sqrt 1_sqrt"},
    "adapter.type": {"lora": "", "dora": "", "none": "full"},
    "attention.strategy": {
        "all_gather": "varlen_llama3 allgather",
        "ring": "p2p alltoall batch_ring batch_zigzag batch_stripe ring_attention zigzag",
        "ulysses": "a2a",
        "hybrid": "a2a+p2p",
    },
}
"""Values of other systems, by jaxsp's field and value."""

_VALUE_BY_NAME = {
    (field, name): value
    for field, values in _VALUES.items()
    for value, names in values.items()
    for name in (value, *names.split())
}


_SEVERAL = {("adapter.type", "qlora"): "adapter.type=lora and adapter.quantization=nf4"}
"""Settings for a field and a value of another system that stands for several fields."""

_FORMATS = {"completion": "text", "pretraining": "text", "text": "text", "tokens": "tokens"}
"""Formats of data sources for types of other systems; most others are messages."""


def find_several(field: str, value: Any) -> str | None:
    """Returns the settings for a value that stands for several fields."""
    return _SEVERAL.get((field, normalize(value))) if isinstance(value, str) else None


def _translate_sources(value: Any) -> Any:
    """Data sources from names of data sets, or from entries with a path and a type."""
    sources = []
    for entry in value if isinstance(value, list | tuple) else [value]:
        fields = entry if isinstance(entry, dict) else {"path": entry}
        names = ("path", "source", "dataset", "name", "data_files")
        path = next((fields[name] for name in names if isinstance(fields.get(name), str)), None)
        if not path:
            return value
        kind = str(fields.get("type", ""))
        sources.append({"source": path, "format": _FORMATS.get(kind, "messages")})
    return sources


def translate_value(field: str, value: Any) -> Any:
    """Returns jaxsp's value for one of another system: adamw for adamw_torch; others unchanged."""
    if field in ("data.train", "data.eval"):
        return _translate_sources(value)
    if not isinstance(value, str):
        return value
    return _VALUE_BY_NAME.get((field, normalize(value)), value)


_TABLE = """
run.directory: output_dir save save_dir save_folder dump_folder base_output_directory
run.directory: exp_name job_name (a run's name is its folder's)
run.seed: random_seed manual_seed data_seed shuffle_seed data_shuffle_seed
not needed: shuffle dataset_shuffle shuffle_merged_datasets enable_data_shuffling (run.seed
    decides the order of rows)
run.steps: max_steps train_iters train_steps training_steps total_steps num_train_steps
run.epochs: num_epochs num_train_epochs max_epochs n_epochs (a whole number)
run.log_every: logging_steps log_interval logging_interval log_freq log_period steps_per_print
run.save_every: save_steps save_strategy save_interval save_freq checkpoint_interval
    checkpoint_period checkpoint.interval (steps, or a duration such as 30m, or epoch)
run.save_every=epoch: saves_per_epoch (or a number of steps)
run.eval_every: eval_steps eval_strategy evaluation_strategy eval_interval eval_freq
    validation.freq (steps, or epoch)
run.eval_every=epoch: evals_per_epoch (or a number of steps)
not offered: validation.steps eval_iters eval_batches max_eval_samples eval_delay (every eval set is
    evaluated as a whole)
not needed: do_train do_eval (data.eval and run.eval_every decide what is evaluated)
run.eval_at_start: eval_on_start
run.early_stopping_min_delta: early_stopping_threshold
run.resume: resume_from_checkpoint auto_resume_from_checkpoints auto_resume load_checkpoint
    ckpt_path (auto, the default, resumes from run.directory)
run.resume=never: overwrite_output_dir (nothing is overwritten, so name a new run.directory)
not offered: ignore_data_skip (a run that resumes continues with the next rows)
run.step_timeout=...: ddp_timeout nccl_timeout distributed_timeout_minutes train_timeout_seconds
    init_timeout_seconds (a duration such as 30m; null: from the time of earlier steps)
run.stop_after=...: exit_duration_in_mins max_time max_run_time (a duration such as 110m)
run.deterministic: full_determinism use_deterministic deterministic_mode
run.on_nonfinite=...: check_for_nan_in_loss_and_grad logging_nan_inf_filter (stop or skip)
model.source=...: model.name (a Hugging Face folder, or a name on the hub)
model.source: base_model model model_name model_name_or_path model_id model_id_or_path
    model_path hf_model_path pretrained_model_name_or_path pretrained_checkpoint initial_load_path
    hf_assets_path (a Hugging Face folder, or a name on the hub)
not needed: base_model_config model_type model_family model_config_type tokenizer_type
    model.flavor (read from the config.json of model.source)
model.tokenizer: tokenizer_name tokenizer_name_or_path tokenizer_path tokenizer_config (null: the
    model's own)
model.config=...: hidden_size num_layers num_hidden_layers num_attention_heads ffn_hidden_size
    vocab_size (fields of a config.json, for a model that starts from random weights)
not offered: model_revision (hf download MODEL --revision REVISION --local-dir
    FOLDER, then set model.source=FOLDER)
not offered: trust_remote_code (code from a model's folder is never run)
model.rope=...: rope_scaling rope_parameters overrides_of_model_config overrides_of_model_kwargs
    (such as {type: yarn, factor: 4}; for fields that model does not have, edit config.json in a
    copy of the folder)
model.rope.theta: rope_theta rope_base rotary_base rope_max_timescale rope_freq_base
model.rope.type: rope_type rope_scaling_type rope_scaling.rope_type rope_scaling.type
    (default, linear, llama3, yarn or longrope)
model.rope.factor: rope_scaling.factor rope_factor rope_scaling_factor
    yarn_scaling_factor rotary_scaling_factor
model.rope.original_max_position_embeddings: rope_scaling.original_max_position_embeddings
    original_max_position_embeddings
not offered: special_tokens add_special_tokens new_special_tokens added_tokens_overrides
    resize_token_embeddings_to_32x (prepare the model's folder with
    transformers first; set model.source to it)
model.compute_dtype=bfloat16: bf16 bf16.enabled use_bf16 (the default; float32 if it is off)
model.compute_dtype: torch_dtype dtype mixed_precision mixed_precision_param precision
    compute_type (bfloat16 or float32; master weights are float32)
model.compute_dtype=bfloat16: fp16 fp16.enabled half_precision float16 (float16 is not offered)
model.compute_dtype=float32: fp32
not needed: tf32 (model.compute_dtype decides, bfloat16 or float32)
not offered: fp8 fp8_format fp8_recipe enable_fp8 quantization (use model.compute_dtype=bfloat16)
data.train: datasets dataset data dataset_name dataset_path dataset_mixer train_dataset
    train_file train_files train_data_path data_path hf_path (format is text, messages,
    prompt_completion or tokens)
data.eval: test_datasets eval_dataset eval_datasets val_dataset validation_file val_data_path
    eval_data_path (format is text, messages, prompt_completion or tokens)
data.train.0.source: data.train.0.path data.train.0.data_files data.train.0.dataset
data.train.0.format=...: dataset_type data.train.0.type data.train.0.ds_type (text, messages,
    prompt_completion or tokens)
data.train.0.subset: dataset_config dataset_config_name dataset_subset data.train.0.config
data.train.0.split: dataset_split dataset_train_split train_split
data.train.0.split=train[:1000]: max_samples max_train_samples num_samples (the number of records)
data.train.0.fields=...: dataset_text_field text_column text_field columns field_messages
    message_field_role message_field_content message_property_mappings data.train.0.field
    data.train.0.field_messages ({messages: conversations, role: from, content: value})
data.train.0.weight: interleave_probs mix_weights dataset_weights (one for each source)
data.eval_fraction: val_set_size val_size eval_split_ratio split_dataset_ratio validation_split
    test_size (a fraction of the documents)
data.row_tokens: seq_len seq_length sequence_len sequence_length max_seq_len max_seq_length
    max_sequence_length context_len context_length max_context_length cutoff_len max_len
    max_length block_size max_target_length model_max_length n_ctx (tokens of one packed row)
data.long_documents=...: truncation truncation_mode truncation_strategy excess_length_strategy
    (split, truncate, drop or error)
not needed: packing pack eval_packing sample_packing eval_sample_packing sample_packing_*
    packing_strategy neat_packing multipack_* batch_flattening padding_free pad_to_sequence_len
    pad_to_multiple_of group_by_length remove_unused_columns (documents are always packed, and
    attend only to themselves)
data.train_on=...: assistant_only_loss completion_only_loss train_on_inputs train_on_prompt
    train_on_responses_only mask_prompt roles_to_train train_on_eos (assistant is the
    default, and completions; all for every token)
data.chat_template=...: chat_template chat_template_path chat_template_jinja template (a Jinja
    file; null: the tokenizer's own)
data.chat_template=...: jinja_template (a Jinja file, or its text)
data.num_workers: dataset_num_proc dataset_processes preprocessing_num_workers num_workers
    num_proc (null: one for each core)
not needed: dataset_prepared_path overwrite_cache overwrite_output_cache (tokens are cached by
    what they are made of)
not needed: dataloader_* (the next steps are always prepared ahead)
not offered: streaming (data are tokenized once and cached, and read from the disk)
batch.rows_per_microbatch: micro_batch_size per_device_batch_size per_device_train_batch_size
    train_micro_batch_size_per_gpu local_batch_size (rows per group of mesh.seq devices, not per
    device)
batch.rows_per_step: global_batch_size train_batch_size total_batch_size effective_batch_size
    batch_size (packed rows of an update, over all devices)
batch.rows_per_step=...: gradient_accumulation_steps gradient_accumulation accumulate_grad_batches
    grad_accum num_microbatches (micro batch x accumulation x GPUs / seq)
not needed: per_device_eval_batch_size eval_batch_size micro_eval_batch_size (evaluation uses
    batch.rows_per_microbatch)
not needed: average_tokens_across_devices calculate_per_token_loss include_num_input_tokens_seen
    include_tokens_per_second (always on: the loss is a mean over all tokens of a step, and tokens
    are counted)
mesh.seq: cp cp_size cp_degree context_parallel context_parallel_size context_parallel_degree sp
    sp_size sp_degree sequence_parallel sequence_parallel_size sequence_parallel_degree
    ici_context_parallelism ici_sequence_parallelism
    (devices that share each row)
mesh.seq: ulysses_degree ulysses_sequence_parallel_size (with attention.strategy=hybrid it is
    attention.ulysses_degree)
mesh.data: dp dp_size dp_shard dp_shard_size data_parallel_size data_parallel_shard_degree fsdp
    fsdp_size ici_fsdp_parallelism (-1 uses all devices; weights are always sharded over mesh.data
    x mesh.seq)
mesh.replica: dp_replicate dp_replicate_size data_parallel_replicate_degree ici_data_parallelism
    dcn_data_parallelism hsdp (weights are repeated over it)
not needed: deepspeed deepspeed_* zero_stage zero_optimization zero3 zero_* fsdp_*
    sharding_strategy use_distributed_optimizer (weights, gradients and optimizer are sharded over
    mesh.data x mesh.seq, as in ZeRO-3)
not offered: tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree
    tensor_model_parallel_size autotp_size ici_tensor_parallelism pp pp_size
    pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size ep ep_size
    expert_parallel_degree expert_parallel_size expert_model_parallel_size (no tensor, pipeline or
    expert parallelism; set mesh.data and mesh.seq)
not needed: ddp_* local_rank world_size num_processes num_machines num_gpus nproc_per_node devices
    (all devices are used; python -m jaxsp.launch starts one process per GPU)
mesh.virtual_cpu_devices=...: use_cpu no_cuda (a number of devices; for trying a mesh)
attention.strategy: ring_attn_func cp_comm_type context_parallel_rotate_method
    context_parallel_strategy sequence_parallel_mode (auto, ulysses, all_gather, ring or hybrid)
attention.kv_heads_per_gather: heads_k_stride (with attention.strategy=all_gather)
attention.kernel: attn_implementation attn_impl attention attention_backend attn_backend
    flash_attention flash_attn use_flash_attn flash_attention_2 sdp_attention eager_attention
    flex_attention xformers_attention (auto is the default; cuDNN's flash attention where it runs)
optimizer.name: optim optim_type optimizer optimizer.type optimizer_type opt_type (adamw, sgd,
    lion, adafactor, muon or adamw8bit)
optimizer.learning_rate: lr peak_lr max_lr base_lr
optimizer.groups=...: lr_groups embedding_lr embedding_lr_scale decoupled_lr decoupled_min_lr
    param_groups param_groups_overrides ([{pattern: lm_head*, learning_rate_factor: 0.1}])
optimizer.schedule: lr_scheduler lr_scheduler_type lr_schedule lr_schedule_type lr_decay_style
    scheduler scheduler.type scheduler_type (cosine, linear, constant, wsd or inverse_sqrt)
optimizer.warmup_fraction: warmup_ratio lr_warmup_fraction warmup_steps_fraction
optimizer.warmup_steps: warmup_iters lr_warmup_iters lr_warmup_steps num_warmup_steps
    warmup_num_steps
optimizer.min_learning_rate_fraction: min_lr_ratio min_lr_factor min_lr_rate cosine_min_lr_ratio
    cosine_learning_rate_final_fraction learning_rate_final_fraction
optimizer.min_learning_rate_fraction=...: min_lr lr_scheduler_kwargs (the last learning rate as a
    fraction of the peak)
optimizer.decay_steps: lr_wsd_decay_iters num_decay_steps
optimizer.decay_fraction: decay_ratio wsd_decay_steps_fraction (with optimizer.schedule=wsd)
optimizer.decay_shape: decay_type lr_wsd_decay_style wsd_decay_style (with optimizer.schedule=wsd;
    sqrt, linear or cosine)
not needed: lr_decay_iters lr_decay_steps num_stable_steps (a schedule ends with the run)
not offered: cosine_constant_lr_ratio (cosine ends with the run; optimizer.schedule=wsd has a
    constant part)
optimizer.weight_decay: wd adam_weight_decay
optimizer.beta1: adam_beta1 adam_b1 beta_1 b1
optimizer.beta1=...: betas adam_betas (and optimizer.beta2)
optimizer.beta2: adam_beta2 adam_b2 beta_2 b2
optimizer.eps: adam_epsilon adam_eps epsilon
optimizer.momentum: sgd_momentum muon_momentum
not offered: muon_* (five iterations, and updates as large as those of AdamW)
not offered: optim_args optim_target_modules adafactor_* (optimizer.momentum, beta1, beta2 and eps)
optimizer.max_grad_norm: clip_grad grad_clip clip_grad_norm gradient_clipping gradient_clip_val
    gradient_clipping_threshold max_norm (null: no clipping)
adapter.type: adapter train_type tuner_type finetuning_type peft_type peft_method peft_scheme
    (lora or dora; none, the default, trains all weights)
adapter.type=lora: lora use_lora use_peft enable_lora peft
adapter.type=dora: use_dora lora_use_dora peft_use_dora
adapter.rank: lora_r lora_rank lora_dim peft.r peft.dim peft.rank lora.r lora.rank lora_config.r
    peft_config.r
adapter.alpha: lora_alpha peft.alpha lora.alpha (null: twice the rank)
adapter.use_rslora: use_rslora lora_use_rslora peft_use_rslora
adapter.dropout: lora_dropout peft.dropout lora.dropout
adapter.quantization=nf4: load_in_4bit qlora use_qlora (with adapter.type=lora)
adapter.quantization=int8: load_in_8bit (with adapter.type=lora)
adapter.quantization=...: quantization_bit quant_bits (nf4 or int8, with adapter.type=lora)
adapter.targets=...: lora_target_modules target_modules lora_target lora_target_names
    lora_target_parameters (a list of projections; all-linear, the default, for all)
adapter.targets=all-linear: lora_target_linear target_linear (the default)
adapter.modules_to_save=...: modules_to_save lora_modules_to_save additional_target (embed_tokens,
    lm_head or both)
adapter.source: lora_model_dir lora_path lora_weights adapter_path adapter_name_or_path adapters
    peft_model_id peft_model_path (a folder with adapter_config.json)
not needed: lora_mlp_kernel lora_qkv_kernel lora_o_kernel autocast_adapter_dtype lora_dtype
    lora_ckpt_dtype (adapters are float32 and computed in model.compute_dtype)
not offered: lora_* peft_* loraplus_* peft_init_lora_weights init_lora_weights rank_pattern
    alpha_pattern layers_to_transform layers_pattern exclude_modules lisa_* vera_* galore_*
    (LoRA, rsLoRA or DoRA of one rank in all layers; see configs/README.md)
memory.remat=...: remat_policy gradient_checkpointing gradient_checkpointing_*
    activation_checkpointing activation_checkpoint activation_checkpoint_mode
    activation_checkpoint.mode ac_mode recompute_granularity recompute_activations
    recompute_method recompute_num_layers selective_ac_option use_reentrant (auto is the
    default; it recomputes as much as memory requires)
memory.offload_activations=layer_inputs: activation_offloading activations_offload
    cpu_offload_activations enable_activation_offload (or layer_inputs_and_attention)
memory.offload_optimizer=state: offload_optimizer_device offload_param offload_param_device
    cpu_offload enable_cpu_offload fsdp_offload_params optimizer_cpu_offload
    optimizer_memory_host_offload (master weights and optimizer state, in host memory)
memory.mlp_tile_tokens=...: tiled_mlp tiled_mlp_num_shards use_tiled_mlp mlp_chunks (tokens of a
    tile, not a number of tiles; auto tiles if needed)
memory.loss_tile_tokens=...: use_liger_kernel liger_cross_entropy
    liger_fused_linear_cross_entropy cut_cross_entropy chunked_cross_entropy
    fused_linear_cross_entropy num_vocab_tiling (the loss is tiled over tokens; auto tiles if
    needed)
memory.grad_reduce_dtype: mixed_precision_reduce reduce_dtype grad_reduce_in_fp32
    accumulate_allreduce_grads_in_fp32 grad_dtype (float32, the default, or bfloat16)
checkpoint.keep_latest: save_total_limit keep_latest_k max_to_keep max_num_checkpoints_to_keep
checkpoint.keep_best=1: load_best_model_at_end save_best_model (the best stays beside the latest)
checkpoint.best_eval=...: metric_for_best_model greater_is_better (an eval set's name; the lowest
    loss is best)
not needed: save_safetensors save_only_model save_on_each_node last_save_in_hf
    last_save_model_only (python -m jaxsp.export makes a Hugging Face folder of a checkpoint)
not needed: async_checkpointing async_mode async_save enable_checkpointing checkpoint.enable
    checkpoint.folder (checkpoints are written to run.directory while training goes on)
logging.trackers: report_to log_with (a list of tensorboard, wandb and mlflow; metrics.jsonl is
    always written)
logging.trackers=tensorboard: tensorboard use_tensorboard enable_tensorboard (the default)
logging.trackers=wandb: wandb use_wandb enable_wandb
logging.trackers=mlflow: mlflow use_mlflow enable_mlflow
logging.project: wandb_project wandb_project_name mlflow_experiment_name experiment_name
logging.run_name: run.name wandb_name wandb_run_name wandb_exp_name mlflow_run_name
not needed: wandb_* mlflow_* (set the environment variable of the same name in upper case, such as
    MLFLOW_TRACKING_URI or WANDB_ENTITY)
not needed: logging_dir tensorboard_dir tensorboard_path save_tb_folder (it is
    run.directory/tensorboard)
not offered: comet_* use_comet swanlab_* trackio_* (logging.trackers is a list of tensorboard,
    wandb and mlflow)
logging.profile_steps=...: profile profiler profiler_steps enable_profiling profile_step_start
    profile_step_end profile_freq (the first and last step, such as [3, 5])
not needed: liger_* (XLA fuses RoPE, norms and activations)
run.compilation_cache: jax_cache_dir jax_compilation_cache_dir logging.compilation_cache
not needed: torch_compile torch_compile_* compile jit_compile torch_empty_cache_steps (XLA
    compiles each step as a whole)
not offered: relora_* bnb_* quantization_config quant_method (quantization of frozen weights is
    adapter.quantization=nf4, or int8)
optimizer.groups=...: freeze_* unfrozen_parameters trainable_parameters
    ([{pattern: lm_head*, frozen: true}]; adapter.type=lora freezes all and adds small matrices)
not offered: rl rlhf_type dpo_* kto_* rpo_* trl reward_model kd_* (supervised training only)
not offered: dropout attention_dropout hidden_dropout neftune_noise_alpha noisy_embedding_alpha
    label_smoothing label_smoothing_factor z_loss (cross entropy without dropout; a loss of your
    own: jaxsp.library.load_model(loss=...))
not offered: push_to_hub hub_* (python -m jaxsp.export RUN FOLDER, then hf upload NAME FOLDER)
not offered: plugins callbacks (see jaxsp/library.py for a loop of your own)
not needed: disable_tqdm strict hf_use_auth_token use_cache is_causal (it has no effect on
    training here)
"""
"""In the order of the config's sections: `field: names (note)`, continued on indented lines.

field:        the same under another name; the value is kept if the field accepts it
field=value:  the field's value in place of the option
field=...:    a field of another unit or meaning
not needed:   jaxsp always does that
not offered:  jaxsp cannot do that
"""


def normalize(name: str) -> str:
    """Returns a name as the table has it, without leading dashes."""
    return name.lstrip("-").replace("-", "_").lower()


def _parse_entry(text: str) -> Counterpart:
    """Parses an entry of the table."""
    field, _, rest = " ".join(text.split()).partition(": ")
    names, _, note = rest.partition(" (")
    note = note.removesuffix(")")
    is_field = field not in (_NOT_NEEDED, _NOT_OFFERED)
    return Counterpart(
        names=tuple(names.split()),
        field=field.removesuffix("=...") if is_field else None,
        note=note if is_field else f"{field}: {note}",
        takes_value=is_field and "=" not in field,
    )


COUNTERPARTS = tuple(_parse_entry(text) for text in re.split(r"\n(?! )", _TABLE.strip()))

_BY_NAME = {name: counterpart for counterpart in COUNTERPARTS for name in counterpart.names}
_PREFIXES = tuple(name.removesuffix("*") for name in _BY_NAME if name.endswith("*"))
_MAX_WORDS = max(name.count(".") + 1 for name in _BY_NAME)
