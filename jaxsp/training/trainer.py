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

from jaxsp.core import errors, processes
from jaxsp.data import account
from jaxsp.training import banner, checkpoint, directory, evaluator, levers, metrics, selfcheck, step
from jaxsp.training.log import Log, Running
from jaxsp.training.material import Material
from jaxsp.training.pace import Pace
from jaxsp.training.saving import Saving
from jaxsp.training.step import Program
from jaxsp.training.stopping import Stopping
from jaxsp.training.store import Store


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

    # What will happen, in words
    lines = banner.before(program, material)
    banner.show(console, lines)
    for words in selfcheck.before_training(program, material.choice):
        console.print(words, soft_wrap=True, highlight=False)

    # Program, weights and rows
    run_step = _compile(program, material, console)
    if start.checkpoint is None:
        state = step.with_weights(program, material.weights())
    else:
        like = step.shapes(program)[0]
        state = checkpoint.restore(start.checkpoint, like, table=program.table, num_steps=start.step)
    feed = material.train.feed(settings, program.mesh, material.schedule, layout=program.attend.layout)
    if verbose:
        console.print("\n".join([f"step {start.step + 1}:", *account.hands(feed.deal(0))]), highlight=False, soft_wrap=True)
    steps = feed.batches()
    evaluate = evaluator.Evaluator(program, material.evals)

    # From here on there is a run
    lock = directory.begin(folder, settings, material, banner.text(lines))

    # Steps; the numbers of one are fetched when the next is under way
    with (
        lock,
        metrics.Writer(folder, from_step=start.step, tensorboard=settings.logging.tensorboard) as writer,
        Store(
            folder / checkpoint.CHECKPOINTS,
            table=program.table,
            keep=settings.checkpoint,
            pace=pace,
            first=writer.settle,  # a step that a checkpoint counts has its line
        ) as store,
        banner.Progress(console, first_step=start.step, num_steps=program.num_steps) as progress,
        metrics.Trace(folder / "profile", settings.logging.profile_steps) as trace,
        contextlib.closing(steps),
    ):

        def evaluated(number: int) -> dict[str, float | None]:
            """Losses of the data sets after a step."""
            with pace.compiles("the evaluation"):
                evaluate.compile()
            pace.does(f"the evaluation after step {number}", expected_s=pace.step_s, takes_s=pace.evaluation_s)
            asked, losses = time.perf_counter(), {}
            for result in evaluate.run(state.master, num_steps=number, alive=pace.alive):
                losses[result.data] = result.loss
                writer.write_result(result)
                progress.say(banner.result(result))
            pace.evaluation_s = time.perf_counter() - asked
            return losses

        if start.owes_evaluation:
            evaluated(start.step)
        owes_evaluation = False
        log = Log(program, material, writer, progress, pace)
        save = Saving(store, settings.run, first_step=start.step, say=progress.say)
        pace.waits(start.step)
        following = next(steps, None)
        while following is not None:
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
            log.catch_up()
            # the step just sent off is running: its time holds this wait, and the rows travel meanwhile
            asked = time.perf_counter()
            following = next(steps, None)
            log.sent(Running(numbers=numbers, counts=counts, data_wait_s=time.perf_counter() - asked))
            save.check()
            pace.save_s = store.write_s
            last = following is None
            saves = save.due(number) or last
            evaluates = evaluate.due(number) or last or (saves and settings.checkpoint.keep_best > 0)
            if not (saves or evaluates or trace.ends(number)):
                continue
            # nothing is running while these are done, and their time is no step's
            log.catch_up()
            if trace.ends(number):
                trace.end()
            losses = {}
            if evaluates and log.goes_on:
                # a stop waits for no evaluation: all processes have let the next step go by now, or none has
                owes_evaluation = not (last or stop.lets(number + 1))
                losses = {} if owes_evaluation else evaluated(number)
            if saves:  # after the results, which would be lost if the run was killed between the two
                pace.does(f"the checkpoint of step {number}", expected_s=pace.step_s, writes=True)
                best_by = settings.checkpoint.best_by or next(iter(losses), "")
                meta = dataclasses.replace(log.meta(), loss=losses.get(best_by), owes_evaluation=owes_evaluation)
                log.save_s = save(state, meta)
            log.go_on()
        log.catch_up()
        pace.does("the last checkpoint", expected_s=pace.step_s, writes=True)
        save.finish(state, dataclasses.replace(log.meta(), owes_evaluation=owes_evaluation))

    # What is left behind
    if not log.goes_on:
        raise errors.Stopped(log.bad.why(saved=save.last_step))
    if stop.reason is not None and save.last_step < program.num_steps:
        with processes.though_deaf():
            console.print(f"stopped by {stop.reason} after step {save.last_step}; the same command goes on from there")
        return
    with processes.though_deaf():
        banner.show(console, banner.after(program, log.first, log.last, recent_losses=log.recent_losses, seconds=log.seconds))


def _compile(program: Program, material: Material, console: rich.console.Console) -> dict[int, jax.stages.Compiled]:
    """Compiles the step for each row length, and reserves the host memory that it offloads to."""
    compiled, host_bytes = {}, 0
    lengths = [stream.row_tokens for stream in material.train.streams]
    for number, row_tokens in enumerate(lengths, 1):
        which = f" for rows of {row_tokens:,} tokens" if len(lengths) > 1 else ""
        began, of_length = time.perf_counter(), dataclasses.replace(program, config=program.config.for_rows_of(row_tokens))
        with console.status(f"compiling the step{which}{f', {number} of {len(lengths)}' if which else ''}"):
            ready = levers.ready(of_length, uncounted=material.choice.uncounted_bytes)
        seconds = time.perf_counter() - began
        console.print(
            f"the step{which} was compiled in {seconds:.1f} s; {levers.takes(ready)}", soft_wrap=True, highlight=False
        )
        compiled[row_tokens] = ready.run
        host_bytes = max(host_bytes, ready.needs.host)
    levers.reserve(program, host_bytes)
    return compiled


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
