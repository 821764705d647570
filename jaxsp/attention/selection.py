"""Choice of the strategy and the kernel of a run, and its description."""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxsp.attention import nodes
from jaxsp.attention.all_gather import AllGather
from jaxsp.attention.attention_config import AttentionConfig
from jaxsp.attention.kernels.blockwise import BlockwiseKernel
from jaxsp.attention.kernels.cudnn import CudnnKernel
from jaxsp.attention.kernels.kernel import (
    AttentionWorkload,
    Device,
    Kernel,
    KernelSettings,
    ScoreConfig,
    divisors,
    min_device_bytes,
)
from jaxsp.attention.ring import Ring
from jaxsp.attention.strategy import Strategy, TokenExchange, combine
from jaxsp.attention.ulysses import Ulysses
from jaxsp.attention.workload import GroupRows, HasHeads, count_workloads, drop_long_windows
from jaxsp.core import errors, units
from jaxsp.core.errors import UserError
from jaxsp.system import hardware

KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (CudnnKernel(), BlockwiseKernel())}
"""Kernels by name. `auto` uses the first that has no unsupported reasons."""

NETWORK_COST = 8.0
"""Time of a byte through a device's network card, in times of a byte over its NVLink: 370 over 48
GB/s for an H100 (planning/gpus.yaml)."""

_MIN_MENTIONED_LSE_BYTES = 64 * units.MIB
"""Minimum memory of log-sum-exps that a description mentions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """Kernel of layers with the same sizes of heads."""

    kernel: Kernel
    settings: KernelSettings
    reason: str = ""
    """Reason that `auto` did not use an earlier kernel; empty if it used its first."""
    heads: tuple[int, int] | None = None
    """Number of K/V heads and size of a head."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """Strategy, kernels and settings of attention, for rows of one length. Processes compare its
    `repr`."""

    strategy: Strategy
    kernels: tuple[KernelChoice, ...]
    """Kernel of the first layer, and others of layers with other heads."""
    layer_scores: tuple[ScoreConfig, ...]
    """Scores of each layer, without windows that are at least as long as the rows."""
    sent_bytes: int = 0
    """Bytes that each device sends per layer and microbatch if attention's results are saved for
    the backward pass, whatever memory.remat is: the mean of all layers."""
    alternatives: tuple[tuple[str, int], ...] = ()
    """Descriptions of the other strategies that `auto` considered, with their `sent_bytes`."""

    @property
    def kernel(self) -> Kernel:
        """Kernel of the first layer."""
        return self.kernels[0].kernel

    @property
    def settings(self) -> KernelSettings:
        return self.kernels[0].settings

    @property
    def fallback_reason(self) -> str:
        return self.kernels[0].reason

    def find_kernel(self, heads: tuple[int, int] | None) -> tuple[Kernel, KernelSettings]:
        """Kernel of layers with these `ScoreConfig.heads`."""
        chosen = next((x for x in self.kernels[1:] if x.heads == heads), self.kernels[0])
        return chosen.kernel, chosen.settings

    @property
    def library_kernel(self) -> Kernel:
        """The kernel that XLA does not compile; that of the first layer if there is none."""
        return next((x.kernel for x in self.kernels if x.kernel.custom_call_prefix), self.kernel)

    @property
    def workspace_bytes(self) -> int:
        """The largest `KernelSettings.workspace_bytes` of a kernel."""
        return max(x.settings.workspace_bytes for x in self.kernels)


class StrategyOption(NamedTuple):
    """A strategy that a sweep over meshes tries, and its name in tables."""

    label: str
    config_fields: dict[str, Any]
    """Changed fields of the config's attention."""


