"""The training loop."""

import contextlib
import dataclasses
import hashlib
import pathlib
import time

import jax
import numpy as np
import rich.console
from jax.experimental import multihost_utils

from jaxsp.checkpoint import disk_space, reader, schedule
from jaxsp.checkpoint.reader import CheckpointMeta
from jaxsp.checkpoint.schedule import CheckpointSchedule
from jaxsp.checkpoint.writer import CheckpointWriter, leftover_bytes
from jaxsp.config.schema import RunConfig
from jaxsp.core import durations, errors
from jaxsp.core.errors import NeedsAttentionError, UserError
from jaxsp.data.packing import summary
from jaxsp.reporting import banner
from jaxsp.reporting import console as output
from jaxsp.reporting.metrics import MetricsWriter
from jaxsp.reporting.profiler import ProfilerTrace
from jaxsp.reporting.progress import Progress
from jaxsp.reporting.step_log import StepLog
from jaxsp.runtime import distributed, run_dir, run_paths
from jaxsp.runtime.preemption import Preemption
from jaxsp.runtime.run_status import RunStatus
from jaxsp.training import evaluator, memory_options, selfcheck, train_step
from jaxsp.training.early_stopping import EarlyStopping
from jaxsp.training.evaluator import Evaluator
from jaxsp.training.inputs import RunInputs
from jaxsp.training.train_step import Program


