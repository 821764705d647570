"""`jaxsp.Trainer` and `jaxsp.plan`: what the commands do, from Python (configs/guide/python.md)."""

import atexit
import dataclasses
import functools
import hashlib
import itertools
import os
import pathlib
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np
import rich.console
from jax.experimental import multihost_utils

from jaxsp.blocks import layers
from jaxsp.config.yaml_io import format_value
from jaxsp.core.batch import NO_LABEL, Batch
from jaxsp.core.errors import ExitCode, ProblemCollector, UserError, at
from jaxsp.core.units import GIB, format_count
from jaxsp.data import chat_template, dataset, in_memory, sources, store, tokenizers
from jaxsp.data.data_config import DataConfig
from jaxsp.data.dataset import PackedDataset
from jaxsp.data.documents import Documents
from jaxsp.data.plain import Trajectories
from jaxsp.data.tokenize import encode_examples
from jaxsp.data.tokenizers import TextEncoder
from jaxsp.evaluation.evaluator import Evaluator
from jaxsp.evaluation.retrieval import RetrievalEvaluator
from jaxsp.generation.generator import Generator, Sampling
from jaxsp.hf import folder, multimodal, peft, published
from jaxsp.hf.weights import check_target, export_model, list_tensors, open_other_parts
from jaxsp.objectives.distill import find_teacher
from jaxsp.objectives.objective import Sft, TileTokens
from jaxsp.objectives.policy import Policy
from jaxsp.objectives.registry import OBJECTIVES
from jaxsp.optimizers import param_groups
from jaxsp.planning import absent, fit, planner
from jaxsp.planning.planner import Plan
from jaxsp.run import (
    build,
    config_file,
    export_command,
    model_files,
    plan_command,
    preflight,
    selfcheck,
    train_command,
)
from jaxsp.run.config_file import Config
from jaxsp.run.data_sets import OpenedSources
from jaxsp.run.references import Reference
from jaxsp.system import device_memory, distributed, jax_platform
from jaxsp.training import train_state
from jaxsp.training.loss import TokenLoss
from jaxsp.training.metric_table import Line
from jaxsp.training.specs import find_division_problems
from jaxsp.training.train_state import TrainState
from jaxsp.training.train_step import StepResults

if TYPE_CHECKING:
    import transformers

NumberLists = Iterable[Any]
"""One list or array of numbers per document."""

ConfigFields = Mapping[str, Any] | str | pathlib.Path
"""Sections of a config, or a YAML file that has them."""


