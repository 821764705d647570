"""Work of the command `jaxsp export`, and merging: trained weights, such as adapters, with their
frozen base."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxsp.blocks import layers
from jaxsp.blocks.config import ModelConfig
from jaxsp.blocks.layers import Parameter
from jaxsp.checkpoint import checksums, reader, run_paths, run_storage
from jaxsp.core import files
from jaxsp.core.errors import ProblemCollector, UserError, at
from jaxsp.data import chat_template, tokenizers
from jaxsp.hf import folder, model_config, multimodal, peft
from jaxsp.hf.weights import (
    WeightReader,
    check_target,
    export_model,
    open_folder,
    open_other_parts,
)
from jaxsp.model import adapters, decoder
from jaxsp.run import config_file, model_files, resume
from jaxsp.run.config_file import Config
from jaxsp.sharding import quantization, sharding
from jaxsp.system import device_memory, jax_platform
from jaxsp.training import specs, train_state


def export(
    *,
    run: str,
    out: str,
    merge: bool,
    source: str | None,
    dtype: Literal["bfloat16", "float32"] | None,
) -> list[str]:
    """Exports a model, or the adapters of a run in PEFT's format: see `jaxsp export --help`.

    Returns: lines to print. Raises: UserError with the problems of the input.
    """
    if files.is_url(out):
        raise UserError(f"OUT_DIR = {out}: must be a folder of this machine. Use hf.")
    directory = pathlib.Path(out)
    check_target(directory)
    jax_platform.choose_platform(virtual_cpu_devices=None)
    with at("RUN_OR_CHECKPOINT", run):
        checkpoint = run_paths.find_latest(run_storage.make_local(run))
        if checkpoint is None and not pathlib.Path(run).exists():
            raise UserError("there is no such folder.")
    if checkpoint is None:
        raise UserError(
            f"{run}: holds no checkpoint. Use a run's directory, or a folder in its checkpoints/."
        )
    meta = reader.read_meta(checkpoint)
    config = config_file.parse(meta.config)
    with at("model.config"):
        model = model_config.parse_model_config(meta.model, row_tokens=config.data.row_tokens)
    model = adapters.add_adapter(model, config.adapter)
    if merge and model.lora is None:
        raise UserError(f"--merge: {run} has no adapter. Leave the flag out.")
    is_adapter = model.lora is not None and not merge
    if is_adapter and dtype == "bfloat16":
        raise UserError("--dtype = bfloat16: adapters are float32. Use --merge, or leave it out.")
    dtype = dtype or config.model.compute_dtype
    has_other_parts = multimodal.are_exported(meta.model)
    copies_parts = has_other_parts and not is_adapter
    if source is not None:
        reason = ""
        if config.model.source is None:
            reason = "started from random weights (model.config), not from a checkpoint"
        elif not config.step.has_frozen_weights:
            reason = "has all weights of the export in its checkpoint"
        if reason and not copies_parts:
            raise UserError(f"--source = {source}: {run} {reason}. Leave it out.")
        if config.model.source is not None:  # a run from random weights keeps them
            config = config.with_fields(model={"source": source})
    parts = None
    if copies_parts:
        parts = _open_other_parts(run, source, config, model, kind=meta.model["model_type"])
    table = specs.build_table(model, config.step)
    weights = reader.read_weights(checkpoint, table)
    model_dir = resume.find_model_dir(checkpoint)
    if is_adapter:
        peft.save_adapter(
            weights,
            table=train_state.select_trained(table, table),
            adapter=config.adapter,
            model=model,
            base=config.model.source,
            directory=directory,
            is_multimodal=model_dir is not None and multimodal.is_multimodal(model_dir),
            small_files=model_dir,
        )
    else:
        if config.step.has_frozen_weights:
            table, weights = merge_base(checkpoint, weights, config=config, model=model)
        # the run's copy has everything that model.source had besides its weights
        is_complete = model_dir is not None and (model_dir / "config.json").is_file()
        tokenizer = None
        if not is_complete and config.model.tokenizer is not None:
            tokenizer = model_files.load_tokenizer(config, None, model_dir)
        export_model(
            weights,
            table=table,
            fields=meta.model,
            tokenizer=tokenizer,
            small_files=model_dir if is_complete else None,
            directory=directory,
            dtype=dtype,
            other_parts=parts,
        )
    write_chat_template(config, directory)
    kind = "adapter, float32" if is_adapter else dtype
    lines = [f"{run}, step {meta.step} -> {directory} ({kind})"]
    problems = ProblemCollector()
    if (directory / "tokenizer_config.json").is_file():
        # training on token ids did not need it
        with problems.collect(), at(str(directory)), at("its tokenizer"):
            tokenizers.load(str(directory))
    lines += problems
    if is_adapter and meta.model.get("eos_token_id") is not None and not model.has_scores:
        ids = meta.model["eos_token_id"]
        lines.append(
            f"PEFT stops at the end tokens of the base; give generate() eos_token_id={ids}"
        )
    if parts is not None:
        text = f"{len(parts.tensors):,} tensors of other parts are copies of those of "
        lines.append(f"{text}{parts.source.path}")
    if is_adapter and config.model.source is None:
        return [*lines, "it belongs to random weights (model.config), which are in no file"]
    quantization = config.adapter.quantization
    if is_adapter and quantization != "none":
        lines.append(
            f"it was trained on the base in {quantization}: on the unquantized base its outputs "
            "differ; --merge exports a model that keeps them"
        )
    path = repr(str(directory))
    auto_class = model_config.find_auto_class(meta.model)
    loader = f"transformers.{auto_class}.from_pretrained({path})"
    if is_adapter and has_other_parts:  # PEFT's own class loads models for text only
        base = f"transformers.{auto_class}.from_pretrained({config.model.source!r})"
        loader = f"peft.PeftModel.from_pretrained({base}, {path})"
    elif is_adapter:
        arguments = f"{path}, num_labels=1" if model.has_scores else path
        loader = f"peft.AutoPeft{auto_class.removeprefix('Auto')}.from_pretrained({arguments})"
    text = f"load it with {loader}, which needs PyTorch"
    return [*lines, f"{text}; --merge exports the whole model instead" if is_adapter else text]


def _open_other_parts(
    name: str, source: str | None, config: Config, model: ModelConfig, *, kind: str
) -> WeightReader:
    """Opens the other parts of the multimodal checkpoint that a run started from."""
    if source is not None:
        return open_other_parts(folder.find(source, field="--source"), model)
    problems = ProblemCollector()
    if config.model.source is None:
        problems.append(f"{name}: started from random weights (model.config).")
    else:
        with problems.collect():
            return open_other_parts(folder.find(config.model.source), model)
    raise UserError(
        f"{problem} The export of {kind} copies the other parts of a multimodal checkpoint: name "
        "its folder with --source."
        for problem in problems
    )


def write_chat_template(config: Config, directory: pathlib.Path) -> None:
    """Writes the run's chat template, so that chats are rendered as in training."""
    template = config.data.chat_template
    if config.data.chat_template_kwargs and (directory / "tokenizer_config.json").is_file():
        with at(str(directory)):
            tokenizer = tokenizers.load(str(directory))
        template = chat_template.load_template(config.data, tokenizer)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


