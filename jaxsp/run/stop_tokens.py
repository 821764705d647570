"""Stop tokens of a fine-tuned model: those that end the turns of its training chats.

A base model ends documents with <|endoftext|>. If chats teach it to end turns with <|im_end|>, and
only <|endoftext|> is in its eos_token_id, generation goes on after every answer.
"""

import dataclasses
import json
import pathlib
from typing import Any

from jaxsp.config import json_values
from jaxsp.config.yaml_io import format_value
from jaxsp.core.errors import UserError
from jaxsp.data import chat_template, tokenize
from jaxsp.data.chat_template import TemplateRenderer
from jaxsp.hf import folder, weights
from jaxsp.run.config_file import Config
from jaxsp.run.data_sets import OpenedSources

GENERATION_CONFIG = "generation_config.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopTokens:
    """Special tokens that end the assistant's turns in the training data."""

    alternatives: tuple[tuple[int, ...], ...] = ()
    """Ends of a turn, each as its tokens; generation must stop at one token of each."""
    description: str = ""
    """Part of a line of the banner; empty without chats."""

    def add_to(self, fields: dict[str, Any], *, default: Any = None) -> dict[str, Any]:
        """Returns fields with those tokens that eos_token_id, by default `default`, lacks."""
        if not self.alternatives:
            return fields
        eos_ids = fields.get("eos_token_id")
        eos_ids = default if eos_ids is None else eos_ids
        ids = _list_ids(eos_ids)
        added = [tokens[-1] for tokens in self.alternatives if not set(tokens) & set(ids)]
        merged = [*dict.fromkeys([*added, *ids])]
        if added:
            eos_ids = merged if len(merged) > 1 else merged[0]
        return fields | {"eos_token_id": eos_ids}

    def add_to_file(self, directory: pathlib.Path, *, default: Any) -> None:
        """Adds the tokens to a folder's generation config. Without one, the export makes one."""
        path = directory / GENERATION_CONFIG
        if self.alternatives and path.is_file():
            fields = folder.read_json(path)
            weights.write_json(path, self.add_to(fields, default=default))


def find(opened: OpenedSources, config: Config, tokenizer: Any) -> StopTokens:
    """Finds the stop tokens of the training data; none without chats."""
    for field, source in opened.train.items():
        if not source.is_chat:
            continue
        entries = opened.records[field].entries()
        texts = (x["record"] for x in entries if x["problem"] is None)
        if isinstance(json.loads(next(texts, "{}")).get("prompt"), str):
            continue  # a prompt and a completion of plain text
        options = tokenize.resolve_options(source, data=config.data, tokenizer=tokenizer)
        assert options is not None, "chats have a tokenizer"
        template = options.template  # all sources have the same
        try:
            renderer = TemplateRenderer(
                {}, tokenizer=tokenizer, template=template, with_marks=False
            )
        except UserError:  # several templates, none of which is for all records
            break
        end = chat_template.find_turn_end(tokenizer, renderer.template)
        alternatives = tuple(tuple(tokenizer.convert_tokens_to_ids(x)) for x in end.stops)
        description = ""
        if end.stops:
            description = f"turns end with {' or '.join(map(''.join, end.stops))}"
        elif end.text:
            description = (
                f"turns end with {end.text.strip()!r}, which is not a special token: generation "
                "does not stop there"
            )
        return StopTokens(alternatives=alternatives, description=description)
    return StopTokens()


def list_stop_ids(
    hf_config: dict[str, Any], directory: pathlib.Path | None, tokenizer: Any
) -> list[int]:
    """Tokens at which generation stops: those of config.json, of the generation config of the
    model's folder if it has one, and the tokenizer's end token."""
    ids = _list_ids(hf_config.get("eos_token_id"))
    path = None if directory is None else directory / GENERATION_CONFIG
    if path is not None and path.is_file():
        ids += _list_ids(folder.read_json(path).get("eos_token_id"))
    if tokenizer is not None:
        ids += _list_ids(tokenizer.eos_token_id)
    return list(dict.fromkeys(ids))


def describe(eos_ids: Any, tokenizer: Any) -> str:
    """An eos_token_id as text, with the tokens themselves if there is a tokenizer."""
    text = f"eos_token_id={json.dumps(eos_ids)}"
    if tokenizer is not None:
        text += f" ({', '.join(map(str, tokenizer.convert_ids_to_tokens(_list_ids(eos_ids))))})"
    return text


def _list_ids(eos_ids: Any) -> list[int]:
    if eos_ids is None:
        return []
    ids = eos_ids if isinstance(eos_ids, list) else [eos_ids]
    if not all(map(json_values.is_integer, ids)):  # config.json is checked before
        text = f"{GENERATION_CONFIG}: eos_token_id = {format_value(eos_ids)}"
        raise UserError(f"{text}: must be a token id, a list of them, or null.")
    return list(ids)
