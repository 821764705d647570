"""The config of a run: its sections, and the fields of model, mesh, attention and memory."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pydantic

from jaxsp.config import fields
from jaxsp.config.adapter_schema import AdapterConfig
from jaxsp.config.fields import (
    HERE,
    MAX_COUNT,
    ConfigSection,
    NonNegativeFloat,
    PositiveCount,
    with_examples,
)
from jaxsp.config.rope_schema import RopeConfig
from jaxsp.config.run_schema import RunConfig


class ModelSourceConfig(ConfigSection):
    """Model, tokenizer and dtype."""

    source: Annotated[str | None, with_examples("Qwen/Qwen3-0.6B", min_length=1)] = None
    """Hugging Face folder, or name on the hub: config.json, safetensors weights and tokenizer. Of a
    multimodal model (gemma3, mistral3, qwen3_5, muse_glimmer), the text model is trained. Set this
    or config."""
    config: Annotated[
        dict[str, Any] | None, with_examples("{model_type: llama, hidden_size: 256}")
    ] = None
    """Fields of a Hugging Face config.json, for a model with random weights. They include
    model_type, such as llama or qwen3."""
    tokenizer: Annotated[str | None, with_examples("bytes")] = None
    """Tokenizer: `bytes` (256 bytes and an end token), or a folder or hub name. Its tokenizer.json
    is used also where transformers' AutoTokenizer would change it. null: that of
    model.source. Records with the format tokens need none."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of activations, and of weights when they are sent and gathered. Master weights are
    float32."""
    rope: Annotated[RopeConfig | None, with_examples("{type: yarn, factor: 4}")] = None
    """Changes of the rotary position embedding, to extend the context. They replace fields of the
    model's config.json, also in checkpoints and in the export. In models whose layers have
    different embeddings (Gemma 3, OLMo 3), they change the layers that attend to whole documents.
    null: the model's own."""
    max_position_embeddings: Annotated[PositiveCount | None, with_examples(131072)] = None
    """Number of positions that the model has after training, which replaces that of its
    config.json. null: factor times the original range if model.rope extends it; otherwise the
    model's own. Longer documents are trained on too; the banner has a note."""

    linear_dtype: Annotated[Literal["float8"] | None, with_examples("float8")] = None
    """float8: linear layers multiply activations, and gradients of activations, in 8-bit floats
    (e4m3) with a scale for each token: up to twice as fast on Hopper, Ada and Blackwell GPUs, with
    a rounding error of a few percent in each product. Gradients of matrices, embedding, head,
    experts and adapters stay in compute_dtype, and master weights in float32. null: all of them."""
    experts_kernel: Literal["auto", "mosaic", "xla"] = "auto"
    """Kernel of experts' matrix products. mosaic: kernels for Hopper GPUs in bfloat16, with jax
    0.11.1 or later. xla: a loop, on any device. auto: mosaic where it runs, otherwise xla. A run
    checks mosaic against xla before the first step."""
    router_aux_loss_coef: Annotated[NonNegativeFloat | None, with_examples(0.001)] = None
    """Factor of the load-balancing loss of experts' routers, that of transformers for batches of
    one row: a mean over rows, which is the same on every mesh. null: that of config.json if it has
    output_router_logits: true, otherwise 0. Routers that are balanced by a bias have no such loss
    (glm4_moe)."""
    router_z_loss_coef: NonNegativeFloat = 0.0
    """Factor of the z-loss of experts' routers, the mean square of their logits' log-sum-exp."""

    _expand_home = pydantic.field_validator("source", "tokenizer")(fields.expand_home)

    def find_problems(self) -> Iterator[str]:
        if self.source is None and self.config is None:
            yield (
                f"{HERE}.source, {HERE}.config: missing. Set one of them for the model, for "
                f"example {HERE}.source=Qwen/Qwen3-0.6B."
            )
        elif self.source is not None and self.config is not None:
            yield (
                f"{self.show('source')}, {self.show('config')}: only one of them may be set. "
                f"Write {HERE}.source=null or {HERE}.config=null."
            )


