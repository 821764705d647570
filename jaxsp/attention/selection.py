"""Choice of the strategy and the kernel of a run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxsp.attention import kernel_selection
from jaxsp.attention.choice import AttentionChoice
from jaxsp.attention.kernels.kernel import (
    Device,
    divisors,
    min_device_bytes,
)
from jaxsp.attention.strategies import nodes, registry
from jaxsp.attention.strategies.attention_config import AttentionConfig
from jaxsp.attention.strategies.strategy import Strategy, combine
from jaxsp.attention.strategies.ulysses import Ulysses
from jaxsp.attention.strategies.workload import (
    GroupRows,
    HasHeads,
    LayerWorkload,
    count_workloads,
    drop_long_windows,
)
from jaxsp.core import errors
from jaxsp.core.errors import UserError
from jaxsp.system import hardware

NETWORK_COST = 8.0
"""Time of a byte through a device's network card, in times of a byte over its NVLink: 370 over 48
GB/s for an H100 (planning/gpus.yaml)."""


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

    The kernel and its settings are the same for all layers.

    Args:
        device_bytes: memory of a device; None: what the devices report, if they are present.
    Raises: UserError with all problems: heads that cannot be shared, a kernel that cannot run this,
        or calls of the kernel that do not fit an empty device.
    """
    strategy = choose_strategy(requested, rows, model)
    device_bytes = device_bytes or min_device_bytes(devices)
    # As if attention were saved, so that memory options do not change the choice
    layers = count_workloads(rows, model)
    workloads = [strategy.kernel_workload(layer) for layer in layers]
    kernel, fallback_reason = kernel_selection.choose(
        requested.kernel, workloads, devices, device_bytes
    )
    kernel_selection.raise_if_whole_rows_only(kernel, strategy)
    settings = kernel_selection.configure(
        kernel, workloads, requested.head_chunks, fallback_reason, devices, device_bytes
    )
    layer = _any_layer(layers)
    others = _auto_candidates(requested, layer, seq=rows.seq)
    sent_bytes = {
        candidate: _mean_sent_bytes(candidate, layers)
        for candidate in (strategy, *_without_problems(others, layer))
    }
    return AttentionChoice(
        strategy=strategy,
        alternatives=tuple(
            (candidate.description, num_bytes)
            for candidate, num_bytes in sent_bytes.items()
            if candidate != strategy
        ),
        sent_bytes=sent_bytes[strategy],
        kernel=kernel,
        settings=settings,
        fallback_reason=fallback_reason,
        layer_scores=drop_long_windows(model.layer_scores, row_tokens=rows.row_tokens),
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
    layer = _any_layer(layers)
    candidates = _without_problems(_candidates(requested, layer, seq=rows.seq), layer)
    best = min(candidates, key=lambda c: (_link_time(c, layers), -c.heads.degree))
    _raise_if_options_unused(requested, best)
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
    layer = _any_layer(count_workloads(rows, model))
    unused = {
        field: AttentionConfig.model_fields[field].default
        for field in ("ulysses_degree", *_list_exchange_options())
    }
    options = []
    for candidate in _list_all(requested, layer, seq=rows.seq):
        fields = unused | candidate.config_fields
        if not candidate.layout.keeps_order:
            fields["chunks_per_device"] = requested.chunks_per_device
        options.append(StrategyOption(candidate.label, fields))
    return options


def _list_exchange_options() -> list[str]:
    """Fields of the config's attention that only some exchanges of tokens use."""
    return sorted(set[str]().union(*(x.options for x in registry.TOKEN_EXCHANGES.values())))


def _list_all(
    requested: AttentionConfig, layer: LayerWorkload, *, seq: int, name: str | None = None
) -> list[Strategy]:
    """Lists the ways in which `seq` devices, at least 2, can share these heads.

    Args: name: of one exchange of tokens; None: all, and whole rows.
    """
    wanted = requested.ulysses_degree
    degrees = [n for n in _legal_degrees(layer, seq=seq) if wanted in (None, n)]
    strategies = [combine(seq)] if seq in degrees and (name is None or wanted == seq) else []
    for exchange in registry.TOKEN_EXCHANGES.values():
        if name in (None, exchange.name):
            for n in degrees:
                if n < seq:
                    own_heads = Ulysses(degree=n).exchange_workload(layer)
                    tokens = exchange.from_config(requested, own_heads, degree=seq // n)
                    strategies.append(combine(n, tokens))
    return strategies


def _legal_degrees(layer: LayerWorkload, *, seq: int) -> list[int]:
    """Numbers of neighbors that can share the heads, the largest first."""
    return [n for n in reversed(divisors(seq)) if layer.num_heads % n == 0]


def _any_layer(layers: Mapping[LayerWorkload, int]) -> LayerWorkload:
    """One of the workloads: the heads, which decide whether a strategy is possible, are equal."""
    return next(iter(layers))


def _mean_sent_bytes(strategy: Strategy, layers: Mapping[LayerWorkload, int]) -> int:
    """Bytes that each device sends per layer and microbatch: the mean of all layers."""
    total = sum(
        num_layers * sum(strategy.sent_bytes(layer).values())
        for layer, num_layers in layers.items()
    )
    return total // sum(layers.values())


def _link_time(strategy: Strategy, layers: Mapping[LayerWorkload, int]) -> float:
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


def _candidates(
    requested: AttentionConfig, layer: LayerWorkload, *, seq: int
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
    if name in registry.TOKEN_EXCHANGES:
        return _list_all(requested, layer, seq=seq, name=name)
    candidates = _auto_candidates(requested, layer, seq=seq)
    whole_rows = [candidate for candidate in candidates if candidate.layout.keeps_order]
    return whole_rows or candidates


def _auto_candidates(
    requested: AttentionConfig, layer: LayerWorkload, *, seq: int
) -> list[Strategy]:
    """Strategies that `auto` considers."""
    if seq == 1:
        return []
    candidates = _list_all(requested, layer, seq=seq)
    return [c for c in candidates if c.tokens.is_automatic]


def _without_problems(candidates: Sequence[Strategy], layer: LayerWorkload) -> Sequence[Strategy]:
    """Candidates whose options fit the heads; all of them if none does."""
    fitting = [candidate for candidate in candidates if candidate.find_problem(layer) is None]
    return fitting or candidates


def _raise_if_options_unused(requested: AttentionConfig, strategy: Strategy) -> None:
    """Raises: UserError for a field of the config's attention that has no effect."""
    for option in _list_exchange_options():
        value = getattr(requested, option)
        default = AttentionConfig.model_fields[option].default
        if option in strategy.tokens.options or value == default:
            continue
        users = [name for name, x in registry.TOKEN_EXCHANGES.items() if option in x.options]
        raise UserError(
            f"attention.{option} = {value}: applies only to {errors.format_choices(users)}, and "
            f"attention.strategy is {requested.strategy} ({strategy.description}). Use "
            f"attention.{option}={default or 'null'}, or attention.strategy="
            f"{errors.format_choices(users)}."
        )
