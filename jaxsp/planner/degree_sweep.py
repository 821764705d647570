"""Plans of every mesh for each of several row lengths, and what a mesh for each length gains.

The devices, and so `mesh.replica`, are the same for all lengths, and so is the attention strategy;
`mesh.seq` may differ. The longest rows come first: what does not fit them is not planned for
shorter ones.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxsp import attention
from jaxsp.attention import StrategyOption
from jaxsp.config.schema import Config
from jaxsp.core import axes
from jaxsp.model.config import ModelConfig
from jaxsp.planner import mesh_sweep
from jaxsp.planner.compile.compiled import Cluster
from jaxsp.planner.data_rows import LengthData
from jaxsp.planner.mesh_sweep import MeshPlan
from jaxsp.planner.planning import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthPlan:
    """A mesh with a strategy for rows of one length."""

    row_tokens: int
    longest_degree: int
    """Number of devices that share one of the longest rows. A microbatch of shorter rows has as
    many tokens per device as one of those, so memory and time depend on it."""
    mesh_plan: MeshPlan

    @property
    def degree(self) -> int:
        """Number of devices that share a row."""
        return self.mesh_plan.mesh[axes.SEQ]

    @property
    def replica(self) -> int:
        return self.mesh_plan.mesh[axes.REPLICA]

    @property
    def plan(self) -> Plan:
        """The plan of a step that could be planned."""
        assert self.mesh_plan.plan is not None
        return self.mesh_plan.plan

    @property
    def is_usable(self) -> bool:
        """True if the step fits and has an estimate of its time."""
        plan = self.mesh_plan.plan
        return plan is not None and plan.fits and plan.step_s_estimate is not None

    def has_strategy(self, attention_fields: Mapping[str, Any] | None) -> bool:
        """True if attention may have these fields; one device per row takes any strategy."""
        return self.degree == 1 or self.mesh_plan.attention_fields == attention_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class DegreeChoice:
    """A mesh for each row length."""

    replica: int
    degrees: Mapping[int, int]
    """Number of devices that share a row, by row length."""
    strategy: str
    """Name of the strategy, such as `hybrid 4`; `none shared` if no row is shared."""
    attention_fields: Mapping[str, Any]
    """Changed fields of the config's attention."""
    tokens_per_s: float
    """Estimated tokens per second without padding: tokens of all lengths over their time."""
    unpacked_tokens_per_s: float | None
    """The same with one document per row; None if the documents are unknown."""
    length_tokens_per_s: Mapping[int, float]
    """Estimate for the steps of each row length."""


