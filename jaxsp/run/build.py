"""A run: made of a config, with everything checked and read before anything is computed."""

import dataclasses
import pathlib
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxsp.blocks.config import ModelConfig
from jaxsp.checkpoint import run_paths
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.core.units import format_count
from jaxsp.data import tokenizers
from jaxsp.data.dataset import PackedDataset
from jaxsp.data.packing import RowSchedule
from jaxsp.evaluation import evaluator, long_ppl
from jaxsp.evaluation.retrieval import Samples
from jaxsp.hf import config_fields, folder
from jaxsp.hf.folder import ModelFolder
from jaxsp.model import decoder
from jaxsp.objectives.distill import Distill
from jaxsp.optimizers import param_groups
from jaxsp.planning import candidates
from jaxsp.run import data_sets, model_files, references, resume, selfcheck
from jaxsp.run.config_file import Config
from jaxsp.run.model_files import InitialWeights, StopTokens
from jaxsp.run.references import Reference
from jaxsp.run.resume import StartPoint
from jaxsp.system import device_mesh
from jaxsp.tasks.task import Sample
from jaxsp.training.specs import StepSpec, find_division_problems, make_spec
from jaxsp.training.step_config import StepConfig

if TYPE_CHECKING:
    import transformers


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedModel:
    """A model on a mesh, with its tokenizer and data sets; its weights are not read."""

    config: Config
    """The whole config; mesh.seq and batch.rows_per_microbatch are numbers."""
    spec: StepSpec
    hf_config: dict[str, Any]
    """Fields of the model's config.json."""
    model_folder: ModelFolder | None
    """Folder of model.source; None if the config or a checkpoint describes the model."""
    adapter_folder: ModelFolder | None
    model_dir: pathlib.Path | None
    """A run's own copy of the model's small files."""
    small_files: pathlib.Path | None
    """Folder with the model's small files (config, tokenizer): model_dir, or that of model_folder.
    """
    tokenizer: "transformers.PreTrainedTokenizerBase | None"
    """None if nothing needs one."""
    stop_tokens: StopTokens
    train_set: PackedDataset | None
    """None unless it was prepared for training."""
    eval_sets: tuple[PackedDataset, ...]
    task_samples: Samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(PreparedModel):
    """A run that is ready to start."""

    train_set: PackedDataset
    schedule: RowSchedule
    """Rows of the remaining steps."""
    start: StartPoint
    weights: InitialWeights
    """Weights of step 0, or only the frozen ones of a resumed run."""
    stop_ids: Sequence[int]
    """Tokens at which generation stops; none if the run neither generates nor has chats."""
    directory: pathlib.Path
    """The run directory, or the local copy of a URL's."""
    is_resume: bool
    """True if the run resumes from a checkpoint of its own."""
    automatic_fields: frozenset[str]
    """Fields that were `auto` in the config: mesh.seq, batch.rows_per_microbatch, or both."""
    ranking_eval_set: dict[str, str] | None
    """Name and digest of the eval set whose loss ranks checkpoints; None without eval sets."""

    @property
    def reference(self) -> Reference:
        """Reference model of the objective."""
        return Reference(
            spec=self.spec,
            source=self.config.model.source,
            adapter_source=self.config.adapter.source,
            run_dir=self.directory,
            is_resume=self.is_resume,
        )

    def write_model(self, directory: pathlib.Path) -> None:
        """Writes the model's small files: those of the run that is resumed, else of model.source;
        with model.tokenizer, or without a source, only the tokenizer."""
        directory.mkdir(exist_ok=True)
        if self.model_dir is not None:
            if not self.model_dir.samefile(directory):
                shutil.copytree(self.model_dir, directory, dirs_exist_ok=True)
        elif self.model_folder is not None and self.config.model.tokenizer is None:
            folder.copy_small_files(self.model_folder.path, directory)
            tokenizers.correct_file(directory)
        elif self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory)
        self.stop_tokens.add_to_file(directory, default=self.hf_config["eos_token_id"])


