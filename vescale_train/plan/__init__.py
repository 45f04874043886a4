"""Plans: data that says how a model is cut, matched strictly against the model's names and checked before any step."""

from vescale_train.plan.check import check
from vescale_train.plan.data import Edge, Placements, Plan
from vescale_train.plan.estimate import Estimate, estimate
from vescale_train.plan.names import Names
from vescale_train.plan.placement import Interleaved, Partial, Placement, Replicate, Shard
from vescale_train.plan.report import KeyReport, Problem, Report
from vescale_train.plan.resolve import Resolved, resolve
from vescale_train.plan.write import content_hash, from_json, shown, to_json

__all__ = [
    "Edge",
    "Estimate",
    "Interleaved",
    "KeyReport",
    "Names",
    "Partial",
    "Placement",
    "Placements",
    "Plan",
    "Problem",
    "Replicate",
    "Report",
    "Resolved",
    "Shard",
    "check",
    "content_hash",
    "estimate",
    "from_json",
    "resolve",
    "shown",
    "to_json",
]
