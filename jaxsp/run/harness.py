"""Adapter for lm-evaluation-harness, whose tasks and scores it keeps.

Requests are documents, packed into rows and scored by the compiled evaluation, on any mesh. Every
process makes the same requests and runs the same programs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval import evaluator as harness
from lm_eval import tasks as harness_tasks
from lm_eval import utils as harness_utils
from lm_eval.api.model import TemplateLM
from lm_eval.models import utils as harness_models

from jaxsp.blocks import layers
from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import UserError
from jaxsp.data.packing import in_memory
from jaxsp.evaluation.evaluator import Evaluator
from jaxsp.generation.generator import Generator, Sampling
from jaxsp.training.metric_table import Line
from jaxsp.training.specs import StepSpec

Request = tuple[Any, list[int], list[int]]
"""Texts, token ids of the context, and of the continuation whose likelihood is asked for."""


class HarnessModel(TemplateLM):
    """Weights on a mesh as a model of the harness. Its longest document is a row."""

    def __init__(self, spec: StepSpec, master: layers.Weights, tokenizer: Any):
        super().__init__()
        self.tokenizer = tokenizer
        self._spec = spec
        self._master = master
        self._evaluator = Evaluator(spec, [])
        self._generator = Generator(spec)

    @property
    def eot_token_id(self) -> int:
        """Id of the end token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token before the first one of a text without context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def max_length(self) -> int:
        """Tokens that the model sees before the last one that it predicts."""
        return self._spec.config.data.max_row_tokens - 1

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for the harness's cache of requests."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Text of a chat by the tokenizer's template."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids of a text, with the tokenizer's special tokens unless it begins with one."""
        if add_special_tokens is None:
            prefix = self.tokenizer.decode([self.prefix_token_id])
            add_special_tokens = not string.startswith(prefix)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and whether greedy decoding would write it.

        Contexts lose their beginning if they do not fit.
        """
        documents = []
        labels = []
        for _, context, continuation in requests:
            ids = np.array([*context, *continuation], np.int32)[-self.max_length - 1 :]
            targets = ids.copy()
            targets[: len(ids) - len(continuation)] = NO_LABEL
            documents.append(ids)
            labels.append(targets)
        if not documents:
            return []
        data = in_memory.pack_arrays("requests", documents, labels, self._spec.config)
        sums = self._evaluator.score(data, self._master)
        is_greedy_D = sums.num_correct_D == sums.num_tokens_D
        return list(zip((-sums.losses_D).tolist(), is_greedy_D.tolist(), strict=True))

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole texts, each token predicted once, in windows of a row."""
        windows: list[Request] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            (text,) = request.args
            for window in harness_utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                context, continuation = harness_utils.make_disjoint_window(window)
                windows.append((None, context, continuation))
                owners.append(number)
        scores = [score for score, _ in self._loglikelihood_tokens(windows)]
        return np.bincount(owners, scores, minlength=len(requests)).tolist()

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers to prompts, each up to the first of its stop texts.

        Prompts lose their beginning if they do not fit beside the answer.
        """
        grouped: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            grouped.setdefault(repr(request.args[1]), []).append(number)
        answers = [""] * len(requests)
        for numbers in grouped.values():
            options = harness_models.normalize_gen_kwargs(requests[numbers[0]].args[1])
            sampling = _choose_sampling(options)
            max_new_tokens = options["max_gen_toks"]
            stops = [*options["until"], self.tokenizer.decode([self.eot_token_id])]
            limit = self.max_length + 1 - max_new_tokens
            if limit < 1:
                raise UserError(
                    f"data.row_tokens = {self.max_length + 1:,}: must hold a prompt and "
                    f"{max_new_tokens:,} tokens of an answer. Use data.row_tokens="
                    f"{2 * max_new_tokens} or more."
                )
            found = self._generator.generate(
                self._master,
                [self.tok_encode(requests[number].args[0])[-limit:] for number in numbers],
                max_new_tokens=max_new_tokens,
                stop_ids=[self.eot_token_id],
                sampling=sampling,
            )
            for number, ids in zip(numbers, found, strict=True):
                text = self.tokenizer.decode(ids)
                answers[number] = harness_models.postprocess_generated_text(text, stops, None)
        return answers


def _choose_sampling(options: dict[str, Any]) -> Sampling:
    """Sampling of a request. Raises: UserError for options that jaxsp does not have."""
    known = ("max_gen_toks", "until", "do_sample", "temperature", "top_p")
    if unknown := sorted(options.keys() - set(known)):
        raise UserError(
            f"--lm-eval: its task asks for {', '.join(unknown)}, which jaxsp's generation does not "
            "have. Export the model with jaxsp export, and use the harness's own hf or vllm model."
        )
    return Sampling(temperature=options.get("temperature", 0.0), top_p=options.get("top_p", 1.0))


def evaluate(
    model: HarnessModel,
    tasks: Sequence[str],
    *,
    num_steps: int,
    limit: int | None = None,
    num_fewshot: int | None = None,
    include_path: str | None = None,
) -> tuple[list[Line], str]:
    """Evaluates tasks of the harness, with its own prompts, scores and seeds.

    Args:
        tasks: names of tasks, groups or patterns.
        num_steps: training steps of the weights.
        limit: number of records of each task; None: all.
        num_fewshot: number of examples in prompts; None: those of the task.
        include_path: folder of more tasks.
    Returns: a line for each task, and the harness's table of results.
    Raises: UserError for tasks that there are none of.
    """
    manager = harness_tasks.TaskManager(include_path=include_path)
    unknown = [name for name in tasks if not manager.match_tasks([name])]
    if unknown:
        raise UserError(
            f"--lm-eval = {', '.join(unknown)}: lm-evaluation-harness has no such task. Use names "
            "that `lm-eval ls tasks` lists, and --lm-eval-tasks FOLDER for your own."
        )
    found = harness.simple_evaluate(
        model,
        tasks=[*tasks],
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
    )
    assert found is not None, "each process is the first one for the harness"
    lines = [
        {"step": num_steps, "lm_eval": name, "results": _select_numbers(numbers)}
        for name, numbers in found["results"].items()
    ]
    return lines, harness_utils.make_table(found)


def _select_numbers(results: dict[str, Any]) -> dict[str, float]:
    """Scores of a task and their standard errors, by the harness's names, such as `acc,none`."""
    return {
        name: float(value)
        for name, value in results.items()
        if "," in name and isinstance(value, int | float)
    }
