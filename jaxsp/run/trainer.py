"""Training: checks, compilation, state, and the loop over steps."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import rich.console

from jaxsp.blocks import layers
from jaxsp.checkpoint import checksums, reader
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.core.errors import NeedsAttentionError
from jaxsp.evaluation import retrieval
from jaxsp.evaluation.evaluator import Evaluator
from jaxsp.evaluation.retrieval import RetrievalEvaluator
from jaxsp.generation.generator import SampleGenerator
from jaxsp.run import banner, metrics, preflight, run_directory
from jaxsp.run import console as output
from jaxsp.run.build import Run
from jaxsp.run.config_file import is_due
from jaxsp.run.run_directory import RunDirectory
from jaxsp.run.schedule import EarlyStopping, broadcast_from_first
from jaxsp.run.step_log import StepLog
from jaxsp.run.trackers import Outcome
from jaxsp.system import distributed
from jaxsp.system.preemption import Preemption
from jaxsp.system.watchdog import Activity, RunStatus
from jaxsp.training import train_state
from jaxsp.training.metric_table import Line
from jaxsp.training.train_state import TrainState

COLLECT_EVERY = 1000
"""Steps between collections of garbage in a run without checkpoints and evaluations."""


def train(
    run: Run,
    console: rich.console.Console,
    *,
    preemption: Preemption | None = None,
    verbose: bool = False,
    on_line: Callable[[Line], None] | None = None,
) -> tuple[Run, TrainState | None]:
    """Trains from the starting point to the last step and writes the run directory.

    All processes train and save together; only process 0 writes the other files.

    Args:
        on_line: called in process 0 with each line of metrics.jsonl, eval.jsonl and tasks.jsonl
            after it is written. An exception in it ends the run.
    Returns: the run, with the kernels that it used, and its last state; None if it was complete.
    Raises:
        UserError: processes differ, or the step, a checkpoint or the directory cannot be used.
        NeedsAttentionError: a step was not finite (unless run.on_nonfinite allows it), or the last
            checkpoint could not be written.
    """
    preemption = preemption or Preemption(RunStatus())
    if jax.process_count() > 1:
        preflight.check_agreement(run)
    start = run.start
    early_stopping = EarlyStopping(
        run.config.run,
        run.ranking_eval_set,
        resumed_state=start.early_stopping if run.is_resume else None,
    )
    completion = ""
    if start.step >= run.spec.num_steps:
        completion = f"has all its {run.spec.num_steps} steps. Raise run.steps or run.epochs"
    elif start.early_stopping is not None and early_stopping.should_stop():
        completion = f"stopped early at step {start.step}: {early_stopping.reason}. "
        completion += "Raise run.early_stopping_patience, or set it to null,"
    if completion:
        preflight.finish_run(run)
        output.print_line(console, f"{run.config.run.directory}: {completion} to train longer.")
        return run, None
    whole_banner, short_banner = banner.describe_run(run)
    output.print_pairs(console, whole_banner if verbose else short_banner)
    run = preflight.report_checks(run, console)
    step, compile_s = preflight.compile_step(run.spec, console)
    start_line = run_directory.describe_start(run, step, compile_s=compile_s)

    def prepare_references(make_weights: Callable[[], layers.Weights] | None) -> None:
        data_sets = [run.train_set, *run.eval_sets]
        if run.reference.list_missing(data_sets):
            preemption.status.activity = Activity(description="the reference pass")
        run.reference.prepare(
            data_sets,
            make_weights=make_weights,
            print_line=functools.partial(output.print_line, console),
            on_batch=preemption.status.heartbeat,
        )

    state, base_checksums = make_state(run, prepare_references)
    with RunDirectory(
        run,
        console,
        preemption.status,
        banner_text=output.format_pairs(whole_banner),
        start_line=start_line,
        on_line=on_line,
    ) as out:
        loop = Loop(run, out, preemption, early_stopping, base_checksums)
        state = loop.run_steps(step.executable, state)
        out.trackers.outcome = loop.outcome
    loop.print_outcome(console)
    return run, state


def make_state(
    run: Run,
    prepare_references: Callable[[Callable[[], layers.Weights] | None], None] = lambda _: None,
) -> tuple[TrainState, dict[str, str]]:
    """State of the first step, and checksums of the frozen weights.

    Args: prepare_references: called with what makes the reference model's weights; None: read them.
    """
    spec = run.spec
    checkpoint = run.start.checkpoint
    if checkpoint is None:
        state = train_state.init_state(spec, run.weights.make())
        prepare_references(lambda: state.master)
        return state, checksums.compute_frozen(spec.state_table, state.master)
    prepare_references(None)
    state = reader.restore(
        checkpoint,
        train_state.abstract_inputs(spec)[0],
        table=spec.state_table,
        num_steps=run.start.step,
        frozen=run.weights.make(frozen_only=True),
    )
    base_checksums = checksums.compute_frozen(spec.state_table, state.master)
    reader.check_base(checkpoint, base_checksums)
    return state, base_checksums


class Loop:
    """The loop over steps, and what happens between them: all processes decide alike."""

    def __init__(
        self,
        run: Run,
        out: RunDirectory,
        preemption: Preemption,
        early_stopping: EarlyStopping,
        base_checksums: dict[str, str],
    ):
        self._run = run
        self._out = out
        self._preemption = preemption
        self._status = preemption.status
        self._early_stopping = early_stopping
        self._base_checksums = base_checksums
        self._eval_sets = Evaluator(run.spec, run.eval_sets, has_long_ppl=run.config.eval.long_ppl)
        self._tasks = RetrievalEvaluator(self._eval_sets, run.task_samples)
        self._has_evaluations = bool(self._eval_sets) or bool(self._tasks)
        self._samples = SampleGenerator(
            run.spec,
            run.eval_sets,
            count=run.config.run.generate_samples,
            tokenizer=run.tokenizer,
            stop_ids=run.stop_ids,
        )
        self._log = StepLog(run, out, self._status)
        self._has_pending_evaluation = False
        self._is_stopped_early = False
        self._trace = contextlib.ExitStack()
        """Holds the trace of JAX's profiler while there is one."""

    def run_steps(self, function: Callable[..., Any], state: TrainState) -> TrainState:
        """Runs steps until the last one or until the run stops early, and saves the last state."""
        run = self._run
        log = self._log
        first_traced, _ = run.config.logging.profile_steps or (0, 0)
        with contextlib.ExitStack() as stack:
            stack.callback(gc.unfreeze)
            if gc.isenabled():
                stack.callback(gc.enable)
            rows = stack.enter_context(contextlib.closing(log.loader.batches()))
            stack.push(self._trace)
            self._evaluate_at_start(state)
            next_batch = log.read_batch(rows)
            for step in itertools.count(run.start.step + 1):
                if next_batch is None or self._is_stopped_early:
                    break
                if self._status.is_slow:
                    log.record_dispatched_step()
                if not (log.can_continue and self._preemption.should_dispatch(step)):
                    break
                batch, counts = next_batch
                assert (counts.documents_P2 >= 0).all(), "a step has whole pairs"
                if step == first_traced:
                    log.record_dispatched_step()  # no step may be running
                    if jax.process_index() == 0:
                        trace = jax.profiler.trace(str(run.directory / "profile"))
                        self._trace.enter_context(trace)
                self._status.dispatched(estimated_s=log.estimate_step_s(counts))
                state, results = function(state, batch)  # asynchronous
                log.record_dispatch(results, counts)
                next_batch = log.read_batch(rows)  # transferred while the step runs
                self._out.checkpoints.poll()
                self._status.checkpoint_s = self._out.writer.write_s
                self._evaluate_and_save(step, state)
            log.record_dispatched_step()
            self._status.begin_writing("the last checkpoint")
            # With keep_best, each checkpoint needs a loss: the resumed run evaluates this one
            self._has_pending_evaluation |= run.config.checkpoint.keep_best > 0
            self._out.checkpoints.finish(state, self._build_meta())
        return state

    def _evaluate_at_start(self, state: TrainState) -> None:
        """Evaluates the starting weights if that is due: in a new run with run.eval_at_start, and
        if the evaluation of the checkpoint was skipped because the run was being stopped."""
        start = self._run.start
        is_resume = self._run.is_resume
        # From process 0: other nodes may have an old copy of the checkpoint's metadata cached
        is_pending = is_resume and broadcast_from_first(start.has_pending_evaluation) > 0
        is_first = self._run.config.run.eval_at_start and not is_resume
        if is_first:
            self._early_stopping.expect_evaluation()
        if self._has_evaluations and (is_pending or is_first):
            loss = self._evaluate(start.step, state)
            if is_resume:
                early_stopping = self._early_stopping.state
                self._out.writer.record_eval(start.step, loss, early_stopping=early_stopping)
        self._is_stopped_early = self._early_stopping.should_stop()
        self._log.restart_clock()

    def _evaluate_and_save(self, step: int, state: TrainState) -> None:
        """Evaluates and writes a checkpoint after a step if they are due; no step's time has them.

        The evaluation comes first: a kill between the two would lose its results.
        """
        run = self._run
        config = run.config.run
        checkpoints = self._out.checkpoints
        is_last = step == run.spec.num_steps
        # All processes must do this once per step: the schedule communicates
        should_save = checkpoints.is_due(step) or is_last
        should_evaluate = is_last or (self._has_evaluations and is_due(config.eval_every, step))
        if "epoch" in (config.save_every, config.eval_every):
            is_epoch_end = run.train_set.is_epoch_end(run.schedule, step - run.start.step)
            should_save |= is_epoch_end and config.save_every == "epoch"
            should_evaluate |= is_epoch_end and config.eval_every == "epoch"
        should_rank = should_save and run.config.checkpoint.keep_best > 0
        if should_evaluate or (should_rank and config.eval_every is None):
            self._early_stopping.expect_evaluation()
        should_evaluate |= should_rank
        _, last_traced = run.config.logging.profile_steps or (0, 0)
        is_first = step == run.start.step + 1
        if not (should_save or should_evaluate or step == last_traced or is_first):
            if step % COLLECT_EVERY == 0:
                gc.collect()
            return
        self._log.record_dispatched_step()
        if step == last_traced:
            self._trace.close()
        loss = None
        self._has_pending_evaluation = should_evaluate
        # Skip the evaluation if the run is being stopped. All processes decide alike: either all of
        # them may dispatch the next step, or none may
        can_evaluate = should_evaluate and self._log.can_continue
        if can_evaluate and (is_last or self._preemption.should_dispatch(step + 1)):
            loss = self._evaluate(step, state)
            self._has_pending_evaluation = False
            self._is_stopped_early = self._early_stopping.should_stop()
        if should_save or self._is_stopped_early:
            self._status.begin_writing(f"the checkpoint of step {step}")
            meta = dataclasses.replace(
                self._build_meta(), eval_loss=loss, eval_set=run.ranking_eval_set
            )
            is_end = is_last or self._is_stopped_early or self._preemption.reason is not None
            self._log.checkpoint_wait_s += checkpoints.save(state, meta, is_last=is_end)
        gc.collect()
        if is_first:
            # A collection in one process delays a step of all. From now on, they collect together
            # here, and leave out what exists already
            gc.freeze()
            gc.disable()
        self._log.restart_clock()

    def _evaluate(self, step: int, state: TrainState) -> float | None:
        """Evaluates, writes and prints. Returns: the loss on the set that ranks checkpoints."""
        if not self._has_evaluations:
            return None
        status = self._status
        print_line = self._out.progress.print_line
        with status.compiling("the evaluation"):
            if self._eval_sets:
                self._eval_sets.compile()
            self._tasks.compile()
        when = f"before step {step + 1}" if step == self._run.start.step else f"after step {step}"
        status.activity = Activity(
            description=f"the evaluation {when}",
            expected_s=status.step_s,
            duration_s=status.evaluation_s,
        )
        began = time.perf_counter()
        lines = []
        for evaluator in (self._eval_sets, self._tasks):
            file = metrics.EVAL_FILE if evaluator is self._eval_sets else metrics.TASKS_FILE
            for line in evaluator.run(state.master, num_steps=step, on_batch=status.heartbeat):
                lines.append(line)
                self._out.metrics.write(file, line)
                print_line(output.format_result(line))
        is_first = status.evaluation_s is None
        with status.compiling("the answers") if is_first else contextlib.nullcontext():
            answers = self._samples.run(state.master, num_steps=step, on_token=status.heartbeat)
            for line in answers:
                self._out.metrics.write(metrics.SAMPLES_FILE, line)
                if line["sample"] == 0:
                    text = f"{line['data']}: the first answer begins with"
                    print_line(f"{text} {line['answer'][:80]!r}")
        if jax.process_index() == 0:
            try:
                retrieval.draw_if_possible(self._run.directory, lines)
            except OSError as error:
                distributed.log(f"needle.png: could not be written: {error.strerror}")
        status.evaluation_s = time.perf_counter() - began
        by_set = {line["data"]: line for line in lines if "data" in line}
        self._early_stopping.record(step, by_set)
        ranking_set = self._run.ranking_eval_set
        return by_set[ranking_set["name"]]["loss"] if ranking_set else None

    def _build_meta(self) -> CheckpointMeta:
        """Metadata of a checkpoint of the current state; all dispatched steps must be recorded."""
        run = self._run
        num_steps = self._log.num_steps
        return CheckpointMeta(
            config=run.config.model_dump(mode="json"),
            model=run.hf_config,
            data=run.train_set.fingerprint(run.config.data, seed=run.config.run.seed),
            step=num_steps,
            rows_consumed=run.schedule.rows_consumed(num_steps - run.start.step),
            num_tokens_total=self._log.num_tokens,
            has_pending_evaluation=self._has_pending_evaluation,
            early_stopping=self._early_stopping.state,
            base=self._base_checksums,
        )

    @property
    def outcome(self) -> Outcome:
        """End of the run, after its last step."""
        if not self._log.can_continue:
            return "failed"
        is_complete = self._is_stopped_early or self._log.num_steps >= self._run.spec.num_steps
        return "finished" if is_complete or self._preemption.reason is None else "stopped"

    def print_outcome(self, console: rich.console.Console) -> None:
        """Prints why the run stopped early, or its summary. Raises: NeedsAttentionError after bad
        steps."""
        step = self._out.checkpoints.last_saved_step
        print_line = self._out.progress.print_line
        if self.outcome == "failed":
            raise NeedsAttentionError(self._log.describe_stop(saved_step=step))
        if self.outcome == "stopped":
            text = f"stopped by {self._preemption.reason} after step {step}"
            print_line(f"{text}; the same command resumes from there")
            return
        if self._is_stopped_early and step < self._run.spec.num_steps:
            print_line(f"stopped early after step {step}: {self._early_stopping.reason}")
        if step > self._run.start.step:
            output.print_pairs(console, self._log.summarize())
