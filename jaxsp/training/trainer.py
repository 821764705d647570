"""The training loop."""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import pathlib
import time
from typing import Any

import filelock
import jax
import numpy as np
import rich.console
from jax.experimental import multihost_utils

from jaxsp.core import config, errors
from jaxsp.data import account, pipeline
from jaxsp.training import banner, checkpoint, evaluator, levers, metrics, selfcheck, step
from jaxsp.training.material import Material
from jaxsp.training.step import Program


def train(program: Program, material: Material, console: rich.console.Console, *, verbose: bool = False) -> None:
    """Trains from where the material begins to the last step, and writes the run directory.

    With several processes, all of them train and save together; process 0 alone writes the rest. A step whose loss or
    gradients are not finite ends the run: a checkpoint is written, and errors.Stopped raised.

    Args: verbose: says who gets which rows of the first step.
    """
    settings, start = program.config, material.start
    directory = pathlib.Path(settings.run.directory)
    _agree(program, material)
    if start.step >= program.num_steps:
        console.print(f"{directory}: has all its {program.num_steps} steps. Raise run.steps or run.epochs to train longer.")
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
    lock = _begin(directory, settings, material, banner.text(lines))

    # Steps; the numbers of one are fetched when the next is under way
    with (
        lock,
        metrics.Writer(directory, from_step=start.step, tensorboard=settings.logging.tensorboard) as writer,
        checkpoint.Store(directory / checkpoint.CHECKPOINTS, keep=settings.checkpoint.keep_latest) as store,
        banner.Progress(console, first_step=start.step, num_steps=program.num_steps) as progress,
        metrics.Trace(directory / "profile", settings.logging.profile_steps) as trace,
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
            f"{directory}/checkpoints/{saved} has the weights after {saved} steps, those that were not finite left out. "
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


def _begin(
    directory: pathlib.Path, settings: config.Config, material: Material, banner_text: str
) -> contextlib.AbstractContextManager:
    """Makes the run's directory, with what can be written before the first step; held by this run until the context ends."""
    lock: contextlib.AbstractContextManager = contextlib.nullcontext()
    if jax.process_index() == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise errors.UserError(f"run.directory = {directory}: cannot be made: {error.strerror}. Name another.") from None
        try:
            lock = filelock.FileLock(directory / "lock", blocking=False).acquire()
        except filelock.Timeout:
            raise errors.UserError(
                f"run.directory = {directory}: another process is writing this run. Wait for it, or name another folder."
            ) from None
        config.save(settings, directory / "config.yaml")
        (directory / "banner.txt").write_text(banner_text, encoding="utf-8")
        material.keep_model(directory / "model")
    _see(directory)
    return lock


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


def _see(directory: pathlib.Path) -> None:
    """Raises: UserError where a process does not see the directory that process 0 has made."""
    if jax.process_count() == 1:
        return
    multihost_utils.sync_global_devices("the run's directory was made")
    for _ in range(30):  # what another node wrote may come late
        if (directory / "config.yaml").is_file():
            return
        time.sleep(1)
    raise errors.UserError(
        f"run.directory = {directory}: process 0 has made it, and process {jax.process_index()} does not see it. Name a folder "
        "that all nodes share."
    )


class Saving:
    """Writes checkpoints, and knows when the next is due; the same in all processes."""

    def __init__(self, store: checkpoint.Store, settings: config.Run, *, first_step: int):
        self._store, self._settings = store, settings
        self._saved_at, self._from_step = time.monotonic(), first_step
        self._ask_at = first_step + 1
        self.last_step = first_step
        """Of the last checkpoint; 0 before the first."""

    def due(self, number: int) -> bool:
        """Whether a checkpoint is to follow a step.

        Clocks of processes differ: process 0 has the word. To hear it all wait for the step that is running, so it is asked
        half way to when the time should be up, then half way of what is left: a few times for each checkpoint.
        """
        if self._settings.save_minutes is None:
            return evaluator.due(self._settings.save_steps, number)
        if number < self._ask_at:
            return False
        seconds = _of_first_process(time.monotonic() - self._saved_at)
        left = 60 * self._settings.save_minutes - seconds
        seconds_per_step = seconds / (number - self._from_step)
        self._ask_at = number + max(1, int(left / seconds_per_step / 2))
        return left <= 0

    def __call__(self, state: step.State, meta: checkpoint.Meta) -> None:
        self._store.save(state, meta)
        self.last_step = self._from_step = meta.step
        self._saved_at, self._ask_at = time.monotonic(), meta.step + 1


def _of_first_process(value: float) -> float:
    if jax.process_count() == 1:
        return value
    return float(multihost_utils.broadcast_one_to_all(np.float32(value)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
    """A step on its way through the devices."""

    numbers: step.Metrics
    counts: pipeline.Counts
    data_wait_s: float


class Log:
    """Turns finished steps into lines of metrics.jsonl and into progress."""

    def __init__(self, program: Program, material: Material, writer: metrics.Writer, progress: banner.Progress):
        self._program, self._material, self._writer, self._progress = program, material, writer, progress
        self._began = self._ended = time.perf_counter()
        self._running: Running | None = None
        self._num_steps, self._num_tokens = material.start.step, material.start.num_tokens
        self._source_names = [source.name for source in material.train.documents.sources]
        self.recent_losses: collections.deque[float] = collections.deque(maxlen=20)
        self.broken: int | None = None
        """The first step that was not finite."""
        self.first: metrics.Line
        self.last: metrics.Line

    @property
    def num_sent(self) -> int:
        """Steps sent to the devices since step 0."""
        return self._num_steps + (self._running is not None)

    @property
    def finite(self) -> bool:
        return self.broken is None

    @property
    def seconds(self) -> float:
        """From before the first step to the end of the last."""
        return self._ended - self._began

    def sent(self, running: Running) -> None:
        """Notes the step that was sent to the devices."""
        assert self._running is None, "one at a time"
        self._running = running

    def catch_up(self) -> None:
        """Waits for the step that is running, if there is one, and records it."""
        if self._running is None:
            return
        running, self._running = self._running, None
        numbers = jax.device_get(running.numbers)
        now = time.perf_counter()
        step_s, self._ended = now - self._ended, now
        self._num_steps += 1
        self._num_tokens += int(numbers.num_tokens)
        if not numbers.finite and self.broken is None:
            self.broken = self._num_steps
        self.last = self._line(running, numbers, step_s)
        if self._num_steps == self._material.start.step + 1:
            self.first = self.last
        if self.last.loss is not None:
            self.recent_losses.append(self.last.loss)
        due = evaluator.due(self._program.config.run.log_every, self._num_steps)
        if due or not self.finite or self._num_steps == self._program.num_steps:
            self._writer.write(self.last)
        self._progress.show(self.last)

    def go_on(self) -> None:
        """Leaves out of the next step's time what was done while no step was running."""
        if self._running is None:
            self._ended = time.perf_counter()

    def meta(self) -> checkpoint.Meta:
        """What a checkpoint made now says of itself; all steps have to be recorded."""
        assert self._running is None, "the tokens of the running step are not counted yet"
        settings, start = self._program.config, self._material.start
        consumed = self._material.schedule.consumed(self._num_steps - start.step)
        lengths = [str(stream.row_tokens) for stream in self._material.train.streams]
        return checkpoint.Meta(
            config=settings.model_dump(mode="json"),
            model=self._material.fields,
            data=self._material.train.fingerprint(settings),
            step=self._num_steps,
            rows=dict(zip(lengths, consumed, strict=True)),
            num_tokens_total=self._num_tokens,
        )

    def _line(self, running: Running, numbers: step.Metrics, step_s: float) -> metrics.Line:
        config, mesh, counts = self._program.config, self._program.mesh, running.counts
        num_devices, num_tokens = mesh.devices.size, int(numbers.num_tokens)
        assert num_tokens == counts.piece_lengths.sum(), "the devices' count and the plan's"
        tflops = metrics.step_flops(self._program.model, counts.piece_lengths) / step_s / num_devices / 1e12
        peak = metrics.peak_tflops(mesh.devices.flat[0].device_kind)
        return metrics.Line(
            step=self._num_steps,
            epoch=None if counts.epoch is None else counts.epoch + 1,
            loss=_finite(numbers.loss) if numbers.num_loss_tokens else None,
            token_accuracy=_finite(numbers.token_accuracy) if numbers.num_loss_tokens else None,
            grad_norm=_finite(numbers.grad_norm),
            learning_rate=float(numbers.learning_rate),
            num_rows=int(numbers.num_rows),
            num_tokens=num_tokens,
            num_loss_tokens=int(numbers.num_loss_tokens),
            num_tokens_total=self._num_tokens,
            num_tokens_by_source=dict(zip(self._source_names, counts.tokens_of_sources, strict=True)),
            row_tokens=counts.row_tokens,
            padding_share=1 - num_tokens / (config.batch.rows_per_step * config.data.longest_row),
            attention_imbalance=counts.imbalance,
            step_s=step_s,
            data_wait_s=running.data_wait_s,
            tokens_per_s=num_tokens / step_s,
            tokens_per_s_per_device=num_tokens / step_s / num_devices,
            tflops_per_device=tflops,
            mfu=None if peak is None else tflops / peak,
            device_peak_gib=metrics.peak_gib(mesh.local_devices),
        )


def _finite(value: Any) -> float | None:
    """JSON has no NaN."""
    return float(value) if np.isfinite(value) else None
