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
from jaxsp.checkpoint.writer import Store, leftover_bytes
from jaxsp.config import schema
from jaxsp.core import durations, errors
from jaxsp.data.packing import summary
from jaxsp.reporting import banner, metrics
from jaxsp.reporting.step_log import Log
from jaxsp.runtime import distributed, run_dir, run_paths
from jaxsp.runtime.preemption import Stopping
from jaxsp.runtime.run_status import Pace
from jaxsp.training import evaluator, memory_options, selfcheck, train_step
from jaxsp.training.early_stopping import EarlyStopping
from jaxsp.training.inputs import Material
from jaxsp.training.train_step import Program


def train(
    program: Program,
    material: Material,
    console: rich.console.Console,
    *,
    stop: Stopping | None = None,
    verbose: bool = False,
) -> None:
    """Trains from where the material begins to the last step, and writes the run directory.

    With several processes, all of them train and save together; process 0 alone writes the rest. A step whose loss or
    gradients are not finite ends the run unless run.on_nan lets it go on: a checkpoint is written, and errors.Stopped raised.

    Args:
        stop: what may ask for an early end, after which the same command goes on; it also hears how the run goes.
        verbose: says who gets which rows of the first step.
    """
    settings, start = program.config, material.start
    stop = stop or Stopping(settings.run, Pace())
    pace = stop.pace
    folder = pathlib.Path(settings.run.directory)
    _agree(program, material)
    if start.step >= program.num_steps:
        console.print(f"{folder}: has all its {program.num_steps} steps. Raise run.steps or run.epochs to train longer.")
        return

    loss_set = _loss_set(program, material)
    is_own = start.is_in(folder)
    early_stopping = EarlyStopping(settings.run, loss_set, before=start.early_stopping if is_own else None)
    if early_stopping.is_over():
        console.print(
            f"{folder}: stopped early at step {start.step}: {early_stopping.reason}. "
            "Raise run.early_stopping_patience, or set it to null, to train longer."
        )
        return

    # What will happen, in words
    lines = banner.before(program, material)
    banner.show(console, lines)
    for words in selfcheck.before_training(program, material.choice):
        console.print(words, soft_wrap=True, highlight=False)
    if warning := _check_disk(program, folder, num_steps=program.num_steps - start.step):
        console.print(warning, soft_wrap=True, highlight=False)

    # Program, weights and rows
    run_step = _compile(program, material, console)
    if start.checkpoint is None:
        state = train_step.with_weights(program, material.weights())
    else:
        like = train_step.shapes(program)[0]
        state = reader.restore(start.checkpoint, like, table=program.table, num_steps=start.step)
    feed = material.train.feed(settings, program.mesh, material.schedule, layout=program.attend.layout)
    if verbose:
        console.print("\n".join([f"step {start.step + 1}:", *summary.hands(feed.deal(0))]), highlight=False, soft_wrap=True)
    steps = feed.batches()
    evaluate = evaluator.Evaluator(program, material.evals)

    # From here on there is a run
    lock = run_dir.begin(folder, settings, banner_text=banner.text(lines), keep_model=material.keep_model)

    # Steps; the numbers of one are fetched when the next is under way
    with (
        lock,
        metrics.Writer(
            folder,
            # a new run drops the evaluation before its first step, which it makes again
            from_step=start.step if is_own else start.step - 1,
            tensorboard=settings.logging.tensorboard,
        ) as writer,
        Store(
            folder / run_paths.CHECKPOINTS,
            table=program.table,
            keep=settings.checkpoint,
            pace=pace,
            first=writer.settle,  # a step that a checkpoint counts has its line
            loss_set=loss_set,
        ) as store,
        banner.Progress(console, first_step=start.step, num_steps=program.num_steps) as progress,
        metrics.Trace(folder / "profile", settings.logging.profile_steps) as trace,
        contextlib.closing(steps),
    ):

        def evaluated(number: int) -> dict[str, float | None]:
            """Losses of the data sets after a step."""
            with pace.compiles("the evaluation"):
                evaluate.compile()
            when = f"before step {number + 1}" if number == start.step else f"after step {number}"
            pace.does(f"the evaluation {when}", expected_s=pace.step_s, takes_s=pace.evaluation_s)
            asked, losses = time.perf_counter(), {}
            for result in evaluate.run(state.master, num_steps=number, alive=pace.alive):
                losses[result.data] = result.loss
                writer.write_result(result)
                progress.say(banner.result(result))
            pace.evaluation_s = time.perf_counter() - asked
            early_stopping.record(number, losses)
            return losses

        store.compile_ahead(state)
        # process 0 may have recorded the loss in a file that another node still has cached
        owed = schedule.of_first_process(float(is_own and start.owes_evaluation))
        is_first = settings.run.eval_at_start and not is_own
        if is_first:
            early_stopping.expect()
        if material.evals and (owed or is_first):
            losses = evaluated(start.step)
            if is_own:
                assert loss_set is not None, "something was evaluated"
                store.record_loss(start.step, losses[loss_set["name"]], early_stopping=early_stopping.state)
        if early_stopping.is_over():  # by the evaluation that a stop did not wait for
            progress.say(f"stopped early after step {start.step}: {early_stopping.reason}")
            return
        owes_evaluation = stops_early = False
        log = Log(program, material, writer, progress, pace)
        save = schedule.Saving(store, settings.run, first_step=start.step, say=progress.say)
        pace.waits(start.step)
        with log.waiting():
            following = next(steps, None)
        while following is not None and not stops_early:
            if pace.is_slow:
                log.catch_up()
            number = log.num_sent + 1
            if not (log.goes_on and stop.lets(number)):
                break
            rows, counts = following
            if trace.begins(number):
                log.catch_up()
                trace.begin()
            pace.sent(number, counts.row_tokens)
            state, numbers = run_step[counts.row_tokens](state, rows)
            log.sent(numbers, counts)
            with log.waiting():  # the step is running, and the rows travel meanwhile
                following = next(steps, None)
            save.check()
            pace.save_s = store.write_s
            last = following is None
            ends_epoch = not last and _ends_epoch(material, settings.run, number)
            saves = save.due(number) or last or (ends_epoch and settings.run.save_every == "epoch")
            evaluates = evaluate.due(number) or last or (ends_epoch and settings.run.eval_every == "epoch")
            ranks = saves and settings.checkpoint.keep_best > 0
            if evaluates or (ranks and settings.run.eval_every is None):
                early_stopping.expect()
            evaluates = evaluates or ranks
            if not (saves or evaluates or trace.ends(number)):
                continue
            # nothing is running while these are done, and their time is no step's
            log.catch_up()
            if trace.ends(number):
                trace.end()
            losses, owes_evaluation = {}, evaluates
            # a stop waits for no evaluation: all processes have let the next step go by now, or none has
            if evaluates and log.goes_on and (last or stop.lets(number + 1)):
                losses, owes_evaluation = evaluated(number), False
                stops_early = early_stopping.is_over()
            if saves or stops_early:  # after the results, which would be lost if the run was killed between the two
                pace.does(f"the checkpoint of step {number}", expected_s=pace.step_s, writes=True)
                meta = dataclasses.replace(
                    _meta(program, material, log),
                    loss=losses.get(loss_set["name"]) if loss_set else None,
                    loss_set=loss_set,
                    owes_evaluation=owes_evaluation,
                    early_stopping=early_stopping.state,
                )
                log.save_s = save(state, meta, is_last=last or stops_early or stop.reason is not None)
            log.go_on()
        log.catch_up()
        pace.does("the last checkpoint", expected_s=pace.step_s, writes=True)
        owes_evaluation |= settings.checkpoint.keep_best > 0  # each checkpoint is to have a loss
        meta = dataclasses.replace(_meta(program, material, log), owes_evaluation=owes_evaluation, early_stopping=early_stopping.state)
        save.finish(state, meta)

    # What is left behind
    if not log.goes_on:
        raise errors.Stopped(log.bad.why(saved=save.last_step))
    if stops_early and save.last_step < program.num_steps:
        with distributed.though_deaf():
            console.print(
                f"stopped early after step {save.last_step}: {early_stopping.reason}", soft_wrap=True, highlight=False
            )
    elif stop.reason is not None and save.last_step < program.num_steps:
        with distributed.though_deaf():
            console.print(f"stopped by {stop.reason} after step {save.last_step}; the same command goes on from there")
        return
    with distributed.though_deaf():
        banner.show(console, banner.after(program, log.first, log.last, recent_losses=log.recent_losses, seconds=log.seconds))


