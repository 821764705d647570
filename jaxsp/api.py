"""`jaxsp.Trainer`: fine-tuning from Python.

Example:
    import jaxsp
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained("models/base")
    texts = open("texts.txt").readlines()
    documents = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    config = {
        "run": {"steps": 10},
        "mesh": {"seq": 4},  # four devices share each row
        "data": {"row_tokens": 512},
        "batch": {"rows_per_step": 8},
        "optimizer": {"learning_rate": 1e-2},
    }
    trainer = jaxsp.Trainer("models/base", config)
    for batch in trainer.pack(documents[8:]):
        metrics = trainer.step(batch)
        print(int(trainer.state.step), float(metrics["loss"]))
    print(trainer.evaluate(documents[:8])["loss"])
    trainer.save("models/tuned")
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np
import pyarrow as pa

from jaxsp.blocks import layers
from jaxsp.config.yaml_io import format_value
from jaxsp.core import host_memory
from jaxsp.core.batch import NO_LABEL, Batch
from jaxsp.core.errors import ProblemCollector, UserError, at
from jaxsp.core.units import format_count
from jaxsp.data.packing import dataset
from jaxsp.data.packing.dataset import PackedDataset
from jaxsp.data.packing.row_reader import Documents
from jaxsp.evaluation.evaluator import Evaluator
from jaxsp.hf import folder, model_config, multimodal, peft
from jaxsp.hf.weights import check_target, export_model, open_other_parts
from jaxsp.memory import memory_compile
from jaxsp.optimizers import param_groups
from jaxsp.run import build, config_file, initial_weights, jax_limits, merging
from jaxsp.run.config_file import Config
from jaxsp.system import compilation_cache
from jaxsp.training import train_state, trainable
from jaxsp.training.loss import TokenLoss
from jaxsp.training.metric_table import Line
from jaxsp.training.specs import find_division_problems
from jaxsp.training.train_state import TrainState
from jaxsp.training.train_step import StepResults

NumberLists = Iterable[Any]
"""One list or array of numbers per document."""

ConfigFields = Mapping[str, Any] | str | pathlib.Path
"""Sections of a config, or a YAML file that has them."""


class Trainer:
    """A model on a device mesh, its optimizer state, and the step that trains it.

    The numbers are those of `jaxsp train` with the same config and rows. `state` is the model's
    weights (`state.master`, float32 if they are trained, sharded over the mesh) and the optimizer's
    state; for a loop of your own, `training.train_step.compile(trainer.spec)` is the step.

    Example: see the top of the file.
    """

    def __init__(
        self,
        source: str,
        config: ConfigFields,
        *,
        loss: TokenLoss | None = None,
        has_weights: bool = False,
    ):
        """Loads a Hugging Face model onto a device mesh; compiles nothing.

        Call it before anything else in the process uses JAX's devices if `config` has
        `mesh.virtual_cpu_devices`.

        Args:
            source: folder with config.json and safetensors, or name of a model on the Hugging Face
                hub.
            config: sections of a config file (`jaxsp train --help` documents them), or the path of
                one. Required: run.steps, data.row_tokens, batch.rows_per_step and
                optimizer.learning_rate. Fields about files, evaluations and logs, such as
                data.train and run.directory, are refused. run.compilation_cache: only a folder has
                an effect.
            loss: a loss per token, `logits_TV, labels_T -> losses_T`; None: cross entropy.
            has_weights: True if each token's loss has a weight: see `pack`.
        Raises: UserError with all problems of the config, the model's files and the mesh.
        """
        whole_config = _build_config(source, config)
        try:
            jax_limits.choose_platform(whole_config)
        except RuntimeError as error:  # JAX has started with other devices
            raise UserError(
                f"mesh.virtual_cpu_devices = {whole_config.mesh.virtual_cpu_devices}: {error}. "
                "Make the Trainer before anything uses JAX's devices."
            ) from None
        if whole_config.run.compilation_cache not in (compilation_cache.AUTO, None):
            compilation_cache.enable(whole_config.run.compilation_cache)
        problems = ProblemCollector()
        self.model = build.prepare_model(
            whole_config, devices=jax.devices(), problems=problems, for_training=False
        )
        self.spec = dataclasses.replace(self.model.spec, loss=loss, has_weights=has_weights)
        problems += param_groups.find_problems(self.spec.config.optimizer, self.spec.table)
        problems += find_division_problems(
            self.spec.config,
            dict(self.spec.mesh.shape),
            layout=self.spec.attention.strategy.layout,
        )
        problems.raise_if_any()
        weights = initial_weights.open_sources(
            self.spec, self.model.model_folder, self.model.adapter_folder
        )
        self.state = train_state.init_state(self.spec, weights.make())
        self._step: Callable[[TrainState, Batch], tuple[TrainState, StepResults]] | None = None
        self._evaluator = Evaluator(self.spec, ())

    def pack(
        self,
        documents: NumberLists,
        *,
        labels: NumberLists | None = None,
        weights: NumberLists | None = None,
    ) -> Iterator[Batch]:
        """Packs documents of token ids into rows, and yields the batches of run.steps steps.

        The rows and their order depend on the documents, run.seed and the row length, and not on
        the mesh: documents are shuffled and packed again in each epoch. The next two batches are
        prepared while one is used. With several processes, pass the same documents in each; every
        process copies only its own devices' shards.

        Args:
            documents: token ids of each document, an iterable of lists or arrays.
                data.long_documents sets what happens to documents longer than a row; by default
                they are split. The first token of a document is never a label.
            labels: a label for each token, not shifted: the token itself, or -100 for no loss.
                None: every token is a label.
            weights: a weight for the loss of predicting each token, finite and at least 0; needs
                `Trainer(..., has_weights=True)`.
        Returns: batches; shapes: see `core.batch.Batch`.
        Raises:
            UserError for ids outside the vocabulary, lists of another length than their document's,
            and bad weights.
        """
        if (weights is not None) != self.spec.has_weights:
            suggestion = "Make the Trainer with has_weights=True."
            if self.spec.has_weights:
                suggestion = "Pass weights to pack."
            raise UserError(
                f"weights: the Trainer has has_weights={self.spec.has_weights}. {suggestion}"
            )
        data = self._pack("documents", documents, labels, weights)
        schedule = data.make_schedule(self.spec.config.rows_per_step, num_steps=self.spec.num_steps)
        loader = data.make_loader(schedule, self.spec.placement)
        return (batch for batch, _ in loader.batches())

    def step(self, batch: Batch) -> StepResults:
        """Trains on a batch. Its metrics are arrays by name; reading one waits for the step.

        Compiles at the first batch, with the memory options that fit.
        Raises: UserError if the step does not fit the devices.
        """
        if self._step is None:
            self._step = memory_compile.compile_fitting_step(self.spec).executable
        self.state, metrics = self._step(self.state, batch)
        return metrics

    def evaluate(
        self, documents: NumberLists, *, labels: NumberLists | None = None, name: str = "eval"
    ) -> Line:
        """Numbers of a line of eval.jsonl for these weights. Compiles at the first call.

        Args: documents, labels: as in `pack`; each is read once. name: of the eval set.
        """
        data = self._pack(name, documents, labels, None)
        return self._evaluator.evaluate(data, self.state.master, num_steps=int(self.state.step))

    def save(
        self,
        directory: str | pathlib.Path,
        *,
        dtype: Literal["bfloat16", "float32"] | None = None,
        source: str | None = None,
    ) -> None:
        """Saves the weights as a Hugging Face folder that transformers loads.

        Config, tokenizer and chat template are those of the model that was loaded. The folder
        appears under its name when it is complete. Adapters (LoRA) are merged into the weights;
        `save_adapter` saves them separately.

        Args:
            directory: a folder that does not exist or is empty.
            dtype: of the saved weights; None: model.compute_dtype.
            source: folder or hub name of a multimodal checkpoint, for families that are saved with
                all parts (Muse Glimmer); None: the model that was loaded.
        Memory:
            One file of weights (5 GB) at a time on the host. Weights that are offloaded to host
            memory are copied there once more.
        Raises: UserError if the folder has files or cannot be written, with several processes, and
            for a source that is not used or has no other parts.
        """
        weights = self._prepare_to_save(directory)
        model_folder = self.model.model_folder
        assert model_folder is not None, "model.source is set"
        config = self.model.config.model
        with at(str(model_folder.path / "config.json")):
            fields = model_config.resolve_fields(model_folder.config_fields, config)
        parts = None
        if multimodal.are_exported(fields):
            whole = model_folder if source is None else folder.find(source, field="source")
            parts = open_other_parts(whole, self.spec.model)
        elif source is not None:
            raise UserError(
                f"source = {source}: {fields['model_type']} is saved without parts of another "
                "folder. Leave it out."
            )
        table = self.spec.table
        if self.spec.config.has_frozen_weights:
            table, weights = merging.merge_state(weights, table=table, model=self.spec.model)
        export_model(
            weights,
            table=table,
            fields=fields,
            tokenizer=None,
            small_files=model_folder.path,
            directory=directory,
            dtype=dtype or config.compute_dtype,
            other_parts=parts,
        )

    def save_adapter(self, directory: str | pathlib.Path) -> None:
        """Saves the trained weights of a model with LoRA as a folder that `peft.PeftModel` loads.

        Raises: UserError if the folder has files or cannot be written, without an adapter in the
            config, and with several processes.
        """
        if self.spec.model.lora is None:
            raise UserError("save_adapter: adapter.type is none. Use save.")
        weights = self._prepare_to_save(directory)
        source = self.model.model_folder
        assert source is not None, "model.source is set"
        table = self.spec.table
        peft.save_adapter(
            trainable.select_trained(table, weights),
            table=trainable.select_trained(table, table),
            adapter=self.spec.config.adapter,
            model=self.spec.model,
            base=source.source,
            directory=directory,
            is_multimodal=multimodal.is_multimodal(source.path),
            small_files=source.path,
        )

    def _prepare_to_save(self, directory: str | pathlib.Path) -> layers.Weights:
        """The weights as arrays that can be sliced. Raises: UserError: see `save`."""
        check_target(directory)
        if jax.process_count() > 1:
            raise UserError(
                "save: must run in one process that drives all devices, but this is one of "
                f"{jax.process_count()}. Use `jaxsp train` and `jaxsp export`."
            )
        # JAX's host memory cannot be sliced
        return jax.tree.map(
            lambda leaf: np.asarray(leaf) if host_memory.is_on_host(leaf) else leaf,
            self.state.master,
        )

    def _pack(
        self,
        name: str,
        documents: NumberLists,
        labels: NumberLists | None,
        weights: NumberLists | None,
    ) -> PackedDataset:
        """Checks documents and plans their rows. Args: name: of the data set."""
        import datasets

        vocab_size = self.spec.model.vocab_size

        def is_id(values: np.ndarray) -> np.ndarray:
            return (values >= 0) & (values < vocab_size) & (values == np.floor(values))

        ids = f"an id from 0 to {vocab_size - 1}, the model's vocabulary"
        tokens = _make_column("documents", documents, None, np.int32, is_id, ids)
        lengths = tokens.value_lengths().to_pylist()
        columns = {"tokens": tokens}
        if labels is not None:
            is_label = lambda values: is_id(values) | (values == NO_LABEL)
            rule = f"{ids}, or {NO_LABEL}"
            columns["labels"] = _make_column("labels", labels, lengths, np.int32, is_label, rule)
        if weights is not None:
            is_weight = lambda values: np.isfinite(values) & (values >= 0)
            rule = "finite and at least 0"
            columns["weights"] = _make_column(
                "weights", weights, lengths, np.float32, is_weight, rule
            )
        columns["place"] = pa.array([f"documents[{number}]" for number in range(len(lengths))])
        with at("documents"):
            packed = Documents(
                [datasets.Dataset(pa.table(columns))],
                source_names=["documents"],
                row_tokens=self.spec.config.row_tokens,
                long_documents=self.model.config.data.long_documents,
            )
        # Digests are for comparisons with checkpoints and other processes
        return dataset.pack_documents(name, packed, **self.spec.config.packing, digests=[""])


def _build_config(source: str, config: ConfigFields) -> Config:
    """Fills in the fields that only training from files needs. Raises: UserError."""
    if not isinstance(config, Mapping):
        config = config_file.read(config)
    fields: dict[str, Any] = {}
    for name, group in config.items():
        if not isinstance(group, Mapping):
            raise UserError(
                f"config: {name} = {group!r}: must be a group of fields, "
                "for example {'run': {'steps': 10}}."
            )
        fields[name] = dict(group)
    problems = ProblemCollector()
    for group, values in fields.items():
        for name, value in values.items():
            instead = _INSTEAD.get(group) or _INSTEAD.get(f"{group}.{name}")
            if instead and value and value != "sft":
                text = f"{group}.{name} = {format_value(value)}"
                problems.append(f"{text}: must not be set here. {instead}")
    problems.raise_if_any()
    unused: dict[str, Any] = {
        "run": {},
        "model": {"source": source, "config": None, "tokenizer": None},
        "data": {"train": [], "eval": []},
    }
    return config_file.parse(
        fields | {name: fields.get(name, {}) | group for name, group in unused.items()},
        unneeded=("run.directory", "data.train"),
    )


_INSTEAD = {
    "run.epochs": "Set run.steps.",
    **dict.fromkeys(("model.source", "model.config"), "Pass the folder before the config."),
    **dict.fromkeys(
        ("run.directory", "run.staging", "run.save_every", "run.resume", "checkpoint"),
        "Save the weights in your own loop, with Trainer.save.",
    ),
    **dict.fromkeys(
        (
            *("data.train", "data.chat_template", "data.train_on", "model.tokenizer"),
            *("data.chat_template_date", "data.chat_template_kwargs", "data.earlier_reasoning"),
            *("data.on_bad_record", "data.max_bad_records", "data.num_workers"),
        ),
        "Pass token ids and labels to pack.",
    ),
    **dict.fromkeys(("data.eval", "data.eval_fraction"), "Pass documents to Trainer.evaluate."),
    **dict.fromkeys(
        ("run.eval_at_start", "run.eval_every", "run.generate_samples", "eval.tasks"),
        "Evaluate in your own loop, or with `jaxsp eval`.",
    ),
    **dict.fromkeys(("run.early_stopping_patience", "run.stop_after"), "End your own loop early."),
    **dict.fromkeys(("run.log_every", "logging"), "Log the metrics of a step in your own loop."),
    "objective.type": "Train on preferences with `jaxsp train`.",
}
"""Alternatives to fields, and to whole sections, that `Trainer` would ignore and so refuses."""


def _make_column(
    name: str,
    lists: NumberLists,
    lengths: list[int] | None,
    dtype: type[np.number],
    is_valid: Callable[[np.ndarray], np.ndarray],
    rule: str,
) -> pa.LargeListArray:
    """Makes a column of lists of numbers.

    Args: lengths: those of the documents; None for the documents themselves.
    Raises: UserError for anything else, and if a length or a number is wrong.
    """
    if isinstance(lists, str | Mapping):
        raise UserError(
            f"{name}: must be a list with one list of numbers per document, "
            f"not a {type(lists).__name__}. Pass the input_ids of a tokenizer's output."
        )
    arrays = []
    for number, values in enumerate(lists):
        try:
            array = np.asarray(values)
        except ValueError:  # lists of different lengths
            array = np.zeros((0, 0))
        is_numeric = array.dtype.kind in "biuf" or array.size == 0
        if array.ndim != 1 or not is_numeric:
            raise UserError(
                f"{name}[{number}]: must be a list of numbers. "
                "Give one list of token ids per document: [[5, 6, 7], [8, 9]]."
            )
        arrays.append(array)
    own_lengths = list(map(len, arrays))
    if lengths is None and not arrays:
        raise UserError(f"{name}: must not be empty. Give documents of at least two tokens.")
    if lengths is not None and own_lengths != lengths:
        pairs = itertools.zip_longest(own_lengths, lengths)
        first = next(number for number, (own, right) in enumerate(pairs) if own != right)
        raise UserError(
            f"{name}[{first}]: must have one number for each token of documents[{first}]. "
            f"Give {format_count(len(lengths), 'list')}, each as long as its document."
        )
    numbers = np.concatenate(arrays)
    ends = np.cumsum([0, *own_lengths])
    wrong = np.flatnonzero(~is_valid(numbers))
    if len(wrong):
        number = int(np.searchsorted(ends, wrong[0], side="right")) - 1
        index = int(wrong[0] - ends[number])
        raise UserError(f"{name}[{number}][{index}] = {numbers[wrong[0]]}: must be {rule}.")
    return pa.LargeListArray.from_arrays(ends, numbers.astype(dtype))