def train(
    program: Program,
    inputs: RunInputs,
    console: rich.console.Console,
    *,
    preemption: Preemption | None = None,
    verbose: bool = False,
) -> None:
    """Trains from where the material begins to the last step, and writes the run directory.

    With several processes, all of them train and save together; process 0 alone writes the rest. A step whose loss or
    gradients are not finite ends the run unless run.on_nonfinite lets it go on: a checkpoint is written, and errors.Stopped raised.

    Args:
        stop: what may ask for an early end, after which the same command goes on; it also hears how the run goes.
        verbose: says who gets which rows of the first step.
    """
    config, start = program.config, inputs.start
    preemption = preemption or Preemption(config.run, RunStatus())
    pace = preemption.status
    folder = pathlib.Path(config.run.directory)
    _check_agreement(program, inputs)
    if start.step >= program.num_steps:
        console.print(
            f"{folder}: has all its {program.num_steps} steps. Raise run.steps or run.epochs to train longer."
        )
        return

    loss_set = _ranking_eval_set(program, inputs)
    is_own = start.is_resume_in(folder)
    early_stopping = EarlyStopping(
        config.run, loss_set, resumed_state=start.early_stopping if is_own else None
    )
    if early_stopping.should_stop():
        console.print(
            f"{folder}: stopped early at step {start.step}: {early_stopping.reason}. "
            "Raise run.early_stopping_patience, or set it to null, to train longer."
        )
        return

    # What will happen, in words
    lines = banner.describe_run(program, inputs)
    output.print_pairs(console, lines)
    for words in selfcheck.check_device(program, inputs.attention_choice):
        console.print(words, soft_wrap=True, highlight=False)
    if warning := _check_disk(program, folder, num_steps=program.num_steps - start.step):
        console.print(warning, soft_wrap=True, highlight=False)

    # Program, weights and rows
    run_step = _compile_steps(program, inputs, console)
    if start.checkpoint is None:
        state = train_step.init_state(program, inputs.make_weights())
    else:
        like = train_step.abstract_inputs(program)[0]
        state = reader.restore(start.checkpoint, like, table=program.table, num_steps=start.step)
    feed = inputs.train_set.make_loader(
        config, program.mesh, inputs.schedule, layout_degree=program.attend.layout_degree
    )
    if verbose:
        console.print(
            "\n".join(
                [f"step {start.step + 1}:", *summary.describe_assignments(feed.assign_rows(0))]
            ),
            highlight=False,
            soft_wrap=True,
        )
    steps = feed.batches()
    evaluate = Evaluator(program, inputs.eval_sets)

    # From here on there is a run
    lock = run_dir.create(
        folder, config, banner_text=output.format_pairs(lines), keep_model=inputs.write_model
    )

    # Steps; the numbers of one are fetched when the next is under way
    with (
        lock,
        MetricsWriter(
            folder,
            # a new run drops the evaluation before its first step, which it makes again
            from_step=start.step if is_own else start.step - 1,
            tensorboard=config.logging.tensorboard,
        ) as writer,
        CheckpointWriter(
            folder / run_paths.CHECKPOINTS_DIR,
            table=program.table,
            retention=config.checkpoint,
            status=pace,
            before_write=writer.sync,  # a step that a checkpoint counts has its line
            eval_set=loss_set,
        ) as store,
        Progress(console, first_step=start.step, num_steps=program.num_steps) as progress,
        ProfilerTrace(folder / "profile", config.logging.profile_steps) as trace,
        contextlib.closing(steps),
    ):

        def evaluated(number: int) -> dict[str, float | None]:
            """Losses of the data sets after a step."""
            with pace.compiling("the evaluation"):
                evaluate.compile()
            when = f"before step {number + 1}" if number == start.step else f"after step {number}"
            pace.begin(
                f"the evaluation {when}", expected_s=pace.step_s, duration_s=pace.evaluation_s
            )
            asked, losses = time.perf_counter(), {}
            for result in evaluate.run(state.master, num_steps=number, on_batch=pace.heartbeat):
                losses[result.data] = result.loss
                writer.write_eval(result)
                progress.print_line(output.format_result(result))
            pace.evaluation_s = time.perf_counter() - asked
            early_stopping.record(number, losses)
            return losses

        store.compile_ahead(state)
        # process 0 may have recorded the loss in a file that another node still has cached
        owed = schedule.broadcast_from_first(float(is_own and start.has_pending_evaluation))
        is_first = config.run.eval_at_start and not is_own
        if is_first:
            early_stopping.expect_evaluation()
        if inputs.eval_sets and (owed or is_first):
            losses = evaluated(start.step)
            if is_own:
                assert loss_set is not None, "something was evaluated"
                store.record_eval(
                    start.step, losses[loss_set["name"]], early_stopping=early_stopping.state
                )
        if early_stopping.should_stop():  # by the evaluation that a stop did not wait for
            progress.print_line(f"stopped early after step {start.step}: {early_stopping.reason}")
            return
        owes_evaluation = stops_early = False
        log = StepLog(program, inputs, writer, progress, pace)
        checkpoints = CheckpointSchedule(
            store, config.run, first_step=start.step, print_line=progress.print_line
        )
        pace.waiting_for_step(start.step)
        with log.measure_batch_wait():
            following = next(steps, None)
        while following is not None and not stops_early:
            if pace.is_slow:
                log.record_previous_step()
            number = log.num_dispatched + 1
            if not (log.can_continue and preemption.should_dispatch(number)):
                break
            rows, counts = following
            if trace.should_start(number):
                log.record_previous_step()
                trace.start()
            pace.dispatched(number, counts.row_tokens)
            state, numbers = run_step[counts.row_tokens](state, rows)
            log.record_dispatch(numbers, counts)
            with log.measure_batch_wait():  # the step is running, and the rows travel meanwhile
                following = next(steps, None)
            checkpoints.poll()
            pace.checkpoint_s = store.write_s
            last = following is None
            ends_epoch = not last and _is_epoch_end(inputs, config.run, number)
            saves = (
                checkpoints.is_due(number)
                or last
                or (ends_epoch and config.run.save_every == "epoch")
            )
            evaluates = (
                evaluate.is_due(number) or last or (ends_epoch and config.run.eval_every == "epoch")
            )
            ranks = saves and config.checkpoint.keep_best > 0
            if evaluates or (ranks and config.run.eval_every is None):
                early_stopping.expect_evaluation()
            evaluates = evaluates or ranks
            if not (saves or evaluates or trace.should_stop(number)):
                continue
            # nothing is running while these are done, and their time is no step's
            log.record_previous_step()
            if trace.should_stop(number):
                trace.stop()
            losses, owes_evaluation = {}, evaluates
            # a stop waits for no evaluation: all processes have let the next step go by now, or none has
            if evaluates and log.can_continue and (last or preemption.should_dispatch(number + 1)):
                losses, owes_evaluation = evaluated(number), False
                stops_early = early_stopping.should_stop()
            if (
                saves or stops_early
            ):  # after the results, which would be lost if the run was killed between the two
                pace.begin(
                    f"the checkpoint of step {number}", expected_s=pace.step_s, is_writing=True
                )
                meta = dataclasses.replace(
                    _meta(program, inputs, log),
                    eval_loss=losses.get(loss_set["name"]) if loss_set else None,
                    eval_set=loss_set,
                    has_pending_evaluation=owes_evaluation,
                    early_stopping=early_stopping.state,
                )
                wait_s = checkpoints.save(
                    state, meta, is_last=last or stops_early or preemption.reason is not None
                )
                log.record_checkpoint_wait(wait_s)
            log.restart_clock()
        log.record_previous_step()
        pace.begin("the last checkpoint", expected_s=pace.step_s, is_writing=True)
        owes_evaluation |= config.checkpoint.keep_best > 0  # each checkpoint is to have a loss
        meta = dataclasses.replace(
            _meta(program, inputs, log),
            has_pending_evaluation=owes_evaluation,
            early_stopping=early_stopping.state,
        )
        checkpoints.finish(state, meta)

    # What is left behind
    if not log.can_continue:
        raise NeedsAttentionError(
            log.nonfinite.stop_message(saved_step=checkpoints.last_saved_step)
        )
    if stops_early and checkpoints.last_saved_step < program.num_steps:
        with distributed.ignore_broken_pipe():
            console.print(
                f"stopped early after step {checkpoints.last_saved_step}: {early_stopping.reason}",
                soft_wrap=True,
                highlight=False,
            )
    elif preemption.reason is not None and checkpoints.last_saved_step < program.num_steps:
        with distributed.ignore_broken_pipe():
            console.print(
                f"stopped by {preemption.reason} after step {checkpoints.last_saved_step}; the same command goes on from there"
            )
        return
    with distributed.ignore_broken_pipe():
        output.print_pairs(
            console,
            banner.summarize_run(
                program,
                log.first_line,
                log.last_line,
                recent_losses=log.recent_losses,
                seconds=log.elapsed_s,
            ),
        )