def _meta(program: Program, material: Material, log: Log) -> reader.Meta:
    """Metadata of a checkpoint made now; all dispatched steps must be recorded."""
    config, start = program.config, material.start
    consumed = material.schedule.consumed(log.num_steps - start.step)
    lengths = [str(stream.row_tokens) for stream in material.train.streams]
    return reader.Meta(
        config=config.model_dump(mode="json"),
        model=material.fields,
        data=material.train.fingerprint(config),
        step=log.num_steps,
        rows=dict(zip(lengths, consumed, strict=True)),
        num_tokens_total=log.num_tokens,
    )


def _ends_epoch(material: Material, run: schema.Run, number: int) -> bool:
    """True if an epoch ends with a step and the config requests an action at its end."""
    if "epoch" not in (run.save_every, run.eval_every):
        return False
    return material.train.ends_epoch(material.schedule, number - material.start.step)


def _compile(program: Program, material: Material, console: rich.console.Console) -> dict[int, jax.stages.Compiled]:
    """Compiles the step for each row length, and reserves the host memory that it offloads to."""
    compiled, host_bytes = {}, 0
    lengths = [stream.row_tokens for stream in material.train.streams]
    for number, row_tokens in enumerate(lengths, 1):
        which = f" for rows of {row_tokens:,} tokens" if len(lengths) > 1 else ""
        began, of_length = time.perf_counter(), dataclasses.replace(program, config=program.config.for_rows_of(row_tokens))
        with console.status(f"compiling the step{which}{f', {number} of {len(lengths)}' if which else ''}"):
            ready = memory_options.ready(of_length, uncounted=material.choice.uncounted_bytes)
        seconds = time.perf_counter() - began
        console.print(
            f"the step{which} was compiled in {durations.describe(round(seconds, 1))}; {memory_options.takes(ready)}",
            soft_wrap=True,
            highlight=False,
        )
        compiled[row_tokens] = ready.run
        host_bytes = max(host_bytes, ready.needs.host)
    memory_options.reserve(program, host_bytes)
    return compiled


