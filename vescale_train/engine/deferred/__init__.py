"""Deferred initialisation: a model is made without memory, cut, and only then given values, a parameter at a time."""

from vescale_train.engine.deferred.materialize import deferred_init, is_deferred, materialize

__all__ = ["deferred_init", "is_deferred", "materialize"]
