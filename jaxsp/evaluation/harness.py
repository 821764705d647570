"""Adapter for lm-evaluation-harness, whose tasks and scores it keeps.

Requests are documents, packed into rows and scored by the compiled evaluation, on any mesh. Every
process makes the same requests and runs the same programs.
"""

import bisect
import math
import pathlib
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from lm_eval import defaults
from lm_eval import evaluator as harness
from lm_eval import utils as harness_utils
from lm_eval.api.model import TemplateLM
from lm_eval.models import utils as harness_models
from lm_eval.tasks import TaskManager

from jaxsp.blocks import layers
from jaxsp.core import errors
from jaxsp.core.batch import NO_LABEL
from jaxsp.core.errors import UserError, at
from jaxsp.data import chat_template, dataset
from jaxsp.data.data_config import DataConfig
from jaxsp.evaluation.evaluator import Evaluator, describe_settings
from jaxsp.generation.generator import Generator, Sampling
from jaxsp.training.metric_table import Line

Request = tuple[Any, list[int], list[int]]
"""Texts, token ids of the context, and of the continuation whose likelihood is asked for."""


class HarnessModel(TemplateLM):
    """Weights on a mesh as a model of the harness. Its longest document is a row."""

    def __init__(
        self,
        evaluator: Evaluator,
        master: layers.Weights,
        tokenizer: Any,
        *,
        stop_ids: Sequence[int],
        chat: DataConfig | None = None,
    ):
        """Args: chat: config of the chat template; None: prompts are plain text."""
        super().__init__()
        if tokenizer.eos_token_id is None:
            raise UserError(
                "--lm-eval: needs a tokenizer with an end token, which texts without a context "
                "begin with. Set eos_token in its tokenizer_config.json."
            )
        self.tokenizer = tokenizer
        self._evaluator = evaluator.for_texts()
        self._spec = self._evaluator.spec
        self._master = master
        self._generator = Generator(self._spec)
        self._stop_ids = stop_ids
        # tokens that the model sees before the last one that it predicts
        self.max_length = self._spec.config.row_tokens - 1
        self._renderer = None
        self.settings = describe_settings(self._spec) | {"chat_template_kwargs": None}
        if chat is not None:
            self._renderer = chat_template.make_prompt_renderer(chat, tokenizer)
            self.settings["chat_template_kwargs"] = chat.chat_template_kwargs

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token before the first one of a text without context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Text of a chat, without a system message that the template refuses. Raises: UserError."""
        assert self._renderer is not None
        is_open = not add_generation_prompt
        try:
            return self._renderer(chat_history, prompt=not is_open, is_open=is_open)[0]
        except UserError as problem:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                with at("--apply-chat-template"):
                    raise
            harness_utils.warning_once(harness.eval_logger, f"no system message: {problem}")
            return self.apply_chat_template(others, add_generation_prompt)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids of a text, by default with special tokens unless it begins with one."""
        if add_special_tokens is None:
            prefix = self.tokenizer.decode([self.prefix_token_id])
            add_special_tokens = not string.startswith(prefix)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation, and True if it is greedy. Contexts lose their
        beginning."""
        documents = []
        labels = []
        for texts, context, continuation in requests:
            if not continuation:
                raise UserError(
                    f"--lm-eval: the continuation {texts[1]!r} of {texts[0][-40:]!r} has no tokens "
                    "of its own, because the tokenizer joins it to the context. Use a task whose "
                    "target_delimiter or choices keep them apart."
                )
            if len(continuation) > self.max_length:
                raise UserError(
                    f"data.row_tokens = {self.max_length + 1:,}: must hold a continuation of "
                    f"{len(continuation):,} tokens and a token before it. Use "
                    f"data.row_tokens={2 * len(continuation)}."
                )
            ids = np.array([*context, *continuation], np.int32)[-self.max_length - 1 :]
            targets = ids.copy()
            targets[: len(ids) - len(continuation)] = NO_LABEL
            documents.append(ids)
            labels.append(targets)
        if not documents:
            return []
        data = dataset.pack_arrays("requests", documents, labels, **self._spec.config.packing)
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
            tokens = self.tok_encode(request.args[0])
            for window in harness_utils.get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length, context_len=1
            ):
                windows.append((None, *harness_utils.make_disjoint_window(window)))
                owners.append(number)
        scores = [score for score, _ in self._loglikelihood_tokens(windows)]
        return np.bincount(owners, scores, minlength=len(requests)).tolist()

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers up to the first stop text. Prompts lose their beginning if they do not fit."""
        grouped: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            grouped.setdefault(repr(request.args[1]), []).append(number)
        answers = [""] * len(requests)
        for numbers in grouped.values():
            options = harness_models.normalize_gen_kwargs(requests[numbers[0]].args[1])
            known = {"max_gen_toks", "until", "do_sample", "temperature", "top_p"}
            if unknown := sorted(options.keys() - known):
                raise UserError(
                    f"--lm-eval: its task asks for {', '.join(unknown)}, which jaxsp's generation "
                    "does not have. Export the model with jaxsp export, and use the harness's own "
                    "hf or vllm model."
                )
            temperature = options.get("temperature", 1.0 if options["do_sample"] else 0.0)
            sampling = Sampling(temperature=temperature, top_p=options.get("top_p", 1.0))
            max_new_tokens = options["max_gen_toks"]
            stops = [*options["until"], self.tokenizer.decode([self.eot_token_id])]
            limit = max(1, self.max_length + 1 - max_new_tokens)
            prompts = [self.tok_encode(requests[number].args[0])[-limit:] for number in numbers]
            found = self._generator.generate(
                self._master,
                [prompt or [self.prefix_token_id] for prompt in prompts],
                max_new_tokens=max_new_tokens,
                stop_ids=self._stop_ids,
                sampling=sampling,
            )
            for number, ids in zip(numbers, found, strict=True):
                answers[number] = self._decode_up_to(ids, stops)
        return answers

    def _decode_up_to(self, ids: list[int], stops: list[str]) -> str:
        """Text before the first of several stop texts, any of which may be a special token."""
        decode = self.tokenizer.decode
        has_stop = lambda last: any(stop in decode(ids[: last + 1]) for stop in stops)
        end = bisect.bisect_left(range(len(ids)), True, key=has_stop) + 1
        text = decode(ids[:end], skip_special_tokens=True)
        return harness_models.postprocess_generated_text(text, stops, None)