def choose_attention(
    requested: AttentionConfig,
    rows: GroupRows,
    model: HasHeads,
    *,
    devices: Sequence[Device],
    device_bytes: int | None = None,
) -> AttentionChoice:
    """Chooses what a config requests, or what `auto` means on these devices, which may be absent.

    The kernel and its settings are the same for all layers with the same sizes of heads.

    Args:
        device_bytes: memory of a device; None: what the devices report, if they are present.
    Raises: UserError with all problems: heads that cannot be shared, a kernel that cannot run this,
        or calls of the kernel that do not fit an empty device.
    """
    strategy = choose_strategy(requested, rows, model)
    device_bytes = device_bytes or min_device_bytes(devices)
    # As if attention were saved, so that memory options do not change the choice
    layers = count_workloads(rows, model)
    by_heads: dict[tuple[int, int], list[AttentionWorkload]] = {}
    for each in layers:
        workload = strategy.kernel_workload(each)
        by_heads.setdefault((each.num_kv_heads, each.head_dim), []).append(workload)
    kernels: list[KernelChoice] = []
    for heads, workloads in by_heads.items():
        kernel, reason = _choose_kernel(requested.kernel, workloads, devices, device_bytes)
        is_split = not kernels or kernel.supports_head_chunks
        chunks = requested.head_chunks if is_split else None
        settings = _configure(kernel, workloads, chunks, reason, devices, device_bytes)
        kernels.append(KernelChoice(kernel=kernel, settings=settings, reason=reason, heads=heads))
    sent_bytes = {}
    for candidate in (strategy, *_list_alternatives(requested, layers, seq=rows.seq)):
        total = sum(count * sum(candidate.sent_bytes(x).values()) for x, count in layers.items())
        sent_bytes[candidate] = total // sum(layers.values())
    first, *others = kernels
    is_other = lambda x: (x.kernel, x.settings) != (first.kernel, first.settings)
    return AttentionChoice(
        strategy=strategy,
        kernels=(first, *filter(is_other, others)),
        layer_scores=drop_long_windows(model.layer_scores, row_tokens=rows.row_tokens),
        sent_bytes=sent_bytes.pop(strategy),
        alternatives=tuple((x.description, size) for x, size in sent_bytes.items()),
    )


def choose_strategy(requested: AttentionConfig, rows: GroupRows, model: HasHeads) -> Strategy:
    """Chooses the requested strategy; `auto` is whole rows if possible, else what waits least for
    links and network cards.

    Whole rows come first even if an all-to-all has to leave the node: they give all devices the
    same work, whatever the lengths of the documents.

    A group of one device shares nothing, whatever is requested, so that a config works on any mesh.

    Raises: UserError for heads that cannot be shared as requested.
    """
    if rows.seq == 1:
        return combine(1)
    layers = count_workloads(rows, model)
    layer = _find_common_heads(layers)
    candidates = _without_problems(_list_candidates(requested, layer, seq=rows.seq), layer)
    best = min(candidates, key=lambda c: (_link_time(c, layers), -c.heads.degree))
    for option in _list_exchange_options():
        value = getattr(requested, option)
        default = AttentionConfig.model_fields[option].default
        if option not in best.tokens.options and value != default:
            users = errors.format_choices(
                name for name, x in TOKEN_EXCHANGES.items() if option in x.options
            )
            raise UserError(
                f"attention.{option} = {value}: applies only to {users}, and attention.strategy is "
                f"{requested.strategy} ({best.description}). Use attention.{option}="
                f"{default or 'null'}, or attention.strategy={users}."
            )
    problem = best.find_problem(layer)
    if problem is not None:
        raise UserError(problem)
    return best


def list_options(
    requested: AttentionConfig, rows: GroupRows, model: HasHeads
) -> list[StrategyOption]:
    """Lists what a sweep tries: all strategies if the config has `auto`, with the fields that
    apply to each."""
    if rows.seq == 1:
        return [StrategyOption("none shared", {})]
    if requested.strategy != "auto":
        return [StrategyOption(requested.strategy, {"strategy": requested.strategy})]
    layer = _find_common_heads(count_workloads(rows, model))
    unused = {
        field: AttentionConfig.model_fields[field].default
        for field in ("ulysses_degree", *_list_exchange_options())
    }
    options = []
    for candidate in _list_strategies(requested, layer, seq=rows.seq):
        fields = unused | candidate.config_fields
        if not candidate.layout.keeps_order:
            fields["chunks_per_device"] = requested.chunks_per_device
        options.append(StrategyOption(candidate.label, fields))
    return options


