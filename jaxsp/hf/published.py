"""Sizes of published models, for plans and benchmarks if the hub does not give their config.json.

They are facts, without weights or a tokenizer: training never uses them.
"""

import dataclasses
import json
import re
from typing import Any

from jaxsp.config.schema import ModelSourceConfig
from jaxsp.core import errors
from jaxsp.core.errors import UserError
from jaxsp.hf import folder, model_config
from jaxsp.hf.folder import HubError
from jaxsp.model.config import ModelConfig

READ_DATE = "2026-11-24"

SOURCE_URLS = {
    "litgpt": "https://github.com/Lightning-AI/litgpt/blob/26857050fe3f/litgpt/config.py",
    "nemo": (
        "https://github.com/NVIDIA/NeMo/blob/09d2252fd8f5/nemo/collections/llm/gpt/model/mistral.py"
    ),
    "olmo-core": (
        "https://github.com/allenai/OLMo-core/blob/fa6c5014c9f6/src/olmo_core/nn/transformer/"
        "config.py"
    ),
    "nim": "https://docs.api.nvidia.com/nim/reference/mistralai-mistral-small-24b-instruct",
}
"""Documents with the sizes; the hub shows those of gated models only after a login."""

DEADLINE_S = 6.0
"""Longest wait for the hub before published sizes are used."""

_TIED = {"tie_word_embeddings": True}
_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
_LLAMA_3 = _LLAMA | {"vocab_size": 128256, "rope_theta": 500000.0}
_LLAMA_3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA_3_0 = _LLAMA_3 | {"max_position_embeddings": 8192}
_LLAMA_3_1 = _LLAMA_3 | {"max_position_embeddings": 131072, "rope_scaling": _LLAMA_3_SCALING}
_SMOLLM_2 = _LLAMA | {"vocab_size": 49152, "max_position_embeddings": 8192} | _TIED
_MISTRAL = {
    "model_type": "mistral",
    "vocab_size": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
_MISTRAL_131K = _MISTRAL | {"vocab_size": 131072, "head_dim": 128}
_QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "vocab_size": 151936}
_QWEN_2_5 = _QWEN | {"model_type": "qwen2", "vocab_size": 152064, "tie_word_embeddings": False}
_QWEN_3 = _QWEN | {"model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": False}
_QWEN_3 |= {"max_position_embeddings": 40960}

