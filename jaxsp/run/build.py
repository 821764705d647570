"""What a config asks for, checked and read, before anything is computed or written."""

import dataclasses
import functools
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxsp import attention
from jaxsp.attention import AttentionChoice
from jaxsp.checkpoint import reader
from jaxsp.config.schema import Config, SourceConfig
from jaxsp.core import paths
from jaxsp.core.errors import ProblemCollector, UserError
from jaxsp.data.chat import chat
from jaxsp.data.ingest import sources
from jaxsp.data.packing import dataset, held_out
from jaxsp.data.packing.dataset import PackedDataset
from jaxsp.data.packing.row_reader import Documents
from jaxsp.data.tokenization import tokenize as text
from jaxsp.data.tokenization import tokenizers
from jaxsp.hf import families, folder, weights
from jaxsp.hf.folder import ModelFolder
from jaxsp.model import decoder, layers
from jaxsp.run import resume
from jaxsp.runtime import device_mesh
from jaxsp.training import memory_options, sharding
from jaxsp.training.inputs import RunInputs, StartPoint
from jaxsp.training.train_step import Program

if TYPE_CHECKING:
    import transformers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """A config's model, mesh and data, read."""

    program: Program
    hf_config: dict[str, Any]
    """Of the model's config.json."""
    model_folder: ModelFolder | None
    """Of model.source."""
    tokenizer: "transformers.PreTrainedTokenizerBase | None"
    attention_choice: AttentionChoice
    train: PackedDataset | None
    """None where it was not asked for."""
    evals: tuple[PackedDataset, ...]


def build_training(
    config: Config, *, devices: list[jax.Device], skip: Sequence[pathlib.Path] = ()
) -> tuple[Program, RunInputs]:
    """Program and material of a run; nothing is written but caches.

    Args:   damaged: checkpoints not to go on from.
    Raises: Damaged for the checkpoint to go on from; else UserError with all problems at once, those of the data's contents
            only when the rest is right.
    """
    problems = ProblemCollector()
    found = meta = fields = kept = None
    with problems.collect():
        found = resume.find_checkpoint(config.run, skip=skip)
    resume.check_same_checkpoint(config.run, found, problems)
    if found is not None:
        meta = reader.raise_on_all_processes(found, functools.partial(reader.read_meta, found))
    if (
        found is not None
        and meta is not None
        and meta.config["model"] == config.model.model_dump(mode="json")
    ):
        # what the run keeps of its model is enough: where it came from may be gone, or out of reach
        kept = resume.find_model_dir(found)
        fields = None if kept is None else meta.model
    asked = resolve_config(
        config, devices=devices, problems=problems, hf_config=fields, run_model_dir=kept
    )
    data, config = asked.train, asked.program.config
    assert data is not None, "it was asked for"
    start = StartPoint()
    if found is not None and meta is not None:
        start = resume.make_start_point(meta, found, config, model=asked.program.model, data=data)
    run = config.run
    if run.steps is not None:
        schedule = data.make_schedule(
            config, consumed=start.rows_consumed, num_steps=max(run.steps - start.step, 0)
        )
    else:
        schedule = data.make_schedule(config, consumed=start.rows_consumed, epochs=run.epochs)
    num_steps = start.step + len(schedule)
    profiled = config.logging.profile_steps
    if profiled is not None and profiled[1] > num_steps:
        raise UserError(
            f"logging.profile_steps = {list(profiled)}: the run has {num_steps} steps. Use steps of these, or null."
        )
    program = dataclasses.replace(asked.program, num_steps=num_steps)
    seed, table, mesh = config.run.seed, program.table, program.mesh
    make = functools.partial(
        sharding.random_weights,
        table,
        seed=seed,
        mesh=mesh,
        is_offloaded=program.has_offloaded_state,
    )
    origin = f"random weights, seed {seed}"
    if found is not None:
        origin = f"step {start.step} of {found}"
    elif asked.model_folder is not None:
        make = make_weight_loader(program, asked.model_folder)
        origin = f"weights of {asked.model_folder.source}"
    if found is None and (pathlib.Path(config.run.directory) / "config.yaml").is_file():
        origin += "; the run that is there has no checkpoint, and begins anew"
    material = RunInputs(
        train_set=data,
        eval_sets=asked.evals,
        start=start,
        schedule=schedule,
        hf_config=asked.hf_config,
        weights_origin=origin,
        attention_choice=asked.attention_choice,
        make_weights=make,
        write_model=functools.partial(_save_model_files, asked, kept),
    )
    return program, material


