"""A content-addressed checkpoint store for PyTorch: save from any parallel layout, load into any other."""

from vescale_ckpt.checkpointer import Checkpointer, load, save
from vescale_ckpt.collecting.gc import GcReport
from vescale_ckpt.execute.read import ReadOptions
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.interop.foreign.detect import open_foreign
from vescale_ckpt.interop.foreign.load import load_foreign
from vescale_ckpt.loading.loader import LoadReport
from vescale_ckpt.plan.read_cost import ReadCost
from vescale_ckpt.retention import RetentionPolicy
from vescale_ckpt.saving.exits import finish_on_sigterm
from vescale_ckpt.saving.handle import SaveHandle, SaveReport, SaveState
from vescale_ckpt.saving.options import SaveOptions
from vescale_ckpt.snapshot import Snapshot
from vescale_ckpt.state.per_rank import PerRank, RankPlace
from vescale_ckpt.state.sharded_view import ShardedView
from vescale_ckpt.store import Store, open_store
from vescale_ckpt.trace import merge_traces

__all__ = [
    "Box",
    "Checkpointer",
    "GcReport",
    "LoadReport",
    "PerRank",
    "RankPlace",
    "ReadCost",
    "ReadOptions",
    "RetentionPolicy",
    "SaveHandle",
    "SaveOptions",
    "SaveReport",
    "SaveState",
    "ShardedView",
    "Snapshot",
    "Store",
    "finish_on_sigterm",
    "load",
    "load_foreign",
    "merge_traces",
    "open_foreign",
    "open_store",
    "save",
]
