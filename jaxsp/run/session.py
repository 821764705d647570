"""Everything around the steps of a run: batches, log, evaluation, checkpoints, early stops."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import rich.console

from jaxsp.checkpoint import schedule
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.checkpoint.schedule import CheckpointSchedule
from jaxsp.checkpoint.writer import CheckpointWriter
from jaxsp.core.batch import Batch
from jaxsp.core.errors import NeedsAttentionError
from jaxsp.data.packing.step_records import StepCounts
from jaxsp.reporting import console as output
from jaxsp.reporting import run_summary, starts
from jaxsp.reporting.metrics import MetricsWriter
from jaxsp.reporting.profiler import ProfilerTrace
from jaxsp.reporting.progress import Progress
from jaxsp.reporting.starts import StartLine
from jaxsp.reporting.step_log import StepLog
from jaxsp.reporting.trackers import registry
from jaxsp.reporting.trackers.tracker import Outcome, TrackedRun
from jaxsp.run import preflight
from jaxsp.runtime import run_dir, run_paths
from jaxsp.runtime.preemption import Preemption
from jaxsp.training.early_stopping import EarlyStopping
from jaxsp.training.evaluator import Evaluator
from jaxsp.training.inputs import RunInputs
from jaxsp.training.program import Program
from jaxsp.training.train_state import TrainState
from jaxsp.training.train_step import StepMetrics


class BatchReader:
    """Iterator over the batches of a run and their step numbers, which reads one batch ahead.

    Iterating yields (step, batch, counts). The loop calls `prefetch` while a step runs on the
    devices, so that the next batch is transferred meanwhile.
    """

    def __init__(self, batches: Iterator[tuple[Batch, StepCounts]], *, start_step: int):
        self._batches = batches
        self._step = start_step
        self._next: tuple[Batch, StepCounts] | None = None

    def prefetch(self) -> None:
        """Reads the next batch."""
        self._next = next(self._batches, None)

    def __iter__(self) -> Iterator[tuple[int, Batch, StepCounts]]:
        while self._next is not None:
            self._step += 1
            batch, counts = self._next
            yield self._step, batch, counts


class Session:
    """State of a run in one process, and the actions before, between and after its steps.

    Use: `with session.open(banner)`, then `evaluate_before_training`, then for each batch
    `should_dispatch`, `before_dispatch`, the step, `after_dispatch`, `evaluate_and_save`; at the
    end `save_last`, and after the context `print_outcome`.
    """

    def __init__(
        self,
        program: Program,
        inputs: RunInputs,
        console: rich.console.Console,
        preemption: Preemption,
        early_stopping: EarlyStopping,
        *,
        base_checksums: dict[str, str],
    ):
        """Args: base_checksums: checksums of the frozen weights, for checkpoints."""
        config = program.config
        self._program = program
        self._config = config
        self._inputs = inputs
        self._start = inputs.start
        self._console = console
        self._preemption = preemption
        self._status = preemption.status
        self._early_stopping = early_stopping
        self._base_checksums = base_checksums
        self._eval_set = preflight.ranking_eval_set(program, inputs)
        self._evaluator = Evaluator(program, inputs.eval_sets)
        self._directory = run_paths.local_dir(config.run)
        self._is_resume = self._start.is_resume_in(self._directory)
        self._has_pending_evaluation = False
        self._is_stopped_early = False
        self._is_training = False
        self._loader = inputs.train_set.make_loader(config, inputs.schedule, program.place_rows)

    @contextlib.contextmanager
    def open(self, banner_text: str, start_line: StartLine) -> Iterator[None]:
        """Creates the run directory and its files, and closes them at the end."""
        config = self._config
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                run_dir.create(
                    self._directory,
                    config,
                    banner_text=banner_text,
                    keep_model=self._inputs.write_model,
                )
            )
            starts.record_start(self._directory, start_line)
            # A new run also drops lines of an evaluation before its first step, and repeats it
            from_step = self._start.step if self._is_resume else self._start.step - 1
            trackers = stack.enter_context(
                registry.Trackers(
                    TrackedRun(config, from_step=from_step, is_resume=self._is_resume),
                    config.logging.trackers,
                    find_outcome=self._find_outcome,
                )
            )
            self._metrics_writer = stack.enter_context(
                MetricsWriter(self._directory, from_step=from_step, trackers=trackers)
            )
            self._checkpoint_writer = stack.enter_context(
                CheckpointWriter(
                    self._directory / run_paths.CHECKPOINTS_DIR,
                    table=self._program.table,
                    retention=config.checkpoint,
                    status=self._status,
                    # Before a checkpoint is written, metrics.jsonl must have the lines of its steps
                    before_write=self._metrics_writer.sync,
                    eval_set=self._eval_set,
                    has_separate_folders=run_dir.may_be_separate(config.run),
                )
            )
            self._progress = stack.enter_context(
                Progress(
                    self._console, first_step=self._start.step, num_steps=self._program.num_steps
                )
            )
            self._trace = stack.enter_context(
                ProfilerTrace(self._directory / "profile", config.logging.profile_steps)
            )
            batches = stack.enter_context(contextlib.closing(self._loader.batches()))
            self.batches = BatchReader(batches, start_step=self._start.step)
            yield

    def evaluate_before_training(self, state: TrainState) -> bool:
        """Evaluates the starting weights if that is due, and prepares the first step.

        An evaluation is due in a new run with run.eval_at_start. It is also due when a run resumes
        and the evaluation of its last checkpoint was skipped because the run was being stopped.

        Returns: False if early stopping ends the run.
        """
        self._checkpoint_writer.compile_ahead(state)
        # Ask process 0 only: other nodes may have an old copy of the checkpoint's metadata cached
        is_pending = self._is_resume and self._start.has_pending_evaluation
        is_pending = bool(schedule.broadcast_from_first(float(is_pending)))
        is_first = self._config.run.eval_at_start and not self._is_resume
        if is_first:
            self._early_stopping.expect_evaluation()
        if self._inputs.eval_sets and (is_pending or is_first):
            losses = self._evaluate(self._start.step, state)
            if self._is_resume:
                assert self._eval_set is not None, "there are eval sets"
                self._checkpoint_writer.record_eval(
                    self._start.step,
                    losses[self._eval_set["name"]],
                    early_stopping=self._early_stopping.state,
                )
        if self._early_stopping.should_stop():
            self._print_early_stop(self._start.step)
            return False
        self._is_training = True
        self._log = StepLog(
            self._program, self._inputs, self._metrics_writer, self._progress, self._status
        )
        self._checkpoints = CheckpointSchedule(
            self._checkpoint_writer,
            self._config.run,
            first_step=self._start.step,
            print_line=self._progress.print_line,
        )
        self._status.waiting_for_step(self._start.step)
        with self._log.measure_batch_wait():
            self.batches.prefetch()
        return True

    def should_dispatch(self, step: int) -> bool:
        """True if the step may be dispatched; must be called for every step, in order."""
        if self._is_stopped_early:
            return False
        if self._status.is_slow:
            self._log.record_dispatched_step()
        return self._log.can_continue and self._preemption.should_dispatch(step)

    def before_dispatch(self, step: int, counts: StepCounts) -> None:
        """Starts the profiler if profiling begins at this step, and updates the run status."""
        if self._trace.should_start(step):
            self._log.record_dispatched_step()
            self._trace.start()
        estimated_s = self._log.estimate_step_s(counts)
        self._status.dispatched(step, counts.row_tokens, estimated_s=estimated_s)

    def after_dispatch(self, metrics: StepMetrics, counts: StepCounts) -> None:
        """Records the previous step, and reads the next batch, while this step runs."""
        self._log.record_dispatch(metrics, counts)
        with self._log.measure_batch_wait():
            self.batches.prefetch()
        self._checkpoints.poll()
        self._status.checkpoint_s = self._checkpoint_writer.write_s

    def evaluate_and_save(self, step: int, state: TrainState) -> None:
        """Evaluates and writes a checkpoint after a step if they are due.

        The time is not part of any step's time. The evaluation comes first, because its results
        would be lost if the run were killed between the checkpoint and the evaluation.
        """
        is_last = step == self._program.num_steps
        should_save, should_evaluate = self._find_due(step, is_last=is_last)
        should_stop_trace = self._trace.should_stop(step)
        if not (should_save or should_evaluate or should_stop_trace):
            return
        self._log.record_dispatched_step()
        if should_stop_trace:
            self._trace.stop()
        losses: dict[str, float | None] = {}
        self._has_pending_evaluation = should_evaluate
        # Skip the evaluation if the run is being stopped. All processes decide alike: either all of
        # them may dispatch the next step, or none may
        if (
            should_evaluate
            and self._log.can_continue
            and (is_last or self._preemption.should_dispatch(step + 1))
        ):
            losses = self._evaluate(step, state)
            self._has_pending_evaluation = False
            self._is_stopped_early = self._early_stopping.should_stop()
        if should_save or self._is_stopped_early:
            self._save(step, state, losses, is_last=is_last)
        self._log.restart_clock()

    def save_last(self, state: TrainState) -> None:
        """Writes a checkpoint of the final state, unless there is one already.

        Raises: NeedsAttentionError if every attempt fails.
        """
        self._log.record_dispatched_step()
        self._status.begin("the last checkpoint", expected_s=self._status.step_s, is_writing=True)
        # With keep_best, each checkpoint needs a loss: the resumed run evaluates this one
        self._has_pending_evaluation |= self._config.checkpoint.keep_best > 0
        self._checkpoints.finish(state, self._build_meta())

    def print_outcome(self) -> None:
        """Prints why the run stopped early, or the summary of a finished run.

        Raises: NeedsAttentionError after steps that were not finite.
        """
        if not self._is_training:
            return
        step = self._checkpoints.last_saved_step
        if not self._log.can_continue:
            raise NeedsAttentionError(self._log.nonfinite.stop_message(saved_step=step))
        is_complete = step >= self._program.num_steps
        if self._is_stopped_early and not is_complete:
            self._print_early_stop(step)
        elif self._preemption.reason is not None and not is_complete:
            self._progress.print_line(
                f"stopped by {self._preemption.reason} after step {step}; "
                "the same command resumes from there"
            )
            return
        summary_pairs = run_summary.summarize_run(
            self._program,
            self._log.first_line,
            self._log.last_line,
            recent_losses=self._log.recent_losses,
            seconds=self._log.elapsed_s,
            steps_s=self._log.steps_s,
            has_eval_sets=bool(self._inputs.eval_sets),
        )
        output.print_pairs(self._console, summary_pairs)

    def _find_outcome(self) -> Outcome:
        """Outcome of the run for its trackers, if no exception ended it."""
        if self._is_training and not self._log.can_continue:
            return "failed"
        step = self._log.num_steps if self._is_training else self._start.step
        is_complete = self._is_stopped_early or step >= self._program.num_steps
        return "finished" if is_complete or self._preemption.reason is None else "stopped"

    def _print_early_stop(self, step: int) -> None:
        self._progress.print_line(f"stopped early after step {step}: {self._early_stopping.reason}")

    def _find_due(self, step: int, *, is_last: bool) -> tuple[bool, bool]:
        """Returns `(should_save, should_evaluate)` after a step.

        All processes must call it once per step: the schedule communicates.
        """
        run = self._config.run
        is_epoch_end = "epoch" in (run.save_every, run.eval_every) and (
            self._inputs.train_set.is_epoch_end(self._inputs.schedule, step - self._start.step)
        )
        is_save_epoch = is_epoch_end and run.save_every == "epoch"
        should_save = self._checkpoints.is_due(step) or is_last or is_save_epoch
        is_eval_epoch = is_epoch_end and run.eval_every == "epoch"
        should_evaluate = self._evaluator.is_due(step) or is_last or is_eval_epoch
        should_rank = should_save and self._config.checkpoint.keep_best > 0
        if should_evaluate or (should_rank and run.eval_every is None):
            self._early_stopping.expect_evaluation()
        return should_save, should_evaluate or should_rank

    def _evaluate(self, step: int, state: TrainState) -> dict[str, float | None]:
        """Evaluates the weights, records the results, and returns the loss of each eval set."""
        with self._status.compiling("the evaluation"):
            self._evaluator.compile()
        when = f"before step {step + 1}" if step == self._start.step else f"after step {step}"
        self._status.begin(
            f"the evaluation {when}",
            expected_s=self._status.step_s,
            duration_s=self._status.evaluation_s,
        )
        began = time.perf_counter()
        losses = {}
        for result in self._evaluator.run(
            state.master, num_steps=step, on_batch=self._status.heartbeat
        ):
            losses[result.data] = result.loss
            self._metrics_writer.write_eval(result)
            self._progress.print_line(output.format_result(result))
        self._status.evaluation_s = time.perf_counter() - began
        self._early_stopping.record(step, losses)
        return losses

    def _save(
        self, step: int, state: TrainState, losses: dict[str, float | None], *, is_last: bool
    ) -> None:
        """Starts writing a checkpoint."""
        self._status.begin(
            f"the checkpoint of step {step}", expected_s=self._status.step_s, is_writing=True
        )
        eval_loss = losses.get(self._eval_set["name"]) if self._eval_set else None
        meta = dataclasses.replace(self._build_meta(), eval_loss=eval_loss, eval_set=self._eval_set)
        is_end = is_last or self._is_stopped_early or self._preemption.reason is not None
        wait_s = self._checkpoints.save(state, meta, is_last=is_end)
        self._log.record_checkpoint_wait(wait_s)

    def _build_meta(self) -> CheckpointMeta:
        """Metadata of a checkpoint of the current state; all dispatched steps must be recorded."""
        inputs = self._inputs
        consumed = inputs.schedule.rows_consumed(self._log.num_steps - self._start.step)
        lengths = [str(stream.row_tokens) for stream in inputs.train_set.streams]
        return CheckpointMeta(
            config=self._config.model_dump(mode="json"),
            model=inputs.hf_config,
            data=inputs.train_set.fingerprint(self._config),
            step=self._log.num_steps,
            rows_consumed=dict(zip(lengths, consumed, strict=True)),
            num_tokens_total=self._log.num_tokens,
            has_pending_evaluation=self._has_pending_evaluation,
            early_stopping=self._early_stopping.state,
            base=self._base_checksums,
        )
