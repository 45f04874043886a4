"""The engine: the few lines of a training script, on any mesh."""

from vescale_train.engine.checkpoint import Checkpoint
from vescale_train.engine.evaluation import evaluate
from vescale_train.engine.parallel import optimizer, parallelize
from vescale_train.engine.progress import TrainProgress, progress_of
from vescale_train.engine.train_step import step

__all__ = ["Checkpoint", "TrainProgress", "evaluate", "optimizer", "parallelize", "progress_of", "step"]
