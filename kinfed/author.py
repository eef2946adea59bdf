"""Everything that the file of an algorithm needs, in one import.

from kinfed.author import Algorithm, Cohort, Population, RoundInfo, Task, Tree, option, sgd
"""

from __future__ import annotations

from kinfed.algorithms.base import (
    EXAMPLE_COUNT,
    Algorithm,
    AveragingAlgorithm,
    PrivacyProfile,
    RoundInfo,
    ServerModels,
    gradient_steps,
    option_values,
)
from kinfed.algorithms.common.averaging import (
    DeltaUp,
    ModelDown,
    ModelState,
    Weights,
    example_counts,
    extrapolated,
    mean_update,
    own_or_server,
)
from kinfed.algorithms.common.candidates import best_fit, mean_losses
from kinfed.core import rng
from kinfed.core.buffers import difference
from kinfed.core.kernels import cosines, pairwise_squared_distances, weighted_mean, weighted_sum
from kinfed.core.options import Range, option
from kinfed.core.tree import Nothing, Tree, counts_examples, exact, renewed, take_rows
from kinfed.data import Cohort, Federation, Population
from kinfed.data.examples.batches import Batch, Batches, Split
from kinfed.data.examples.local_training import LocalTraining
from kinfed.engine.contract.class_sums import ClassSums
from kinfed.engine.contract.columns import ColumnSplit, last_layers, parse_patterns
from kinfed.engine.contract.feature_loss import (
    Deltas,
    FeatureLoss,
    by_autograd,
    cross_entropy,
    logit_delta,
    on_rows,
    separable,
)
from kinfed.engine.contract.head import Head
from kinfed.engine.contract.task import Task
from kinfed.engine.contract.update_program import Add, Collect, Gradient, GradientStep, Instruction, Learn, Mix, Norm
from kinfed.engine.training.run_program import mixture, run_program
from kinfed.engine.training.sgd import each_step, gradient, sgd, toward_zero
from kinfed.errors import ConfigError

__all__ = [
    "EXAMPLE_COUNT",
    "Add",
    "Algorithm",
    "AveragingAlgorithm",
    "Batch",
    "Batches",
    "ClassSums",
    "Cohort",
    "Collect",
    "ColumnSplit",
    "ConfigError",
    "DeltaUp",
    "Deltas",
    "FeatureLoss",
    "Federation",
    "Gradient",
    "GradientStep",
    "Head",
    "Instruction",
    "Learn",
    "LocalTraining",
    "Mix",
    "ModelDown",
    "ModelState",
    "Norm",
    "Nothing",
    "Population",
    "PrivacyProfile",
    "Range",
    "RoundInfo",
    "ServerModels",
    "Split",
    "Task",
    "Tree",
    "Weights",
    "best_fit",
    "by_autograd",
    "cosines",
    "counts_examples",
    "cross_entropy",
    "difference",
    "each_step",
    "exact",
    "example_counts",
    "extrapolated",
    "gradient",
    "gradient_steps",
    "last_layers",
    "logit_delta",
    "mean_losses",
    "mean_update",
    "mixture",
    "on_rows",
    "option",
    "option_values",
    "own_or_server",
    "pairwise_squared_distances",
    "parse_patterns",
    "renewed",
    "rng",
    "run_program",
    "separable",
    "sgd",
    "take_rows",
    "toward_zero",
    "weighted_mean",
    "weighted_sum",
]