def _find_common_heads(layers: Iterable[AttentionWorkload]) -> AttentionWorkload:
    """The first workload, with K/V heads of which all layers have a multiple."""
    first, *others = layers
    num_kv_heads = math.gcd(first.num_kv_heads, *(layer.num_kv_heads for layer in others))
    return dataclasses.replace(first, num_kv_heads=num_kv_heads)


def _list_exchange_options() -> list[str]:
    """Fields of the config's attention that only some exchanges of tokens use."""
    return sorted(set[str]().union(*(x.options for x in TOKEN_EXCHANGES.values())))


def _list_candidates(
    requested: AttentionConfig, layer: AttentionWorkload, *, seq: int
) -> Sequence[Strategy]:
    """Strategies to choose from, at least one. Raises: UserError if there is none."""
    name = requested.strategy
    wanted = requested.ulysses_degree
    legal = _legal_degrees(layer, seq=seq)
    if name == Ulysses.name:
        if seq not in legal:
            raise UserError(
                f"mesh.seq = {seq}: must divide the {layer.num_heads} query heads, because "
                "attention.strategy is ulysses. Use mesh.seq="
                f"{errors.format_choices(divisors(layer.num_heads))}, or attention.strategy=auto."
            )
        if wanted not in (None, seq):
            raise UserError(
                f"attention.ulysses_degree = {wanted}: attention.strategy is ulysses, with which "
                f"all mesh.seq = {seq} devices share the heads. Use attention.ulysses_degree=null, "
                "or attention.strategy=ring between sets of neighbors."
            )
        return [combine(seq)]
    if wanted is not None and wanted not in legal:
        raise UserError(
            f"attention.ulysses_degree = {wanted}: must divide mesh.seq = {seq} and the "
            f"{layer.num_heads} query heads. Use {errors.format_choices(sorted(legal))}, or null."
        )
    if name in TOKEN_EXCHANGES:
        return _list_strategies(requested, layer, seq=seq, name=name)
    candidates = [x for x in _list_strategies(requested, layer, seq=seq) if x.tokens.is_automatic]
    whole_rows = [candidate for candidate in candidates if candidate.layout.keeps_order]
    return whole_rows or candidates


def _list_alternatives(
    requested: AttentionConfig, layers: Iterable[AttentionWorkload], *, seq: int
) -> Sequence[Strategy]:
    """Strategies that `auto` considers, with the requested options."""
    if seq == 1:
        return []
    layer = _find_common_heads(layers)
    strategies = _list_strategies(requested, layer, seq=seq)
    return _without_problems([x for x in strategies if x.tokens.is_automatic], layer)


