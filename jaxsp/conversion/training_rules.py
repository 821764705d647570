"""Rules for options of training that need more than another name: batch, length, schedule."""

import math
from typing import Any

from jaxsp.config import yaml_io
from jaxsp.conversion.draft import Draft
from jaxsp.conversion.options import Options, is_on, is_set
from jaxsp.core.errors import UserError

_SEQ = (
    "context_parallel_size",
    "sequence_parallel_size",
    "sequence_parallel_degree",
    "cp_size",
    "sp_size",
    "parallelism_config_cp_size",
    "parallelism_config_sp_size",
)

_TENSOR = ("tensor_parallel_size", "tp_size", "parallelism_config_tp_size", "autotp_size")

_REPLICA = ("dp_replicate_size", "parallelism_config_dp_replicate_size")

_SHARD = ("dp_shard_size", "parallelism_config_dp_shard_size")

_MICRO = ("micro_batch_size", "per_device_train_batch_size", "train_micro_batch_size_per_gpu")

_LONG = ("packing_strategy", "excess_length_strategy", "truncation_strategy", "truncation_mode")

_RUN_NAMES = ("run_name", "wandb_name", "wandb_run_name", "mlflow_run_name")

_TRACKER_OPTIONS = (
    "report_to",
    "log_with",
    "use_wandb",
    "wandb_project",
    "use_mlflow",
    "mlflow_experiment_name",
)

_TRACKERS = ("tensorboard", "wandb", "mlflow")


