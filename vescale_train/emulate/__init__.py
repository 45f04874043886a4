"""Many ranks computed in one process, to the bit."""

from vescale_train.emulate.gloo import addition_order, all_reduce, chunk_elements, reduce_scatter

__all__ = ["addition_order", "all_reduce", "chunk_elements", "reduce_scatter"]
