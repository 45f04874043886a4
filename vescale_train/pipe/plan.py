"""The plan of a pipeline: how a model is cut, how many stages lie on a rank, which schedule runs them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vescale_train.errors import ConfigError
from vescale_train.pipe.schedules import PipelineScheduleType, Schedule, named_schedule, schedule_from_text
from vescale_train.pipe.schedules.named import placement_of, rank_of_stage


class ModeType(StrEnum):
    """Where stages come from."""

    FQN = "fqn"
    """From the names of the model's own modules; the model stays as it is."""
    TRACE = "trace"
    """From torch's tracer, which cuts a graph of the model."""
    MANUAL = "manual"
    """From the caller, one module a stage."""


class PipelineSplitMethodType(StrEnum):
    """Where the cuts are made."""

    MANUAL = "manual"
    """At ``split_points``."""
    UNIFORM = "uniform"
    """The same number of blocks in each stage."""
    PARAMETERS = "parameters"
    """The largest stage has as few parameters as possible."""
    FLOPS = "flops"
    """The slowest stage has as few floating-point operations as possible."""
    AUTO = "auto"
    """As ``FLOPS`` or by measured ``costs``, and then all stages of one rank together, too."""


_TWO_STAGES = {PipelineScheduleType.ZBV, PipelineScheduleType.DUALPIPE_V}


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineParallelPlan:
    """Everything that is decided before a pipeline is built; the same on all its ranks."""

    num_microbatches: int
    mode: ModeType = ModeType.FQN
    split_method: PipelineSplitMethodType = PipelineSplitMethodType.UNIFORM
    virtual_chunks: int = 1
    """Stages on each rank; ZBV and DualPipeV have two whatever is said here."""
    num_stages: int | None = None
    """All stages; None is ranks x ``virtual_chunks``, and anything else has to agree with that."""
    split_points: tuple[str, ...] = ()
    """For ``MANUAL``: the first unit of every stage but the first, in order."""
    smallest_unsplittable_units: tuple[str, ...] = ()
    """Regular expressions over names (whole match): modules that are not cut even if they hold a list of blocks."""
    costs: tuple[float, ...] = ()
    """For ``AUTO``: what each unit costs, measured by the caller, in the order of ``stage.unit_names``."""
    schedule_type: PipelineScheduleType | str | Schedule = PipelineScheduleType.SIMPLE_1F1B
    """A name, the text of a schedule, or a schedule."""
    forward_only: bool = False
    loss_reduction: str = "mean"
    """``mean`` weighs the loss of a micro-batch by its share of the samples, ``sum`` adds losses up."""
    whole: tuple[str, ...] = ()
    """Inputs that all micro-batches get as a whole although their first dimension is that of the batch."""
    shared_modules: tuple[tuple[str, ...], ...] = ()
    """Groups of parameter names to be kept equal, beyond those that the model itself ties."""
    exact: bool = True
    """Keep gradients of tied parameters by micro-batch, so that their sum has the bits of one process."""

    def __post_init__(self) -> None:
        for name, value in (("num_microbatches", self.num_microbatches), ("virtual_chunks", self.virtual_chunks)):
            if value < 1:
                raise ConfigError(f"cannot make a pipeline plan: {name} is {value}; it must be at least 1")
        if self.loss_reduction not in {"mean", "sum"}:
            raise ConfigError(
                f"cannot make a pipeline plan: loss_reduction is {self.loss_reduction!r}; use 'mean' or 'sum'"
            )
        for name, kinds in (("mode", ModeType), ("split_method", PipelineSplitMethodType)):
            if getattr(self, name) not in set(kinds):
                raise ConfigError(
                    f"cannot make a pipeline plan: {name} is {getattr(self, name)!r}; use {', '.join(kinds)}"
                )
            object.__setattr__(self, name, kinds(getattr(self, name)))  # a name does for its member
        manual = self.split_method == PipelineSplitMethodType.MANUAL
        if manual != bool(self.split_points) and self.mode == ModeType.FQN:
            raise ConfigError(
                f"cannot make a pipeline plan: split_method is {self.split_method.value!r} and there are "
                f"{len(self.split_points)} split_points; they belong together"
            )
        if self.costs and self.split_method != PipelineSplitMethodType.AUTO:
            raise ConfigError("cannot make a pipeline plan: costs are only used by split_method='auto'")

    def stages_per_rank(self) -> int:
        """Return how many stages lie on each rank."""
        schedule = self.given_schedule()
        if schedule is not None:
            return schedule.num_stages // schedule.num_ranks
        kind = PipelineScheduleType(str(self.schedule_type))
        return 2 if kind in _TWO_STAGES else self.virtual_chunks

    def given_schedule(self) -> Schedule | None:
        """Return the caller's own schedule, or None if the plan names one."""
        if isinstance(self.schedule_type, Schedule):
            return self.schedule_type
        if self.schedule_type in set(PipelineScheduleType):
            return None
        if "F" in self.schedule_type:
            return schedule_from_text(self.schedule_type)
        known = ", ".join(PipelineScheduleType)
        raise ConfigError(
            f"cannot make a pipeline plan: schedule_type is {self.schedule_type!r}; use {known}, or a schedule's text"
        )

    def stage_count(self, num_ranks: int) -> int:
        """Return how many stages there are on so many ranks.

        Raises:
            ConfigError: ``num_stages`` says something else, or there would be another number on each rank.
        """
        schedule = self.given_schedule()
        count = schedule.num_stages if schedule is not None else num_ranks * self.stages_per_rank()
        if self.num_stages not in {None, count}:
            raise ConfigError(
                f"cannot make a pipeline plan: num_stages is {self.num_stages}, but {num_ranks} ranks x "
                f"{self.stages_per_rank()} stages a rank are {count}"
            )
        return count

    def rank_of(self, stage: int, num_ranks: int) -> int:
        """Return the rank on which a stage lies."""
        schedule = self.given_schedule()
        if schedule is not None:
            return schedule.stage_ranks()[stage]
        return rank_of_stage(stage, num_ranks, placement_of(PipelineScheduleType(str(self.schedule_type))))

    def schedule(self, num_ranks: int, *, forward_only: bool = False) -> Schedule:
        """Return the schedule for so many ranks: computations, or what the caller gave.

        Raises:
            ConfigError: there is no such schedule for these numbers.
        """
        given = self.given_schedule()
        if given is None:
            return named_schedule(
                str(self.schedule_type),
                num_ranks=num_ranks,
                num_microbatches=self.num_microbatches,
                stages_per_rank=self.stages_per_rank(),
                forward_only=forward_only,
            )
        return _forward_of(given) if forward_only and not given.forward_only else given


def _forward_of(schedule: Schedule) -> Schedule:
    """Keep the forwards of a schedule; they stand in an order in which they can run."""
    rows = tuple(
        tuple(leaf for leaf in schedule.instructions(rank) if leaf.kind == "F") for rank in range(schedule.num_ranks)
    )
    return Schedule(
        rows=rows,
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        name=f"{schedule.name}, forward only",
        forward_only=True,
    )
