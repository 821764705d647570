"""Everything that a run measures at an evaluation, written to its files and printed."""

import contextlib
import time
from collections.abc import Callable

import jax

from jaxsp.blocks import layers
from jaxsp.evaluation import evaluator, task_plots
from jaxsp.evaluation.evaluator import Evaluator
from jaxsp.evaluation.retrieval import RetrievalEvaluator
from jaxsp.generation.samples import SampleGenerator
from jaxsp.run import console, metrics
from jaxsp.run.metrics import MetricsWriter
from jaxsp.run.run import Run
from jaxsp.system import distributed
from jaxsp.system.run_status import Activity, RunStatus
from jaxsp.training.metric_table import Line


class Evaluations:
    """Evaluates eval sets and retrieval tasks; False if a run has neither."""

    def __init__(
        self,
        run: Run,
        metrics: MetricsWriter,
        status: RunStatus,
        print_line: Callable[[str], None],
    ):
        config = run.config
        self._eval_every = config.run.eval_every
        self._directory = run.directory
        self._eval_sets = Evaluator(run.spec, run.eval_sets, has_long_ppl=config.eval.long_ppl)
        self._tasks = RetrievalEvaluator(self._eval_sets, run.task_samples)
        self._samples = SampleGenerator(
            run.spec,
            run.eval_sets,
            count=config.run.generate_samples,
            tokenizer=run.tokenizer,
            stop_ids=run.stop_ids,
        )
        self._has_generated = False
        self._metrics = metrics
        self._status = status
        self._print_line = print_line

    def __bool__(self) -> bool:
        return bool(self._eval_sets) or bool(self._tasks)

    def is_due(self, step: int) -> bool:
        """True if an evaluation is due after a step."""
        return bool(self) and evaluator.is_due(self._eval_every, step)

    def run(self, master: layers.Weights, *, step: int, when: str) -> dict[str, Line]:
        """Evaluates weights. Returns the line of each eval set, by its name.

        Args:
            step: number of training steps of the weights.
            when: phrase such as `after step 10`, for the run status.
        """
        if not self:
            return {}
        with self._status.compiling("the evaluation"):
            self._eval_sets.compile()
            self._tasks.compile()
        self._status.activity = Activity(
            description=f"the evaluation {when}",
            expected_s=self._status.step_s,
            duration_s=self._status.evaluation_s,
        )
        began = time.perf_counter()
        heartbeat = self._status.heartbeat
        lines = {}
        for line in self._eval_sets.run(master, num_steps=step, on_batch=heartbeat):
            lines[line["data"]] = line
            self._metrics.write(metrics.EVAL_FILE, line)
            self._print_line(console.format_result(line))
        task_lines = []
        for line in self._tasks.run(master, num_steps=step, on_batch=heartbeat):
            task_lines.append(line)
            self._metrics.write(metrics.TASKS_FILE, line)
            self._print_line(console.format_result(line))
        self._generate_samples(master, step)
        if jax.process_index() == 0:
            try:
                task_plots.draw_if_possible(self._directory, task_lines)
            except OSError as error:
                reason = error.strerror
                distributed.log(f"needle.png: could not be written: {reason}. The run continues")
        self._status.evaluation_s = time.perf_counter() - began
        return lines

    def _generate_samples(self, master: layers.Weights, step: int) -> None:
        """Answers documents of the eval sets; the first time, that includes compilation."""
        if not self._samples:
            return
        is_first = not self._has_generated
        compiling = self._status.compiling("the answers") if is_first else contextlib.nullcontext()
        with compiling:
            lines = [*self._samples.run(master, num_steps=step, on_token=self._status.heartbeat)]
        self._has_generated = True
        for line in lines:
            self._metrics.write(metrics.SAMPLES_FILE, line)
            if line["sample"] == 0:
                self._print_line(console.format_sample(line))
