"""GPUs that jaxsp can plan for: the facts that XLA needs to compile for one, and its peak rates.

All figures were published by others; none was measured for jaxsp. The facts for XLA come from its
own file of each GPU, in xla/backends/gpu/target_config/specs of its repository, except name, memory
and L2 cache of the H200, which come from torch, and those of the GH200, which are the H100's.
"""

import dataclasses
from collections.abc import Mapping

from jaxsp.core.units import GIB, MIB
from jaxsp.system import hardware


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Peak rates of a device, for a roofline: the data sheet and what others measured.

    GB are 10^9 bytes. A link's rate is that of one device, in one direction, while the other
    direction carries as much.
    """

    peak_tflops: float
    """Dense bfloat16 rate of the data sheet, which no program reaches."""
    matmul_tflops: float
    """Rate of large bfloat16 matrix products by cuBLAS."""
    attention_forward_tflops: float
    """Rate of cuDNN's causal attention in bfloat16: long rows, head size 128. Masked pairs do not
    count as arithmetic."""
    attention_backward_tflops: float
    """Rate of cuDNN's backward pass, which has 2.5 times the operations of the forward pass."""
    memory_gb_s: float
    """Rate of the device's own memory, reads and writes together."""
    link_gb_s: float
    """Rate of NCCL to the other devices of the node, in large messages."""
    network_gb_s: float
    """Rate to other nodes, with one network card per device as in NVIDIA's DGX."""
    host_gb_s: float
    """Rate to host memory, each way, while both directions of all 8 devices of a node are busy."""
    link_hop_us: float = 1.9
    """Latency of a hop of NCCL's rings inside a node, in microseconds."""
    network_hop_us: float = 4.0
    """Latency of a hop between nodes."""
    sources: Mapping[str, str]
    """Source of each figure, by the name of its field; "assumed" where none is published."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """A kind of GPU."""

    name: str
    """Name that CUDA gives it, which is JAX's device_kind."""
    memory_bytes: int
    """Memory that CUDA reports; drivers differ by some MiB."""
    ceilings: Ceilings
    node_devices: int = 8
    """GPUs of a node, which share its host memory."""
    nvlink_domain_size: int = 8
    """GPUs of one NVLink domain, which may span several nodes."""
    node_host_gib: float = 2000.0
    """Host memory of a node, unless --host-gib is given."""
    compute_capability: int = 9
    """Major number; the minor is 0. Defaults are those of Hopper."""
    features: str = "ACCELERATED_FEATURES"
    """XLA's name for the set of instructions of that capability."""
    cores: int = 132
    fpus_per_core: int = 128
    clock_ghz: float = 1.98
    memory_bytes_per_s: int
    l2_bytes: int
    shared_bytes_per_core: int = 233472
    """Shared memory of a core; a block may have all of it except 1 KiB."""

    @property
    def target_config(self) -> str:
        """Text of the GpuTargetConfigProto with which XLA compiles without the GPU."""
        return f"""
gpu_device_info {{
  cuda_compute_capability {{
    major: {self.compute_capability} feature_extension: {self.features}
  }}
  name: "{self.name}" device_vendor: "NVIDIA Corporation" device_address_bits: 64
  core_count: {self.cores} fpus_per_core: {self.fpus_per_core} clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  memory_bandwidth: {self.memory_bytes_per_s}
  l2_cache_size: {self.l2_bytes}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {self.shared_bytes_per_core - 1024}
  shared_memory_per_core: {self.shared_bytes_per_core}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.28.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 patch: 0 }}
device_description_str: "{self.name}"
"""


_DATA_SHEET = "NVIDIA's data sheet, SXM, without sparsity"
_AZURE = "Azure/AI-benchmarking-guide"
_CUDNN_FRONTEND = "NVIDIA/cudnn-frontend, benchmark"

_HOP = (
    "NCCL's model of its own latency, hwLatencies in src/graph/tuning.cc: rings with the protocol "
    "LL128, which NCCL takes where latency matters; Simple has 3.4 and 14"
)

