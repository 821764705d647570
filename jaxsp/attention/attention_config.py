"""Config of the attention strategy and kernel."""

from typing import Annotated, Literal

from jaxsp.config.fields import ConfigSection, PositiveCount, with_examples


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
    chunks_per_device: Annotated[Literal["auto", 2, 4, 8, 16], with_examples(4)] = "auto"
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
