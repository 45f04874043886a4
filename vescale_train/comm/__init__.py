"""Collectives that torch lacks: uneven parts, sums whose bits do not depend on the number of ranks, named deadlines."""

from vescale_train.comm.canonical import canonical_all_reduce, canonical_reduce_scatter, even_sizes
from vescale_train.comm.deadline import deadline
from vescale_train.comm.tree import Node, TreeSum, nodes_of, sum_nodes, tree_sum, units_of
from vescale_train.comm.uneven import exchange, gather_uneven, reduce_scatter_uneven, sizes_over

__all__ = [
    "Node",
    "TreeSum",
    "canonical_all_reduce",
    "canonical_reduce_scatter",
    "deadline",
    "even_sizes",
    "exchange",
    "gather_uneven",
    "nodes_of",
    "reduce_scatter_uneven",
    "sizes_over",
    "sum_nodes",
    "tree_sum",
    "units_of",
]
