"""Special tokens of a model: stop, begin and padding ids of its config.json."""

from typing import TYPE_CHECKING, Any

from jaxsp.hf.config_fields import TOKEN_ID_FIELDS

if TYPE_CHECKING:
    import transformers


def choose(
    fields: dict[str, Any], tokenizer: "transformers.PreTrainedTokenizerBase | None"
) -> dict[str, Any]:
    """Returns the ids of special tokens: from the tokenizer, else from the config, else null.

    They are those of generation_config.json. A list in the config that contains the tokenizer's id
    is kept whole. The default of the model family is never used: Llama's eos_token_id = 2 is an
    ordinary byte for a byte tokenizer.
    """
    token_ids = {}
    for name in TOKEN_ID_FIELDS:
        tokenizer_id = getattr(tokenizer, name, None)
        config_id = fields.get(name)
        is_listed = isinstance(config_id, list) and tokenizer_id in config_id
        token_ids[name] = config_id if tokenizer_id is None or is_listed else tokenizer_id
    return token_ids


def add(
    fields: dict[str, Any], tokenizer: "transformers.PreTrainedTokenizerBase | None"
) -> dict[str, Any]:
    """Returns the fields of a config.json with the ids of `choose`.

    pad_token_id stays the model's own: another one would change how the loaded model trains.
    """
    return fields | choose(fields, tokenizer) | {"pad_token_id": read_padding_id(fields)}


def read_padding_id(fields: dict[str, Any]) -> int | None:
    """Returns the token whose embedding gets no gradient from inputs, as in transformers.

    Its models create `nn.Embedding(..., padding_idx=config.pad_token_id)`. A field that is missing
    has the default of its family (Gemma 2, 3 and Cohere 2: 0; Phi-3: 32000), unless the vocabulary
    is smaller; null is no token, and a negative id counts from the end.
    """
    import transformers

    vocab_size = fields["vocab_size"]
    default = transformers.AutoConfig.for_model(fields["model_type"]).pad_token_id
    padding_id = fields.get("pad_token_id", default)
    if padding_id is None or padding_id >= vocab_size:
        return None
    return padding_id % vocab_size