def _list_strategies(
    requested: AttentionConfig, layer: AttentionWorkload, *, seq: int, name: str | None = None
) -> list[Strategy]:
    """Lists the ways in which `seq` devices, at least 2, can share these heads.

    Args: name: of one exchange of tokens; None: all, and whole rows.
    """
    wanted = requested.ulysses_degree
    degrees = [n for n in _legal_degrees(layer, seq=seq) if wanted in (None, n)]
    strategies = [combine(seq)] if seq in degrees and (name is None or wanted == seq) else []
    for exchange in TOKEN_EXCHANGES.values():
        if name in (None, exchange.name):
            for n in degrees:
                if n < seq:
                    own_heads = Ulysses(degree=n).exchange_workload(layer)
                    tokens = exchange.from_config(requested, own_heads, degree=seq // n)
                    strategies.append(combine(n, tokens))
    return strategies


def _legal_degrees(layer: AttentionWorkload, *, seq: int) -> list[int]:
    """Numbers of neighbors that can share the heads, the largest first."""
    return [n for n in reversed(divisors(seq)) if layer.num_heads % n == 0]


def _without_problems(
    candidates: Sequence[Strategy], layer: AttentionWorkload
) -> Sequence[Strategy]:
    """Candidates whose options fit the heads; all of them if none does."""
    return [x for x in candidates if x.find_problem(layer) is None] or candidates


def _link_time(strategy: Strategy, layers: Mapping[AttentionWorkload, int]) -> float:
    """Time that a strategy's collectives take in all layers, in bytes over NVLink.

    Nodes have hardware.DEVICES_PER_NODE devices, so that a plan and a run on any nodes choose
    the same strategy.
    """
    node_devices = hardware.DEVICES_PER_NODE
    # groups of another size than a node's lie on nodes in several ways, which repeat after this
    period = math.lcm(strategy.seq, node_devices)
    time = 0.0
    for layer, num_layers in layers.items():
        for operation, num_bytes in strategy.sent_bytes(layer).items():
            groups = tuple(
                tuple(first + position for position in group)
                for first in range(0, period, strategy.seq)
                for group in strategy.device_groups(operation)
            )
            load = nodes.find_load(operation, groups, node_devices=node_devices)
            time += num_layers * num_bytes * max(load.link, NETWORK_COST * load.network)
    return time


def _choose_kernel(
    name: str,
    workloads: Sequence[AttentionWorkload],
    devices: Sequence[Device],
    device_bytes: int | None,
) -> tuple[Kernel, str]:
    """The requested kernel, or the first that supports all workloads; and the reason that an
    earlier kernel cannot run, empty if there is none.

    Raises: UserError if the requested kernel does not support a workload.
    """
    fallback_reason = ""
    for kernel in KERNELS.values() if name == "auto" else [KERNELS[name]]:
        find_reasons = functools.partial(
            kernel.unsupported_reasons, devices=devices, device_bytes=device_bytes
        )
        reasons = next(filter(None, map(find_reasons, workloads)), [])
        if not reasons:
            return kernel, fallback_reason
        if name != "auto":
            raise UserError(
                f"attention.kernel = {name}: {kernel.title} {reason.reason}. {reason.suggestion}"
                for reason in reasons
            )
        fallback_reason = fallback_reason or f"{kernel.title} {reasons[0].reason}"
    raise AssertionError("one kernel supports everything")


def _configure(
    kernel: Kernel,
    workloads: Sequence[AttentionWorkload],
    requested_chunks: int | None,
    fallback_reason: str,
    devices: Sequence[Device],
    device_bytes: int | None,
) -> KernelSettings:
    """Settings that all kinds of layers share, with the largest memory that a kind needs.

    Raises: UserError for head chunks that a kind of layer does not support.
    """
    if requested_chunks is not None and not kernel.supports_head_chunks:
        supporting = [k.name for k in KERNELS.values() if k.supports_head_chunks]
        because = f", because {fallback_reason}" if fallback_reason else ""
        raise UserError(
            f"attention.head_chunks = {requested_chunks}: works only with the "
            f"{errors.format_choices(supporting)} kernel, and this is {kernel.name}{because}. "
            "Use attention.head_chunks=null."
        )
    legal = set.intersection(*(set(kernel.legal_head_chunks(x)) for x in workloads))
    if requested_chunks is not None and requested_chunks not in legal:
        first = workloads[0]
        raise UserError(
            f"attention.head_chunks = {requested_chunks}: must divide the {first.num_heads} query "
            f"and {first.num_kv_heads} K/V heads of a device into equal chunks that the kernel "
            f"supports for {first.kernel_tokens:,} tokens. Use "
            f"{errors.format_choices(sorted(legal))}, or null."
        )
    configure = functools.partial(kernel.configure, devices=devices, device_bytes=device_bytes)
    settings = [configure(workload, head_chunks=requested_chunks) for workload in workloads]
    most_chunks = max(x.head_chunks for x in settings)
    if any(x.head_chunks != most_chunks for x in settings):
        enough = min((n for n in legal if n >= most_chunks), default=None)
        if enough is None:
            kv_heads = max(x.num_kv_heads for x in workloads)
            raise UserError(
                f"attention.head_chunks = null: some layers need {most_chunks} head chunks, and "
                "the heads of layers with windows cannot be divided into that number. Use "
                f"attention.kv_heads_per_gather={kv_heads}."
            )
        settings = [configure(workload, head_chunks=enough) for workload in workloads]
    return dataclasses.replace(
        settings[0],
        capacity_factor=min(x.capacity_factor for x in settings),
        workspace_bytes=max(x.workspace_bytes for x in settings),
        lse_bytes=max(x.lse_bytes for x in settings),
    )


def describe_exceptions(choice: AttentionChoice) -> list[str]:
    """Descriptions of the kernels that only some layers have."""
    layer_heads = [score.heads for score in choice.layer_scores]
    descriptions = []
    for other in choice.kernels[1:]:
        assert other.heads is not None
        num_heads, size = other.heads
        descriptions.append(
            f"{layer_heads.count(other.heads)} of {len(layer_heads)} layers: "
            f"{other.kernel.describe()} kernel for {num_heads} K/V heads of {size}"
            + (f", because {other.reason}" if other.reason else "")
        )
    return descriptions


def describe_choice(choice: AttentionChoice, model: HasHeads) -> str:
    """Describes a choice in one line.

    Windows and softcaps are given with the number of layers that have them if not all do, such as
    `52 of 62 layers: each token sees the last 1,024 of its document`.
    """
    settings = choice.settings
    kernel = f"{choice.kernel.describe()} kernel"
    if settings.head_chunks > 1:
        kernel += f", heads in {settings.head_chunks} chunks"
    if settings.copies_segments:
        kernel += (
            f", segments copied to rows of their own in {settings.capacity_factor} times the memory"
        )
    if settings.lse_bytes >= _MIN_MENTIONED_LSE_BYTES:
        kernel += f", whose log-sum-exps need {settings.lse_bytes / units.MIB:,.0f} MiB"
    parts: collections.Counter[str] = collections.Counter()
    for score in choice.layer_scores:
        if score.window is not None:
            parts[f"each token sees the last {score.window:,} of its document"] += 1
        if score.softcap is not None:
            parts[f"scores are capped at {score.softcap:g}"] += 1
    num_layers = len(choice.layer_scores)
    for part, count in parts.items():
        kernel += (
            f", {part}" if count == num_layers else f", {count} of {num_layers} layers: {part}"
        )
    kernel += "".join(f", {text}" for text in describe_exceptions(choice))
    reason = ""
    if choice.fallback_reason:
        reason = f" ({choice.kernel.name} because {choice.fallback_reason})"
    strategy = choice.strategy
    if strategy.seq == 1:
        return f"{kernel}, all heads on each device{reason}"
    heads, kv_heads = strategy.heads.local_heads(model.num_heads, model.num_kv_heads)
    held = (
        f"each device has {heads} of {model.num_heads} query heads and "
        f"{kv_heads} of {model.num_kv_heads} K/V heads"
    )
    layout = strategy.layout
    if not layout.keeps_order:
        held += f", and {layout.chunks_per_device} of {layout.num_chunks} chunks of each row"
    average = " on average" if len(set(choice.layer_scores)) > 1 else ""
    traffic = (
        f"it sends {units.format_bytes(choice.sent_bytes)} per layer and microbatch{average} "
        "if attention is not recomputed"
    )
    if choice.alternatives:
        alternatives = ", ".join(
            f"{description}: {units.format_bytes(num_bytes)}"
            for description, num_bytes in choice.alternatives
        )
        traffic += f" (alternatives: {alternatives})"
    return f"{strategy.description}, {kernel}; {held}; {traffic}{reason}"


TOKEN_EXCHANGES: dict[str, type[TokenExchange]] = {
    exchange.name: exchange for exchange in (Ring, AllGather)
}
"""Exchanges of tokens by name, in the order in which alternatives are listed."""