def convert_batch(options: Options, draft: Draft, num_gpus: int) -> None:
    """Converts batch sizes and the GPUs that share rows; rows per step are those of an update.

    Raises: UserError if the number of GPUs does not fit.
    """
    seq = math.prod(options.take_count(name) or 1 for name in _SEQ)
    tensor = math.prod(options.take_count(name) or 1 for name in _TENSOR)
    options.take(*_SHARD)  # mesh.data is what remains
    draft.not_needed += options.list_taken(*_SHARD)
    if tensor > 1:
        draft.not_converted[f"tensor parallelism of {tensor}"] = (
            "not offered; its GPUs share rows in mesh.seq, with the same batch"
        )
    sharing = seq * tensor
    if num_gpus % sharing:
        raise UserError(
            f"--gpus = {num_gpus}: must be a multiple of the {sharing} GPUs that share each row. "
            f"Use {sharing * max(1, num_gpus // sharing)} or {sharing * (num_gpus // sharing + 1)}."
        )
    groups = num_gpus // sharing
    micro = options.take_count(*_MICRO) or 1
    total = options.take_count("global_batch_size", "train_batch_size", "total_batch_size")
    per_gpu = options.take_count("batch_size")
    accumulation = options.take_count("gradient_accumulation_steps")
    if accumulation is None:
        accumulation = max(1, (per_gpu or micro) // micro)
        if options.system == "ms-swift":
            accumulation = max(1, math.ceil(16 / micro / num_gpus))
    rows = total or micro * accumulation * groups
    origin = f"micro batch {micro} x accumulation {accumulation} x {num_gpus} GPUs"
    if sharing > 1:
        origin += f" / {sharing} that share a row"
    draft.set("batch.rows_per_step", rows, "global batch" if total else origin)
    if rows % (groups * micro):
        draft.add_task(f"batch.rows_per_step: {rows} must be a multiple of {groups} groups")
        micro = 1
    if micro > 1:
        draft.set("batch.rows_per_microbatch", micro, "micro batch")
    if sharing > 1:
        draft.set("mesh.seq", sharing, "GPUs that share a row")
    replicas = options.take_count(*_REPLICA) or 1
    if groups % replicas:
        draft.add_task(
            f"mesh.replica: {replicas} does not divide {groups} groups; 1 is the default"
        )
    elif replicas > 1:
        draft.set("mesh.replica", replicas, options.origin(*_REPLICA))
    _compare_packing(options, draft)


def round_row_tokens(draft: Draft) -> None:
    """Makes rows long enough that the GPUs that share one have equally many tokens."""
    row_tokens = draft.fields.get("data.row_tokens")
    divisor = 2 * draft.fields.get("mesh.seq", 1)
    if isinstance(row_tokens, int) and divisor > 2 and row_tokens % divisor:
        draft.fields["data.row_tokens"] = row_tokens + -row_tokens % divisor
        draft.add_task(f"data.row_tokens: {row_tokens}, rounded to a multiple of {divisor}")


def _compare_packing(options: Options, draft: Draft) -> None:
    """Reports that rows hold several documents where a row of the input has one."""
    name = "sample_packing" if options.system == "axolotl" else "packing"
    is_packed = is_on(options.take(name))
    draft.not_needed += options.list_taken(name)
    if not is_packed:
        draft.add_task(
            f"batch.rows_per_step: without {name}, a row of {options.title} is one document, and "
            "here it is full of them, so a step has more tokens. Use fewer rows for the same number"
        )


def convert_length(options: Options, draft: Draft) -> None:
    """Converts steps or epochs. A positive number of steps takes precedence."""
    steps = options.take("max_steps")
    epochs = options.take("num_epochs", "num_train_epochs", "max_epochs")
    checkpoint = options.take("resume_from_checkpoint", "auto_resume_from_checkpoints")
    if isinstance(checkpoint, str):
        draft.add_task(
            f"model.source: {checkpoint} is a checkpoint of {options.title}, which is not read; a "
            "Hugging Face folder of its weights can be"
        )
    draft.not_needed += options.list_taken("resume_from_checkpoint", "auto_resume_from_checkpoints")
    if isinstance(steps, int) and steps > 0:
        draft.set("run.steps", steps, "max_steps")
        draft.not_needed += options.list_taken("num_epochs", "num_train_epochs", "max_epochs")
    elif isinstance(epochs, int | float) and epochs > 0:
        names = ("num_epochs", "num_train_epochs", "max_epochs")
        draft.set("run.epochs", math.ceil(epochs), options.origin(*names))
        if epochs != math.ceil(epochs):
            draft.add_task(f"run.epochs: must be whole, and is {epochs:g}; or set run.steps")


def convert_schedule(options: Options, draft: Draft) -> None:
    """Converts warmup and the last learning rate."""
    steps = options.take("warmup_steps")
    fraction = options.take("warmup_ratio")
    if isinstance(steps, int) and steps > 0:
        draft.set("optimizer.warmup_steps", steps, "warmup_steps")
        if options.list_taken("warmup_ratio"):
            draft.not_converted[f"warmup_ratio = {fraction}"] = "warmup_steps is set"
    elif is_on(steps) or is_on(fraction):
        origin = options.origin("warmup_steps", "warmup_ratio")
        draft.set("optimizer.warmup_fraction", steps or fraction, origin)
    given = options.take("lr_scheduler_kwargs")
    arguments = dict(given) if isinstance(given, dict) else {}
    if given is not None and not arguments:
        draft.not_converted["lr_scheduler_kwargs"] = "must be a mapping"
    peak = options.values.get("learning_rate")
    last = arguments.pop("min_lr_rate", None)
    if "min_lr" in arguments and isinstance(peak, float) and peak > 0:
        last = arguments.pop("min_lr") / peak
    if last is not None:
        draft.set("optimizer.min_learning_rate_fraction", last, "lr_scheduler_kwargs")
    if arguments:
        text = yaml_io.format_value(arguments)
        draft.not_converted[f"lr_scheduler_kwargs: {text}"] = "the schedule has no such option"
    betas = options.take("adam_betas", "betas")
    if betas is not None and not (isinstance(betas, list | tuple) and len(betas) == 2):
        draft.not_converted[f"betas = {yaml_io.format_value(betas)}"] = "must be a list of two"
    elif betas is not None:
        draft.set("optimizer.beta1", betas[0], "betas")
        draft.set("optimizer.beta2", betas[1], "betas")


def convert_intervals(options: Options, draft: Draft) -> None:
    """Converts how often checkpoints are written and eval sets are evaluated."""
    if not any("save_total_limit" in name for name in options.values):
        draft.add_task("checkpoint.keep_latest: the latest 2 are kept, the default; theirs is all")
    has_eval = bool(draft.fields.keys() & {"data.eval", "data.eval_fraction"})
    for field, strategies, steps, per_epoch in (
        ("save", ("save_strategy",), "save_steps", "saves_per_epoch"),
        ("eval", ("eval_strategy", "evaluation_strategy"), "eval_steps", "evals_per_epoch"),
    ):
        strategy = options.take(*strategies)
        number = options.take(steps)
        times = options.take(per_epoch)
        if field == "eval" and not has_eval:
            draft.not_needed += options.list_taken(*strategies, steps, per_epoch)
            continue
        value = _find_interval(strategy, number, times)
        field = f"run.{field}_every"
        if value is not None:
            origin = options.origin(per_epoch, steps, *strategies)
            draft.set(field, None if value == "no" else value, origin)
        if isinstance(times, int) and times > 1:
            draft.add_task(f"{field}: {times} times per epoch; set the number of steps")
        elif isinstance(number, float) and value is None:
            draft.add_task(f"{field}: {number:g} of the run; set the number of steps")
        elif is_on(strategy) and value is None:
            draft.add_task(f"{field}: strategy {strategy}; set the number of steps")


def _find_interval(strategy: Any, steps: Any, times_per_epoch: Any) -> Any:
    """Returns steps, epoch, no, or None for jaxsp's default."""
    if strategy in ("no", False) or times_per_epoch == 0:
        return "no"
    if strategy == "epoch" or is_on(times_per_epoch):
        return "epoch"
    return steps if isinstance(steps, int) and steps > 0 else None


def convert_trackers(options: Options, draft: Draft) -> None:
    """Converts trackers; a project of wandb or mlflow turns the tracker on."""
    given = options.take("report_to", "log_with")
    names = [given] if isinstance(given, str) else list(given or ())
    project = options.take("wandb_project")
    experiment = options.take("mlflow_experiment_name")
    if is_set(project) or is_on(options.take("use_wandb")):
        names.append("wandb")
    if is_set(experiment) or is_on(options.take("use_mlflow", "mlflow_tracking_uri")):
        names.append("mlflow")
    trackers = [name for name in _TRACKERS if name in names]
    for name in set(map(str, names)) - {*_TRACKERS, "none", "all"}:
        draft.not_converted[f"report_to: {name}"] = (
            f"not offered; logging.trackers is a list of {', '.join(_TRACKERS)}"
        )
    if "all" in names:
        draft.add_task("logging.trackers: report_to is all; name them")
    if trackers or names == ["none"]:
        draft.set("logging.trackers", trackers, options.origin(*_TRACKER_OPTIONS))
    if set(trackers) & {"wandb", "mlflow"} and (project or experiment):
        origin = options.origin("wandb_project", "mlflow_experiment_name")
        draft.set("logging.project", str(project or experiment), origin)
    run_name = options.take(*_RUN_NAMES)
    if run_name:
        draft.set("logging.run_name", str(run_name), options.origin(*_RUN_NAMES))


def convert_text(options: Options, draft: Draft) -> None:
    """Converts the tokens that have a loss, the chat template, and long documents."""
    values = {
        name: options.take(name)
        for name in ("train_on_inputs", "assistant_only_loss", "completion_only_loss", "loss_scale")
    }
    trains_all = is_on(values["train_on_inputs"]) or values["loss_scale"] == "all"
    sources = draft.fields.get("data.train", [])
    has_prompts = any(source["format"] != "text" for source in sources)
    if options.system == "trl":
        restricts = is_on(values["assistant_only_loss"]) or is_on(values["completion_only_loss"])
        trains_all = has_prompts and not restricts
    if trains_all:
        draft.set("data.train_on", "all", f"as in {options.title}; assistant: answers only")
    if values["loss_scale"] not in (None, "default", "all"):
        draft.not_converted[f"loss_scale: {values['loss_scale']}"] = "data.train_on is assistant"
    _convert_template(options, draft, has_chats=has_prompts)
    actions = {
        "drop": "drop delete",
        "truncate": "truncate keep_start right bfd",
        "split": "split bfd_split wrapped",
        "error": "raise",
    }
    action = options.take(_LONG[0]) or options.take(*_LONG[1:])
    found = [ours for ours, theirs in actions.items() if action in theirs.split()]
    if found:
        draft.set("data.long_documents", found[0], options.origin(*_LONG))
    elif action is not None:
        draft.add_task(f"data.long_documents: {action} is not offered; split is the default")


def _convert_template(options: Options, draft: Draft, *, has_chats: bool) -> None:
    """Converts a chat template in a file or as text; names of templates are not known here."""
    template = options.take("chat_template_jinja", "chat_template_path")
    name = options.take("chat_template", "template")
    name = None if str(name).startswith("tokenizer_default") or name == "jinja" else name
    if isinstance(template, str) and ("{" in template or template.endswith((".jinja", ".jinja2"))):
        if has_chats:
            origin = options.origin("chat_template_jinja", "chat_template_path")
            draft.set("data.chat_template", template, origin)
        else:
            draft.not_needed.append("chat_template")
    elif template is not None or name is not None:
        draft.add_task(
            f"data.chat_template: {template or name} is not a Jinja file; without one, the "
            "tokenizer's own is used, which chat models have"
        )
