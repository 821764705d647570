"""Rules for options of the model that need more than another name: adapter, dtypes, memory."""

import re

from jaxsp.config import yaml_io
from jaxsp.config.rope_schema import RopeConfig
from jaxsp.conversion.draft import Draft
from jaxsp.conversion.options import Options, is_on, is_set

_KINDS = ("adapter", "tuner_type", "train_type", "finetuning_type")

_BITS = ("load_in_4bit", "load_in_8bit", "quant_bits", "quantization_bit", "adapter")

_TARGETS = ("lora_target_modules", "target_modules")


def convert_adapter(options: Options, draft: Draft) -> None:
    """Converts LoRA and the quantization of frozen weights."""
    kind = options.take(*_KINDS)
    if kind is None and options.system == "ms-swift":
        kind = "lora"
    uses_peft = is_on(options.take("use_peft"))
    uses_dora = is_on(options.take("use_dora", "peft_use_dora"))
    kind = str(kind or ("lora" if uses_peft else "none")).lower()
    bits = options.take("quant_bits", "quantization_bit")
    is_4bit = is_on(options.take("load_in_4bit")) or bits == 4 or kind == "qlora"
    is_8bit = is_on(options.take("load_in_8bit")) or bits == 8
    if kind in ("none", "full", "false"):
        names = [name for name in options.values if _is_adapter_option(name)]
        for name in names:
            options.take(name)
        draft.not_needed += names
        if is_4bit or is_8bit:
            reason = "adapter.quantization needs adapter.type=lora"
            draft.not_converted["quantized weights"] = reason
        return
    if kind not in ("lora", "qlora", "dora"):
        draft.add_task(f"adapter.type: {kind} is not offered, and lora is in its place")
    origin = options.origin(*_KINDS, "use_peft")
    draft.set("adapter.type", "dora" if uses_dora or kind == "dora" else "lora", origin)
    if is_4bit or is_8bit:
        origin = options.origin(*_BITS)
        draft.set("adapter.quantization", "nf4" if is_4bit else "int8", origin)
    options.add_defaults("lora")
    if is_on(options.take("lora_target_linear")):
        options.take("lora_target_modules")
        draft.not_needed += options.list_taken("lora_target_modules")
        draft.set("adapter.targets", "all-linear", "lora_target_linear")
    targets = options.take(*_TARGETS)
    targets = [targets] if isinstance(targets, str) and targets.endswith("_proj") else targets
    if targets in ("all-linear", ["all-linear"], "all"):
        draft.set("adapter.targets", "all-linear", options.origin(*_TARGETS))
    elif isinstance(targets, list | tuple):
        names = [str(target).rpartition(".")[2] for target in targets]  # of self_attn.q_proj
        draft.set("adapter.targets", list(dict.fromkeys(names)), options.origin(*_TARGETS))
    elif targets is not None and "adapter.targets" not in draft.fields:
        draft.add_task(f"adapter.targets: {yaml_io.format_value(targets)} is not a list of names")
    saved = options.take("modules_to_save", "lora_modules_to_save")
    if saved is not None:
        saved = saved if isinstance(saved, list) else [saved]
        draft.set("adapter.modules_to_save", saved, "modules_to_save")


def _is_adapter_option(name: str) -> bool:
    """True for options that have an effect only with an adapter."""
    return bool(re.match(r"(lora|peft|loraplus|bnb)_|use_rslora|target_modules|loftq", name))


def convert_precision(options: Options, draft: Draft) -> None:
    """Converts dtypes. Master weights are float32, so the dtype of loading has no counterpart."""
    names = ("bf16", "bfloat16", "fp16", "float16", "float32", "mixed_precision")
    values = {name: options.take(name) for name in names}
    loaded = options.take("torch_dtype", "dtype")
    is_half = is_on(values["fp16"]) or is_on(values["float16"])
    if is_half or "float16" in (loaded, values["mixed_precision"]) or "fp16" in values.values():
        draft.not_converted["float16"] = "not offered; model.compute_dtype is bfloat16"
    elif values["bf16"] is False or is_on(values["float32"]):
        draft.set("model.compute_dtype", "float32", "bf16 is off")
    elif options.system == "axolotl" and not options.list_taken(*names):
        draft.add_task("model.compute_dtype: bfloat16, the default; Axolotl's is float32")
    draft.not_needed += options.list_taken(*names, "torch_dtype", "dtype")


def convert_memory(options: Options, draft: Draft) -> None:
    """Converts offloading to host memory; recomputation and tiles are automatic."""
    recomputation = options.take("gradient_checkpointing")
    if is_on(options.take("activation_offloading")) or str(recomputation).startswith("offload"):
        draft.set("memory.offload_activations", "layer_inputs", "activation offloading")
    draft.not_needed += options.list_taken("gradient_checkpointing")
    devices = [
        options.take(name)
        for name in (
            "offload_optimizer_device",
            "offload_param_device",
            "offload_optimizer.device",
            "offload_param.device",
            "fsdp_offload_params",
            "offload_params",
        )
    ]
    deepspeed = options.take("deepspeed")
    devices.append("offload" in str(options.values.get("fsdp")))
    if any(map(is_on, devices)) or deepspeed in ("zero2_offload", "zero3_offload"):
        draft.set("memory.offload_optimizer", "state", "offloading of optimizer and parameters")
    elif isinstance(deepspeed, str) and "." in deepspeed:
        draft.add_task(
            f"memory.offload_optimizer: state, if {deepspeed} offloads to the CPU; or convert "
            "that file together with this one"
        )
    if deepspeed is not None:
        draft.not_needed.append("deepspeed")


def convert_rope(options: Options, draft: Draft) -> None:
    """Converts an extension of the context."""
    given = options.take("rope_scaling", "rope_parameters")
    max_model_len = options.take_count("max_model_len")
    if isinstance(given, str):
        given = {"type": given}
    if max_model_len and not given:
        draft.not_needed.append("max_model_len")
    if not isinstance(given, dict):
        if given is not None:
            draft.not_converted["rope_scaling"] = "must be a mapping or a type"
        return
    renamed = {"rope_type": "type", "rope_theta": "theta"}
    fields = {renamed.get(name, name): value for name, value in given.items()}
    unknown = [name for name in fields if name not in RopeConfig.model_fields]
    for name in unknown:
        draft.not_converted[f"rope_scaling.{name}"] = "model.rope has no such field"
        del fields[name]
    draft.set("model.rope", fields, "rope_scaling")
    if max_model_len and "factor" not in fields:
        draft.set("model.max_position_embeddings", max_model_len, "max_model_len")


def convert_tokens(options: Options, draft: Draft) -> None:
    """Converts special tokens and plugins, of which most change nothing here."""
    tokens = options.take("special_tokens")
    tokens = dict(tokens) if isinstance(tokens, dict) else {}
    tokens = {name: value for name, value in tokens.items() if is_set(value)}
    if tokens.pop("pad_token", None):
        draft.not_needed.append("special_tokens.pad_token")
    if tokens:
        draft.add_task(
            f"model.source: special_tokens {yaml_io.format_value(tokens)}: save the tokenizer with "
            "them in the model's folder, if it has others"
        )
    plugins = options.take("plugins")
    for plugin in plugins if isinstance(plugins, list) else filter(is_set, [plugins]):
        if re.search(r"\.(LigerPlugin|CutCrossEntropyPlugin)$", str(plugin)):
            draft.not_needed.append("plugins")
        else:
            draft.not_converted[f"plugins: {plugin}"] = "not offered"