_H100 = Ceilings(
    peak_tflops=hardware.PEAK_TFLOPS["H100"],
    matmul_tflops=715.0,
    attention_forward_tflops=619.0,
    attention_backward_tflops=528.0,
    memory_gb_s=2970.0,
    link_gb_s=370.0,
    network_gb_s=48.0,
    host_gb_s=28.0,
    sources={
        "link_hop_us": _HOP,
        "network_hop_us": _HOP,
        "peak_tflops": _DATA_SHEET,
        "matmul_tflops": "vllm-project/vllm pull 23939: torch, 16,384 tokens x 7168 x 2112, 0.72 "
        "of the peak. Cubes of 8192 reach 765 (NVIDIA/cutlass issue 1662), the best of all shapes "
        "794.5 (stas00/ml-engineering, MAMF)",
        "attention_forward_tflops": f"{_CUDNN_FRONTEND}/attention_training/results/llama3.1/h200, "
        "2026-09-28: cuDNN 9.27 on an H200, which computes as fast, 2 rows of 32,768 tokens, 64 "
        "query and 8 K/V heads",
        "attention_backward_tflops": "as forward",
        "memory_gb_s": f"{_AZURE}, ND H100 v5: BabelStream's triad; the data sheet has 3350",
        "link_gb_s": "a developer of NCCL, NVIDIA/nccl-tests issue 212: all collectives except "
        "all-reduce reach it in a node of 8; the data sheet has 900 both ways together",
        "network_gb_s": "a developer of NCCL, NVIDIA/nccl-tests issue 290: 46 to 48 of the 50 of a "
        "400 Gb/s card, of which DGX H100 and H200 have one for each GPU",
        "host_gb_s": "liguodongiot/llm-action: nvbandwidth on 8 H800, whose host link is the same. "
        "Mean of the rates with all 8 busy both ways, 24 to the host and 33 back. All 8 one way: "
        "45 and 55; a single GPU both ways: 34 and 53. PCIe 5.0 x16 has 64",
    },
)

_H200 = dataclasses.replace(
    _H100,
    peak_tflops=hardware.PEAK_TFLOPS["H200"],
    memory_gb_s=4150.0,
    sources={
        **_H100.sources,
        "matmul_tflops": "as the H100 (stas00/ml-engineering: the same). "
        + _H100.sources["matmul_tflops"],
        "memory_gb_s": f"{_AZURE}, ND H200 v5: BabelStream's triad; the data sheet has 4800",
    },
)

_A100 = Ceilings(
    peak_tflops=hardware.PEAK_TFLOPS["A100"],
    matmul_tflops=254.0,
    attention_forward_tflops=176.0,
    attention_backward_tflops=143.0,
    memory_gb_s=1700.0,
    link_gb_s=230.0,
    network_gb_s=24.0,
    host_gb_s=9.0,
    sources={
        "link_hop_us": _HOP,
        "network_hop_us": _HOP,
        "peak_tflops": _DATA_SHEET,
        "matmul_tflops": f"{_AZURE}, ND A100 v4: cuBLASLt in float16, a cube of 8192, 0.81 of the "
        "peak",
        "attention_forward_tflops": f"{_CUDNN_FRONTEND}/attention_training/results/llama3.1/a100, "
        "2026-09-28: cuDNN 9.27 on an A100 80GB PCIe, which has less power, 2 rows of 32,768 "
        "tokens, 64 query and 8 K/V heads; FlashAttention-2 there 199 and 180",
        "attention_backward_tflops": "as forward",
        "memory_gb_s": f"{_AZURE}, ND A100 v4: BabelStream's triad; the data sheet has 2039",
        "link_gb_s": "a developer of NCCL, NVIDIA/nccl-tests issue 149: in a node of 8; the data "
        "sheet has 600 both ways together",
        "network_gb_s": "NVIDIA/nccl-tests issue 119: 96 of the 100 of four 200 Gb/s cards, of "
        "which DGX A100 has one for each GPU",
        "host_gb_s": "assumed: two share a PCIe switch, so half of the mean of the 24 to the host "
        "and 12 back that a single GPU reaches both ways (NVIDIA/nvbandwidth issues 11 and 53). A "
        "single GPU one way: 26; PCIe 4.0 x16 has 32",
    },
)

_B200 = Ceilings(
    peak_tflops=hardware.PEAK_TFLOPS["B200"],
    matmul_tflops=1510.0,
    attention_forward_tflops=1420.0,
    attention_backward_tflops=1110.0,
    memory_gb_s=6600.0,
    link_gb_s=680.0,
    network_gb_s=48.0,
    host_gb_s=28.0,
    sources={
        "link_hop_us": _HOP,
        "network_hop_us": _HOP,
        "peak_tflops": _DATA_SHEET,
        "matmul_tflops": "vllm-project/vllm pull 19566: torch on SM100, 16,384 tokens by a layer "
        "of Llama 3.1 8B, 0.67 of the peak. Cubes of 8192 reach 1610 (NVIDIA's tilus, in float16), "
        "the best of all shapes 1745 (stas00/ml-engineering, MAMF)",
        "attention_forward_tflops": f"{_CUDNN_FRONTEND}/sdpa_benchmark_training/artifacts, bf16 on "
        "B200: cuDNN 9.13, a row of 32,768 tokens, 128 query and 8 K/V heads; of 131,072 tokens "
        "1355 and 1048. cuDNN 9.27 on GB200: 1593 and 1221",
        "attention_backward_tflops": "as forward",
        "memory_gb_s": "assumed: 0.86 of bus width times clock, 7672 (pytorch/ao pull 4002), as "
        "H200; the data sheet has 8000",
        "link_gb_s": f"{_AZURE}, ND GB200 v6: all-reduce in a ring of 4 with the same links. "
        "NCCL's own constant is 722 (NVIDIA/nccl issue 1807); the data sheet has 1800 both ways "
        "together",
        "network_gb_s": "as the H100: DGX B200 has the same cards. "
        + _H100.sources["network_gb_s"],
        "host_gb_s": "assumed: as the H100, whose host link is the same",
    },
)

