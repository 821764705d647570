"""GPUs that jaxsp can plan for, from gpus.yaml: facts that XLA needs to compile, and peak rates."""

import dataclasses
import pathlib
from collections.abc import Mapping

from jaxsp.config import yaml_io
from jaxsp.system import hardware


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Peak rates of a device, for a roofline: the data sheet and what others measured. gpus.yaml
    has the sources.

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
    link_hop_us: float
    """Latency of a hop of NCCL's rings inside a node, in microseconds."""
    network_hop_us: float
    """Latency of a hop between nodes."""


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


_TABLE = yaml_io.load(pathlib.Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

ASSUMED: Mapping[str, Mapping[str, tuple[float, str]]] = _TABLE["assumed"]
"""Rates and sizes that were never measured, and the reasons for them, by GPU."""


def _find_rates(name: str) -> dict[str, float]:
    """Rates of a GPU by field; assumed ones replace those of its base."""
    rates = _TABLE["rates"][name] | ASSUMED.get(name, {})
    base = rates.pop("base", None)
    own = {field: float(rate) for field, (rate, _) in rates.items()}
    return (_find_rates(base) if base else {}) | own


GPUS = {
    name: Gpu(
        ceilings=Ceilings(
            # NVIDIA's data sheet, SXM, without sparsity
            peak_tflops=hardware.PEAK_TFLOPS[name.partition("-")[0].upper()],
            **_find_rates(name),
        ),
        **fields,
    )
    for name, fields in _TABLE["gpus"].items()
}
"""GPUs by the name of --device."""


def find_by_device_kind(device_kind: str) -> Gpu | None:
    """Finds the GPU with this device_kind in JAX.

    None if it is not in GPUS, such as an A100 with 40 GB and all PCIe and NVL cards.
    """
    return next((gpu for gpu in GPUS.values() if gpu.name == device_kind), None)
