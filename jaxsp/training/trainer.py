"""The training loop."""

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
import time

import jax
import numpy as np
import rich.console
from jax.experimental import multihost_utils

from jaxsp.core import errors
from jaxsp.data import account
from jaxsp.training import banner, checkpoint, directory, evaluator, levers, metrics, selfcheck, step
from jaxsp.training.log import Log, Running
from jaxsp.training.material import Material
from jaxsp.training.saving import Saving
from jaxsp.training.step import Program


def train(program: Program, material: Material, console: rich.console.Console, *, verbose: bool = False) -> None:
    """Trains from where the material begins to the last step, and writes the run directory.

    With several processes, all of them train and save together; process 0 alone writes the rest. A step whose loss or
    gradients are not finite ends the run: a checkpoint is written, and errors.Stopped raised.

    Args: verbose: says who gets which rows of the first step.
    """
    settings, start = program.config, material.start
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

    # Weights, rows and program
    if start.checkpoint is None:
        state = step.with_weights(program, material.weights())
    else:
        state = checkpoint.restore(start.checkpoint, step.shapes(program)[0], num_steps=start.step)
    feed = material.train.feed(settings, program.mesh, material.schedule)
    if verbose:
        console.print("\n".join([f"step {start.step + 1}:", *account.hands(feed.deal(0))]), highlight=False, soft_wrap=True)
    steps = feed.batches()
    run_step = _compile(program, material, console)
    evaluate = evaluator.Evaluator(program, material.evals)

    # From here on there is a run
    lock = directory.begin(folder, settings, material, banner.text(lines))

    # Steps; the numbers of one are fetched when the next is under way
    with (
        lock,
        metrics.Writer(folder, from_step=start.step, tensorboard=settings.logging.tensorboard) as writer,
        checkpoint.Store(folder / checkpoint.CHECKPOINTS, keep=settings.checkpoint.keep_latest) as store,
        banner.Progress(console, first_step=start.step, num_steps=program.num_steps) as progress,
        metrics.Trace(folder / "profile", settings.logging.profile_steps) as trace,
        contextlib.closing(steps),
        contextlib.ExitStack() as leaving,
    ):
        log, save = Log(program, material, writer, progress), Saving(store, settings.run, first_step=start.step)
        leaving.push(functools.partial(_interrupted, log, save))
        following = next(steps, None)
        while following is not None and log.finite:
            rows, counts = following
            number = log.num_sent + 1
            if trace.begins(number):
                log.catch_up()
                trace.begin()
            state, numbers = run_step[counts.row_tokens](state, rows)
            log.catch_up()
            # the step just sent off is running: its time holds this wait, and the rows travel meanwhile
            asked = time.perf_counter()
            following = next(steps, None)
            log.sent(Running(numbers=numbers, counts=counts, data_wait_s=time.perf_counter() - asked))
            last = following is None
            saves, evaluates = save.due(number) or last, evaluate.due(number) or last
            if not (saves or evaluates or trace.ends(number)):
                continue
            # nothing is running while these are done, and their time is no step's
            log.catch_up()
            if trace.ends(number):
                trace.end()
            if evaluates and log.finite:
                for result in evaluate.run(state.master, num_steps=number):
                    writer.write_result(result)
                    progress.say(banner.result(result))
            if saves:  # after the results, which would be lost if the run was killed between the two
                save(state, log.meta())
            log.go_on()
        log.catch_up()
        if not log.finite and save.last_step < log.num_sent:
            save(state, log.meta())
        store.finish()

    # What is left behind
    if not log.finite:
        saved = save.last_step
        raise errors.Stopped(
            f"step {log.broken}: the loss or the gradient norm is not finite. The step changed no weight; "
            f"{folder}/checkpoints/{saved} has the weights after {saved} steps, those that were not finite left out. "
            "A lower optimizer.learning_rate or more optimizer.warmup_steps usually help."
        )
    banner.show(console, banner.after(program, log.first, log.last, recent_losses=log.recent_losses, seconds=log.seconds))


def _compile(program: Program, material: Material, console: rich.console.Console) -> dict[int, jax.stages.Compiled]:
    """The step for rows of each length."""
    compiled = {}
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
    return compiled


def _interrupted(log: "Log", save: "Saving", kind: type[BaseException] | None, *_: object) -> None:
    """Lets an interruption say what it costs."""
    if kind is KeyboardInterrupt:
        kept = (
            f"the same command goes on from step {save.last_step}" if save.last_step else "no checkpoint has been written yet"
        )
        raise KeyboardInterrupt(f"interrupted after step {log.num_sent}; {kept}") from None


def _agree(program: Program, material: Material) -> None:
    """Raises: UserError where processes were given different configs or data, or would begin at different steps."""
    if jax.process_count() == 1:
        return
    start, settings = material.start, program.config
    told = [(f"data: {one.name}", digest) for data in (material.train, *material.evals) for one, digest in data.origins]
    told.append(("the config", repr(settings)))
    told.append(("XLA_FLAGS", repr(program.told)))
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
