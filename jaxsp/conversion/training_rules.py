"""Rules for options of training that need more than another name: batch, length, schedule."""

import math
from typing import Any

from jaxsp.config import yaml_io
from jaxsp.conversion.draft import Draft, as_list, is_on, is_set
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

_MICRO = ("micro_batch_size", "per_device_train_batch_size", "train_micro_batch_size_per_gpu")

_TRACKERS = ("tensorboard", "wandb", "mlflow")

_LONG_DOCUMENTS = {
    "drop": "drop delete",
    "truncate": "truncate keep_start right bfd",
    "split": "split bfd_split wrapped",
    "error": "raise",
}
"""Values of other systems, by that of data.long_documents."""


def convert_batch(draft: Draft) -> None:
    """Converts batch sizes and the GPUs that share rows; rows per step are those of an update.

    Raises: UserError if the number of GPUs does not fit.
    """
    num_gpus = draft.num_gpus
    seq = math.prod(draft.take_count(name) or 1 for name in _SEQ)
    tensor = math.prod(draft.take_count(name) or 1 for name in _TENSOR)
    # mesh.data is what remains
    draft.skip("dp_shard_size", "parallelism_config_dp_shard_size")
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
    micro = draft.take_count(*_MICRO) or 1
    total = draft.take_count("global_batch_size", "train_batch_size", "total_batch_size")
    per_gpu = draft.take_count("batch_size")
    accumulation = draft.take_count("gradient_accumulation_steps")
    if accumulation is None:
        accumulation = max(1, (per_gpu or micro) // micro)
        if draft.system == "ms-swift":
            accumulation = max(1, math.ceil(16 / micro / num_gpus))
    rows = total or micro * accumulation * groups
    origin = f"micro batch {micro} x accumulation {accumulation} x {num_gpus} GPUs"
    if sharing > 1:
        origin += f" / {sharing} that share a row"
        draft.set("mesh.seq", sharing, "GPUs that share a row")
    draft.set("batch.rows_per_step", rows, "global batch" if total else origin)
    if rows % (groups * micro):
        draft.add_task(f"batch.rows_per_step: {rows} must be a multiple of {groups} groups")
    elif micro > 1:
        draft.set("batch.rows_per_microbatch", micro, "micro batch")
    replica_names = ("dp_replicate_size", "parallelism_config_dp_replicate_size")
    replicas = draft.take_count(*replica_names) or 1
    if groups % replicas:
        draft.add_task(
            f"mesh.replica: {replicas} does not divide {groups} groups; 1 is the default"
        )
    elif replicas > 1:
        draft.set("mesh.replica", replicas, *replica_names)
    # rows hold several documents; here, a row of the input has one
    packing = "sample_packing" if draft.system == "axolotl" else "packing"
    if not is_on(draft.skip(packing)) and draft.pair_format is None:
        draft.add_task(
            f"batch.rows_per_step: without {packing}, a row of {draft.title} is one document, and "
            "here it is full of them, so a step has more tokens. Use fewer rows for the same number"
        )


def round_row_tokens(draft: Draft) -> None:
    """Makes rows long enough that the GPUs that share one have equally many tokens."""
    row_tokens = draft.fields.get("data.row_tokens")
    divisor = 2 * draft.fields.get("mesh.seq", 1)
    if isinstance(row_tokens, int) and divisor > 2 and row_tokens % divisor:
        draft.fields["data.row_tokens"] = row_tokens + -row_tokens % divisor
        draft.add_task(f"data.row_tokens: {row_tokens}, rounded to a multiple of {divisor}")


def convert_length(draft: Draft) -> None:
    """Converts steps or epochs. A positive number of steps takes precedence."""
    checkpoint = draft.skip("resume_from_checkpoint", "auto_resume_from_checkpoints")
    if isinstance(checkpoint, str):
        draft.add_task(
            f"model.source: {checkpoint} is a checkpoint of {draft.title}, which is not read; a "
            "Hugging Face folder of its weights can be"
        )
    steps = draft.take("max_steps")
    epoch_names = ("num_epochs", "num_train_epochs", "max_epochs")
    if isinstance(steps, int) and steps > 0:
        draft.set("run.steps", steps, "max_steps")
        draft.skip(*epoch_names)
        return
    epochs = draft.take(*epoch_names)
    if isinstance(epochs, int | float) and epochs > 0:
        draft.set("run.epochs", math.ceil(epochs), *epoch_names)
        if epochs != math.ceil(epochs):
            draft.add_task(f"run.epochs: must be whole, and is {epochs:g}; or set run.steps")


def convert_schedule(draft: Draft) -> None:
    """Converts warmup and the last learning rate."""
    steps = draft.take("warmup_steps")
    fraction = draft.take("warmup_ratio")
    if isinstance(steps, int) and steps > 0:
        draft.set("optimizer.warmup_steps", steps, "warmup_steps")
        if fraction is not None and "warmup_ratio" not in draft.defaults:
            draft.not_converted[f"warmup_ratio = {fraction}"] = "warmup_steps is set"
    elif is_on(steps) or is_on(fraction):
        names = ("warmup_steps", "warmup_ratio")
        draft.set("optimizer.warmup_fraction", steps or fraction, *names)
    given = draft.take("lr_scheduler_kwargs")
    arguments = dict(given) if isinstance(given, dict) else {}
    if given is not None and not arguments:
        draft.not_converted["lr_scheduler_kwargs"] = "must be a mapping"
    peak = draft.options.get("learning_rate")
    last = arguments.pop("min_lr_rate", None)
    if "min_lr" in arguments and isinstance(peak, float) and peak > 0:
        last = arguments.pop("min_lr") / peak
    if last is not None:
        draft.set("optimizer.min_learning_rate_fraction", last, "lr_scheduler_kwargs")
    if arguments:
        text = yaml_io.format_value(arguments)
        draft.not_converted[f"lr_scheduler_kwargs: {text}"] = "the schedule has no such option"
    betas = draft.take("adam_betas", "betas")
    if isinstance(betas, list | tuple) and len(betas) == 2:
        draft.set("optimizer.beta1", betas[0], "betas")
        draft.set("optimizer.beta2", betas[1], "betas")
    elif betas is not None:
        draft.not_converted[f"betas = {yaml_io.format_value(betas)}"] = "must be a list of two"


def convert_intervals(draft: Draft) -> None:
    """Converts how often checkpoints are written and eval sets are evaluated."""
    if not any("save_total_limit" in name for name in draft.options):
        draft.add_task("checkpoint.keep_latest: the latest 2 are kept, the default; theirs is all")
    _convert_interval(draft, "save", "save_strategy")
    if draft.fields.keys() & {"data.eval", "data.eval_fraction"}:
        _convert_interval(draft, "eval", "eval_strategy", "evaluation_strategy")
    else:
        draft.skip("eval_strategy", "evaluation_strategy", "eval_steps", "evals_per_epoch")


def _convert_interval(draft: Draft, kind: str, *strategies: str) -> None:
    """Converts the interval of `save` or `eval`: steps, a strategy, or times per epoch."""
    field = f"run.{kind}_every"
    strategy = draft.take(*strategies)
    steps = draft.take(f"{kind}_steps")
    times = draft.take(f"{kind}s_per_epoch")
    names = (f"{kind}s_per_epoch", f"{kind}_steps", *strategies)
    if strategy in ("no", False) or times == 0:
        draft.set(field, None, *names)
    elif strategy == "epoch" or is_on(times):
        draft.set(field, "epoch", *names)
        if isinstance(times, int) and times > 1:
            draft.add_task(f"{field}: {times} times per epoch; set the number of steps")
    elif isinstance(steps, int) and steps > 0:
        draft.set(field, steps, *names)
    elif isinstance(steps, float):
        draft.add_task(f"{field}: {steps:g} of the run; set the number of steps")
    elif is_on(strategy):
        draft.add_task(f"{field}: strategy {strategy}; set the number of steps")


def convert_trackers(draft: Draft) -> None:
    """Converts trackers; a project of wandb or mlflow turns the tracker on."""
    names = as_list(draft.take("report_to", "log_with"))
    project = draft.take("wandb_project")
    experiment = draft.take("mlflow_experiment_name")
    if is_on(draft.take("use_wandb")) or is_set(project):
        names.append("wandb")
    if is_on(draft.take("use_mlflow", "mlflow_tracking_uri")) or is_set(experiment):
        names.append("mlflow")
    trackers = [name for name in _TRACKERS if name in names]
    for name in set(map(str, names)) - {*_TRACKERS, "none", "all"}:
        draft.not_converted[f"report_to: {name}"] = (
            f"not offered; logging.trackers is a list of {', '.join(_TRACKERS)}"
        )
    if "all" in names:
        draft.add_task("logging.trackers: report_to is all; name them")
    projects = ("wandb_project", "mlflow_experiment_name")
    if trackers or names == ["none"]:
        switches = ("report_to", "log_with", "use_wandb", "wandb_project", "use_mlflow")
        draft.set("logging.trackers", trackers, *switches, "mlflow_experiment_name")
    if set(trackers) & {"wandb", "mlflow"} and (project or experiment):
        draft.set("logging.project", str(project or experiment), *projects)
    run_names = ("run_name", "wandb_name", "wandb_run_name", "mlflow_run_name")
    run_name = draft.take(*run_names)
    if run_name:
        draft.set("logging.run_name", str(run_name), *run_names)


def convert_text(draft: Draft) -> None:
    """Converts the tokens that have a loss, the chat template, and long documents."""
    trains_on_inputs = is_on(draft.take("train_on_inputs"))
    restricts = [is_on(draft.take(f"{kind}_only_loss")) for kind in ("assistant", "completion")]
    loss_scale = draft.take("loss_scale")
    sources = draft.fields.get("data.train", [])
    has_prompts = any(source["format"] != "text" for source in sources)
    trains_all = trains_on_inputs or loss_scale == "all"
    if draft.system == "trl":
        trains_all = has_prompts and not any(restricts)
    if trains_all and draft.pair_format is None:
        draft.set("data.train_on", "all", f"as in {draft.title}; assistant: answers only")
    if loss_scale not in (None, "default", "all"):
        draft.not_converted[f"loss_scale: {loss_scale}"] = "data.train_on is assistant"
    _convert_template(draft, has_chats=has_prompts)
    names = ("excess_length_strategy", "truncation_strategy", "truncation_mode")
    action = draft.take("packing_strategy") or draft.take(*names)
    found = [ours for ours, theirs in _LONG_DOCUMENTS.items() if action in theirs.split()]
    if found:
        draft.set("data.long_documents", found[0], "packing_strategy", *names)
    elif action is not None:
        draft.add_task(f"data.long_documents: {action} is not offered; split is the default")


def _convert_template(draft: Draft, *, has_chats: bool) -> None:
    """Converts a chat template in a file or as text; names of templates are not known here."""
    names = ("chat_template_jinja", "chat_template_path")
    template: Any = draft.take(*names)
    name = draft.take("chat_template", "template")
    name = None if str(name).startswith("tokenizer_default") or name == "jinja" else name
    if isinstance(template, str) and ("{" in template or template.endswith((".jinja", ".jinja2"))):
        if has_chats:
            draft.set("data.chat_template", template, *names)
        else:
            draft.not_needed.append("chat_template")
    elif template is not None or name is not None:
        draft.add_task(
            f"data.chat_template: {template or name} is not a Jinja file; without one, the "
            "tokenizer's own is used, which chat models have"
        )
