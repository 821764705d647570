"""What a config asks for, checked and read, before anything is computed or written."""

import dataclasses
import functools
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxsp import attention, cli
from jaxsp.core import axes, config, errors
from jaxsp.core import mesh as meshes
from jaxsp.data import packing, rows, sources, text
from jaxsp.hf import families, folder, weights
from jaxsp.model import decoder
from jaxsp.training import checkpoint, sharding
from jaxsp.training.material import DataSet, Material, Start
from jaxsp.training.step import Program

if TYPE_CHECKING:
    import transformers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A config's model, mesh and data, read."""

    program: Program
    fields: dict[str, Any]
    """Of the model's config.json."""
    folder: folder.Folder | None
    """Of model.source."""
    tokenizer: "transformers.PreTrainedTokenizerBase | None"
    choice: attention.Choice
    train: DataSet | None
    """None where it was not asked for."""
    evals: tuple[DataSet, ...]


def training(settings: config.Config, *, devices: list[jax.Device]) -> tuple[Program, Material]:
    """Program and material of a run; nothing is written but caches.

    Raises: UserError with all problems at once; those of the data's contents only when the rest is right.
    """
    problems = cli.Problems()
    found = meta = fields = kept = None
    with problems.collect():
        found = resumed(settings.run)
        meta = None if found is None else checkpoint.read_meta(found)
    if found is not None and meta is not None and meta.config["model"] == settings.model.model_dump(mode="json"):
        # what the run keeps of its model is enough: where it came from may be gone, or out of reach
        kept = kept_model(found)
        fields = None if kept is None else meta.model
    asked = read(settings, devices=devices, problems=problems, fields=fields, kept=kept)
    data = asked.train
    assert data is not None, "it was asked for"
    start = Start()
    if found is not None and meta is not None:
        _check_same(meta, asked, data, found)
        start = Start(
            checkpoint=found,
            step=meta.step,
            rows=meta.rows,
            num_tokens=meta.num_tokens_total,
            changed=_changed(meta, settings),
        )
    num_steps, total_rows = length(settings, data.epochs, start)
    profiled = settings.logging.profile_steps
    if profiled is not None and profiled[1] > num_steps:
        raise errors.UserError(
            f"logging.profile_steps = {list(profiled)}: the run has {num_steps} steps. Use steps of these, or null."
        )
    program = dataclasses.replace(asked.program, num_steps=num_steps)
    seed, table, mesh = settings.run.seed, program.table, program.mesh
    make = functools.partial(sharding.random_weights, table, seed=seed, mesh=mesh)
    origin = f"random weights, seed {seed}"
    if found is not None:
        origin = f"step {start.step} of {found}"
    elif asked.folder is not None:
        make = functools.partial(sharding.load, table, mesh, weights.open_folder(asked.folder, table).read)
        origin = f"weights of {asked.folder.source}"
    if found is None and (pathlib.Path(settings.run.directory) / "config.yaml").is_file():
        origin += "; the run that is there has no checkpoint, and begins anew"
    material = Material(
        train=data,
        evals=asked.evals,
        start=start,
        total_rows=total_rows,
        fields=asked.fields,
        origin=origin,
        choice=asked.choice,
        weights=make,
        keep_model=functools.partial(_keep_model, asked, kept),
    )
    return program, material


