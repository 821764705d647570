"""Memory of Llama-3.1-8B's training step on H100s, option by option, by compiling it without a GPU.

    python -m scripts.bench.memory --out scripts/bench/results/today-memory.json
    python -m scripts.bench.memory --tokens 131072 --options none "tiled loss"

A full fine-tune with AdamW and float32 master weights, on 8 GPUs (with a row each, or sharing one)
and on one GPU. Each line adds a memory option. The figures are XLA's for the compiled step and, on
the device, an estimate of cuDNN's workspace. Nothing was measured on a GPU. Needs the plan extra;
offloading the optimizer needs jax 0.11.1 or later.
"""

import dataclasses
import sys
from typing import Any

import jax

from jaxsp.core.errors import UserError
from jaxsp.planning import fit, gpus
from jaxsp.run.config_file import Config
from scripts.bench import configs, machine, report, results

MODULE = "scripts.bench.memory"

DEVICE = "h100-80gb"

HOST_GIB = {8: 2000, 1: 250}
"""Host memory of a node, by its number of devices."""

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {"seq": 1, "loss_tile_tokens": "all", "mlp_tile_tokens": "all", "remat": "none"},
    "tiled loss": {"loss_tile_tokens": "auto"},
    "Ulysses": {"seq": 8},
    "remat": {"remat": "save_attention"},
    "tiled MLP": {"mlp_tile_tokens": "auto"},
    "offload": {"offload_activations": "layer_inputs_and_attention"},
    "offload optimizer": {"offload_optimizer": "state"},
    "remat full": {"offload_activations": "layer_inputs", "remat": "full"},
    "offload gradients": {"offload_optimizer": "state_and_gradients"},
}
"""Changes of each line from the line before: mesh.seq, and fields of `memory`.

Tiles that are `auto` are made only if the step does not fit without them. The last two lines make
longer rows fit, for more arithmetic or traffic.
"""

TOKENS = {8: (131072, 1048576, 3670016, 5242880), 1: (524288, 655360)}
"""Row lengths by the number of devices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A step to compile."""

    options: str
    """Last line of OPTIONS that is applied."""
    num_devices: int
    row_tokens: int
    max_segments: int


PLAN_FIELDS = "device_gib device_limit_gib host_gib fits remat head_chunks plan_s memory".split()
PLAN_FIELDS += "host_memory mlp_tile_tokens loss_tile_tokens".split()
"""Fields of a plan that the results have."""


def main(arguments: list[str]) -> int:
    """Runs the command. Returns: 1 if a case was refused."""
    parser = results.make_parser(MODULE, __doc__)
    names = ", ".join(OPTIONS)
    default = tuple(OPTIONS)
    parser.add_argument(
        "--options", nargs="+", choices=OPTIONS, default=default, metavar="NAME", help=names
    )
    lengths = "row lengths; default: 131,072 to 5,242,880 on 8 devices, 524,288 and 655,360 on one"
    parser.add_argument("--tokens", nargs="+", type=int, help=lengths)
    parser.add_argument("--devices", nargs="+", type=int, choices=TOKENS, default=tuple(TOKENS))
    parser.add_argument("--documents", type=int, default=64, help="data.max_segments_per_row")
    args = parser.parse_args(arguments)
    configs.prepare_to_plan()
    contents = results.open_results(
        MODULE,
        arguments,
        **machine.read_cpu_versions("jax", "jaxlib", "jax-cuda12-plugin"),
        device=DEVICE,
        device_gib=gpus.GPUS[DEVICE].memory_bytes / 2**30,
        host_gib=HOST_GIB,
        model=configs.LLAMA_8B,
        options=OPTIONS,
    )
    for num_devices in args.devices:
        for options in args.options:
            if num_devices == 1 and "seq" in OPTIONS[options] and options != "none":
                continue  # the same as the line before
            for tokens in args.tokens or TOKENS[num_devices]:
                case = Case(
                    options=options,
                    num_devices=num_devices,
                    row_tokens=tokens,
                    max_segments=args.documents,
                )
                result = measure(case)
                contents["cases"].append(dataclasses.asdict(case) | result)
                print(format_case(case, result), flush=True)
                results.write(args.out, contents)
    return int(any(case["status"] == report.REFUSED for case in contents["cases"]))


def format_case(case: Case, result: dict[str, Any]) -> str:
    """Formats a case as a line of text."""
    text = f"{case.num_devices} x {DEVICE}  {case.row_tokens:>9,} tokens  {case.options:<17}"
    if result["status"] != report.OK:
        return f"{text} {result['status']}: {result['message']}"
    cudnn_gib = result["memory"].get(fit.WORKSPACE, 0.0)
    fits = "fits" if result["fits"] else "does not fit"
    return (
        f"{text} {result['device_gib']:7.1f} GiB on each device ({cudnn_gib:.1f} of them for "
        f"cuDNN), {result['host_gib']:7.1f} GiB of host memory: {fits}"
    )


def make_config(case: Case) -> Config:
    """The config of a case."""
    fields: dict[str, Any] = {}
    for name, changes in OPTIONS.items():
        fields |= changes
        if name == case.options:
            break
    seq = min(fields.pop("seq"), case.num_devices)
    tokens_per_device = case.row_tokens // seq
    memory = {
        name: tokens_per_device if value == "all" else value for name, value in fields.items()
    }
    num_groups = case.num_devices // seq
    return configs.make_config(
        configs.LLAMA_8B,
        mesh={"data": num_groups, "seq": seq},
        data={
            "row_tokens": case.row_tokens,
            "max_segments_per_row": case.max_segments,
        },
        batch={"rows_per_step": num_groups},
        memory=memory,
    )


def measure(case: Case) -> dict[str, Any]:
    """Compiles a case. Returns: status, and fields of the plan or a message."""
    try:
        plan = configs.plan_config(
            make_config(case),
            device=DEVICE,
            num_devices=case.num_devices,
            host_gib=HOST_GIB[case.num_devices],
        )
    except (UserError, jax.errors.JaxRuntimeError) as error:
        return {"status": report.REFUSED, "message": str(error).splitlines()[0]}
    fields = dataclasses.asdict(plan)
    return {"status": report.OK} | {name: fields[name] for name in PLAN_FIELDS}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
