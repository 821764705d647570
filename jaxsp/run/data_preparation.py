"""Reads, tokenizes and packs data without devices; training then finds the tokens in the cache.

Printed by `jaxsp train CONFIG.yaml --prepare-data`, and by `jaxsp plan --data`.
"""

import rich.console

from jaxsp.core import axes
from jaxsp.core.errors import ProblemCollector
from jaxsp.core.units import format_count
from jaxsp.data.packing import summary
from jaxsp.run import data_sets, model_files
from jaxsp.run.config_file import Config
from jaxsp.run.model_files import ModelFiles
from jaxsp.training.specs import find_division_problems


def prepare_data(config: Config, console: rich.console.Console) -> None:
    """Prepares training and eval data as training does. Raises: UserError with all problems."""
    problems = ProblemCollector()
    mesh = config.mesh
    if mesh.seq != "auto":  # the number of devices is unknown
        sizes = {axes.REPLICA: mesh.replica, axes.DATA: max(mesh.data, 1), axes.SEQ: mesh.degree}
        with_rows = config.step.with_one_row_for_auto()
        problems += find_division_problems(with_rows, sizes, layout=None)
    files = model_files.read_model(config, None, problems)
    print_data(config, files, console, problems)


def print_data(
    config: Config, files: ModelFiles, console: rich.console.Console, problems: ProblemCollector
) -> int:
    """Prepares the data sets of a config, and prints their rows and steps.

    Args: problems: problems found before.
    Returns: the steps of the run. Raises: UserError with all problems.
    """
    config = data_sets.inline_chat_template(config)
    opened = data_sets.open_sources(config, for_training=True, problems=problems)
    tokenizer = model_files.load_checked_tokenizer(config, files, opened, None, problems)
    problems.raise_if_any()
    assert files.config is not None, "it has reported a problem"
    train, evals = data_sets.make_data_sets(
        opened, config, tokenizer, vocab_size=files.config.vocab_size, for_training=True
    )
    assert train is not None, "made for training"
    schedule = train.make_schedule(
        config.batch.rows_per_step,
        num_steps=config.run.steps,
        epochs=config.run.epochs,
    )
    lines = summary.describe_data(train, config.data, schedule)
    lines += [("eval", f"{each.name} ({summary.describe_documents(each)})") for each in evals]
    lines.append(("steps", format_count(len(schedule), "step")))
    for label, line in lines:
        console.print(f"{label:<8}{line}", highlight=False, soft_wrap=True)
    return len(schedule)