ReadLayer = Callable[[int | None], np.ndarray]
"""Function that returns a layer of a weight, float32; None: of a weight outside the layers."""


def merge_base(
    checkpoint: pathlib.Path, trained: layers.Weights, *, config: Config, model: ModelConfig
) -> tuple[layers.Weights, layers.Weights]:
    """The whole model of a run with frozen weights.

    Args: trained: the checkpoint's weights, float32, in the structure of `select_trained`.
    Returns: the parameter table of the model without adapters, and its weights: functions that
        read and merge one layer, as `hf.weights.export_model` takes them.
    """
    if config.model.source is None:
        suggestion = "Train all weights, without frozen groups."
        if model.lora is not None:
            suggestion = "Export the adapter: leave out --merge."
        raise UserError(
            f"{checkpoint}: its frozen weights are random (model.config), and in no file. "
            f"{suggestion}"
        )
    base = open_folder(folder.find(config.model.source), decoder.plain_table(model))
    table = specs.build_table(model, config.step)
    frozen = train_state.select_frozen(table, table)

    def compute_checksum(param: Parameter) -> Any:
        """Checksum of a frozen weight as training stored it; all of its layers are in memory."""
        tensors = [_read_tensor(base, param, layer) for layer in param.layers or [None]]
        array = tensors[0] if param.layers is None else np.stack(tensors)
        return jax.tree.map(checksums.compute_on_host, quantization.encode(param, array))

    found = {"base": jax.tree.map(compute_checksum, frozen)}
    reader.check_base(checkpoint, checksums.name_leaves(found))
    whole = train_state.merge(trained, jax.tree.map(lambda param: base, frozen))
    return merge_state(whole, table=table, model=model)