def read(
    settings: config.Config,
    *,
    devices: list[jax.Device],
    problems: cli.Problems,
    with_training: bool = True,
    fields: dict[str, Any] | None = None,
    kept: pathlib.Path | None = None,
) -> Asked:
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
        if fields is None and settings.model.source is not None:
            source = folder.find(settings.model.source)
        fields = fields or (source.fields if source else settings.model.config)
        assert fields is not None, "core.config asks for one of them"
        model = families.model_config(fields, field=str(source.path / "config.json") if source else "model.config")
    with problems.collect():
        sizes = meshes.shape(settings.mesh, len(devices))
    asked = [("data.train", settings.data.train)] if with_training else []
    asked += [("data.eval", settings.data.eval)]
    named = [(f"{group}.{number}", one) for group, all_of in asked for number, one in enumerate(all_of)]
    not_found = settings.model.source is not None and fields is None
    if settings.model.tokenizer is not None or (not not_found and any(one.format == "text" for _, one in named)):
        with problems.collect():
            tokenizer = _tokenizer(settings, source, kept)
            if model is not None and len(tokenizer) > model.vocab_size:
                raise errors.UserError(
                    f"model.tokenizer: makes {len(tokenizer):,} different tokens, and the model's vocab_size is "
                    f"{model.vocab_size:,}. Use the model's own tokenizer: model.tokenizer=null with a model.source."
                )
    if source is not None and model is not None and not source.on_hub:
        with problems.collect():
            weights.open_folder(source, decoder.table(model))  # before anything is tokenised
    records = {}
    for field, one in named:
        with problems.collect():
            records[field] = sources.read(one, field=f"{field}.source")
    with problems.collect():
        _check_names(settings.data.eval)
    if model is not None:
        with problems.collect():
            heads = {"num_heads": model.num_heads, "num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
            kernel = attention.choose(settings, devices=devices, **heads)
    if sizes is not None:
        problems += _divisions(settings, sizes, with_training=with_training)
    problems.check()
    assert model is not None
    assert sizes is not None
    assert kernel is not None
    if (cache := settings.logging.compilation_cache) is not None:
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(cache).expanduser()))

    tokenize = functools.partial(text.tokenize, tokenizer=tokenizer, vocab_size=model.vocab_size, workers=settings.data.workers)
    tokenized = {}
    for field, one in named:
        with problems.collect():
            tokenized[field] = tokenize(records[field], source=one, field=f"{field}.source")
    problems.check()
    row_tokens, max_pieces = settings.data.row_tokens, settings.data.max_documents_per_row

    def data_set(name: str, members: Sequence[str], field: str) -> DataSet:
        documents = rows.Documents([tokenized[member] for member in members], field=field)
        epochs = packing.Epochs(documents.lengths, row_tokens=row_tokens, max_pieces=max_pieces, seed=settings.run.seed)
        return DataSet(name=name, documents=documents, epochs=epochs)

    members = [field for field, _ in named if field.startswith("data.train")]
    attend = attention.make_attend(seq=sizes[axes.SEQ], kernel=kernel.kernel, head_chunks=kernel.head_chunks)
    program = Program(
        config=settings, model=model, mesh=meshes.make(sizes, devices), attend=attend, num_steps=settings.run.steps or 1
    )
    return Asked(
        program=program,
        fields=fields | families.token_ids(fields, tokenizer),
        folder=source,
        tokenizer=tokenizer,
        choice=kernel,
        train=data_set("train", members, "data.train") if members else None,
        evals=tuple(
            data_set(one.name or one.source, [field], f"{field}.source")
            for field, one in named
            if field.startswith("data.eval")
        ),
    )


