"""The list of all questions, in the order in which they are asked."""

from __future__ import annotations

from benchmarks import (
    bench_async,
    bench_copies,
    bench_dedup,
    bench_export,
    bench_gc,
    bench_imbalance,
    bench_manifest,
    bench_many_tensors,
    bench_memory,
    bench_metadata,
    bench_one_tensor,
    bench_planning,
    bench_ranks,
    bench_reshard,
    bench_s3,
    bench_save_load,
    bench_training,
    bench_unchanged,
)

QUESTIONS = (
    bench_save_load.QUESTION,
    bench_unchanged.QUESTION,
    bench_many_tensors.QUESTION,
    bench_one_tensor.QUESTION,
    bench_async.QUESTION,
    bench_training.QUESTION,
    bench_memory.QUESTION,
    bench_ranks.QUESTION,
    bench_reshard.QUESTION,
    bench_copies.QUESTION,
    bench_dedup.QUESTION,
    bench_imbalance.QUESTION,
    bench_metadata.QUESTION,
    bench_planning.QUESTION,
    bench_manifest.QUESTION,
    bench_gc.QUESTION,
    bench_export.QUESTION,
    bench_s3.QUESTION,
)

BY_NAME = {question.name: question for question in QUESTIONS}
