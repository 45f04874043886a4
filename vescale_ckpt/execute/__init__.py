"""Execution: where plans meet bytes."""