_GEMMA_3 = {"model_type": "gemma3_text", "vocab_size": 262144, "head_dim": 256}
_GEMMA_3 |= {"rms_norm_eps": 1e-6, "sliding_window": 1024, "max_position_embeddings": 131072}
_GEMMA_3 |= {"query_pre_attn_scalar": 256, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
_GEMMA_3_SCALING = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
_OLMO = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_OLMO_2 = _OLMO | {"model_type": "olmo2", "vocab_size": 100352, "rope_theta": 500000.0}
_OLMO_3_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
_OLMO_3 = _OLMO | {
    "model_type": "olmo3",
    "vocab_size": 100278,
    "max_position_embeddings": 65536,
    "sliding_window": 4096,
    "rope_parameters": {
        "full_attention": _OLMO_3_YARN | {"rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    },
}
_PHI_4 = {"model_type": "phi3", "vocab_size": 100352, "rms_norm_eps": 1e-5, "rope_theta": 250000.0}
_PHI_4 |= {"sliding_window": None, "tie_word_embeddings": False}
_PHI_4 |= {"original_max_position_embeddings": 16384, "max_position_embeddings": 16384}

_FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "llama-2": _LLAMA | {"vocab_size": 32000, "rope_theta": 10000.0},
    "llama-3": _LLAMA_3_0,
    "llama-3.1": _LLAMA_3_1,
    "llama-3.2": _LLAMA_3_1 | {"rope_scaling": _LLAMA_3_SCALING | {"factor": 32.0}} | _TIED,
    "smollm2": _SMOLLM_2 | {"rope_theta": 100000.0},
    "smollm2-1.7b": _SMOLLM_2 | {"rope_theta": 130000.0},
    "mistral-0.1": _MISTRAL | {"vocab_size": 32000, "rope_theta": 1e4, "sliding_window": 4096},
    "mistral-0.2": _MISTRAL | {"vocab_size": 32000},
    "mistral": _MISTRAL,
    "mistral-nemo": _MISTRAL_131K,
    "mistral-small": _MISTRAL_131K | {"rope_theta": 1e8},
    "qwen2.5-small": _QWEN_2_5 | {"vocab_size": 151936} | _TIED,
    "qwen2.5-7b": _QWEN_2_5,
    "qwen2.5": _QWEN_2_5 | {"rms_norm_eps": 1e-5},
    "qwen3-small": _QWEN_3 | _TIED,
    "qwen3": _QWEN_3,
    "gemma-3-1b": _GEMMA_3 | {"sliding_window": 512},
    "gemma-3": _GEMMA_3 | _GEMMA_3_SCALING,
    "gemma-3-27b": _GEMMA_3 | _GEMMA_3_SCALING | {"head_dim": 128, "query_pre_attn_scalar": 168},
    "olmo-2": _OLMO_2 | {"max_position_embeddings": 4096},
    "olmo-3": _OLMO_3,
    "phi-4": _PHI_4,
    "qwen3-2507": _QWEN_3 | {"rope_theta": 5e6, "max_position_embeddings": 262144} | _TIED,
}
"""Fields that models share; the others are in the lines of the table."""

_TABLE = """
# family, billions of parameters; layers, hidden size, heads, key-value heads, MLP; source; names
llama-2        6.74   32  4096  32 32 11008  litgpt meta-llama/Llama-2-7b{-hf,-chat-hf}
llama-2       13.02   40  5120  40 40 13824  litgpt meta-llama/Llama-2-13b{-hf,-chat-hf}
llama-2       68.98   80  8192  64  8 28672  litgpt meta-llama/Llama-2-70b{-hf,-chat-hf}
llama-2        1.10   22  2048  32  4  5632  litgpt TinyLlama/TinyLlama-1.1B-Chat-v1.0
llama-3        8.03   32  4096  32  8 14336  litgpt meta-llama/Meta-Llama-3-8B{,-Instruct}
llama-3       70.55   80  8192  64  8 28672  litgpt meta-llama/Meta-Llama-3-70B{,-Instruct}
llama-3.1      8.03   32  4096  32  8 14336  litgpt meta-llama/Llama-3.1-8B{,-Instruct}
llama-3.1      8.03   32  4096  32  8 14336  litgpt meta-llama/Meta-Llama-3.1-8B{,-Instruct}
llama-3.1      8.03   32  4096  32  8 14336  litgpt deepseek-ai/DeepSeek-R1-Distill-Llama-8B
llama-3.1     70.55   80  8192  64  8 28672  litgpt meta-llama/Llama-3.1-70B{,-Instruct}
llama-3.1     70.55   80  8192  64  8 28672  litgpt meta-llama/Meta-Llama-3.1-70B{,-Instruct}
llama-3.1     70.55   80  8192  64  8 28672  litgpt meta-llama/Llama-3.3-70B-Instruct
llama-3.1     70.55   80  8192  64  8 28672  litgpt deepseek-ai/DeepSeek-R1-Distill-Llama-70B
llama-3.1    405.85  126 16384 128  8 53248  litgpt meta-llama/Llama-3.1-405B{,-Instruct}
llama-3.1    405.85  126 16384 128  8 53248  litgpt meta-llama/Meta-Llama-3.1-405B{,-Instruct}
llama-3.2      1.24   16  2048  32  8  8192  litgpt meta-llama/Llama-3.2-1B{,-Instruct}
llama-3.2      3.21   28  3072  24  8  8192  litgpt meta-llama/Llama-3.2-3B{,-Instruct}
smollm2       0.135   30   576   9  3  1536  litgpt HuggingFaceTB/SmolLM2-135M{,-Instruct}
smollm2       0.362   32   960  15  5  2560  litgpt HuggingFaceTB/SmolLM2-360M{,-Instruct}
smollm2-1.7b   1.71   24  2048  32 32  8192  litgpt HuggingFaceTB/SmolLM2-1.7B{,-Instruct}
mistral-0.1    7.24   32  4096  32  8 14336  litgpt mistralai/Mistral-7B{,-Instruct}-v0.1
mistral-0.2    7.24   32  4096  32  8 14336  litgpt mistralai/Mistral-7B-Instruct-v0.2
mistral        7.25   32  4096  32  8 14336  litgpt mistralai/Mistral-7B{,-Instruct}-v0.3
mistral-nemo  12.25   40  5120  32  8 14336  nemo   mistralai/Mistral-Nemo-{Base,Instruct}-2407
mistral-small 23.57   40  5120  32  8 32768  nim    mistralai/Mistral-Small-24B-{Base,Instruct}-2501
mistral      122.61   88 12288  96  8 28672  litgpt mistralai/Mistral-Large-Instruct-{2407,2411}
qwen2.5-small  0.49   24   896  14  2  4864  litgpt Qwen/Qwen2.5-0.5B{,-Instruct}
qwen2.5-small  1.54   28  1536  12  2  8960  litgpt Qwen/Qwen2.5-1.5B{,-Instruct}
qwen2.5-small  3.09   36  2048  16  2 11008  litgpt Qwen/Qwen2.5-3B{,-Instruct}
qwen2.5-7b     7.62   28  3584  28  4 18944  litgpt Qwen/Qwen2.5-7B{,-Instruct}
qwen2.5       14.77   48  5120  40  8 13824  litgpt Qwen/Qwen2.5-14B{,-Instruct}
qwen2.5       32.76   64  5120  40  8 27648  litgpt Qwen/Qwen2.5-32B{,-Instruct}
qwen2.5       72.71   80  8192  64  8 29568  litgpt Qwen/Qwen2.5-72B{,-Instruct}
qwen2.5       32.76   64  5120  40  8 27648  litgpt Qwen/QwQ-32B
qwen3-small    0.60   28  1024  16  8  3072  litgpt Qwen/Qwen3-0.6B{,-Base}
qwen3-small    1.72   28  2048  16  8  6144  litgpt Qwen/Qwen3-1.7B{,-Base}
qwen3-small    4.02   36  2560  32  8  9728  litgpt Qwen/Qwen3-4B{,-Base}
qwen3          8.19   36  4096  32  8 12288  litgpt Qwen/Qwen3-8B{,-Base}
qwen3         14.77   40  5120  40  8 17408  litgpt Qwen/Qwen3-14B{,-Base}
qwen3         32.76   64  5120  64  8 25600  litgpt Qwen/Qwen3-32B
qwen3-2507     4.02   36  2560  32  8  9728  litgpt Qwen/Qwen3-4B-{Instruct,Thinking}-2507
gemma-3-1b     1.00   26  1152   4  1  6912  litgpt google/gemma-3-1b-{pt,it}
gemma-3        3.88   34  2560   8  4 10240  litgpt google/gemma-3-4b-{pt,it}
gemma-3       11.77   48  3840  16  8 15360  litgpt google/gemma-3-12b-{pt,it}
gemma-3-27b   27.02   62  5376  32 16 21504  litgpt google/gemma-3-27b-{pt,it}
olmo-2         7.30   32  4096  32 32 11008  litgpt allenai/OLMo-2-1124-7B{,-SFT,-DPO,-Instruct}
olmo-2        13.72   40  5120  40 40 13824  litgpt allenai/OLMo-2-1124-13B{,-SFT,-DPO,-Instruct}
olmo-3         7.30   32  4096  32 32 11008  olmo-core allenai/Olmo-3-1025-7B
olmo-3        32.23   64  5120  40  8 27648  olmo-core allenai/Olmo-3-1125-32B
phi-4         14.66   40  5120  40 10 17920  litgpt microsoft/phi-4
"""
"""Published models; of Gemma 3, the text model. A test compares each number of parameters with that
of the decoder."""

_SIZE_COLUMNS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A published model."""

    name: str
    fields: dict[str, Any]
    billion_params: float
    """Published number of parameters."""
    source_url: str
    """Address of the document that has the sizes."""


def _parse_table(table: str) -> dict[str, PublishedModel]:
    """Models of a table by name."""
    models = {}
    for line in table.strip().splitlines()[1:]:
        family, billions, *numbers, source, names = line.split()
        sizes = dict(zip(_SIZE_COLUMNS, map(int, numbers), strict=True))
        first, choices, last = re.split(r"[{}]", names) if "{" in names else (names, "", "")
        for choice in choices.split(","):
            name = f"{first}{choice}{last}"
            models[name] = PublishedModel(
                name=name,
                fields=_FAMILY_FIELDS[family] | sizes,
                billion_params=float(billions),
                source_url=SOURCE_URLS[source],
            )
    return models


MODELS = _parse_table(_TABLE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a config's model, for planning."""

    model: ModelConfig
    fields: dict[str, Any]
    """Fields of its config.json, with the changes of model.rope."""
    published: PublishedModel | None
    """The published sizes if they are used in place of the model's own config.json."""
    note: str
    """First line of the output if published sizes are used; empty otherwise."""

    @property
    def overrides(self) -> list[str]:
        """Changes of the config that use published sizes; none if they are not used."""
        if self.published is None:
            return []
        return ["model.source=null", f"model.config={json.dumps(self.published.fields)}"]


def read_sizes(model: ModelSourceConfig, *, row_tokens: int | None = None) -> ModelSizes:
    """Reads the sizes of a config's model.

    Published sizes are used only if the hub cannot be reached within DEADLINE_S, or refuses the
    model to this login.

    Args:
        row_tokens: length of the longest rows, for RoPE that depends on it.
    Raises: UserError if there is no such folder or model, or nothing about it is known.
    """
    name = str(model.source)
    published = None
    note = ""
    try:
        fields, field = model_config.read_fields(model, deadline_s=DEADLINE_S)
    except HubError as error:
        if name not in MODELS and folder.has_parent(name):
            raise
        if name not in MODELS:
            raise UserError(_unknown_problem(name, error.reason)) from None
        published = MODELS[name]
        note = (
            f"PUBLISHED SIZES of {name}, because {error.reason}; "
            f"read on {READ_DATE} from {published.source_url}"
        )
        field = f"published sizes of {name}"
        fields = model_config.resolve_fields(published.fields, model, field=field)
    sizes = model_config.parse_model_config(fields, field=field, row_tokens=row_tokens)
    return ModelSizes(model=sizes, fields=fields, published=published, note=note)


def _unknown_problem(name: str, reason: str) -> str:
    """The problem of a model that is neither on the hub nor in the table."""
    known = " ".join(line.split()[-1] for line in _TABLE.strip().splitlines()[1:])
    hint = errors.did_you_mean(name, list(MODELS))
    return (
        f"model.source = {name}: {reason}, and jaxsp has no published sizes of it.{hint} Give a "
        f"folder with the model's config.json; on a machine with a network, `hf download {name} "
        f"config.json --local-dir FOLDER` makes one. Or use a model with published sizes: {known}."
    )
