"""Work of the command `jaxsp generate`."""

import argparse
import dataclasses
import time
from typing import Any

import jax
import rich.console

from jaxsp.core import errors, files
from jaxsp.core.errors import UserError, at
from jaxsp.core.units import format_count
from jaxsp.data.chat import chat_template
from jaxsp.data.tokenization.encoding import TextEncoder
from jaxsp.generation.generator import Generator, Sampling
from jaxsp.generation.text_stream import TextStream
from jaxsp.hf import context_range, folder, model_config
from jaxsp.run import config_file, given_model, jax_limits, model_files, stop_tokens
from jaxsp.run import console as output
from jaxsp.run.config_file import Config
from jaxsp.run.given_model import GivenModel
from jaxsp.system import cluster, compilation_cache, distributed

_MIN_ROW_TOKENS = 512
"""Minimum row length of a model without a run."""


def run(args: argparse.Namespace) -> None:
    """Runs the command. Raises: UserError with the problems of the input."""
    sampling = Sampling(temperature=args.temperature, top_p=args.top_p, seed=args.seed)
    sampling.check()
    if args.system is not None and args.chat is None:
        raise UserError("--system: is the first message of a chat. Use --chat TEXT too.")
    if args.top_p != 1 and args.temperature == 0:
        raise UserError(
            f"--top-p = {args.top_p}: is for samples, and answers are greedy. Use --temperature 1 "
            "too."
        )
    given = given_model.find(args.what)
    if given.meta is None:
        fields = folder.find(given.name, field="WHAT").config_fields
        is_reward_model = model_config.is_reward_model(fields)
    else:
        is_reward_model = config_file.parse(given.meta.config).objective.type == "reward"
    if is_reward_model:
        raise UserError(
            f"{given.name}: is a reward model, which scores texts and generates none. Use the "
            "model that it was made from, or one that was trained with another objective."
        )
    config = _load_config(given, args.changes)
    process = cluster.read_arguments(args)
    jax_limits.choose_platform(config, process)
    compilation_cache.enable(config.run.compilation_cache, num_processes=process.num_processes)
    distributed.initialize(process)
    model_dir = given.find_model_dir(config)
    source = None
    if model_dir is None and config.model.source is not None:
        source = folder.find(config.model.source)
    tokenizer = model_files.load_tokenizer(config, source, model_dir)
    prompt = _encode(args, config, tokenizer)
    if given.meta is None and not any(
        change.startswith("data.row_tokens") for change in args.changes
    ):
        seq = config.mesh.seq
        degree = seq if isinstance(seq, int) else 1
        row_tokens = degree
        while row_tokens < max(len(prompt) + args.max_new_tokens, _MIN_ROW_TOKENS):
            row_tokens *= 2
        config = config.with_fields(data={"row_tokens": row_tokens})
    resolved = given.resolve(config)
    spec = resolved.spec
    generator = Generator(spec)
    generator.check([prompt], args.max_new_tokens)  # before the weights are read
    console = rich.console.Console(quiet=jax.process_index() > 0, markup=False)
    mesh = " x ".join(f"{axis} {size}" for axis, size in spec.mesh.shape.items())
    output.print_line(
        console, f"{given.description}; {config.model.compute_dtype} compute on {mesh}"
    )
    num_tokens = len(prompt) + args.max_new_tokens - 1  # nothing follows the last one
    if text := context_range.describe_excess(resolved.hf_config, row_tokens=num_tokens):
        output.print_line(console, f"note: {text}")
    master = given.load_weights(resolved)
    stop_folder = model_dir
    if given.meta is None:
        stop_folder = folder.find(given.name, field="WHAT").path
    answer = _Answer(TextStream(tokenizer), is_printed=jax.process_index() == 0)
    generator.generate(
        master,
        [prompt],
        max_new_tokens=args.max_new_tokens,
        stop_ids=stop_tokens.list_stop_ids(resolved.hf_config, stop_folder, tokenizer),
        sampling=sampling,
        on_token=answer.add,
    )
    answer.finish()
    output.print_line(console, answer.describe_speed(len(prompt)))


def _load_config(given: GivenModel, changes: list[str]) -> Config:
    """Loads the config of a run, or of a model, without data. Raises: UserError."""
    data: dict[str, Any] = {"row_tokens": _MIN_ROW_TOKENS}
    data |= given.fields.get("data", {}) | {"train": [], "eval": [], "eval_fraction": None}
    fields = given.fields | {"data": data, "eval": {}, "objective": {}}
    config = config_file.parse(given.add_model(fields), changes, trains=False)
    given.check_config(config)
    return config


def _encode(args: argparse.Namespace, config: Config, tokenizer: Any) -> list[int]:
    """Tokens of the prompt. Raises: UserError if there are none."""
    if args.chat is not None:
        messages = [{"role": "user", "content": args.chat}]
        if args.system is not None:
            messages.insert(0, {"role": "system", "content": args.system})
        renderer = chat_template.make_prompt_renderer(config.data, tokenizer)
        with at("--chat"):
            text = renderer(messages, prompt=True)[0]
    elif args.prompt_file is not None:
        try:
            text = files.read_text(args.prompt_file)
        except (OSError, ValueError) as error:
            raise UserError(
                f"--prompt-file = {args.prompt_file}: cannot be read: {error}. Name a text file, "
                "or use --prompt TEXT."
            ) from None
    else:
        text = args.prompt
    ids = TextEncoder(tokenizer).encode_prompt(text, is_plain=args.chat is None)
    if not ids:
        raise UserError("--prompt: has no tokens. Use a text with at least one character.")
    return ids


def escape(text: str) -> str:
    """Escapes what controls a terminal, except line breaks and tabs."""
    return errors.escape(text, keep="\n\t")


@dataclasses.dataclass
class _Answer:
    """Prints an answer as its tokens come, and measures the time."""

    stream: TextStream
    is_printed: bool
    began: float = dataclasses.field(default_factory=time.perf_counter)
    times: list[float] = dataclasses.field(default_factory=list)
    """Seconds from the beginning to each token."""

    def add(self, _: int, token: int) -> None:
        self.times.append(time.perf_counter() - self.began)
        self._print(self.stream.add(token))

    def finish(self) -> None:
        self._print(self.stream.finish() + "\n")

    def _print(self, text: str) -> None:
        if self.is_printed:
            print(escape(text), end="", flush=True)

    def describe_speed(self, prompt_tokens: int) -> str:
        """Describes the time of the answer.

        The first two tokens count apart, because their programs are compiled.
        """
        first = self.times[:2][-1]
        text = f"{format_count(prompt_tokens, 'token')} of the prompt, {len(self.times):,} new"
        text += f"; prompt and compilation {first:.1f} s"
        if len(self.times) > 2:
            speed = (len(self.times) - 2) / (self.times[-1] - first)
            text += f", then {speed:,.1f} tokens/s"
        return text
