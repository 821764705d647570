"""Published measurements of other systems, with their sources."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from scripts.bench import configs

SECONDS = "s a step"
TOKENS_PER_S = "tokens/s/GPU"
"""Units of measurements."""

CUDNN = "cuDNN"
FLASH2 = "FlashAttention-2"
"""Attention kernels. Estimates assume cuDNN."""

READ = "read at the source"
SECOND_HAND = "second hand"
"""Origin of a measurement."""

LLAMA3_70B: dict[str, Any] = {
    **configs.LLAMA_8B,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}

LLAMA2_70B: dict[str, Any] = {**LLAMA3_70B, "vocab_size": 32000, "rope_theta": 10000.0}

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

QWEN3_32B: dict[str, Any] = {
    **QWEN3_8B,
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "intermediate_size": 25600,
}

TRL = "https://github.com/huggingface/trl/pull"
TORCHTITAN = "https://github.com/pytorch/torchtitan/blob"
PERFORMANCE_A100 = f"{TORCHTITAN}/3278a52f5e08/docs/performance.md"
DGXC = "https://github.com/NVIDIA/dgxc-benchmarking/blob"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A published training run and the config that plans the same work."""

    name: str
    model: Mapping[str, Any]
    """Fields of the model's config.json."""
    device: str
    """From gpus.GPUS."""
    num_devices: int
    data: int
    """Devices along the mesh axis `data`."""
    seq: int
    """Devices along the mesh axis `seq`."""
    row_tokens: int
    rows_per_step: int
    rows_per_microbatch: int = 1
    """Rows that a sequence-parallel group works on at one time."""
    memory: Mapping[str, Any]
    """Fields of the config's group `memory`."""
    measured: tuple[float, ...]
    """One or more measurements of this run."""
    unit: str
    """SECONDS or TOKENS_PER_S."""
    kernel: str
    """Attention kernel of the run."""
    source: str
    """URL."""
    checked: str
    """READ or SECOND_HAND."""
    note: str
    """Differences between the run and the plan, and what was inferred."""

    @property
    def measured_s(self) -> tuple[float, ...]:
        """Measured seconds per step, the shortest first."""
        if self.unit == SECONDS:
            return tuple(sorted(self.measured))
        tokens = self.rows_per_step * self.row_tokens / self.num_devices
        return tuple(sorted(tokens / value for value in self.measured))

    @property
    def is_same_kernel(self) -> bool:
        """True if the run has the attention kernel that the estimate assumes."""
        return self.kernel == CUDNN


MILLION_TOKENS: dict[str, Any] = {
    "device": "h100-80gb",
    "num_devices": 8,
    "data": 1,
    "seq": 8,
    "row_tokens": 1048576,
    "rows_per_step": 1,
}

TORCHTITAN_A100: dict[str, Any] = {
    "device": "a100-80gb",
    "num_devices": 64,
    "data": 64,
    "seq": 1,
    "row_tokens": 8192,
    "rows_per_step": 64,
}

OFFLOADED = {"remat": "full", "offload_activations": "layer_inputs"}