class MeshConfig(ConfigSection):
    """Device mesh of replica x data x seq devices."""

    replica: PositiveCount = 1
    """Number of replicas. Weights are sharded over data x seq and repeated over replica."""
    data: Annotated[int, pydantic.Field(ge=-1, le=MAX_COUNT)] = -1
    """Number of sequence-parallel groups in a replica, each with its own rows. -1: as many as the
    devices allow."""
    seq: Annotated[PositiveCount | Literal["auto"], with_examples(4)] = 1
    """Number of devices that share each row (degree of sequence parallelism). auto: the number with
    which a step recomputes least (memory.remat) by the memory formula, of several the smallest;
    groups larger than a node of 8 only to save attention. It requires mesh.data=-1."""
    virtual_cpu_devices: Annotated[PositiveCount | None, with_examples(8)] = None
    """Number of devices to split the CPU into, for trying a mesh without GPUs. It has no effect
    with an accelerator."""

    def find_problems(self) -> Iterator[str]:
        if self.seq == "auto" and self.data != -1:
            yield f"{HERE}.seq = auto: {HERE}.data follows from it. Use {HERE}.data=-1."

    @pydantic.field_validator("data")
    @classmethod
    def _check_data(cls, value: int) -> int:
        if value == 0:
            raise ValueError("must be -1 or at least 1")
        return value

    @pydantic.field_validator("seq", mode="before")
    @classmethod
    def _check_seq(cls, value: Any) -> Any:
        if value != "auto" and not fields.is_count(value):
            raise ValueError("must be an integer of at least 1, or auto")
        return value

    @property
    def degree(self) -> int:
        """Number of devices that share each row, after `auto` is resolved."""
        assert isinstance(self.seq, int), "memory/row_meshes.py resolves it"
        return self.seq


class AttentionConfig(ConfigSection):
    """Attention strategy and kernel."""

    strategy: Literal["auto", "ulysses", "ring", "all_gather"] = "auto"
    """Distribution of attention over a sequence-parallel group. ulysses: each device gets all
    tokens for some of the heads; mesh.seq must divide the query heads. ring: each device keeps its
    queries, and keys and values travel around the group. all_gather: each device keeps its queries
    and gathers keys and values of all tokens, some heads at a time. ring and all_gather can be
    combined with ulysses among neighbors: see ulysses_degree. auto: ulysses where possible,
    otherwise the ring, with the degree that waits least for the links inside nodes of 8 GPUs and
    for the network between them."""
    ulysses_degree: Annotated[PositiveCount | None, with_examples(4)] = None
    """Number of neighbors that share the heads by ulysses, while ring or all_gather connects their
    sets. It must divide mesh.seq and the query heads. 1: ring or all_gather among all devices of a
    group. null: the degree that waits least, mostly that of a node."""
    kv_heads_per_gather: Annotated[PositiveCount | None, with_examples(2)] = None
    """Number of a device's K/V heads that all_gather gathers at a time. null: one. It does not
    apply to layers with a sliding window, which gather nothing."""
    chunks_per_device: Annotated[Literal["auto"] | PositiveCount, with_examples(4)] = "auto"
    """Number of chunks of a row that each device holds where devices keep their queries (ring
    and all_gather), dealt back and forth: 2, 4, 8 or 16. More chunks balance rows of several
    documents better, with more and smaller calls of the kernel. auto: the largest number for which
    chunks have a multiple of 1,024 tokens. It is 2 if there is none, if rows have one document, and
    for models with sliding windows, where each chunk receives the window before it."""
    kernel: Literal["auto", "cudnn", "blockwise"] = "auto"
    """Attention kernel. cudnn: flash attention in bfloat16, on NVIDIA GPUs from the A100 on (before
    Hopper, packed documents are copied to rows of their own). blockwise: online softmax over
    blocks, memory linear in length, on any device. auto: cudnn where it runs, otherwise
    blockwise."""
    head_chunks: Annotated[PositiveCount | None, with_examples(2)] = None
    """Number of chunks into which cudnn splits a device's heads; it processes one after another.
    null: the smallest number that satisfies cuDNN's limits and bounds its memory."""

    @pydantic.field_validator("chunks_per_device", mode="before")
    @classmethod
    def _check_chunks_per_device(cls, value: Any) -> Any:
        if value != "auto" and not (fields.is_count(value) and value in (2, 4, 8, 16)):
            raise ValueError("must be auto, 2, 4, 8 or 16")
        return value