def make_weight_loader(program: Program, source: ModelFolder) -> functools.partial[layers.Weights]:
    """Function that loads a Hugging Face folder's weights, float32, onto the program's mesh.

    The files are checked now, and downloaded first if they are on the hub.
    Raises: UserError for tensors and files that are missing, damaged or not the model's.
    """
    read = weights.open_folder(source, program.table).read
    return functools.partial(
        sharding.load_weights,
        program.table,
        program.mesh,
        read,
        is_offloaded=program.has_offloaded_state,
    )


def resolve_config(
    config: Config,
    *,
    devices: list[jax.Device],
    problems: ProblemCollector,
    for_training: bool = True,
    hf_config: dict[str, Any] | None = None,
    run_model_dir: pathlib.Path | None = None,
) -> ResolvedConfig:
    """The model, the mesh and the documents of a config.

    Args:
        problems: those that were found before.
        with_training: reads data.train too, and asks for steps that divide into turns.
        fields: of the model's config.json, where a checkpoint has them; model.source is not looked at then.
        kept: where a run keeps its tokenizer; asked before model.tokenizer and model.source.
    Raises: UserError with all problems at once; those of the data's contents only when the rest is right.
    """
    model = sizes = tokenizer = source = kernel = None
    with problems.collect():
        config = _inline_chat_template(config)
    with problems.collect():
        if hf_config is None and config.model.source is not None:
            source = folder.find(config.model.source)
        hf_config = hf_config or (source.config_fields if source else config.model.config)
        assert hf_config is not None, "core.config asks for one of them"
        model = families.parse_model_config(
            hf_config, field=str(source.path / "config.json") if source else "model.config"
        )
    with problems.collect():
        sizes = device_mesh.resolve_axis_sizes(config.mesh, len(devices))
    # documents may be held out of the training sources
    needs_train = for_training or config.data.eval_fraction is not None
    asked = [("data.train", config.data.train)] if needs_train else []
    asked += [("data.eval", config.data.eval)]
    named = [
        (f"{group}.{number}", one) for group, all_of in asked for number, one in enumerate(all_of)
    ]
    not_found = config.model.source is not None and hf_config is None
    if config.model.tokenizer is not None or (
        not not_found and any(one.format != "tokens" for _, one in named)
    ):
        with problems.collect():
            tokenizer = load_tokenizer(config, source, run_model_dir)
            if model is not None and len(tokenizer) > model.vocab_size:
                way_out = f"Set model.config.vocab_size={len(tokenizer)}, or more."
                if config.model.source is not None:
                    way_out = "Use the model's own tokenizer: model.tokenizer=null."
                raise UserError(
                    f"model.tokenizer: makes {len(tokenizer):,} different tokens, and the model's vocab_size is "
                    f"{model.vocab_size:,}. {way_out}"
                )
    if source is not None and model is not None and not source.is_on_hub:
        with problems.collect():
            weights.open_folder(source, decoder.param_table(model))  # before anything is tokenised
    records = {}
    for field, one in named:
        with problems.collect():
            records[field] = sources.read(one, data=config.data, field=f"{field}.source")
    with problems.collect():
        for field, group in asked:
            _check_unique_names(field, group)
    with problems.collect():
        sources.check_no_duplicates(
            {
                field: one
                for field, one in named
                if field in records and field.startswith("data.train.")
            }
        )
    if model is not None:
        with problems.collect():
            heads = {
                "num_heads": model.num_heads,
                "num_kv_heads": model.num_kv_heads,
                "head_dim": model.head_dim,
            }
            # one kernel for all lengths of rows: where cuDNN serves but some, none of them
            of_lengths = [
                config.with_row_tokens(length) for length in reversed(config.data.row_lengths)
            ]
            kernels = [
                attention.choose(one, devices=devices, window=model.sliding_window, **heads)
                for one in of_lengths
            ]
            kernel = next((one for one in kernels if one.kernel != "cudnn"), kernels[0])
    problems += memory_options.find_problems(config, platform=devices[0].platform)
    if sizes is not None:
        degree = kernel.strategy.outer_degree if kernel is not None else None
        problems += device_mesh.find_division_problems(
            config, sizes, degree=degree, with_training=for_training
        )
    problems.raise_if_any()
    assert model is not None
    assert sizes is not None
    assert kernel is not None
    if (cache := config.logging.compilation_cache) is not None:
        cache_path = paths.expand_user(cache, field="logging.compilation_cache")
        jax.config.update("jax_compilation_cache_dir", str(cache_path))

    tokenize = functools.partial(
        text.tokenize_dataset, data=config.data, tokenizer=tokenizer, vocab_size=model.vocab_size
    )
    tokenized = {}
    for field, one in named:
        with problems.collect():
            tokenized[field] = tokenize(records[field], source=one, field=f"{field}.source")
    problems.raise_if_any()

    longest_only = config.with_row_tokens(config.data.max_row_tokens)
    members = {field: one for field, one in named if field.startswith("data.train")}
    chosen = None
    if config.data.eval_fraction is not None:
        chosen = held_out.select_records(
            [tokenized[member].dataset for member in members],
            source_names=[one.name or one.source for one in members.values()],
            fraction=config.data.eval_fraction,
            seed=config.run.seed,
        )

    def data_set(
        name: str,
        members: Mapping[str, SourceConfig],
        field: str,
        packed: Config,
        chosen: Sequence[np.ndarray] | None = None,
        *,
        use_held_out: bool = False,
    ) -> PackedDataset:
        documents = Documents(
            [tokenized[member].dataset for member in members],
            source_names=[one.name or one.source for one in members.values()],
            held_out=chosen,
            use_held_out=use_held_out,
            longest_row=config.data.max_row_tokens,
            long_documents=config.data.long_documents,
            field=field,
        )
        weights = [
            one.weight for one in members.values() if one.weight is not None and not use_held_out
        ]
        weights = weights if len(weights) > 1 else []  # all tokens are of the only one in any case
        digests = [tokenized[member].digest for member in members]
        if chosen is not None:
            digests = [
                held_out.digest_split(digest, mask, is_held_out=use_held_out)
                for digest, mask in zip(digests, chosen, strict=True)
            ]
        return dataset.pack_documents(
            name, documents, packed, digests=digests, source_weights=weights or None
        )

    evals = [
        data_set(one.name or one.source, {field: one}, f"{field}.source", longest_only)
        for field, one in named
        if field.startswith("data.eval")
    ]
    if chosen is not None:
        evals.append(
            data_set(
                held_out.EVAL_SET_NAME,
                members,
                "data.eval_fraction",
                longest_only,
                chosen,
                use_held_out=True,
            )
        )
    attend = attention.make_chosen_attend(kernel)
    program = Program(
        config=config,
        model=model,
        mesh=device_mesh.make_mesh(sizes, devices),
        attend=attend,
        num_steps=config.run.steps or 1,
    )
    return ResolvedConfig(
        program=program,
        hf_config=hf_config | families.choose_token_ids(hf_config, tokenizer),
        model_folder=source,
        tokenizer=tokenizer,
        attention_choice=kernel,
        train=data_set("train", members, "data.train", config, chosen) if for_training else None,
        evals=tuple(evals),
    )