class DegreeSweep:
    """Plans of all meshes for several row lengths. A step is compiled once."""

    def __init__(
        self,
        config: Config,
        *,
        model: ModelConfig,
        cluster: Cluster,
        row_lengths: Sequence[int],
        document_tokens: int | None = None,
        data: Mapping[int, LengthData] | None = None,
        on_result: Callable[[LengthPlan], None] = lambda _: None,
    ):
        """Prepares a sweep.

        Args:
            row_lengths: lengths of the config to plan, the shortest first.
            on_result: called with each result.
        """
        self._config = config
        self._model = model
        self._cluster = cluster
        self._lengths = row_lengths
        self._document_tokens = document_tokens
        self._data = data or {}
        self._on_result = on_result
        self._plans: dict[str, MeshPlan] = {}

    def run(self) -> list[LengthPlan]:
        """Plans all meshes that may be part of a choice.

        Raises: UserError if there is no plan for the longest rows.
        """
        *shorter, longest = self._lengths
        results: list[LengthPlan] = []
        # more devices per row and fewer replicas come first
        for mesh, option in mesh_sweep.list_combinations(
            self._make_config(longest, 1), self._model, num_devices=self._cluster.num_devices
        ):
            if not _is_too_large(results, mesh, option.config_fields):
                results.append(self._plan(longest, mesh, option, longest_degree=mesh[axes.SEQ]))
        mesh_sweep.raise_if_no_plan([result.mesh_plan for result in results])
        for replica, fields in _list_strategies(results):
            usable = _select(results, longest, replica, fields)
            fastest = min(usable, key=_seconds).degree
            for row_tokens in reversed(shorter):
                for mesh, option in self._list_options(replica, fields, max_degree=fastest):
                    results.append(self._plan(row_tokens, mesh, option, longest_degree=fastest))
                for result in usable:
                    option = StrategyOption(
                        result.mesh_plan.strategy, result.mesh_plan.attention_fields
                    )
                    mesh = result.mesh_plan.mesh
                    results.append(
                        self._plan(row_tokens, mesh, option, longest_degree=result.degree)
                    )
        return results

    def _list_options(
        self, replica: int, fields: Mapping[str, Any] | None, *, max_degree: int
    ) -> Iterator[tuple[dict[str, int], StrategyOption]]:
        """Yields the meshes of a replica that can have a strategy.

        Shorter rows are never shared by more devices than the longest.
        """
        for mesh in mesh_sweep.list_meshes(self._cluster.num_devices):
            degree = mesh[axes.SEQ]
            if mesh[axes.REPLICA] != replica or degree > max_degree:
                continue
            config = self._make_config(self._lengths[-1], degree)
            for option in attention.list_options(config, self._model, seq=degree):
                if degree == 1 or option.config_fields == fields:
                    yield mesh, option

    def _plan(
        self, row_tokens: int, mesh: dict[str, int], option: StrategyOption, *, longest_degree: int
    ) -> LengthPlan:
        """Plans rows of a length, unless the same step was planned."""
        config = self._make_config(row_tokens, mesh[axes.SEQ], longest_degree=longest_degree)
        config = mesh_sweep.with_mesh(config, mesh, option.config_fields)
        key = config.model_dump_json()
        is_new = key not in self._plans
        if is_new:
            self._plans[key] = mesh_sweep.plan_mesh(
                config,
                mesh,
                option,
                model=self._model,
                cluster=self._cluster,
                document_tokens=self._document_tokens,
                data=self._data.get(row_tokens),
            )
        result = LengthPlan(
            row_tokens=row_tokens, longest_degree=longest_degree, mesh_plan=self._plans[key]
        )
        if is_new:
            self._on_result(result)
        return result

    def _make_config(
        self, row_tokens: int, degree: int, *, longest_degree: int | None = None
    ) -> Config:
        """Makes the config of steps with rows of a length. Args: longest_degree: None: `degree`."""
        degrees = dict.fromkeys(self._config.data.row_lengths, longest_degree or degree)
        degrees[row_tokens] = degree
        return self._config.with_degrees(degrees).with_row_tokens(row_tokens)


def choose_one_degree(
    results: Sequence[LengthPlan], row_lengths: Sequence[int]
) -> DegreeChoice | None:
    """Chooses the fastest mesh and strategy that fit the rows of all lengths; None if none do."""
    choices = []
    for longest in _usable(results, row_lengths[-1]):
        plans = {row_lengths[-1]: longest}
        for row_tokens in row_lengths[:-1]:
            same_mesh = [
                result
                for result in _select(
                    results, row_tokens, longest.replica, longest.mesh_plan.attention_fields
                )
                if result.degree == result.longest_degree == longest.degree
            ]
            if same_mesh:
                plans[row_tokens] = same_mesh[0]
        if len(plans) == len(row_lengths):
            choices.append(_make_choice(plans))
    return max(choices, key=lambda choice: choice.tokens_per_s, default=None)


def choose_degrees(
    results: Sequence[LengthPlan], row_lengths: Sequence[int]
) -> DegreeChoice | None:
    """Chooses the fastest degree of each length, with one strategy; None if some length never fits.

    One degree for all lengths is among the choices.
    """
    choices = [choose_one_degree(results, row_lengths)]
    longest = row_lengths[-1]
    of_longest = [result for result in results if result.row_tokens == longest]
    for replica, fields in _list_strategies(of_longest):
        fastest = min(_select(results, longest, replica, fields), key=_seconds)
        plans = {longest: fastest}
        for row_tokens in row_lengths[:-1]:
            usable = [
                result
                for result in _select(results, row_tokens, replica, fields)
                if result.longest_degree == fastest.degree
            ]
            if usable:
                plans[row_tokens] = min(usable, key=_seconds)
        if len(plans) == len(row_lengths):
            choices.append(_make_choice(plans))
    return max(filter(None, choices), key=lambda choice: choice.tokens_per_s, default=None)


