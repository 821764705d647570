"""Remaining work of a run that has done all its steps: old checkpoints."""

from jaxsp.checkpoint import files, reader
from jaxsp.config.schema import Config
from jaxsp.processes import distributed
from jaxsp.runtime import run_dir, run_paths
from jaxsp.training.inputs import StartPoint


def finish_run(config: Config, start: StartPoint, *, eval_set: dict[str, str] | None) -> None:
    """Deletes superseded checkpoints.

    It does nothing for a run that was to resume from a checkpoint of another run.

    Args: eval_set: name and digest of the eval set that ranks checkpoints.
    """
    directory = run_paths.local_dir(config.run)
    if not start.is_resume_in(directory):
        return
    if run_dir.is_writer(directory):
        checkpoints = directory / run_paths.CHECKPOINTS_DIR
        try:
            files.remove_leftovers(checkpoints)
            files.delete_superseded(checkpoints, config.checkpoint, eval_set)
        except OSError as error:
            reason = reader.describe_error(error)
            distributed.log(f"{checkpoints}: an old checkpoint could not be deleted: {reason}")
