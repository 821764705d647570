"""Training: checks, compilation, state, and the loop over steps."""

import functools
from collections.abc import Callable

import rich.console

from jaxsp.blocks import layers
from jaxsp.checkpoint import checksums, reader
from jaxsp.run import banner, preflight, starts
from jaxsp.run import console as output
from jaxsp.run.early_stopping import EarlyStopping
from jaxsp.run.preflight import StepFunction
from jaxsp.run.run import Run
from jaxsp.run.session import Session, open_session
from jaxsp.system.preemption import Preemption
from jaxsp.system.run_status import Activity, RunStatus
from jaxsp.training import train_state
from jaxsp.training.train_state import TrainState


def train(
    run: Run,
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
    preemption = preemption or Preemption(RunStatus())
    preflight.check_agreement(run)
    early_stopping = EarlyStopping(
        run.config.run,
        run.ranking_eval_set,
        resumed_state=run.start.early_stopping if run.is_resume else None,
    )
    if message := preflight.describe_completion(run, early_stopping):
        preflight.finish_run(run)
        output.print_line(console, message)
        return
    entries = banner.describe_run(run)
    output.print_pairs(console, banner.select_pairs(entries, is_verbose=verbose))
    preflight.report_checks(run, console)
    step = preflight.compile_step(run.spec, console)
    start_line = starts.describe_start(run, memory=step.memory, compile_s=step.seconds)
    prepare_references = functools.partial(_prepare_references, run, console, preemption)
    if run.start.checkpoint is not None:
        prepare_references(None)
    state, base_checksums = _make_state(run)
    if run.start.checkpoint is None:
        prepare_references(lambda: state.master)
    with open_session(
        run,
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


def _make_state(run: Run) -> tuple[TrainState, dict[str, str]]:
    """State of the first step, and checksums of the frozen weights."""
    spec = run.spec
    checkpoint = run.start.checkpoint
    if checkpoint is None:
        state = train_state.init_state(spec, run.weights.make())
        return state, checksums.compute_frozen(spec.table, state.master)
    state = reader.restore(
        checkpoint,
        train_state.abstract_inputs(spec)[0],
        table=spec.table,
        num_steps=run.start.step,
        frozen=run.weights.make(frozen_only=True),
    )
    base_checksums = checksums.compute_frozen(spec.table, state.master)
    reader.check_base(checkpoint, base_checksums)
    return state, base_checksums


def _prepare_references(
    run: Run,
    console: rich.console.Console,
    preemption: Preemption,
    make_weights: Callable[[], layers.Weights] | None,
) -> None:
    """Computes or reads the log-probabilities of the reference model, if the objective needs them.

    Args: make_weights: makes the weights of the reference model; None: they are read.
    """
    data_sets = [run.train_set, *run.eval_sets]
    if not run.reference.list_missing(data_sets):
        return
    preemption.status.activity = Activity(description="the reference pass")
    run.reference.prepare(
        data_sets,
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