class MemoryConfig(ConfigSection):
    """Memory-saving options."""

    remat: Literal["auto", "none", "save_attention_and_mlp", "save_attention", "full"] = "auto"
    """Recomputation in the backward pass. none: only elementwise operations.
    save_attention_and_mlp: each layer from its input, except attention and the wide products of the
    MLP, whose results are kept. save_attention: each layer from its input, except attention. full:
    attention too, which is about a quarter more arithmetic for long rows. auto: the first of
    save_attention_and_mlp (if nothing is offloaded), save_attention and full that fits. Gathered
    weights are never kept; they are gathered again."""
    kept_mlp_layers: Annotated[Literal["auto"] | int, with_examples(16)] = "auto"
    """Number of layers, the last ones, in which remat: save_attention_and_mlp keeps the MLP's
    products. auto: all of them, or with remat: auto as many as fit. A number needs remat:
    save_attention_and_mlp."""
    offload_activations: Annotated[
        Literal["none", "layer_inputs", "layer_inputs_and_attention"], with_examples("layer_inputs")
    ] = "none"
    """Activations kept in host memory until the backward pass. layer_inputs: each layer's input.
    layer_inputs_and_attention: also the results of attention."""
    offload_every: Annotated[PositiveCount, with_examples(2)] = 1
    """With offload_activations: layer_inputs, only the input of every k-th layer is kept until the
    backward pass, which computes those between again: (k - 1) / k of the forward pass. Host memory
    for layer inputs is divided by almost k. Requires remat full or auto, and jax 0.11.1 or later.
    """
    offload_during_attention: Literal["auto", "always", "never"] = "auto"
    """With offload_activations: layer_inputs and remat: full, the backward pass keeps a layer's
    input and the gradient of its output in host memory while it computes attention, when device
    memory is fullest. auto: only if the step does not fit otherwise. Requires jax 0.11.1 or later.
    """
    offload_optimizer: Annotated[
        Literal["none", "state", "state_and_gradients"], with_examples("state")
    ] = "none"
    """Arrays kept in host memory between steps. state: float32 weights and the optimizer's moments;
    the update copies one layer at a time to its device, and weights in the compute dtype stay
    there. state_and_gradients: also finished gradients, and frozen weights. Requires jax 0.11.1 or
    later."""
    mlp_tile_tokens: Annotated[Literal["auto"] | PositiveCount, with_examples(4096)] = "auto"
    """Tokens per device that go through a layer's projections and MLP at a time; tiles are
    recomputed in the backward pass. auto: all tokens, or fewer if the step does not fit."""
    loss_tile_tokens: Annotated[Literal["auto"] | PositiveCount, with_examples(1024)] = "auto"
    """Tokens per device whose logits exist at a time. auto: all tokens, or fewer if the step does
    not fit."""
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which gradients of sharded weights are sent and summed. Gradients of small weights
    are always summed in float32."""

    def find_problems(self) -> Iterator[str]:
        offloaded = self.offload_activations
        if self.remat == "full" and offloaded == "layer_inputs_and_attention":
            yield (
                f"{self.show('offload_activations')}: memory.remat = full keeps no results of "
                f"attention. Use {HERE}.offload_activations=layer_inputs, or "
                f"{HERE}.remat=save_attention."
            )
        for name, off in (("offload_every", (1,)), ("offload_during_attention", ("auto", "never"))):
            if getattr(self, name) in off:
                continue
            if offloaded != "layer_inputs":
                yield (
                    f"{self.show(name)}: needs layer inputs in host memory. Use "
                    f"{HERE}.offload_activations=layer_inputs, or {HERE}.{name}={off[0]}."
                )
            if self.remat not in ("auto", "full"):
                yield (
                    f"{self.show(name)}: {HERE}.remat = {self.remat} keeps more than layer inputs. "
                    f"Use {HERE}.remat=full."
                )

    @pydantic.field_validator("kept_mlp_layers", mode="before")
    @classmethod
    def _check_kept_layers(cls, value: Any) -> Any:
        if value not in ("auto", 0) and not fields.is_count(value):
            raise ValueError("must be auto, or an integer of at least 0")
        return value

    @pydantic.field_validator("mlp_tile_tokens", "loss_tile_tokens", mode="before")
    @classmethod
    def _check_tile_tokens(cls, value: Any) -> Any:
        if value != "auto" and not fields.is_count(value):
            raise ValueError("must be auto, or an integer of at least 1")
        return value


class Config(ConfigSection):
    """The config of a run; setup/config_file.py has the classes of the other sections."""

    run: RunConfig
    model: ModelSourceConfig
    mesh: MeshConfig = MeshConfig()
    attention: AttentionConfig = AttentionConfig()
    data: Any
    batch: Any
    objective: Any
    optimizer: Any
    adapter: AdapterConfig = AdapterConfig()
    memory: MemoryConfig = MemoryConfig()
    eval: Any
    checkpoint: Any
    logging: Any

    @property
    def has_frozen_weights(self) -> bool:
        """True if some of the model's own weights are not trained."""
        has_frozen_group = any(group.frozen for group in self.optimizer.groups)
        return has_frozen_group or self.adapter.type != "none"

    def with_fields(self, **sections: dict[str, Any]) -> "Config":
        """Returns the config with other fields: `with_fields(data={"row_tokens": 1024})`."""
        return self.model_copy(
            update={
                name: getattr(self, name).model_copy(update=changes)
                for name, changes in sections.items()
            }
        )

    def with_degree(self, seq: int) -> "Config":
        """Returns the config with a number of devices that share each row."""
        return self.with_fields(mesh={"seq": seq})

    def with_rows_per_microbatch(self, number: int) -> "Config":
        """Returns the config with a number of rows per microbatch and group."""
        return self.with_fields(batch={"rows_per_microbatch": number})

    def with_one_row_for_auto(self) -> "Config":
        """Returns the config with 1 row per microbatch and group in place of `auto`."""
        is_automatic = self.batch.rows_per_microbatch == "auto"
        return self.with_rows_per_microbatch(1) if is_automatic else self
