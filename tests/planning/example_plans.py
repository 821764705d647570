"""Plans with example values, made without compiling a step."""

import dataclasses

from jaxsp.planning import fit, planner, step_time
from jaxsp.planning.planner import Plan, PlannedCollective

_ALL_TO_ALL = PlannedCollective(
    kind="all-to-all",
    axes=["seq"],
    bytes=2e9,
    node_bytes=0.0,
    num_runs=1,
    seconds=0.25,
    waited_s=0.125,
)


def make_plan(**changes):
    """Makes a plan that fits on 8 H100s. Args: changes: fields with other values."""
    fields = {
        "device_type": "h100-80gb",
        "num_devices": 8,
        "node_devices": 8,
        "mesh": {"replica": 1, "data": 1, "seq": 8},
        "row_tokens": 131072,
        "rows_per_step": 8,
        "rows_per_microbatch": 1,
        "max_segments_per_row": 64,
        "document_tokens": 131072,
        "layers": "",
        "strategy": "Ulysses of 8",
        "attention_bytes": 2 * 2**20,
        "alternative_bytes": {"ring of 8": 3 * 2**20},
        "kernel": "cudnn",
        "kernel_title": "cuDNN",
        "fallback_reason": "",
        "head_chunks": 1,
        "remat": "save_attention",
        "mlp_tile_tokens": 16384,
        "loss_tile_tokens": 2048,
        "options": "memory options in words",
        "fits": True,
        "memory_bottleneck": "device",
        "shortage": "",
        "suggestions": [],
        "device_gib": 30.0,
        "device_limit_gib": 72.8,
        "host_gib": 0.0,
        "host_limit_gib": 1960.0,
        "host_pool_gib": 0.0,
        "memory": {fit.WEIGHTS: 10.0, fit.OTHER: 20.0, planner.RESERVED: 6.3},
        "host_memory": {},
        "sent_bytes": 2.0e9,
        "collectives": [_ALL_TO_ALL],
        "model_flops": 2e15,
        "hardware_flops": 2.5e15,
        "host_copy_bytes": (0.0, 0.0),
        "step_s_estimate": 5.0,
        "tokens_per_s_estimate": 209715.2,
        "mfu_estimate": 0.4,
        "seconds_estimate": {
            step_time.MATMULS: 2.75,
            step_time.ATTENTION: 2.125,
            step_time.EXPOSED_COLLECTIVES: 0.125,
        },
        "time_bottleneck": step_time.MATMULS,
        "jax_version": "0.12.0",
        "plan_s": 8.0,
        "objective": "",
        "reference_s_estimate": None,
    }
    assert fields.keys() == {field.name for field in dataclasses.fields(Plan)}
    return Plan(**fields | changes)
