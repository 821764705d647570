"""Everything around the steps of a run: batches, log, evaluation, checkpoints, early stops."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator

import jax
import rich.console

from jaxsp.checkpoint import run_paths
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.checkpoint.writer import CheckpointWriter
from jaxsp.core import urls
from jaxsp.core.batch import Batch
from jaxsp.core.errors import NeedsAttentionError
from jaxsp.data.packing.loader import StepCounts
from jaxsp.run import checkpoint_schedule, run_dir, run_summary, starts, stored_run
from jaxsp.run import console as output
from jaxsp.run.checkpoint_schedule import CheckpointSchedule
from jaxsp.run.early_stopping import EarlyStopping
from jaxsp.run.evaluations import Evaluations
from jaxsp.run.metrics import MetricsWriter
from jaxsp.run.profiler import ProfilerTrace
from jaxsp.run.progress import Progress
from jaxsp.run.run import Run
from jaxsp.run.starts import StartLine
from jaxsp.run.step_log import StepLog
from jaxsp.run.trackers.tracker import Outcome
from jaxsp.run.tracking import Trackers
from jaxsp.system.preemption import Preemption
from jaxsp.training.train_state import TrainState
from jaxsp.training.train_step import StepResults


@dataclasses.dataclass(kw_only=True)
class Session:
    """Decisions and records between the steps of a run, in one process. Made by `open_session`."""

    run: Run
    writer: CheckpointWriter
    progress: Progress
    trace: ProfilerTrace
    preemption: Preemption
    early_stopping: EarlyStopping
    evaluations: Evaluations
    checkpoints: CheckpointSchedule
    log: StepLog
    rows: Iterator[tuple[Batch, StepCounts]]
    base_checksums: dict[str, str]
    """Checksums of the frozen weights, for checkpoints."""
    next_batch: tuple[Batch, StepCounts] | None = None
    is_stopped_early: bool = False
    has_pending_evaluation: bool = False

    def evaluate_at_start(self, state: TrainState) -> None:
        """Evaluates the starting weights if that is due.

        It is due in a new run with run.eval_at_start. It is also due when a run resumes and the
        evaluation of its last checkpoint was skipped because the run was being stopped.
        """
        is_resume = self.run.is_resume
        # From process 0: other nodes may have an old copy of the checkpoint's metadata cached
        is_pending = is_resume and self.run.start.has_pending_evaluation
        is_pending = bool(checkpoint_schedule.broadcast_from_first(float(is_pending)))
        is_first = self.run.config.run.eval_at_start and not is_resume
        if is_first:
            self.early_stopping.expect_evaluation()
        if self.evaluations and (is_pending or is_first):
            loss = self._evaluate(self.run.start.step, state)
            if is_resume:
                self.writer.record_eval(
                    self.run.start.step, loss, early_stopping=self.early_stopping.state
                )
        self.is_stopped_early = self.early_stopping.should_stop()
        self.log.restart_clock()

    def batches(self) -> Iterator[tuple[int, Batch, StepCounts]]:
        """Yields the number, the batch and the counts of each step.

        `after_dispatch` reads the next batch, which is transferred while the step runs.
        """
        self._read_batch()
        for step in itertools.count(self.run.start.step + 1):
            if self.next_batch is None:
                return
            yield step, *self.next_batch

    def _read_batch(self) -> None:
        with self.log.measure_batch_wait():
            self.next_batch = next(self.rows, None)
        if self.next_batch is not None:
            assert (self.next_batch[1].documents_P2 >= 0).all(), "a step has whole pairs"

    def should_dispatch(self, step: int) -> bool:
        """True if the step may be dispatched; must be called for every step, in order."""
        if self.is_stopped_early:
            return False
        if self.preemption.status.is_slow:
            self.log.record_dispatched_step()
        return self.log.can_continue and self.preemption.should_dispatch(step)

    def before_dispatch(self, step: int, counts: StepCounts) -> None:
        """Starts the profiler if profiling begins at this step, and updates the run status."""
        if self.trace.should_start(step):
            self.log.record_dispatched_step()
            self.trace.start()
        estimated_s = self.log.estimate_step_s(counts)
        self.preemption.status.dispatched(estimated_s=estimated_s)

    def after_dispatch(self, results: StepResults, counts: StepCounts) -> None:
        """Records the previous step, and reads the next batch, while this step runs."""
        self.log.record_dispatch(results, counts)
        self._read_batch()
        self.checkpoints.poll()
        self.preemption.status.checkpoint_s = self.writer.write_s

    def evaluate_and_save(self, step: int, state: TrainState) -> None:
        """Evaluates and writes a checkpoint after a step if they are due.

        The time is not part of any step's time. The evaluation comes first, because its results
        would be lost if the run were killed between the checkpoint and the evaluation.
        """
        is_last = step == self.run.spec.num_steps
        run = self.run.config.run
        # All processes must do this once per step: the schedule communicates
        is_epoch_end = "epoch" in (run.save_every, run.eval_every) and (
            self.run.train_set.is_epoch_end(self.run.schedule, step - self.run.start.step)
        )
        is_save_epoch = is_epoch_end and run.save_every == "epoch"
        should_save = self.checkpoints.is_due(step) or is_last or is_save_epoch
        is_eval_epoch = is_epoch_end and run.eval_every == "epoch"
        should_evaluate = self.evaluations.is_due(step) or is_last or is_eval_epoch
        should_rank = should_save and self.run.config.checkpoint.keep_best > 0
        if should_evaluate or (should_rank and run.eval_every is None):
            self.early_stopping.expect_evaluation()
        should_evaluate |= should_rank
        should_stop_trace = self.trace.should_stop(step)
        if not (should_save or should_evaluate or should_stop_trace):
            return
        self.log.record_dispatched_step()
        if should_stop_trace:
            self.trace.stop()
        loss = None
        self.has_pending_evaluation = should_evaluate
        # Skip the evaluation if the run is being stopped. All processes decide alike: either all of
        # them may dispatch the next step, or none may
        if (
            should_evaluate
            and self.log.can_continue
            and (is_last or self.preemption.should_dispatch(step + 1))
        ):
            loss = self._evaluate(step, state)
            self.has_pending_evaluation = False
            self.is_stopped_early = self.early_stopping.should_stop()
        if should_save or self.is_stopped_early:
            self.preemption.status.begin_writing(f"the checkpoint of step {step}")
            meta = dataclasses.replace(
                self._build_meta(), eval_loss=loss, eval_set=self.run.ranking_eval_set
            )
            is_end = is_last or self.is_stopped_early or self.preemption.reason is not None
            wait_s = self.checkpoints.save(state, meta, is_last=is_end)
            self.log.record_checkpoint_wait(wait_s)
        self.log.restart_clock()

    def save_last(self, state: TrainState) -> None:
        """Writes a checkpoint of the final state, unless there is one already.

        Raises: NeedsAttentionError if every attempt fails.
        """
        self.log.record_dispatched_step()
        self.preemption.status.begin_writing("the last checkpoint")
        # With keep_best, each checkpoint needs a loss: the resumed run evaluates this one
        self.has_pending_evaluation |= self.run.config.checkpoint.keep_best > 0
        self.checkpoints.finish(state, self._build_meta())

    @property
    def outcome(self) -> Outcome:
        """End of the run, after its last step."""
        if not self.log.can_continue:
            return "failed"
        is_complete = self.is_stopped_early or self.log.num_steps >= self.run.spec.num_steps
        return "finished" if is_complete or self.preemption.reason is None else "stopped"

    def print_outcome(self, console: rich.console.Console) -> None:
        """Prints why the run stopped early, or the summary of a finished run.

        Raises: NeedsAttentionError after steps that were not finite.
        """
        step = self.checkpoints.last_saved_step
        if not self.log.can_continue:
            raise NeedsAttentionError(self.log.nonfinite.stop_message(saved_step=step))
        is_complete = step >= self.run.spec.num_steps
        if self.is_stopped_early and not is_complete:
            self.progress.print_line(
                f"stopped early after step {step}: {self.early_stopping.reason}"
            )
            if step == self.run.start.step:  # nothing to summarize
                return
        elif self.preemption.reason is not None and not is_complete:
            self.progress.print_line(
                f"stopped by {self.preemption.reason} after step {step}; "
                "the same command resumes from there"
            )
            return
        summary_pairs = run_summary.summarize_run(
            self.run.config.run.directory,
            self.log.first_line,
            self.log.last_line,
            recent_losses=self.log.recent_losses,
            seconds=self.log.elapsed_s,
            steps_s=self.log.steps_s,
            has_eval_sets=bool(self.run.eval_sets),
        )
        output.print_pairs(console, summary_pairs)

    def _evaluate(self, step: int, state: TrainState) -> float | None:
        """Evaluates, and returns the loss on the eval set that ranks checkpoints."""
        when = f"before step {step + 1}" if step == self.run.start.step else f"after step {step}"
        lines = self.evaluations.run(state.master, step=step, when=when)
        self.early_stopping.record(step, lines)
        return (
            lines[self.run.ranking_eval_set["name"]]["loss"] if self.run.ranking_eval_set else None
        )

    def _build_meta(self) -> CheckpointMeta:
        """Metadata of a checkpoint of the current state; all dispatched steps must be recorded."""
        run = self.run
        config = run.config
        return CheckpointMeta(
            config=config.model_dump(mode="json"),
            model=run.hf_config,
            data=run.train_set.fingerprint(config.data, seed=config.run.seed),
            step=self.log.num_steps,
            rows_consumed=run.schedule.rows_consumed(self.log.num_steps - run.start.step),
            num_tokens_total=self.log.num_tokens,
            has_pending_evaluation=self.has_pending_evaluation,
            early_stopping=self.early_stopping.state,
            base=self.base_checksums,
        )


@contextlib.contextmanager
def open_session(
    run: Run,
    state: TrainState,
    console: rich.console.Console,
    preemption: Preemption,
    early_stopping: EarlyStopping,
    *,
    base_checksums: dict[str, str],
    banner_text: str,
    start_line: StartLine,
) -> Iterator[Session]:
    """Opens the files of a run, and evaluates its starting weights if that is due.

    At the end, closes the files, and prints the outcome unless there was an exception.

    Raises: NeedsAttentionError at the end, after steps that were not finite.
    """
    config = run.config
    spec = run.spec
    directory = run.directory
    first_step = run.start.step
    status = preemption.status
    loader = run.train_set.make_loader(run.schedule, spec.placement)
    # A new run also drops lines of an evaluation before its first step, and repeats it
    from_step = first_step if run.is_resume else first_step - 1
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(run_dir.create(run, banner_text))
        starts.record_start(directory, start_line)
        run.reference.keep([run.train_set, *run.eval_sets])
        trackers = enter(Trackers(config, from_step=from_step, is_resume=run.is_resume))
        metrics = enter(MetricsWriter(directory, from_step=from_step, trackers=trackers))
        writer = CheckpointWriter(
            directory / run_paths.CHECKPOINTS_DIR,
            table=spec.table,
            config=config.checkpoint,
            status=status,
            # Before a checkpoint is written, metrics.jsonl must have the lines of its steps
            before_write=metrics.sync,
            eval_set=run.ranking_eval_set,
            is_writer=run_dir.is_writer(directory),
            has_separate_folders=urls.is_url(config.run.directory) and jax.process_count() > 1,
            uploads=stored_run.uploads.get(directory.resolve()),
        )
        enter(writer)
        progress = enter(Progress(console, first_step=first_step, num_steps=spec.num_steps))
        session = Session(
            run=run,
            writer=writer,
            progress=progress,
            trace=enter(ProfilerTrace(directory / "profile", config.logging.profile_steps)),
            preemption=preemption,
            early_stopping=early_stopping,
            evaluations=Evaluations(run, metrics, status, progress.print_line),
            checkpoints=CheckpointSchedule(
                writer, config.run, first_step=first_step, print_line=progress.print_line
            ),
            log=StepLog(run, metrics, progress, status),
            rows=enter(contextlib.closing(loader.batches())),
            base_checksums=base_checksums,
        )
        writer.compile_ahead(state)
        session.evaluate_at_start(state)
        yield session
        trackers.outcome = session.outcome
    session.print_outcome(console)