_GB200 = dataclasses.replace(
    _B200,
    peak_tflops=hardware.PEAK_TFLOPS["GB200"],
    matmul_tflops=1675.0,
    attention_forward_tflops=1593.0,
    attention_backward_tflops=1221.0,
    memory_gb_s=6820.0,
    host_gb_s=100.0,
    sources={
        **_B200.sources,
        "matmul_tflops": "assumed: 0.67 of the peak, as the B200",
        "attention_forward_tflops": f"{_CUDNN_FRONTEND}/sdpa_benchmark_training/artifacts: cuDNN "
        "9.27 on GB200",
        "memory_gb_s": "assumed: 0.86 of bus width times clock, 7928, as the B200",
        "host_gb_s": "assumed: two GPUs share the 400 GB/s that a Grace CPU reads or writes, each "
        "both ways. The NVLink-C2C of each has 450 each way",
    },
)

_GH200 = dataclasses.replace(
    _H100,
    peak_tflops=hardware.PEAK_TFLOPS["GH200"],
    memory_gb_s=3550.0,
    link_gb_s=48.0,
    host_gb_s=150.0,
    sources={
        **_H100.sources,
        "memory_gb_s": "assumed: 0.89 of the data sheet's 4000, as the H100",
        "link_gb_s": "assumed: one GPU per node, so all traffic goes through its network card",
        "host_gb_s": "NVIDIA/nvbandwidth issues 23 and 41: 346 to the GPU and about 300 back one "
        "way, half of it both ways",
    },
)

GPUS = {
    "h100-80gb": Gpu(
        name="NVIDIA H100 80GB HBM3",
        memory_bytes=84942979072,
        ceilings=_H100,
        memory_bytes_per_s=3352320000000,
        l2_bytes=52428800,
    ),
    "h200-141gb": Gpu(
        name="NVIDIA H200",
        # 139.80 GiB
        memory_bytes=143156 * MIB,
        ceilings=_H200,
        memory_bytes_per_s=4800000000000,
        l2_bytes=62914560,
    ),
    "a100-80gb": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        memory_bytes=85100068864,
        ceilings=_A100,
        compute_capability=8,
        features="NONE",
        cores=108,
        fpus_per_core=64,
        clock_ghz=1.41,
        memory_bytes_per_s=2039040000000,
        l2_bytes=41943040,
        shared_bytes_per_core=167936,
    ),
    "b200-180gb": Gpu(
        name="NVIDIA B200",
        # 178.35 GiB, torch's with newer drivers
        memory_bytes=182631 * MIB,
        ceilings=_B200,
        compute_capability=10,
        cores=148,
        clock_ghz=1.965,
        memory_bytes_per_s=7672320000000,
        l2_bytes=132644864,
    ),
    "gb200-186gb": Gpu(
        name="NVIDIA GB200",
        # 184.31 GiB
        memory_bytes=197897748480,
        ceilings=_GB200,
        node_devices=4,
        nvlink_domain_size=72,
        # Two CPUs with 480 GB each
        node_host_gib=894.0,
        compute_capability=10,
        cores=152,
        clock_ghz=2.062,
        memory_bytes_per_s=7928064000000,
        l2_bytes=135528448,
    ),
    "gh200-96gb": Gpu(
        name="NVIDIA GH200 480GB",
        # Assumed: 95 GiB
        memory_bytes=95 * GIB,
        ceilings=_GH200,
        node_devices=1,
        nvlink_domain_size=1,
        node_host_gib=447.0,
        memory_bytes_per_s=4022784000000,
        l2_bytes=62914560,
    ),
}
"""GPUs by the name of --device: SXM modules and Grace superchips."""


def find_by_device_kind(device_kind: str) -> Gpu | None:
    """Finds the GPU with this device_kind in JAX.

    None if it is not in GPUS, such as an A100 with 40 GB and all PCIe and NVL cards.
    """
    return next((gpu for gpu in GPUS.values() if gpu.name == device_kind), None)