def _check_disk(program: Program, folder: pathlib.Path, *, num_steps: int) -> str | None:
    """Warns if the disk may become full. Raises: UserError if no checkpoint fits. Process 0 does it for all."""
    if jax.process_index() > 0:
        return None
    state = train_step.shapes(program)[0]
    checkpoint_bytes = disk_space.num_bytes((state.master, state.opt))
    return disk_space.check(
        program.config,
        checkpoint_bytes=checkpoint_bytes,
        num_steps=num_steps,
        leftover_bytes=leftover_bytes(folder / run_paths.CHECKPOINTS),
    )


def _loss_set(program: Program, material: Material) -> dict[str, str] | None:
    """Name and digest of the data set whose loss ranks checkpoints; None if nothing is evaluated."""
    best_by = program.config.checkpoint.best_by
    chosen = [data for data in material.evals if best_by in (None, data.name)]
    return evaluator.identity(chosen[0], program.config) if chosen else None


def _agree(program: Program, material: Material) -> None:
    """Raises: UserError where processes were given different configs or data, or would begin at different steps."""
    if jax.process_count() == 1:
        return
    start, settings = material.start, program.config
    told = [(f"data: {one.name}", digest) for data in (material.train, *material.evals) for one, digest in data.origins]
    told.append(("the config", repr(settings)))
    told.append(("XLA_FLAGS", repr(program.told)))
    told.append(("attention (the devices' memory or versions)", repr(material.choice)))
    hashes = [np.frombuffer(hashlib.sha256(words.encode()).digest()[:8], np.int32) for _, words in told]
    own = np.concatenate([[start.step, sum(start.rows.values())], *hashes]).astype(np.int32)
    of_all = multihost_utils.process_allgather(own)
    differs = (of_all != of_all[0]).any(0)
    if differs[:2].any():
        steps = errors.choices(sorted({*of_all[:, 0].tolist()}))
        raise errors.UserError(
            f"run.directory = {settings.run.directory}: processes would begin at steps {steps}, because they see different "
            "checkpoints. Name a folder that all nodes share."
        )
    for (what, _), other in zip(told, differs[2:].reshape(-1, 2).any(1), strict=True):
        if other:
            raise errors.UserError(
                f"{what}: is not the same in all processes. Give all of them the same files, for example in a folder that all "
                "nodes share."
            )