class HarnessTasks(NamedTuple):
    """Tasks of the harness, which exist."""

    names: Sequence[str]
    manager: TaskManager
    limit: int | None
    """Number of records of each task; None: all."""
    num_fewshot: int | None
    """Number of examples in prompts; None: those of the task."""
    apply_chat_template: bool


def find_tasks(names: str, *, folder: str | None, **options: Any) -> HarnessTasks:
    """Finds tasks, groups or patterns, also in a folder. Raises: UserError

    Args: options: other fields of HarnessTasks.
    """
    if folder is not None and not pathlib.Path(folder).is_dir():
        raise UserError(f"--lm-eval-tasks = {folder}: there is no such folder. Name one with YAML.")
    for name, least in (("limit", 1), ("num_fewshot", 0)):
        if options[name] is not None and options[name] < least:
            flag = f"--{name.replace('_', '-')} = {options[name]}"
            raise UserError(f"{flag}: must be at least {least}. Use {least} or more.")
    split = [name.strip() for name in names.split(",")]
    if not all(split):
        raise UserError(f"--lm-eval = {names}: has an empty name. Use --lm-eval TASK,TASK.")
    manager = TaskManager(include_path=folder)  # takes some 10 s
    unknown = [name for name in split if not manager.match_tasks([name])]
    if unknown:
        raise UserError(
            f"--lm-eval = {names}: lm-evaluation-harness has no task {', '.join(unknown)}. Use "
            "names that `lm-eval ls tasks` lists, and --lm-eval-tasks FOLDER for your own."
        )
    return HarnessTasks(manager.match_tasks(split), manager, **options)


def evaluate(model: HarnessModel, tasks: HarnessTasks, *, num_steps: int) -> tuple[list[Line], str]:
    """Evaluates tasks of the harness, with its own prompts, scores and seeds. Raises: UserError

    Returns: a line for each task, and the harness's table of results.
    """
    # simple_evaluate() would do it, run git in the current folder, and list the machine's packages
    random.seed(defaults.DEFAULT_RANDOM_SEED)
    np.random.seed(defaults.DEFAULT_OTHER_SEED)
    harness_utils.set_torch_seed(defaults.DEFAULT_OTHER_SEED)
    try:
        loaded = tasks.manager.load([*tasks.names])
        for task in loaded["tasks"].values():
            of_task = task.get_config("num_fewshot")  # 0: the task has no examples
            if of_task is None or (of_task and tasks.num_fewshot is not None):
                task.set_config(key="num_fewshot", value=tasks.num_fewshot or 0)
            task.set_fewshot_seed(seed=defaults.DEFAULT_OTHER_SEED)
        found = harness.evaluate(
            model,
            loaded,
            limit=tasks.limit,
            log_samples=False,
            apply_chat_template=tasks.apply_chat_template,
            fewshot_as_multiturn=True,
        )
    except ConnectionError as error:  # of datasets
        raise UserError(
            f"--lm-eval = {','.join(tasks.names)}: {errors.first_line(error)}. Run it once where "
            "the hub can be reached, with the same HF_HOME."
        ) from error
    assert found is not None, "each process is the first one for the harness"
    settings = model.settings | {"limit": tasks.limit, "num_fewshot": tasks.num_fewshot}
    lines = []
    for task_name, results in found["results"].items():
        numbers = {  # scores and their standard errors by names such as `acc,none`
            name: float(value) if math.isfinite(value) else None
            for name, value in results.items()
            if "," in name and isinstance(value, int | float)
        }
        lines.append({"step": num_steps, "lm_eval": task_name, "results": numbers} | settings)
    return lines, harness_utils.make_table(found)