RUNS = (
    Run(
        name="TRL Qwen3-8B 1M",
        model=QWEN3_8B,
        **MILLION_TOKENS,
        memory=OFFLOADED,
        measured=(364, 373, 380),
        unit=SECONDS,
        kernel=CUDNN,
        source=f"{TRL}/6846",
        checked=READ,
        note="364 s: pull 6845; 373 s: huggingface/transformers pull 48324; 380 s: pull 6846. "
        "FSDP2, context parallelism over 8 GPUs, gradient checkpointing with offload",
    ),
    Run(
        name="TRL Qwen3-32B 1M",
        model=QWEN3_32B,
        **MILLION_TOKENS,
        memory={**OFFLOADED, "offload_optimizer": "state"},
        measured=(1295,),
        unit=SECONDS,
        kernel=CUDNN,
        source=f"{TRL}/6845",
        checked=READ,
        note="The kernel is inferred: in the same table Qwen3-8B takes 364 s, which it does with "
        "cuDNN only. The plan has its optimizer state on the host, without which it does not fit",
    ),
    Run(
        name="MaxText Llama-2-70B 4K",
        model=LLAMA2_70B,
        device="h100-80gb",
        num_devices=64,
        data=64,
        seq=1,
        row_tokens=4096,
        rows_per_step=128,
        rows_per_microbatch=2,
        memory={"remat": "save_attention"},
        measured=(6.999, 7.908),
        unit=SECONDS,
        kernel=CUDNN,
        source=f"{DGXC}/v24.11.1/maxtext/README_70b.md",
        checked=READ,
        note="Table (6.999 s) and sample log (7.908 s) of the same page differ. Its remat policy "
        "keeps more than `save_attention`: Q, K, V and output projections (configure.sh)",
    ),
    Run(
        name="MaxText Llama-3-70B 8K",
        model=LLAMA3_70B,
        device="h100-80gb",
        num_devices=128,
        data=128,
        seq=1,
        row_tokens=8192,
        rows_per_step=256,
        rows_per_microbatch=2,
        memory={"remat": "full"},
        measured=(15.563, 15.570),
        unit=SECONDS,
        kernel=CUDNN,
        source=f"{DGXC}/v25.02/maxtext/README_70b.md",
        checked=READ,
        note="Its remat policy keeps the Q, K and V projections (configure.sh)",
    ),
    Run(
        name="torchtitan Llama-3-8B 8K",
        model=configs.LLAMA_8B,
        **TORCHTITAN_A100,
        memory={"remat": "save_attention"},
        measured=(2904, 2973),
        unit=TOKENS_PER_S,
        kernel=FLASH2,
        source=PERFORMANCE_A100,
        checked=READ,
        note="FSDP2, selective checkpointing of every other layer (2904) or of operations (2973), "
        "which recomputes less than `save_attention`. The kernel is faster than cuDNN on an A100 "
        "(planner/compile/gpus.py)",
    ),
    Run(
        name="torchtitan Llama-3-70B 8K",
        model=LLAMA3_70B,
        **TORCHTITAN_A100,
        memory={"remat": "full"},
        measured=(331,),
        unit=TOKENS_PER_S,
        kernel=FLASH2,
        source=PERFORMANCE_A100,
        checked=READ,
        note="FSDP2, full checkpointing. The kernel is faster than cuDNN on an A100",
    ),
    Run(
        name="torchtitan Llama-3.1-8B 8K",
        model=configs.LLAMA_8B,
        device="h100-80gb",
        num_devices=8,
        data=8,
        seq=1,
        row_tokens=8192,
        rows_per_step=16,
        rows_per_microbatch=2,
        memory={"remat": "save_attention"},
        measured=(6667,),
        unit=TOKENS_PER_S,
        kernel=FLASH2,
        source=f"{TORCHTITAN}/b5bcd76c66d0/benchmarks/llama3_h100_202412_torchtitan.md",
        checked=READ,
        note="H100s limited to 500 W, with 96 GB of memory at 2.4 TB/s instead of 80 GB at 3.35; "
        "torch.compile. The kernel is inferred: torch's default in December 2024 "
        "(pytorch/pytorch issue 142132)",
    ),
    Run(
        name="Transformers Qwen3-8B 1M",
        model=QWEN3_8B,
        **MILLION_TOKENS,
        memory=OFFLOADED,
        measured=(606,),
        unit=SECONDS,
        kernel=FLASH2,
        source="https://github.com/huggingface/transformers/pull/48324",
        checked=READ,
        note="The TRL run where torch did not select cuDNN; with cuDNN it took 373 s",
    ),
    Run(
        name="ALST Llama-3.1-8B 3.7M",
        model=configs.LLAMA_8B,
        device="h100-80gb",
        num_devices=8,
        data=1,
        seq=8,
        row_tokens=3702784,
        rows_per_step=1,
        memory={**OFFLOADED, "offload_optimizer": "state"},
        measured=(6455,),
        unit=SECONDS,
        kernel=FLASH2,
        source="https://arxiv.org/abs/2506.13996",
        checked=SECOND_HAND,
        note="1:47:35 an iteration, quoted from the paper's table, which was not read again. The "
        "kernel is that of ArcticTraining's recipe run-h100-sp8-llama-8b.yml, which was read. The "
        "row is 3.7M to the nearest multiple of 8 x 4,096",
    ),
)
"""Runs with the kernel that estimates assume come first."""