def build_training(
    config: Config, *, devices: list[jax.Device], skip: Sequence[pathlib.Path] = ()
) -> Run:
    """Builds a run; writes nothing except caches.

    Args: skip: damaged checkpoints, which the run must not resume from.
    Raises:
        DamagedCheckpointError: the checkpoint to resume from is damaged.
        UserError: all problems at once; those of the data's contents only if the rest is right.
    """
    problems = ProblemCollector()
    checkpoint = resume.open_checkpoint(config.run, skip, problems)
    hf_config = None
    model_dir = None
    if checkpoint is not None:
        saved = checkpoint.config
        kernel = saved.model.delta_net_kernel
        if config.model.delta_net_kernel == "auto" and kernel == "xla":
            config = config.with_fields(model={"delta_net_kernel": "xla"})
        # The run's own copy is enough: the model's source may be gone or out of reach
        if saved.model == config.model.model_copy(update={"delta_net_kernel": kernel}):
            model_dir = resume.find_model_dir(checkpoint.path)
        hf_config = checkpoint.meta.model if model_dir else None
        given = config.adapter.model_dump(exclude_unset=True)
        if saved.adapter.model_copy(update=given) == saved.adapter:
            config = config.model_copy(update={"adapter": saved.adapter})
    # Raises the problems collected so far together with its own
    prepared = prepare_model(
        config, devices=devices, problems=problems, hf_config=hf_config, model_dir=model_dir
    )
    choices = {
        "mesh.seq": config.mesh.seq,
        "batch.rows_per_microbatch": config.batch.rows_per_microbatch,
        selfcheck.DELTA_NET_FIELD: config.model.delta_net_kernel,
    }
    config = prepared.config
    train_set = prepared.train_set
    assert train_set is not None, "prepared for training"
    start = StartPoint()
    if checkpoint is not None:
        start = resume.make_start_point(
            checkpoint, config, model=prepared.spec.model, data=train_set
        )
    schedule = resume.make_schedule(config, start, train_set)
    num_steps = start.step + len(schedule)
    profiled = config.logging.profile_steps
    if profiled is not None and profiled[1] > num_steps:
        raise UserError(
            f"logging.profile_steps = {list(profiled)}: the run has only {num_steps} steps. "
            "Use earlier ones, or null to profile none."
        )
    spec = dataclasses.replace(prepared.spec, num_steps=num_steps)
    # A checkpoint has all weights except the frozen ones, which come from the model
    needs_model = checkpoint is None or config.step.has_frozen_weights
    stop_ids: Sequence[int] = ()
    if config.run.generate_samples or prepared.stop_tokens.alternatives:
        stop_ids = model_files.list_stop_ids(
            prepared.hf_config, prepared.small_files, prepared.tokenizer
        )
    values = vars(prepared) | {"spec": spec, "train_set": train_set}
    directory = config.run.local_dir
    own = (directory / run_paths.CHECKPOINTS_DIR).resolve()
    return Run(
        **values,
        schedule=schedule,
        start=start,
        weights=model_files.open_weights(
            spec,
            prepared.model_folder if needs_model else None,
            prepared.adapter_folder if checkpoint is None else None,
        ),
        stop_ids=stop_ids,
        directory=directory,
        is_resume=start.checkpoint is not None and start.checkpoint.parent.resolve() == own,
        automatic_fields=frozenset(field for field, value in choices.items() if value == "auto"),
        ranking_eval_set=next(
            (
                evaluator.identify_eval_set(data)
                for data in prepared.eval_sets
                if config.checkpoint.best_eval in (None, data.name)
            ),
            None,
        ),
    )


