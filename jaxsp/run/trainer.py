"""Training: checks, compilation, state, and the loop over steps."""

import functools
from collections.abc import Callable

import rich.console

from jaxsp.blocks import layers
from jaxsp.checkpoint import checksums, reader
from jaxsp.reporting import banner, starts
from jaxsp.reporting import console as output
from jaxsp.run import preflight, references
from jaxsp.run.preflight import StepFunction
from jaxsp.run.session import Session, open_session
from jaxsp.runtime import run_paths
from jaxsp.runtime.preemption import Preemption
from jaxsp.runtime.run_status import RunStatus
from jaxsp.training import train_state
from jaxsp.training.inputs import RunInputs
from jaxsp.training.specs import StepSpec
from jaxsp.training.train_state import TrainState


def train(
    spec: StepSpec,
    inputs: RunInputs,
    console: rich.console.Console,
    *,
    preemption: Preemption | None = None,
    verbose: bool = False,
) -> None:
    """Trains from the starting point to the last step and writes the run directory.

    All processes train and save together; only process 0 writes the other files.

    Args:
        preemption: handles requests to stop early. The same command then resumes the run.
        verbose: print the whole banner.
    Raises:
        UserError: the processes have different configs, data or checkpoints, or the step, a
            checkpoint or the run directory cannot be used.
        NeedsAttentionError: a step was not finite (unless run.on_nonfinite allows it), or the last
            checkpoint could not be written.
    """
    preemption = preemption or Preemption(spec.config.run, RunStatus())
    preflight.check_agreement(spec, inputs)
    early_stopping = preflight.make_early_stopping(spec, inputs)
    if message := preflight.describe_completion(spec, inputs, early_stopping):
        eval_set = preflight.ranking_eval_set(spec, inputs)
        preflight.finish_run(spec.config, inputs.start, eval_set=eval_set)
        output.print_line(console, message)
        return
    entries = banner.describe_run(spec, inputs)
    output.print_pairs(console, banner.select_pairs(entries, is_verbose=verbose))
    preflight.report_checks(spec, inputs, console)
    step = preflight.compile_step(spec, console)
    start_line = starts.describe_start(spec, inputs, memory=step.memory, compile_s=step.seconds)
    has_reference_state = inputs.start.checkpoint is None
    if not has_reference_state:
        _prepare_references(spec, inputs, inputs.make_reference_weights, console, preemption)
    checkpoint = inputs.start.checkpoint
    if checkpoint is None:
        state = train_state.init_state(spec, inputs.make_weights())
        base_checksums = checksums.compute_frozen(spec.table, state.master)
    else:
        state = reader.restore(
            checkpoint,
            train_state.abstract_inputs(spec)[0],
            table=spec.table,
            num_steps=inputs.start.step,
            frozen=inputs.make_frozen_weights(),
        )
        base_checksums = checksums.compute_frozen(spec.table, state.master)
        reader.check_base(checkpoint, base_checksums)
    if has_reference_state:
        _prepare_references(spec, inputs, lambda: state.master, console, preemption)
    with open_session(
        spec,
        inputs,
        state,
        console,
        preemption,
        early_stopping,
        base_checksums=base_checksums,
        banner_text=output.format_pairs(banner.select_pairs(entries, is_verbose=True)),
        start_line=start_line,
    ) as session:
        state = run_steps(session, step.function, state)
        session.save_last(state)


def _prepare_references(
    spec: StepSpec,
    inputs: RunInputs,
    make_weights: Callable[[], layers.Weights],
    console: rich.console.Console,
    preemption: Preemption,
) -> None:
    """Computes or reads the log-probabilities of the reference model, if the objective needs them.

    Args: make_weights: makes the weights of the reference model.
    """
    data_sets = [inputs.train_set, *inputs.eval_sets]
    if not references.list_missing(spec, data_sets):
        return
    preemption.status.begin("the reference pass")
    directory = run_paths.local_dir(spec.config.run)
    folder = directory / references.FOLDER
    references.prepare(
        spec,
        data_sets,
        folders=[folder],
        weights_identity=references.choose_identity(
            folder,
            is_resume=inputs.start.is_resume_in(directory),
            compute=inputs.reference_identity,
        ),
        make_weights=make_weights,
        print_line=functools.partial(output.print_line, console),
        on_batch=preemption.status.heartbeat,
    )


def run_steps(session: Session, function: StepFunction, state: TrainState) -> TrainState:
    """Runs steps until the last one or until the run stops early, and returns the final state."""
    for step, batch, counts in session.batches():
        if not session.should_dispatch(step):
            break
        session.before_dispatch(step, counts)
        state, results = function(state, batch)  # asynchronous
        session.after_dispatch(results, counts)
        session.evaluate_and_save(step, state)
    return state