def load_tokenizer(
    config: Config, source: ModelFolder | None, kept: pathlib.Path | None
) -> "transformers.PreTrainedTokenizerBase":
    """The tokenizer that a config asks for: the one a run keeps, else the one that is named, else that of model.source.

    Raises: UserError where there is none.
    """
    named = config.model.tokenizer
    if (
        named != tokenizers.BYTE_TOKENIZER
        and kept is not None
        and (kept / "tokenizer_config.json").is_file()
    ):
        return tokenizers.load(str(kept))
    if named is None and source is None:
        raise UserError(
            "model.tokenizer = null: text needs one. Use bytes, or a folder or hub name."
        )
    if named is not None:
        return tokenizers.load(named)
    assert source is not None
    return tokenizers.load(
        str(source.path), error_prefix=f"model.source = {source.source}: its tokenizer"
    )


def _save_model_files(
    asked: ResolvedConfig, kept: pathlib.Path | None, directory: pathlib.Path
) -> None:
    directory.mkdir(exist_ok=True)
    if kept is not None:
        if not kept.samefile(directory):
            shutil.copytree(kept, directory, dirs_exist_ok=True)
    elif asked.model_folder is not None and asked.program.config.model.tokenizer is None:
        folder.copy_small_files(asked.model_folder.path, directory)
    elif asked.tokenizer is not None:
        asked.tokenizer.save_pretrained(directory)


def _inline_chat_template(config: Config) -> Config:
    """The config with the chat template itself in place of its file, so that a run has all it needs. Raises: UserError."""
    if config.data.chat_template is None:
        return config
    data = config.data.model_copy(
        update={"chat_template": chat.resolve_template(config.data.chat_template)}
    )
    return config.model_copy(update={"data": data})


def _check_unique_names(field: str, given: Sequence[SourceConfig]) -> None:
    names = [one.name or one.source for one in given]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise UserError(
                f"{field}.{number}.name = {name}: is the name of another one. Give each its own: "
                f"{field}.{number}.name={name}-{number}."
            )
