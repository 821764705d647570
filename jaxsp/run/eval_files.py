"""Files that `jaxsp eval` appends its results to."""

import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax

from jaxsp.core.errors import UserError
from jaxsp.run import metrics, task_plots
from jaxsp.system import jsonl
from jaxsp.training.metric_table import Line


class EvalFiles(NamedTuple):
    """A file for each kind of results, or the same one for all."""

    evals: pathlib.Path
    tasks: pathlib.Path
    harness: pathlib.Path
    plot: pathlib.Path

    def find(self, line: Line) -> pathlib.Path:
        """Returns the file of a line."""
        if "lm_eval" in line:
            return self.harness
        return self.tasks if "task" in line else self.evals

    def append(self, line: Line) -> None:
        """Appends a line to its file; process 0 writes."""
        if jax.process_index() == 0:
            jsonl.append_record(self.find(line), line)

    def draw(self, lines: Sequence[Line]) -> str:
        """Draws needles if there are some. Returns: files that have something of
        `lines`, and why there is no plot."""
        texts = [str(path) for path in dict.fromkeys(map(self.find, lines))]
        if jax.process_index() == 0:
            texts.append(task_plots.draw_if_possible(self.plot, lines))
        return ", ".join(filter(None, texts))


def choose(out: str | None, run: pathlib.Path | None) -> EvalFiles | None:
    """Chooses the file of --out, else those of a run's directory; None if there is neither.

    Raises: UserError if the folder cannot be written.
    """
    if out:
        path = pathlib.Path(out)
        files = EvalFiles(path, path, path, path.with_name(f"{path.stem}-needle.png"))
    elif run is not None:
        names = (metrics.EVAL_FILE, metrics.TASKS_FILE, metrics.HARNESS_FILE, metrics.NEEDLE_PLOT)
        files = EvalFiles(*(run / name for name in names))
    else:
        return None
    folder = files.evals.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise UserError(
            f"--out = {files.evals}: {folder} must be a folder that can be written. Use --out FILE "
            "with a file in such a folder."
        )
    return files
