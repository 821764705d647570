"""Keeps tokenizers as their tokenizer.json defines them, where transformers' classes change them.

transformers 5 builds the backend of some classes itself and takes only the vocabulary from
tokenizer.json. For the model_type qwen2 it does so whatever tokenizer_config.json names, so that
models with the shape of DeepSeek-R1-Distill-Qwen would get other ids than they were trained with.
"""

import json
import pathlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers
    import transformers

_FILE = "tokenizer.json"

_COMPONENTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")

_MODEL_FIELDS = (
    "dropout",
    "unk_token",
    "fuse_unk",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "byte_fallback",
    "ignore_merges",
)
"""Fields of the models of the `tokenizers` library that determine ids."""

_TEKKEN_TOKEN = "[AVAILABLE_TOOLS]"
"""Control token of Mistral's Tekken vocabularies."""

_LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern that the converter for Mistral's files wrote by mistake."""

_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern of Mistral's Tekken tokenizers."""


def load_as_in_file(
    tokenizer: "transformers.PreTrainedTokenizerBase", name: str
) -> tuple["transformers.PreTrainedTokenizerBase", list[str]]:
    """Returns the tokenizer that tokenizer.json defines, and a note for each difference.

    Args:
        tokenizer: what AutoTokenizer loaded; returned as it is if it agrees with the file, or if
            there is no tokenizer.json.
        name: the folder or hub name that it was loaded from.
    """
    notes = []
    loaded_type = type(tokenizer).__name__
    from_file = _load_file(tokenizer, name)
    if from_file is not None and (differing := _find_differences(tokenizer, from_file)):
        tokenizer = from_file
        notes.append(
            f"{name}: transformers' AutoTokenizer loads a {loaded_type} whose "
            f"{', '.join(differing)} differ from tokenizer.json. jaxsp uses tokenizer.json, like "
            f"transformers.PreTrainedTokenizerFast.from_pretrained({name!r})."
        )
    if _has_wrong_split(getattr(tokenizer, "backend_tokenizer", None)):
        _correct_split(tokenizer.backend_tokenizer)
        notes.append(
            f"{name}: its tokenizer.json splits text by another pattern than Mistral's tokenizers "
            "do. jaxsp uses Mistral's, like transformers with fix_mistral_regex=True; so does the "
            "export."
        )
    return tokenizer, notes


def correct_file(directory: pathlib.Path) -> None:
    """Corrects the split pattern in a folder's tokenizer.json as `load_as_in_file` does."""
    import tokenizers

    path = directory / _FILE
    if path.is_file():
        backend = tokenizers.Tokenizer.from_file(str(path))
        if _has_wrong_split(backend):
            _correct_split(backend)
            backend.save(str(path))


def _load_file(
    tokenizer: "transformers.PreTrainedTokenizerBase", name: str
) -> "transformers.PreTrainedTokenizerFast | None":
    """Loads a tokenizer from tokenizer.json; None if `tokenizer` was, or there is no such file.

    Special tokens that only the class of `tokenizer` names are kept if the file has them.
    """
    import transformers
    from transformers.utils import hub

    fast = transformers.PreTrainedTokenizerFast
    if type(tokenizer) is fast:
        return None
    path = hub.cached_file(
        name,
        _FILE,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        return None
    from_file = fast.from_pretrained(name)
    own_tokens = from_file.special_tokens_map
    backend = from_file.backend_tokenizer
    missing: dict[str, Any] = {
        role: token
        for role, token in tokenizer.special_tokens_map.items()
        if role not in own_tokens and backend.token_to_id(str(token)) is not None
    }
    return fast.from_pretrained(name, **missing) if missing else from_file


def _find_differences(
    tokenizer: "transformers.PreTrainedTokenizerBase", from_file: Any
) -> list[str]:
    """Names the parts of a tokenizer that give other ids or texts than the file's."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return ["tokens"]
    loaded = _describe_parts(backend)
    expected = _describe_parts(from_file.backend_tokenizer)
    return [part.replace("_", "-") for part in expected if loaded[part] != expected[part]]


def _describe_parts(backend: "tokenizers.Tokenizer") -> dict[str, Any]:
    """Describes what determines a backend's ids and texts, in a form that can be compared."""
    parts = {name: _describe_component(getattr(backend, name), name) for name in _COMPONENTS}
    model = backend.model
    # some files have "" where others have null
    fields = {name: getattr(model, name, None) or None for name in _MODEL_FIELDS}
    if _has_all_bytes(backend):  # no character is unknown
        fields |= {"unk_token": None, "fuse_unk": None}
    size = backend.get_vocab_size(with_added_tokens=False)
    added_tokens = {
        index: (token.content, token.lstrip, token.rstrip, token.single_word, token.normalized)
        for index, token in backend.get_added_tokens_decoder().items()
    }
    return {**parts, "model": (type(model).__name__, size, fields), "added tokens": added_tokens}


def _describe_component(component: Any, name: str) -> Any:
    def simplify(value: Any) -> Any:
        if isinstance(value, list):
            return [simplify(item) for item in value]
        if not isinstance(value, dict):
            return value
        if value.get("type") == "ByteLevel" and name in ("decoder", "post_processor"):
            return "ByteLevel"  # its options matter in a pre-tokenizer only
        # offsets are read without a post-processor
        return {key: simplify(item) for key, item in value.items() if key != "trim_offsets"}

    return None if component is None else simplify(json.loads(component.__getstate__()))


def _has_all_bytes(backend: "tokenizers.Tokenizer") -> bool:
    """True if a vocabulary has a token for every byte, so that no character is unknown."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    spellings = ([f"<0x{byte:02X}>" for byte in range(256)], bytes_to_unicode().values())
    return any(
        all(backend.token_to_id(token) is not None for token in spelling) for spelling in spellings
    )


def _has_wrong_split(backend: "tokenizers.Tokenizer | None") -> bool:
    """True for a vocabulary of Mistral's whose text is split as Llama 3's."""
    if backend is None or backend.token_to_id(_TEKKEN_TOKEN) is None:
        return False
    splits = _describe_component(backend.pre_tokenizer, "pre_tokenizer") or {}
    first, *_ = splits.get("pretokenizers") or [{}]
    return first.get("pattern") == {"Regex": _LLAMA_SPLIT}


def _correct_split(backend: "tokenizers.Tokenizer") -> None:
    import tokenizers
    from tokenizers import pre_tokenizers

    steps: Any = backend.pre_tokenizer  # a sequence
    steps[0] = pre_tokenizers.Split(tokenizers.Regex(_TEKKEN_SPLIT), behavior="isolated")