def length(settings: config.Config, epochs: packing.Epochs, start: Start) -> tuple[int, int]:
    """Steps of the run, and rows that it consumes; the last step of a number of epochs may be filled with empty rows."""
    rows_per_step = settings.batch.rows_per_step
    if settings.run.steps is not None:
        return settings.run.steps, start.rows + max(settings.run.steps - start.step, 0) * rows_per_step
    assert settings.run.epochs is not None, "core.config asks for one of them"
    total_rows = max(epochs.rows_in(settings.run.epochs), start.rows)
    return start.step + -(-(total_rows - start.rows) // rows_per_step), total_rows


def resumed(run: config.Run) -> pathlib.Path | None:
    """The checkpoint that a run goes on from. Raises: UserError where there has to be one, or run.directory cannot be used."""
    directory = pathlib.Path(run.directory)
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    asked = f"run.directory = {run.directory}"
    if not there.is_dir():
        raise errors.UserError(f"{asked}: {there} is a file. Name a folder that is new or empty.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise errors.UserError(f"{asked}: {there} cannot be written. Name another folder: run.directory=runs/a.")
    has_files = directory.is_dir() and any(directory.iterdir())
    if run.resume == "auto":
        if has_files and not (directory / "config.yaml").is_file():
            raise errors.UserError(f"{asked}: holds files, but no run. Name a folder that is new or empty.")
        return checkpoint.newest(directory)
    # process 0 may have begun to write by the time that another looks
    if has_files and jax.process_index() == 0:
        raise errors.UserError(
            f"{asked}: is not empty. Remove it, name another (run.directory={run.directory}-2), or go on with run.resume=auto."
        )
    if run.resume == "never":
        return None
    found = checkpoint.newest(run.resume)
    if found is None:
        raise errors.UserError(
            f"run.resume = {run.resume}: holds no checkpoint. Give a run's directory or a folder in its checkpoints/, or "
            "auto or never."
        )
    return found


def kept_model(found: pathlib.Path) -> pathlib.Path | None:
    """Where the run of a checkpoint keeps the small files of its model; None for a checkpoint that lies elsewhere."""
    run = checkpoint.run_of(found)
    return run / "model" if run is not None and (run / "model").is_dir() else None


def _check_same(meta: checkpoint.Meta, asked: Asked, data: DataSet, found: pathlib.Path) -> None:
    """Raises: UserError where a checkpoint is of another model, or of other rows."""
    way_out = (
        f"Undo that, or begin a run with these weights: python -m jaxsp.export {found} FOLDER, then run.directory=NEW "
        "model.source=FOLDER."
    )
    saved, settings, problems = config.parse(meta.config), asked.program.config, []
    was, model = families.model_config(meta.model, field="model.config"), asked.program.model
    for name in (field.name for field in dataclasses.fields(model) if getattr(model, field.name) != getattr(was, field.name)):
        said = f"{name} = {getattr(model, name)}: is {getattr(was, name)} in the model of {found}"
        problems.append(f"model: {said}. {way_out}")
    if saved.optimizer.name != settings.optimizer.name:
        problems.append(f"optimizer.name: {found} has the state of {saved.optimizer.name}. {way_out}")
    if meta.data != data.fingerprint(settings):
        decides = {
            "run.seed": (saved.run.seed, settings.run.seed),
            "data.row_tokens": (saved.data.row_tokens, settings.data.row_tokens),
            "data.max_documents_per_row": (saved.data.max_documents_per_row, settings.data.max_documents_per_row),
        }
        differs = [f"{name} = {now}, and was {before}" for name, (before, now) in decides.items() if now != before]
        what = "; ".join(differs) or "data.train: the documents are not those of before"
        problems.append(f"{what}: that makes other rows than those that {found} has consumed {meta.rows:,} of. {way_out}")
    if problems:
        raise errors.UserError(problems)


def _changed(meta: checkpoint.Meta, settings: config.Config) -> tuple[str, ...]:
    """The fields that are not as they were, with both values."""
    before, now = meta.config, settings.model_dump(mode="json")
    return tuple(
        f"{group}.{name} {before.get(group, {}).get(name)} -> {value}"
        for group, fields in now.items()
        for name, value in fields.items()
        if before.get(group, {}).get(name) != value and (group, name) not in (("run", "directory"), ("run", "resume"))
    )


def _tokenizer(
    settings: config.Config, source: folder.Folder | None, kept: pathlib.Path | None
) -> "transformers.PreTrainedTokenizerBase":
    named = settings.model.tokenizer
    if named != text.BYTES and kept is not None and (kept / "tokenizer_config.json").is_file():
        return text.load_tokenizer(str(kept))
    if named is None and source is None:
        raise errors.UserError("model.tokenizer = null: text needs one. Use bytes, or a folder or hub name.")
    if named is not None:
        return text.load_tokenizer(named)
    assert source is not None
    return text.load_tokenizer(str(source.path), asked=f"model.source = {source.source}: its tokenizer")


def _keep_model(asked: Asked, kept: pathlib.Path | None, directory: pathlib.Path) -> None:
    directory.mkdir(exist_ok=True)
    if kept is not None:
        if not kept.samefile(directory):
            shutil.copytree(kept, directory, dirs_exist_ok=True)
    elif asked.folder is not None and asked.program.config.model.tokenizer is None:
        folder.copy_small_files(asked.folder.path, directory)
    elif asked.tokenizer is not None:
        asked.tokenizer.save_pretrained(directory)


def _check_names(evals: Sequence[config.Source]) -> None:
    names = [one.name or one.source for one in evals]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise errors.UserError(
                f"data.eval.{number}.name = {name}: is the name of another data set. Give each its own: "
                f"data.eval.{number}.name={name}-{number}."
            )


def _divisions(settings: config.Config, sizes: dict[str, int], *, with_training: bool) -> list[str]:
    """Rows and lengths that do not divide."""
    found = []
    row_tokens, seq = settings.data.row_tokens, sizes[axes.SEQ]
    if row_tokens % seq:
        near = errors.choices(_multiples(row_tokens, seq))
        found.append(f"data.row_tokens = {row_tokens}: cannot be cut into {seq} equal shares (mesh.seq). Use {near}.")
    per_step, at_once = settings.batch.rows_per_step, settings.batch.rows_at_once
    groups = sizes[axes.REPLICA] * sizes[axes.DATA]
    if with_training and per_step % (groups * at_once):
        near = errors.choices(_multiples(per_step, groups * at_once))
        found.append(
            f"batch.rows_per_step = {per_step}: is no whole number of turns of {groups * at_once} rows "
            f"({groups} groups, {at_once} row{'s' * (at_once > 1)} at once). Use {near}."
        )
    return found


def _multiples(number: int, of: int) -> list[int]:
    """The multiples of `of` on both sides of a number."""
    below = number // of * of
    return [below, below + of] if below else [of]