def prepare_model(
    config: Config,
    *,
    devices: list[jax.Device],
    problems: ProblemCollector,
    for_training: bool = True,
    hf_config: dict[str, Any] | None = None,
    model_dir: pathlib.Path | None = None,
) -> PreparedModel:
    """Reads the model and the data sets of a config, and chooses the mesh.

    Args:
        for_training: also read data.train, and require steps that divide into microbatches.
        hf_config: fields of the model's config.json from a checkpoint, instead of model.source.
        model_dir: the run's copy of the model's small files; its tokenizer is used first.
    Raises: UserError as `build_training`, with `problems` found before.
    """
    with problems.collect():
        config = data_sets.inline_chat_template(config)
    with problems.collect():
        if config.eval.long_ppl:
            long_ppl.check(config.data.row_tokens)
    source = model = None
    with problems.collect():
        source, hf_config, adapter = model_files.read_model(config, hf_config)
        model = adapter.model
        is_automatic = config.model.delta_net_kernel == "auto"
        if model.delta_net is not None and is_automatic and not for_training:
            config = config.with_fields(model={"delta_net_kernel": "xla"})  # nothing is checked
    opened = data_sets.open_sources(config, for_training=for_training, problems=problems)
    tokenizer = None
    with problems.collect():
        tokenizer = model_files.load_checked_tokenizer(
            config, source, model, model_dir, has_text=opened.have_text
        )
        if model is not None and model.teacher is not None:
            model_files.check_teacher_tokens(config, tokenizer)
    spec = _resolve_step(config.step, model, devices, problems, for_training=for_training)
    problems.raise_if_any()
    # what is missing has reported a problem
    assert hf_config is not None
    assert spec is not None
    if (delta_net := spec.model.delta_net) is not None:
        config = config.with_fields(model={"delta_net_kernel": delta_net.kernel})
    config = config.with_fields(
        mesh={"seq": spec.config.mesh.seq},
        batch={"rows_per_microbatch": spec.config.rows_per_microbatch},
    ).model_copy(update={"adapter": adapter.config})
    models = filter(None, (spec.model, spec.model.teacher))
    vocab_size = min(model.vocab_size for model in models)
    train, evals = data_sets.make_data_sets(
        opened, config, tokenizer, vocab_size=vocab_size, for_training=for_training
    )
    common_vocab_size = spec.common_vocab_size
    objective = config.objective
    if isinstance(objective, Distill) and objective.predictions is not None:
        used = [*filter(None, (train,)), *evals]
        model_ids = spec.model.vocab_size
        common_vocab_size = references.attach(objective, used, model_ids=model_ids)
    rows_per_step = config.batch.rows_per_step
    num_split_pairs = 0 if train is None else train.num_split_pairs
    if num_split_pairs and rows_per_step % 2:
        raise UserError(
            f"batch.rows_per_step = {rows_per_step}: must be even, because "
            f"{format_count(num_split_pairs, 'pair')} of documents "
            f"{'is' if num_split_pairs == 1 else 'are'} in two rows each, which must be in "
            f"one step. Use {rows_per_step + 1}, or a data.row_tokens that holds both documents."
        )
    hf_config = config_fields.add_token_ids(hf_config, tokenizer)
    stops = StopTokens()
    if any(source.is_chat for source in opened.train.values()):
        stops = model_files.find_stop_tokens(opened, config, tokenizer)
        hf_config = stops.add_to(hf_config)
    return PreparedModel(
        config=config,
        spec=dataclasses.replace(
            spec,
            config=config.step,
            num_steps=config.run.steps or 1,
            has_split_pairs=num_split_pairs > 0,
            common_vocab_size=common_vocab_size,
        ),
        hf_config=hf_config,
        model_folder=source,
        adapter_folder=adapter.folder,
        model_dir=model_dir,
        small_files=source.path if source is not None and model_dir is None else model_dir,
        tokenizer=tokenizer,
        stop_tokens=stops,
        train_set=train,
        eval_sets=evals,
        task_samples=_make_task_samples(config, tokenizer) if config.eval.tasks else {},
    )


def _resolve_step(
    config: StepConfig,
    model: ModelConfig | None,
    devices: list[jax.Device],
    problems: ProblemCollector,
    *,
    for_training: bool,
) -> StepSpec | None:
    """Chooses the mesh, the rows of a microbatch and the attention; None if there are problems."""
    spec = None
    if model is not None:
        with problems.collect():
            config = candidates.resolve(config, model, devices=devices, with_training=for_training)
    if config.mesh.seq == "auto":
        return None
    config = config.with_one_row_for_auto()  # if the model is unknown
    if model is not None:
        with problems.collect():
            spec = make_spec(config, model, devices=devices)
    problems += candidates.find_problems(config, platform=devices[0].platform, model=model)
    with problems.collect():
        problems += find_division_problems(
            config,
            device_mesh.resolve_axis_sizes(config.mesh, len(devices)),
            layout=None if spec is None else spec.attention.strategy.layout,
            with_training=for_training,
        )
    if for_training and model is not None:
        problems += param_groups.find_problems(config.optimizer, decoder.param_table(model))
    return spec


def _make_task_samples(config: Config, tokenizer: Any) -> Samples:
    """Samples of `eval.tasks`, by task; prompts begin as every text of the tokenizer."""
    if config.objective.type == "reward":
        raise UserError(
            "eval.tasks: a reward model predicts no tokens, so it has no answers. Leave the tasks "
            "out."
        )
    first_ids = np.array(tokenizers.surrounding_tokens(tokenizer)[0], np.int32)
    tokenize = lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    made: dict[str, list[Sample]] = {}
    problems = ProblemCollector()
    for number, task in enumerate(config.eval.tasks):
        field = f"eval.tasks.{number}.lengths"
        for length in task.lengths:
            with problems.collect():
                samples = task.make_samples(
                    tokenize, length=length, reserved_tokens=len(first_ids), field=field
                )
                made.setdefault(task.task, []).extend(
                    dataclasses.replace(sample, prompt_ids=np.append(first_ids, sample.prompt_ids))
                    for sample in samples
                )
    problems.raise_if_any()
    return made