class Trainer:
    """A model on a device mesh, and everything that `jaxsp train` does with it.

    With training data in the config, `train` is the whole run: evaluations, checkpoints, trackers,
    and resuming in run.directory. Without, the loop is yours: `pack` and `step`. The numbers are
    those of `jaxsp train` with the same config and rows.

    Attributes:
        config: the whole config.
        model: the model, its tokenizer and data sets.
        spec: the step; `training.train_step.compile(trainer.spec)` compiles it for other loops.

    Example:
        trainer = jaxsp.Trainer("config.yaml", ["run.steps=100"])
        trainer.train(on_line=print)
        print(trainer.generate(["Once upon a time"]))
        trainer.save("models/tuned")
    """

    def __init__(
        self,
        config: ConfigFields,
        changes: Sequence[str] = (),
        *,
        loss: TokenLoss | None = None,
        has_weights: bool = False,
    ):
        """Reads the model and the data, and chooses the mesh; compiles nothing.

        Make it before anything else in the process uses JAX's devices if `config` has
        mesh.virtual_cpu_devices, or if the job has several processes, which it joins as the
        commands do (srun, mpirun, torchrun).

        Args:
            config: a config file, or its sections (`jaxsp train --help` documents them). A source
                of data.train or data.eval may have records in memory instead of a path: see
                `data.in_memory.write_sources`. Without data.train, fields about files, evaluations
                and logs are refused, because your own loop would ignore them.
            changes: fields to change, as on the command line: `["run.steps=10"]`.
            loss: a loss per token, `logits_TV, labels_T -> losses_T`; None: cross entropy.
            has_weights: True if each token's loss has a weight: see `pack`.
        Raises: UserError with all problems of the config, the model's files, the data and the mesh.
        """
        self.config = _load_config(config, changes)
        process = distributed.detect_process(os.environ)
        try:
            preflight.choose_platform(self.config, process)
        except RuntimeError as error:  # JAX has started with other devices
            raise UserError(
                f"mesh.virtual_cpu_devices = {self.config.mesh.virtual_cpu_devices}: {error}. "
                "Make the Trainer before anything uses JAX's devices."
            ) from None
        if process.num_processes > 1 and not distributed.is_connected():
            distributed.initialize(process)
            atexit.register(distributed.shutdown)
            sys.excepthook = _abort_job
        cache = self.config.run.compilation_cache
        if self.config.data.train or cache not in ("auto", None):
            jax_platform.enable_cache(cache, num_processes=process.num_processes)
        problems = ProblemCollector()
        trains = bool(self.config.data.train)
        if trains and has_weights:
            problems.append("has_weights = True: data.train has no weights of tokens. Use pack.")
        if has_weights and self.config.objective.needs:
            problems.append(
                f"has_weights = True: objective.type = {self.config.objective.type} weighs tokens "
                "by their advantages. Use has_weights=False."
            )
        if loss is not None and not isinstance(self.config.objective, Sft):
            problems.append(
                f"loss: objective.type = {self.config.objective.type} has a loss of its own. Leave "
                "it out."
            )
        self.model = build.prepare_model(
            self.config, devices=jax.devices(), problems=problems, for_training=trains
        )
        self.spec = dataclasses.replace(self.model.spec, loss=loss, has_weights=has_weights)
        if not trains:
            problems += param_groups.find_problems(self.spec.config.optimizer, self.spec.table)
            problems += find_division_problems(
                self.spec.config,
                dict(self.spec.mesh.shape),
                layout=self.spec.attention.strategy.layout,
            )
            problems.raise_if_any()
        self._weights = model_files.open_weights(
            self.spec, self.model.model_folder, self.model.adapter_folder
        )
        self._state: TrainState | None = None
        self._num_steps = 0
        self._is_interrupted = False
        self._make_programs()
        self._step: Callable[[TrainState, Batch], tuple[TrainState, StepResults]] | None = None

    def _make_programs(self) -> None:
        """Creates the evaluators, and drops the compiled generator and scorer."""
        self._evaluator = Evaluator(self.spec, ())
        self._set_evaluator = Evaluator(
            self.spec, self.model.eval_sets, has_long_ppl=self.config.eval.long_ppl
        )
        self._generator: Generator | None = None
        self._scorer: Evaluator | None = None

    @property
    def state(self) -> TrainState:
        """The model's weights (`state.master`, float32 if they are trained, sharded over the mesh)
        and the optimizer's state: those of the model, or after the last step.

        Raises: UserError if a kernel is wrong on this device, or after an error in `train`.
        """
        if self._is_interrupted:
            raise UserError("train ended with an error: call it again, which resumes the run.")
        if self._state is None:
            selfcheck.check_device(self.spec)
            self._state = train_state.init_state(self.spec, self._weights.make())
        return self._state

    def train(
        self, *, on_line: Callable[[Line], None] | None = None, is_quiet: bool = False
    ) -> list[Line]:
        """Trains as `jaxsp train` does, to the last step; resumes from run.directory.

        Signals and hangs have the effects of the command (configs/guide/failures.md). After SIGTERM
        or Ctrl-C, the run finishes the step and writes a checkpoint, if run.shutdown_grace allows
        it, and SystemExit(0) ends the script: `state` then has the weights of that step.

        Args:
            on_line: called with each line of metrics.jsonl, eval.jsonl and tasks.jsonl when it is
                written, in process 0. An exception ends the run without a checkpoint.
            is_quiet: do not print the banner and the progress.
        Returns: the lines; empty in other processes.
        Raises:
            UserError if the config has no training data, in another thread than the main one, and
            for problems with the run directory; NeedsAttentionError: see `run.trainer.train`.
        """
        if not self.config.data.train:
            raise UserError(
                "train: the config has no data.train. Name its data, for example "
                "{'data': {'train': [{'source': records}]}}, or use pack and step."
            )
        if threading.current_thread() is not threading.main_thread():
            raise UserError("train: must run in the main thread, which receives signals.")
        if distributed.last_read(distributed.STOP_KEY):
            raise UserError("train: a process of this job was asked to stop. Start the job again.")
        self.config.logging.check_installed()
        lines: list[Line] = []

        def add(line: Line) -> None:
            lines.append(line)
            if on_line is not None:
                on_line(line)

        self._state = None  # a device may not hold both
        self._is_interrupted = True
        console = rich.console.Console(quiet=is_quiet or jax.process_index() > 0, markup=False)
        preemption = train_command.make_preemption(self.config)
        with preemption.listen():
            run, self._state = train_command.train_config(
                self.config,
                console,
                preemption,
                loss=self.spec.loss,
                on_line=add,
                needs_state=True,
            )
        self._is_interrupted = False
        self.model = run
        self.spec = run.spec
        self._make_programs()
        if preemption.reason is not None and int(self.state.step) < self.spec.num_steps:
            raise SystemExit(0)
        return lines

    def tokenize(self, records: Iterable[Any]) -> tuple[list[list[int]], list[list[int]]]:
        """Encodes records as training does.

        The tokens that end the turns of chats become stop tokens of `generate` and `save`.

        Args: records: see `data.in_memory.write_sources`.
        Returns:
            tokens and labels of each document, for `pack` and `evaluate`: a label is the token
            itself, or -100 where it has no loss. Records without text have none.
        Raises: UserError for a record that cannot be used.
        """
        whole = self.config.model_dump(mode="json")
        fields = {name: whole[name] for name in ("model", "data", "objective")}
        fields["data"] |= in_memory.write_sources({"train": [{"source": records}]})
        data = config_file.parse(fields, trains=False).data
        (source,) = data.train
        tokenizer = self._load_tokenizer() if source.needs_tokenizer else None
        with at("records"):
            opened = sources.read(source, data=data)
            found = model_files.find_stop_tokens(
                OpenedSources(
                    train={"": source},
                    evals={},
                    records={"": opened},
                    have_text=source.needs_tokenizer,
                ),
                self.config.model_copy(update={"data": data}),
                tokenizer,
            )
            if found.alternatives:
                fields = found.add_to(self.model.hf_config)
                self.model = dataclasses.replace(self.model, stop_tokens=found, hf_config=fields)
            encoded = [*encode_examples(opened, tokenizer=tokenizer, num_records=sys.maxsize)]
        tokens = [example.tokens.tolist() for example in encoded]
        labels = [
            example.tokens.tolist() if example.labels is None else example.labels.tolist()
            for example in encoded
        ]
        return tokens, labels

    def generate(
        self,
        prompts: Iterable[Any],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[str]:
        """Texts of answers, without the tokens that end them. Args: those of `generate_ids`."""
        decode = functools.partial(self._load_tokenizer().decode, skip_special_tokens=True)
        answers = self.generate_ids(
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
        return [str(decode(answer)) for answer in answers]

    def generate_ids(
        self,
        prompts: Iterable[Any],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[list[int]]:
        """Answers prompts with these weights, as `jaxsp generate` does.

        Args:
            prompts: texts, chats (lists of messages) or lists of token ids. A prompt and its answer
                must fit into data.row_tokens.
            temperature, top_p, seed: see `generation.generator.Sampling`. 0: the likeliest tokens.
        Returns: token ids of each answer, with the token that ends it.
        Raises: UserError for prompts that are empty or too long, and for a reward model.
        """
        tokenizer = self._load_tokenizer()
        encoder = TextEncoder(tokenizer)
        vocab_size = self.spec.model.vocab_size
        given = [prompts] if isinstance(prompts, str) else [*prompts]
        ids: list[list[int]] = []
        for number, prompt in enumerate(given):
            if not isinstance(prompt, str | Sequence | np.ndarray):
                raise UserError(
                    f"prompts[{number}]: must be a text, a list of messages or of token ids, not a "
                    f"{type(prompt).__name__}. Put a single prompt into a list."
                )
            items: list[Any] = [prompt] if isinstance(prompt, str) else [*prompt]
            if isinstance(prompt, str):
                ids.append(encoder.encode_prompt(prompt, is_plain=True))
            elif items and isinstance(items[0], Mapping):
                renderer = chat_template.make_prompt_renderer(self.config.data, tokenizer)
                text = renderer(items, prompt=True)[0]
                ids.append(encoder.encode_prompt(text, is_plain=False))
            elif all(isinstance(x, int | np.integer) and 0 <= x < vocab_size for x in items):
                ids.append([*map(int, items)])
            else:
                raise UserError(
                    f"prompts[{number}]: must have ids from 0 to {vocab_size - 1}, the model's "
                    "vocabulary."
                )
        small_files = self.model.small_files
        stop_ids = model_files.list_stop_ids(self.model.hf_config, small_files, tokenizer)
        self._generator = self._generator or Generator(self.spec)
        return self._generator.generate(
            self.state.master,
            ids,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            sampling=Sampling(temperature=temperature, top_p=top_p, seed=seed),
        )

    def evaluate_sets(self) -> list[Line]:
        """Evaluates the eval sets and the retrieval tasks of the config with these weights.

        Returns: lines of eval.jsonl and tasks.jsonl. Raises: UserError if there are none.
        """
        if not self.model.eval_sets and not self.model.task_samples:
            raise UserError(
                "evaluate_sets: the config has no eval sets. Name them in data.eval or eval.tasks, "
                "or use evaluate."
            )
        Reference(
            spec=self.spec,
            source=self.config.model.source,
            adapter_source=self.config.adapter.source,
            run_dir=None,
            is_resume=False,
        ).prepare(
            self.model.eval_sets,
            print_line=print if jax.process_index() == 0 else lambda line: None,
        )
        sets = self._set_evaluator
        tasks = RetrievalEvaluator(sets, self.model.task_samples)
        num_steps = int(self.state.step)
        return [
            line
            for evaluator in (sets, tasks)
            for line in evaluator.run(self.state.master, num_steps=num_steps)
        ]

    def pack(
        self,
        documents: NumberLists,
        *,
        labels: NumberLists | None = None,
        weights: NumberLists | None = None,
        epochs: int | None = None,
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
            epochs: number of times that each document is used, instead of run.steps steps; rows of
                the last batch may be empty. 1 with the objective policy, whose documents are
                records of the format trajectories, with labels of their own.
        Returns: batches; shapes: see `core.batch.Batch`.
        Raises:
            UserError for ids outside the vocabulary, lists of another length than their document's,
            and bad weights.
        """
        if self.config.data.train:
            raise UserError(
                "pack: the config has data.train, which train reads. Use train, or leave "
                "data.train out."
            )
        if (weights is not None) != self.spec.has_weights:
            suggestion = "Make the Trainer with has_weights=True."
            if self.spec.has_weights:
                suggestion = "Pass weights to pack."
            raise UserError(
                f"weights: the Trainer has has_weights={self.spec.has_weights}. {suggestion}"
            )
        needs = self.spec.objective.needs
        data = self._pack("documents", documents, labels, weights, needs=needs)
        if needs and epochs is None:
            epochs = 1
        num_steps = self.spec.num_steps if epochs is None else None
        schedule = data.make_schedule(
            self.spec.config.rows_per_step, num_steps=num_steps, epochs=epochs
        )
        loader = data.make_loader(schedule, self.spec.placement)
        return (batch for batch, _ in loader.batches())

    def logps(self, documents: NumberLists) -> list[np.ndarray]:
        """Log-probability of each token of some documents after those before it, by these weights
        and at the temperature of the objective policy. Compiles at the first call.

        All processes must call it together with the same documents, and get all of them.

        Args: documents: token ids of each document, at least two and at most data.row_tokens.
        Returns: float32 arrays of the documents' lengths; the first token has 0.
        """
        objective = self.spec.objective
        temperature = objective.temperature if isinstance(objective, Policy) else 1.0

        def compute_losses(logits_TV: jax.Array, labels_T: jax.Array) -> jax.Array:
            return -TileTokens(logits_XV=logits_TV / temperature, labels_X=labels_T).logps_X

        if self._scorer is None:
            spec = dataclasses.replace(self._evaluator.for_texts().spec, loss=compute_losses)
            self._scorer = Evaluator(spec, ())
        documents = [*documents]
        for number, length in enumerate(map(np.size, documents)):
            if not 2 <= length <= self.spec.config.row_tokens:
                raise UserError(
                    f"documents[{number}]: has {format_count(length, 'token')}, but must have at "
                    f"least 2 and at most data.row_tokens, {self.spec.config.row_tokens:,}."
                )
        data = self._pack("documents", documents)
        losses = self._scorer.compute_losses(data, self.state.master)
        return [np.append(0, -values[:-1]).astype(np.float32) for values in losses]

    def weights(
        self, *, dtype: Literal["bfloat16", "float32"] | None = None, max_bytes: int = 2 * GIB
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields the weights for an inference engine: tensors by their Hugging Face names, some at
        a time. Adapters are merged into them.

        All processes must read all of it together, and get the same tensors.

        Args:
            dtype: of the tensors; None: model.compute_dtype.
            max_bytes: size of the tensors that are yielded together, except for one that is larger.
        Memory: these tensors on each host and, with several processes, a layer of a weight on each
            device.
        Raises: UserError with several processes and weights in host memory.
        """
        spec = self.spec
        table = spec.table
        arrays = export_command.make_layer_readers(spec.select_own(self.state.master), table=table)
        if spec.config.has_frozen_weights:
            table, arrays = export_command.merge_state(arrays, table=table, model=spec.model)
        parts = self._open_other_parts(None)
        shard: dict[str, np.ndarray] = {}
        num_bytes = 0
        named = list_tensors(arrays, table, dtype or self.config.model.compute_dtype)
        for name, tensor in named.items():
            num_bytes += tensor.num_bytes
            if shard and num_bytes > max_bytes:
                yield shard
                shard = {}
                num_bytes = tensor.num_bytes
            shard[name if parts is None else parts.find_stored_name(name)] = tensor.to_numpy()
        yield shard

    def step(self, batch: Batch) -> StepResults:
        """Trains on a batch. Its metrics are arrays by name; reading one waits for the step.

        Compiles at the first batch, with the memory options that fit.
        Raises: UserError if the step does not fit.
        """
        if self._step is None:
            self._step = fit.compile_fitting_step(self.spec).executable
        self._num_steps += 1
        end = self.spec.num_steps
        if self._num_steps == end + 1 and self.spec.config.optimizer.make_rate(end)(end) == 0:
            distributed.log(
                f"warning: run.steps = {end} steps are done, and the learning rate is now 0. Set "
                "more run.steps, or optimizer.schedule=constant."
            )
        self._state, metrics = self._step(self.state, batch)
        return metrics

    def evaluate(
        self, documents: NumberLists, *, labels: NumberLists | None = None, name: str = "eval"
    ) -> Line:
        """Numbers of a line of eval.jsonl for these weights. Compiles at the first call.

        Args: documents, labels: as in `pack`; each is read once. name: of the eval set.
        """
        if self.spec.objective.has_pairs:
            raise UserError(
                "evaluate: the objective needs pairs. Name them in data.eval, and use "
                "evaluate_sets."
            )
        data = self._pack(name, documents, labels, needs=self.spec.objective.needs)
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
        weights = self.spec.select_own(self._prepare_to_save(directory))
        model_folder = self.model.model_folder
        fields = self.model.hf_config
        parts = self._open_other_parts(source)
        table = self.spec.table
        if self.spec.config.has_frozen_weights:
            table, weights = export_command.merge_state(weights, table=table, model=self.spec.model)
        own_tokenizer = self.config.model.tokenizer is not None
        export_model(
            weights,
            table=table,
            fields=fields,
            tokenizer=self._load_tokenizer() if own_tokenizer else None,
            small_files=None if own_tokenizer or model_folder is None else model_folder.path,
            directory=directory,
            dtype=dtype or self.config.model.compute_dtype,
            other_parts=parts,
        )
        out = pathlib.Path(directory)
        tokenizers.correct_file(out)
        self.model.stop_tokens.add_to_file(out, default=fields["eos_token_id"])
        export_command.write_chat_template(self.model.config, out)

    def save_adapter(self, directory: str | pathlib.Path) -> None:
        """Saves the trained weights of a model with LoRA as a folder that `peft.PeftModel` loads.

        Raises: UserError if the folder has files or cannot be written, without an adapter in the
            config, and with several processes.
        """
        if self.spec.model.lora is None:
            raise UserError("save_adapter: adapter.type is none. Use save.")
        weights = self._prepare_to_save(directory)
        source = self.model.model_folder
        table = self.spec.table
        peft.save_adapter(
            train_state.select_trained(table, self.spec.select_own(weights)),
            table=train_state.select_trained(table, table),
            adapter=self.spec.config.adapter,
            model=self.spec.model,
            base=None if source is None else source.source,
            directory=directory,
            is_multimodal=source is not None and multimodal.is_multimodal(source.path),
            small_files=None if source is None else source.path,
        )
        tokenizers.correct_file(pathlib.Path(directory))
        export_command.write_chat_template(self.model.config, pathlib.Path(directory))

    def _open_other_parts(self, source: str | None) -> Any:
        """Other parts of a multimodal checkpoint, for families that are saved with them. Raises:
        UserError: see `save`."""
        fields = self.model.hf_config
        if multimodal.are_exported(fields):
            whole = self.model.model_folder
            if source is not None:
                whole = folder.find(source, field="source")
            if whole is None:
                raise UserError(
                    f"source: {fields['model_type']} is saved with the other parts of a multimodal "
                    "checkpoint. Name its folder."
                )
            return open_other_parts(whole, self.spec.model)
        if source is not None:
            raise UserError(
                f"source = {source}: {fields['model_type']} is saved without parts of another "
                "folder. Leave it out."
            )
        return None

    def _load_tokenizer(self) -> "transformers.PreTrainedTokenizerBase":
        """The model's tokenizer. Raises: UserError if there is none."""
        if self.model.tokenizer is not None:
            return self.model.tokenizer
        return model_files.load_tokenizer(self.config, self.model.model_folder, None)

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
            lambda leaf: np.asarray(leaf) if device_memory.is_on_host(leaf) else leaf,
            self.state.master,
        )

    def _pack(
        self,
        name: str,
        documents: NumberLists,
        labels: NumberLists | None = None,
        weights: NumberLists | None = None,
        *,
        needs: tuple[str, ...] = (),
    ) -> PackedDataset:
        """Checks documents and plans their rows. Args: name: of the data set. needs: numbers
        of tokens that records have."""
        columns: dict[str, Any] = {}
        problems = ProblemCollector()
        with problems.collect():
            columns = self._make_columns(documents, labels, weights, needs=needs)
        if jax.process_count() > 1:
            with problems.collect():  # all take part, also one with bad documents
                _check_equal(columns)
        problems.raise_if_any()
        with at("documents"):
            packed = Documents(
                [store.from_columns(columns)],
                source_names=["documents"],
                row_tokens=self.spec.config.row_tokens,
                long_documents=self.config.data.long_documents,
                numbers=needs,
                equal_numbers=self.spec.objective.needs_equal,
            )
        # Digests are for comparisons with checkpoints and other processes
        return dataset.pack_documents(name, packed, **self.spec.config.packing, digests=[""])

    def _make_columns(
        self,
        documents: NumberLists,
        labels: NumberLists | None,
        weights: NumberLists | None,
        *,
        needs: tuple[str, ...],
    ) -> dict[str, Any]:
        """Columns of documents as `Documents` reads them. Raises: UserError for bad ones."""
        numbers: dict[str, Any] = {}
        if needs:
            if labels is not None:
                raise UserError("labels: trajectories have a loss_mask of their own. Leave it out.")
            documents, labels, numbers = _read_trajectories(documents, self.config.data)
        vocab_size = self.spec.model.vocab_size

        def is_id(values: np.ndarray) -> np.ndarray:
            return (values >= 0) & (values < vocab_size) & (values == np.floor(values))

        ids = f"an id from 0 to {vocab_size - 1}, the model's vocabulary"
        tokens = _make_column("documents", documents, None, np.int32, is_id, ids)
        lengths = [*map(len, tokens)]
        columns: dict[str, Any] = {"tokens": tokens}
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
        places = [f"documents[{number}]" for number in range(len(lengths))]
        return columns | {"place": places} | numbers


def _check_equal(columns: Mapping[str, Any]) -> None:
    """Checks that all processes have the same documents. Raises: UserError if not."""
    digest = hashlib.sha256()
    for arrays in (values for name, values in columns.items() if name != "place"):
        digest.update(np.array([*map(len, arrays)]).data)
        for array in arrays:
            digest.update(np.ascontiguousarray(array).data)
    own = np.frombuffer(digest.digest(), np.uint32)
    is_other = (multihost_utils.process_allgather(own) != own).any(axis=1)
    if is_other.any():
        raise UserError(
            f"documents: process {is_other.argmax()} has different documents from process "
            f"{jax.process_index()}. Pass the same list in each process."
        )


def _read_trajectories(
    records: Iterable[Any], data: DataConfig
) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, Any]]:
    """Token ids, labels and numbers of records of the format trajectories, with their places.
    Raises: UserError for bad ones, unless data.on_bad_record leaves them out."""
    source = Trajectories(source="memory")
    entries = []
    places = []
    bad = []
    for number, record in enumerate(records):
        try:
            entries.append(source.convert(record))
            places.append(f"documents[{number}]")
        except UserError as error:
            bad.append(f"documents[{number}]: {error}")
    sources.check_bad_records(bad, data=data)
    if bad:
        count = format_count(len(bad), "bad record")
        distributed.log(f"{count} left out; the first: {bad[0]}")
    column = lambda name: [entry[name] for entry in entries]
    numbers = {name: column(name) for name in source.numbers}
    return column("input_ids"), column("labels"), numbers | {"place": places}


def plan(
    config: ConfigFields,
    changes: Sequence[str] = (),
    *,
    device: str = "h100-80gb",
    num_devices: int | None = None,
    document_tokens: int | None = None,
) -> Plan:
    """Plans a config's step on absent GPUs, as `jaxsp plan` does. Needs the extra jaxsp[plan].

    Args:
        config, changes: see `Trainer`; data.train and run.directory may be missing.
        device: type of the GPUs: see `jaxsp plan --help`.
        num_devices: number of GPUs; None: the product of the mesh, or a node of 8.
        document_tokens: length of the documents that fill a row, for the time; None: the row.
    Raises: UserError for what training would refuse.
    """
    fields = _read_sections(config)
    data = fields.get("data", {})
    for group in ("train", "eval"):
        if isinstance(data.get(group), list | tuple):  # records in memory are not read
            data[group] = [
                {"format": "text", "name": f"{group}-{number}"} | dict(each) | {"source": "memory"}
                if isinstance(each, Mapping) and not isinstance(each.get("source", ""), str)
                else each
                for number, each in enumerate(data[group])
            ]
    loaded = config_file.parse(fields, changes, unneeded=("run.directory", "data.train"))
    sizes = published.read_sizes(
        loaded.model,
        row_tokens=loaded.data.row_tokens,
        teacher=find_teacher(loaded.objective),
    )
    adapter = peft.resolve(loaded.adapter, sizes.model)
    cluster = absent.make_cluster(device, plan_command.count_devices(loaded, num_devices))
    step = loaded.model_copy(update={"adapter": adapter.config}).step
    return planner.plan_step(
        planner.resolve_config(step, model=adapter.model, cluster=cluster),
        model=adapter.model,
        cluster=cluster,
        document_tokens=document_tokens,
    )


def _read_sections(config: ConfigFields) -> dict[str, Any]:
    """Sections of a config, which may be a file. Raises: UserError."""
    if not isinstance(config, Mapping):
        config = config_file.read(config)
    for name, group in config.items():
        if not isinstance(group, Mapping):
            raise UserError(
                f"config: {name} = {group!r}: must be a group of fields, "
                "for example {'run': {'steps': 10}}."
            )
    return {name: dict(group) for name, group in config.items()}


def _load_config(config: ConfigFields, changes: Sequence[str]) -> Config:
    """Loads a config. Raises: UserError, also for fields that a loop of the user's would ignore."""
    fields = _read_sections(config)
    if "data" in fields:
        fields["data"] = in_memory.write_sources(fields["data"])
    given = {f"{group}.{name}": fields[group][name] for group in fields for name in fields[group]}
    given |= {name: value for name, _, value in (change.partition("=") for change in changes)}
    if any(value for name, value in given.items() if name.startswith("data.train")):
        return config_file.parse(fields, changes)
    problems = ProblemCollector()
    for name, value in given.items():
        instead = _INSTEAD.get(name) or _INSTEAD.get(name.partition(".")[0])
        is_used = name == "objective.type" and value in _OWN_LOOP_OBJECTIVES
        if instead and value and not is_used:
            text = f"{name} = {format_value(value)}"
            problems.append(f"{text}: has no effect without data.train. {instead}")
    problems.raise_if_any()
    return config_file.parse(fields, changes, unneeded=("run.directory", "data.train"))


def _abort_job(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """Prints an exception, and ends the job: the other processes would wait for this one."""
    sys.__excepthook__(kind, error, trace)
    distributed.abort_job(ExitCode.INTERNAL_ERROR)


_OWN_LOOP_OBJECTIVES = [own.model_fields["type"].default for own in OBJECTIVES if not own.has_pairs]
"""Objectives of own loops over batches."""

_INSTEAD = {
    "run.epochs": "Set run.steps.",
    **dict.fromkeys(
        ("run.directory", "run.staging", "run.save_every", "run.resume", "checkpoint"),
        "Save the weights in your own loop, with Trainer.save.",
    ),
    "data.eval_fraction": "Pass documents to Trainer.evaluate.",
    **dict.fromkeys(
        ("run.eval_at_start", "run.eval_every", "run.generate_samples"),
        "Evaluate in your own loop.",
    ),
    **dict.fromkeys(("run.early_stopping_patience", "run.stop_after"), "End your own loop early."),
    **dict.fromkeys(("run.log_every", "logging"), "Log the metrics of a step in your own loop."),
    "objective.predictions": "Leave it out: the teacher runs in each step.",
    "objective.type": "Preferences need data.train, and Trainer.train.",
}
"""Alternatives to fields, and to whole sections, that have no effect without training data."""


def _make_column(
    name: str,
    lists: NumberLists,
    lengths: list[int] | None,
    dtype: type[np.number],
    is_valid: Callable[[np.ndarray], np.ndarray],
    rule: str,
) -> list[np.ndarray]:
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
    return [array.astype(dtype) for array in arrays]