def merge_state(
    weights: layers.Weights, *, table: layers.Weights, model: ModelConfig
) -> tuple[layers.Weights, layers.Weights]:
    """The whole model of all weights of a run with frozen weights, like `merge_base`.

    Args: weights: arrays of this process's devices or numpy's, readers of weights in files, or
        functions: see `make_layer_readers`.
    """
    read: dict[tuple[Any, ...], ReadLayer] = {}  # by name, rows and layers
    lora = model.lora

    def add(param: Parameter, stored: Any) -> None:
        key = (param.hf_name, param.hf_rows, param.layers)
        read[key] = functools.partial(_read_layer, param, stored)

    def merge(param: Parameter) -> ReadLayer:
        """Function that returns a layer of a weight with its adapter, if it has one."""
        rows = param.hf_rows
        read_weight = read[param.hf_name, rows, param.layers]
        if lora is None or not param.is_matrix:
            return read_weight
        stem = param.hf_name.removesuffix(".weight")
        tensor = param.adapted_tensor
        if tensor is not None and tensor in lora.target_parameters:
            stem = decoder.LAYER_PREFIX + lora.name_module(tensor)
            rows = param.adapted_rows
        read_a = read.get((f"{stem}.lora_A.weight", None, param.layers))
        read_b = read.get((f"{stem}.lora_B.weight", rows, param.layers))
        read_magnitude = read.get((f"{stem}.lora_magnitude_vector", rows, param.layers))
        if read_a is None or read_b is None:
            return read_weight

        def read_merged(layer: int | None) -> np.ndarray:
            magnitude = None if read_magnitude is None else read_magnitude(layer)
            weights = read_weight(layer), read_a(layer), read_b(layer)
            return merge_matrix(*weights, scale=lora.scale, magnitude_o=magnitude)

        return read_merged

    jax.tree.map(add, table, weights)
    plain_table = decoder.plain_table(model)
    return plain_table, jax.tree.map(merge, plain_table)


def make_layer_readers(weights: layers.Weights, *, table: layers.Weights) -> layers.Weights:
    """Functions that copy a layer of a weight, as it is stored, to the host of every process.

    Moves: the layer to all devices, if there are several processes, which must call together.
    Raises: UserError with several processes, if weights are in host memory.
    """

    def read(param: Parameter, stored: Any, layer: int | None) -> Any:
        def read_array(array: Any) -> np.ndarray:
            if device_memory.is_on_host(array):
                if not array.is_fully_addressable:
                    raise UserError(
                        "weights: with several processes, they must be on the devices. Use "
                        "memory.offload_optimizer=none."
                    )
                array = np.asarray(array)
            part = array if layer is None else array[param.find(layer)]
            return np.asarray(multihost_utils.process_allgather(part, tiled=True))

        return jax.tree.map(read_array, stored)

    return jax.tree.map(lambda *each: functools.partial(read, *each), table, weights)


def _read_layer(param: Parameter, stored: Any, layer: int | None) -> np.ndarray:
    """A layer, float32 and without padding, as training used it."""
    if isinstance(stored, WeightReader):
        stored = quantization.encode(param, _read_tensor(stored, param, layer))
    elif callable(stored):
        stored = stored(layer)
    elif layer is not None:
        stored = jax.tree.map(lambda x: x[param.find(layer)], stored)
    stored = jax.tree.map(np.asarray, stored)
    whole = np.asarray(quantization.decode(param, stored, jnp.dtype("float32")))
    return np.asarray(sharding.remove_padding(param, whole))


def _read_tensor(reader: WeightReader, param: Parameter, layer: int | None) -> np.ndarray:
    return reader.read(param, layer, tuple(slice(size) for size in param.shape))


def merge_matrix(
    weight_oi: np.ndarray,
    a_ri: np.ndarray,
    b_or: np.ndarray,
    *,
    scale: float,
    magnitude_o: np.ndarray | None = None,
) -> np.ndarray:
    """The matrix W + scale * B A, whose rows have DoRA's magnitudes as norms if there are any.

    All are float32; experts' have a dim of experts first. The operations are PEFT's
    `merge_and_unload`.
    """
    merged_oi = weight_oi + (b_or @ a_ri) * np.float32(scale)
    if magnitude_o is not None:
        norms_o = np.sqrt(np.sum(np.square(merged_oi, dtype=np.float64), axis=-1))
        # A row of zeros stays zero, as in training
        factors_o = np.divide(magnitude_o, norms_o, out=np.zeros_like(norms_o), where=norms_o > 0)
        merged_oi *= factors_o.astype(np.float32)[:, None]
    return merged_oi
