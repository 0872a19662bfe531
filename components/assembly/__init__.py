"""Groups of rollouts -> training batch."""

from muster.assembly.batch import TrainingBatch, assemble, read_batch

__all__ = ["TrainingBatch", "assemble", "read_batch"]
