"""The training engine and the pipeline runtime that stand on the checkpoint store."""
