"""python -m jaxsp.train CONFIG.yaml [key.path=value ...]: trains, and says what it does."""

import os
import pathlib

import jax
import rich.console

from jaxsp import attention, cli
from jaxsp.core import axes, config, errors
from jaxsp.core import mesh as meshes
from jaxsp.data import packing, rows, sources, text
from jaxsp.hf import families
from jaxsp.training import trainer
from jaxsp.training.banner import Material
from jaxsp.training.step import Program


def main(arguments: list[str]) -> None:
    """The command. Raises: UserError with every problem that can be found before the first step."""
    parser = cli.parser("train", "Trains a model and writes a run directory.", fields=True)
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("changes", metavar="key.path=value", nargs="*", default=[], help="changes a field of the config")
    given = parser.parse_args(arguments)
    settings = config.load(given.config, given.changes)
    meshes.choose_platform(virtual_cpu_devices=settings.mesh.virtual_cpu_devices)
    program, material = prepare(settings, devices=jax.devices())
    trainer.train(program, material, rich.console.Console())


def prepare(settings: config.Config, *, devices: list[jax.Device]) -> tuple[Program, Material]:
    """What a config asks for, checked and read, on these devices. Nothing is written but `datasets`' cache.

    Raises: UserError with all problems at once; those of the data's contents only when the rest is right.
    """
    problems = cli.Problems()
    model = sizes = tokenizer = None
    with problems.collect():
        model = families.model_config(settings.model.config, field="model.config")
    with problems.collect():
        sizes = meshes.shape(settings.mesh, len(devices))
    with problems.collect():
        _check_directory(settings.run.directory)
    if settings.model.tokenizer is not None:
        with problems.collect():
            tokenizer = text.load_tokenizer(settings.model.tokenizer)
    read = []
    for number, source in enumerate(settings.data.train):
        with problems.collect():
            read.append((source, f"data.train.{number}.source", sources.read(source, field=f"data.train.{number}.source")))
            if source.format == "text" and settings.model.tokenizer is None:
                raise errors.UserError("model.tokenizer = null: text needs one. Use bytes, or a folder or hub name.")
    if model is not None:
        problems += attention.problems(num_heads=model.num_heads, seq=settings.mesh.seq)
    if sizes is not None:
        problems += _divisions(settings, sizes)
    problems.check()
    assert model is not None
    assert sizes is not None

    tokenized = []
    for source, field, dataset in read:
        with problems.collect():
            tokenized.append(
                text.tokenize(
                    dataset,
                    source=source,
                    tokenizer=tokenizer,
                    vocab_size=model.vocab_size,
                    workers=settings.data.workers,
                    field=field,
                )
            )
    problems.check()
    documents = rows.Documents(tokenized)
    row_tokens, max_pieces = settings.data.row_tokens, settings.data.max_documents_per_row
    epochs = packing.Epochs(documents.lengths, row_tokens=row_tokens, max_pieces=max_pieces, seed=settings.run.seed)
    num_steps, total_rows = length(settings, epochs)
    attend = attention.make_attend(seq=sizes[axes.SEQ], kernel=settings.attention.kernel)
    program = Program(config=settings, model=model, mesh=meshes.make(sizes, devices), attend=attend, num_steps=num_steps)
    return program, Material(documents=documents, epochs=epochs, total_rows=total_rows)


def length(settings: config.Config, epochs: packing.Epochs) -> tuple[int, int]:
    """Steps of the run, and rows that it consumes; the last step of a number of epochs may be filled with empty rows."""
    rows_per_step = settings.batch.rows_per_step
    if settings.run.steps is not None:
        return settings.run.steps, settings.run.steps * rows_per_step
    assert settings.run.epochs is not None, "core.config asks for one of them"
    total_rows = epochs.rows_in(settings.run.epochs)
    return -(-total_rows // rows_per_step), total_rows


def _check_directory(name: str) -> None:
    directory = pathlib.Path(name)
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not there.is_dir():
        raise errors.UserError(f"run.directory = {name}: {there} is a file. Name a folder that is new or empty.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise errors.UserError(f"run.directory = {name}: {there} cannot be written. Name another folder: run.directory=runs/a.")
    if directory.is_dir() and any(directory.iterdir()):
        raise errors.UserError(f"run.directory = {name}: is not empty. Remove it, or name another: run.directory={name}-2.")


def _divisions(settings: config.Config, sizes: dict[str, int]) -> list[str]:
    """Rows and lengths that do not divide."""
    found = []
    row_tokens, seq = settings.data.row_tokens, sizes[axes.SEQ]
    if row_tokens % seq:
        near = errors.choices(_multiples(row_tokens, seq))
        found.append(f"data.row_tokens = {row_tokens}: cannot be cut into {seq} equal shares (mesh.seq). Use {near}.")
    per_step, at_once = settings.batch.rows_per_step, settings.batch.rows_at_once
    groups = sizes[axes.REPLICA] * sizes[axes.DATA]
    if per_step % (groups * at_once):
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


if __name__ == "__main__":
    cli.run(main)
