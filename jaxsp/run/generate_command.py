"""Work of the command `jaxsp generate`."""

import time
from typing import Any

import jax
import rich.console

from jaxsp.core import errors, files
from jaxsp.core.errors import UserError, at
from jaxsp.core.units import format_count
from jaxsp.data import chat_template
from jaxsp.data.tokenizers import TextEncoder
from jaxsp.generation.generator import Generator, Sampling
from jaxsp.hf import context_range, folder, model_config
from jaxsp.run import config_file, given_model, model_files, preflight
from jaxsp.run import console as output
from jaxsp.system.cluster import Process

_MIN_ROW_TOKENS = 512
"""Minimum row length without a run."""


def generate(
    *,
    what: str,
    process: Process,
    changes: list[str],
    prompt: str | None,
    prompt_file: str | None,
    chat: str | None,
    system: str | None,
    max_new_tokens: int,
    **sampling_options: Any,
) -> None:
    """Prints the answer of a model, and its speed: see `jaxsp generate --help`.

    Other options are fields of `Sampling`.
    """
    sampling = Sampling(**sampling_options)
    sampling.check()
    if system is not None and chat is None:
        raise UserError("--system: is the first message of a chat. Use --chat TEXT too.")
    if sampling.top_p != 1 and sampling.temperature == 0:
        raise UserError(
            f"--top-p = {sampling.top_p}: is for samples, and answers are greedy. Use "
            "--temperature 1 too."
        )
    given = given_model.find(what)
    source = None
    if given.meta is None:
        source = folder.find(what, field="WHAT")
        hf_config = source.config_fields
    else:
        hf_config = given.meta.model
    if model_config.is_reward_model(hf_config):
        raise UserError(
            f"{what}: is a reward model, which scores texts and generates none. Use the model that "
            "it was made from, or one that was trained with another objective."
        )
    data: dict[str, Any] = {"row_tokens": _MIN_ROW_TOKENS}
    data |= given.fields.get("data", {}) | {"train": [], "eval": [], "eval_fraction": None}
    fields = given.fields | {"data": data, "eval": {}, "objective": {}}
    config = config_file.parse(given.add_model(fields), changes, trains=False)
    given.check_config(config)
    preflight.start(config, process)
    model_dir = given.find_model_dir(config)
    if source is None and model_dir is None and config.model.source is not None:
        source = folder.find(config.model.source)
    tokenizer = model_files.load_tokenizer(config, source, model_dir)
    text = prompt or ""
    if prompt_file is not None:
        try:
            text = files.read_text(prompt_file)
        except (OSError, ValueError) as error:
            raise UserError(
                f"--prompt-file = {prompt_file}: cannot be read: {error}. Name a text file, or use "
                "--prompt TEXT."
            ) from None
    elif chat is not None:
        messages = [] if system is None else [{"role": "system", "content": system}]
        renderer = chat_template.make_prompt_renderer(config.data, tokenizer)
        with at("--chat"):
            text = renderer([*messages, {"role": "user", "content": chat}], prompt=True)[0]
    ids = TextEncoder(tokenizer).encode_prompt(text, is_plain=chat is None)
    if not ids:
        raise UserError("--prompt: has no tokens. Use a text with at least one character.")
    num_tokens = len(ids) + max_new_tokens
    has_length = any(change.startswith("data.row_tokens") for change in changes)
    if given.meta is None and not has_length:
        row_tokens = config.mesh.seq if isinstance(config.mesh.seq, int) else 1
        while row_tokens < max(num_tokens, _MIN_ROW_TOKENS):
            row_tokens *= 2
        config = config.with_fields(data={"row_tokens": row_tokens})
    resolved = given.resolve(config)
    generator = Generator(resolved.spec)
    generator.check([ids], max_new_tokens)  # before the weights are read
    console = rich.console.Console(quiet=jax.process_index() > 0, markup=False)
    output.print_line(console, given.describe(resolved))
    # nothing follows the last token
    if text := context_range.describe_excess(resolved.hf_config, row_tokens=num_tokens - 1):
        output.print_line(console, f"note: {text}")
    master = given.load_weights(resolved)
    stream = TextStream(tokenizer)
    times: list[float] = []
    began = time.perf_counter()

    def write(text: str) -> None:
        if not console.quiet:
            print(errors.escape(text, keep="\n\t"), end="", flush=True)

    def add_token(_: int, token: int) -> None:
        times.append(time.perf_counter() - began)
        write(stream.add(token))

    generator.generate(
        master,
        [ids],
        max_new_tokens=max_new_tokens,
        stop_ids=model_files.list_stop_ids(resolved.hf_config, resolved.small_files, tokenizer),
        sampling=sampling,
        on_token=add_token,
    )
    write(f"{stream.finish()}\n")
    first = times[:2][-1]  # the programs of the first two tokens are compiled
    text = f"{format_count(len(ids), 'token')} of the prompt, {len(times):,} new"
    text += f"; prompt and compilation {first:.1f} s"
    if len(times) > 2:
        text += f", then {(len(times) - 2) / (times[-1] - first):,.1f} tokens/s"
    output.print_line(console, text)


class TextStream:
    """Decodes tokens one after another, of which one character may need several."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._length = 0
        """Characters that were returned."""

    def add(self, token: int) -> str:
        """Returns the text that a token completes; empty inside of a character."""
        self._ids.append(token)
        return self.finish(is_complete=False)

    def finish(self, *, is_complete: bool = True) -> str:
        """Returns the rest of the text, without special tokens and as it was tokenized."""
        text = self._tokenizer.decode(
            self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        if not is_complete and text.endswith("\ufffd"):  # bytes that are no whole character yet
            return ""
        new = text[self._length :]
        self._length = len(text)
        return new