def sum_tokens_per_s(plans: Sequence[Plan]) -> tuple[float, float | None]:
    """Sums the tokens of all steps over their seconds: packed, and with one document per row.

    Steps are those of an epoch of the data. Without data, lengths have equal numbers of tokens, and
    the second number is None.

    Args: plans: one for each row length, with an estimate.
    """
    tokens = 0.0
    seconds = 0.0
    unpacked_tokens = 0.0
    unpacked_s = 0.0
    for plan in plans:
        assert plan.step_s_estimate is not None
        assert plan.tokens_per_s_estimate is not None
        data = plan.data
        num_steps = 1 if data is None else data.num_steps
        seconds += num_steps * plan.step_s_estimate
        tokens += num_steps * plan.step_s_estimate * plan.tokens_per_s_estimate
        if data and data.unpacked_step_s and data.unpacked_steps and data.unpacked_tokens:
            unpacked_tokens += data.unpacked_tokens
            unpacked_s += data.unpacked_steps * data.unpacked_step_s
    return tokens / seconds, unpacked_tokens / unpacked_s if unpacked_s else None


def _is_too_large(
    results: Sequence[LengthPlan], mesh: Mapping[str, int], fields: Mapping[str, Any]
) -> bool:
    """True if rows did not fit a mesh on which each device has less of rows and weights."""
    smaller: dict[tuple[int, int], list[bool]] = {}
    for result in results:
        replica = result.replica
        degree = result.degree
        if replica > mesh[axes.REPLICA] or degree < mesh[axes.SEQ]:
            continue
        # whole rows on one device need more memory than with any strategy
        if mesh[axes.SEQ] == 1 or result.has_strategy(fields):
            plan = result.mesh_plan.plan
            is_short = plan is not None and not plan.fits
            smaller.setdefault((replica, degree), []).append(is_short)
    return any(map(all, smaller.values()))


def _list_strategies(
    results: Sequence[LengthPlan],
) -> list[tuple[int, Mapping[str, Any] | None]]:
    """Lists the replicas and strategies with which rows fit.

    The strategy is None where one device has the rows.
    """
    pairs: list[tuple[int, Mapping[str, Any] | None]] = []
    for result in results:
        fields = None if result.degree == 1 else result.mesh_plan.attention_fields
        if result.is_usable and (result.replica, fields) not in pairs:
            pairs.append((result.replica, fields))
    return pairs


def _select(
    results: Sequence[LengthPlan],
    row_tokens: int,
    replica: int,
    fields: Mapping[str, Any] | None,
) -> list[LengthPlan]:
    """Selects the usable plans of a length, a replica and a strategy."""
    return [
        result
        for result in _usable(results, row_tokens)
        if result.replica == replica and result.has_strategy(fields)
    ]


def _usable(results: Sequence[LengthPlan], row_tokens: int) -> list[LengthPlan]:
    """Usable plans of a length."""
    return [result for result in results if result.row_tokens == row_tokens and result.is_usable]


def _seconds(result: LengthPlan) -> float:
    """Estimated seconds of a step; steps of a length have equal numbers of rows."""
    assert result.plan.step_s_estimate is not None
    return result.plan.step_s_estimate


def _make_choice(plans: Mapping[int, LengthPlan]) -> DegreeChoice:
    """Makes a choice of a plan for each length."""
    tokens_per_s, unpacked = sum_tokens_per_s([result.plan for result in plans.values()])
    # one device per row takes any strategy
    shared = max(plans.values(), key=lambda result: result.degree > 1)
    return DegreeChoice(
        replica=shared.replica,
        degrees={row_tokens: plans[row_tokens].degree for row_tokens in sorted(plans)},
        strategy=shared.mesh_plan.strategy,
        attention_fields=shared.mesh_plan.attention_fields,
        tokens_per_s=tokens_per_s,
        unpacked_tokens_per_s=unpacked,
        length_tokens_per_s={
            row_tokens: float(plans[row_tokens].plan.tokens_per_s_estimate or 0)
            for row_tokens in sorted(plans)
        },
    )
