"""Running a pipeline: messages between stages, stages under torch's runtime, tied gradients, the engine."""