def _meta(program: Program, material: RunInputs, log: StepLog) -> CheckpointMeta:
    """Metadata of a checkpoint made now; all dispatched steps must be recorded."""
    config, start = program.config, material.start
    consumed = material.schedule.rows_consumed(log.num_steps - start.step)
    lengths = [str(stream.row_tokens) for stream in material.train_set.streams]
    return CheckpointMeta(
        config=config.model_dump(mode="json"),
        model=material.hf_config,
        data=material.train_set.fingerprint(config),
        step=log.num_steps,
        rows_consumed=dict(zip(lengths, consumed, strict=True)),
        num_tokens_total=log.num_tokens,
    )


def _is_epoch_end(material: RunInputs, run: RunConfig, number: int) -> bool:
    """True if an epoch ends with a step and the config requests an action at its end."""
    if "epoch" not in (run.save_every, run.eval_every):
        return False
    return material.train_set.is_epoch_end(material.schedule, number - material.start.step)


def _compile_steps(
    program: Program, material: RunInputs, console: rich.console.Console
) -> dict[int, jax.stages.Compiled]:
    """Compiles the step for each row length, and reserves the host memory that it offloads to."""
    compiled, host_bytes = {}, 0
    lengths = [stream.row_tokens for stream in material.train_set.streams]
    for number, row_tokens in enumerate(lengths, 1):
        which = f" for rows of {row_tokens:,} tokens" if len(lengths) > 1 else ""
        began, of_length = (
            time.perf_counter(),
            dataclasses.replace(program, config=program.config.with_row_tokens(row_tokens)),
        )
        with console.status(
            f"compiling the step{which}{f', {number} of {len(lengths)}' if which else ''}"
        ):
            ready = memory_options.compile_fitting_step(
                of_length, workspace_bytes=material.attention_choice.workspace_bytes
            )
        seconds = time.perf_counter() - began
        console.print(
            f"the step{which} was compiled in {durations.describe(round(seconds, 1))}; {memory_options.describe_compiled(ready)}",
            soft_wrap=True,
            highlight=False,
        )
        compiled[row_tokens] = ready.executable
        host_bytes = max(host_bytes, ready.memory_use.host)
    memory_options.reserve_host_memory(program, host_bytes)
    return compiled


def _check_disk(program: Program, folder: pathlib.Path, *, num_steps: int) -> str | None:
    """Warns if the disk may become full. Raises: UserError if no checkpoint fits. Process 0 does it for all."""
    if jax.process_index() > 0:
        return None
    state = train_step.abstract_inputs(program)[0]
    checkpoint_bytes = disk_space.tree_bytes((state.master, state.opt_state))
    return disk_space.check(
        program.config,
        checkpoint_bytes=checkpoint_bytes,
        num_steps=num_steps,
        leftover_bytes=leftover_bytes(folder / run_paths.CHECKPOINTS_DIR),
    )


def _ranking_eval_set(program: Program, material: RunInputs) -> dict[str, str] | None:
    """Name and digest of the data set whose loss ranks checkpoints; None if nothing is evaluated."""
    best_eval = program.config.checkpoint.best_eval
    chosen = [data for data in material.eval_sets if best_eval in (None, data.name)]
    return evaluator.identify_eval_set(chosen[0], program.config) if chosen else None


def _check_agreement(program: Program, material: RunInputs) -> None:
    """Raises: UserError where processes were given different configs or data, or would begin at different steps."""
    if jax.process_count() == 1:
        return
    start, config = material.start, program.config
    told = [
        (f"data: {one.name}", digest)
        for data in (material.train_set, *material.eval_sets)
        for one, digest in data.digested_sources
    ]
    told.append(("the config", repr(config)))
    told.append(("XLA_FLAGS", repr(program.compile_options)))
    told.append(("attention (the devices' memory or versions)", repr(material.attention_choice)))
    hashes = [
        np.frombuffer(hashlib.sha256(words.encode()).digest()[:8], np.int32) for _, words in told
    ]
    own = np.concatenate([[start.step, sum(start.rows_consumed.values())], *hashes]).astype(
        np.int32
    )
    of_all = multihost_utils.process_allgather(own)
    differs = (of_all != of_all[0]).any(0)
    if differs[:2].any():
        steps = errors.format_choices(sorted({*of_all[:, 0].tolist()}))
        raise UserError(
            f"run.directory = {config.run.directory}: processes would begin at steps {steps}, because they see different "
            "checkpoints. Name a folder that all nodes share."
        )
    for (what, _), other in zip(told, differs[2:].reshape(-1, 2).any(1), strict=True):
        if other:
            raise UserError(
                f"{what}: is not the same in all processes. Give all of them the same files, for example in a folder that all "
                "nodes share."
            )
