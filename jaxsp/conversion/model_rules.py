"""Rules for options of the model that need more than another name: adapter, dtypes, memory."""

import re

from jaxsp.config import yaml_io
from jaxsp.config.rope_schema import RopeConfig
from jaxsp.conversion.draft import Draft, as_list, is_on, is_set

_TARGETS = ("lora_target_modules", "target_modules")

_PARAMETERS = ("lora_target_parameters", "target_parameters")

_FLOATS = ("bf16", "bfloat16", "fp16", "float16", "float32", "mixed_precision")

_OFFLOADING = (
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer.device",
    "offload_param.device",
    "fsdp_offload_params",
    "offload_params",
)


def convert_adapter(draft: Draft) -> None:
    """Converts LoRA and the quantization of frozen weights."""
    kinds = ("adapter", "tuner_type", "train_type", "finetuning_type")
    default = "lora" if draft.system == "ms-swift" else "none"
    uses_peft = is_on(draft.take("use_peft"))
    uses_dora = is_on(draft.take("use_dora", "peft_use_dora"))
    kind = str(draft.take(*kinds) or ("lora" if uses_peft else default)).lower()
    bits = draft.take("quant_bits", "quantization_bit")
    is_4bit = is_on(draft.take("load_in_4bit")) or bits == 4 or kind == "qlora"
    is_8bit = is_on(draft.take("load_in_8bit")) or bits == 8
    if kind in ("none", "full", "false"):
        draft.skip(*filter(_is_adapter_option, list(draft.options)))
        draft.add_defaults("full")
        if is_4bit or is_8bit:
            reason = "adapter.quantization needs adapter.type=lora"
            draft.not_converted["quantized weights"] = reason
        return
    if kind not in ("lora", "qlora", "dora"):
        draft.add_task(f"adapter.type: {kind} is not offered, and lora is in its place")
    draft.set("adapter.type", "dora" if uses_dora or kind == "dora" else "lora", *kinds, "use_peft")
    if is_4bit or is_8bit:
        names = ("load_in_4bit", "load_in_8bit", "quant_bits", "quantization_bit", "adapter")
        draft.set("adapter.quantization", "nf4" if is_4bit else "int8", *names)
    draft.add_defaults("lora")
    _convert_targets(draft)
    saved = draft.take("modules_to_save", "lora_modules_to_save")
    if saved is not None:
        draft.set("adapter.modules_to_save", as_list(saved), "modules_to_save")


def _is_adapter_option(name: str) -> bool:
    """True for options that have an effect only with an adapter."""
    return bool(re.match(r"(lora|peft|loraplus|bnb)_|use_rslora|target_|loftq", name))


def _convert_targets(draft: Draft) -> None:
    """Converts the projections and tensors of experts that have an adapter."""
    parameters = draft.take(*_PARAMETERS)
    if parameters:
        draft.set("adapter.target_parameters", as_list(parameters), *_PARAMETERS)
    if is_on(draft.take("lora_target_linear")):
        draft.skip("lora_target_modules")
        draft.set("adapter.targets", "all-linear", "lora_target_linear")
    targets = draft.take(*_TARGETS)
    if isinstance(targets, str) and targets.endswith("_proj"):
        targets = [targets]
    if targets in ("all-linear", ["all-linear"], "all"):
        draft.set("adapter.targets", "all-linear", *_TARGETS)
    elif isinstance(targets, list | tuple):
        names = [str(target).rpartition(".")[2] for target in targets]  # of self_attn.q_proj
        draft.set("adapter.targets", list(dict.fromkeys(names)), *_TARGETS)
    elif targets is not None and "adapter.targets" not in draft.fields:
        draft.add_task(f"adapter.targets: {yaml_io.format_value(targets)} is not a list of names")


def convert_precision(draft: Draft) -> None:
    """Converts dtypes. Master weights are float32, so the dtype of loading has no counterpart."""
    has_dtype = any(name.rpartition(".")[2] in _FLOATS for name in draft.options)
    values = {name: draft.skip(name) for name in _FLOATS}
    loaded = draft.skip("torch_dtype", "dtype")
    is_half = is_on(values["fp16"]) or is_on(values["float16"])
    if is_half or "float16" in (loaded, values["mixed_precision"]) or "fp16" in values.values():
        draft.not_converted["float16"] = "not offered; model.compute_dtype is bfloat16"
    elif values["bf16"] is False or is_on(values["float32"]):
        draft.set("model.compute_dtype", "float32", "bf16 is off")
    elif draft.system == "axolotl" and not has_dtype:
        draft.add_task("model.compute_dtype: bfloat16, the default; Axolotl's is float32")


def convert_memory(draft: Draft) -> None:
    """Converts offloading to host memory; recomputation and tiles are automatic."""
    recomputation = draft.skip("gradient_checkpointing")
    if is_on(draft.take("activation_offloading")) or str(recomputation).startswith("offload"):
        draft.set("memory.offload_activations", "layer_inputs", "activation offloading")
    devices = [draft.take(name) for name in _OFFLOADING]
    devices.append("offload" in str(draft.options.get("fsdp")))
    deepspeed = draft.skip("deepspeed")
    if any(map(is_on, devices)) or deepspeed in ("zero2_offload", "zero3_offload"):
        draft.set("memory.offload_optimizer", "state", "offloading of optimizer and parameters")
    elif isinstance(deepspeed, str) and "." in deepspeed:
        draft.add_task(
            f"memory.offload_optimizer: state, if {deepspeed} offloads to the CPU; or convert "
            "that file together with this one"
        )


def convert_rope(draft: Draft) -> None:
    """Converts an extension of the context."""
    given = draft.take("rope_scaling", "rope_parameters")
    if not given:
        draft.skip("max_model_len")
        return
    max_model_len = draft.take_count("max_model_len")
    if isinstance(given, str):
        given = {"type": given}
    if not isinstance(given, dict):
        draft.not_converted["rope_scaling"] = "must be a mapping or a type"
        return
    renamed = {"rope_type": "type", "rope_theta": "theta"}
    fields = {renamed.get(name, name): value for name, value in given.items()}
    known = {name: value for name, value in fields.items() if name in RopeConfig.model_fields}
    for name in fields.keys() - known.keys():
        draft.not_converted[f"rope_scaling.{name}"] = "model.rope has no such field"
    draft.set("model.rope", known, "rope_scaling")
    if max_model_len and "factor" not in fields:
        draft.set("model.max_position_embeddings", max_model_len, "max_model_len")


def convert_tokens(draft: Draft) -> None:
    """Converts special tokens and plugins, of which most change nothing here."""
    tokens = draft.take("special_tokens")
    tokens = dict(tokens) if isinstance(tokens, dict) else {}
    if tokens.pop("pad_token", None):
        draft.not_needed.append("special_tokens.pad_token")
    tokens = {name: value for name, value in tokens.items() if is_set(value)}
    if tokens:
        draft.add_task(
            f"model.source: special_tokens {yaml_io.format_value(tokens)}: save the tokenizer with "
            "them in the model's folder, if it has others"
        )
    for plugin in as_list(draft.take("plugins")):
        if re.search(r"\.(LigerPlugin|CutCrossEntropyPlugin)$", str(plugin)):
            draft.not_needed.append("plugins")
        else:
            draft.not_converted[f"plugins: {plugin}"] = "not offered"
