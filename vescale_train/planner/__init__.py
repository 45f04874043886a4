"""Plans and layouts that nobody had to write: proposed from a model's structure, with reasons; overrides win."""

from vescale_train.planner.auto import auto_parallelize_module
from vescale_train.planner.cost import Cost, Layout, Machine
from vescale_train.planner.families import FAMILIES, Family
from vescale_train.planner.propose import explain, propose
from vescale_train.planner.search import Choice, search

__all__ = [
    "FAMILIES",
    "Choice",
    "Cost",
    "Family",
    "Layout",
    "Machine",
    "auto_parallelize_module",
    "explain",
    "propose",
    "search",
]
