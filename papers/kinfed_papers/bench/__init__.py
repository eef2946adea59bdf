"""How fast is a round, beside a plain PyTorch loop and beside the machine?

    result = run_benchmarks(["mlr", "mlp", "cnn", "mlr-10k"], repeats=7, threads=(1, 2))
    print_result(result)

Every workload is a FedAvg round on synthetic images whose client sizes follow the power law of FedProx. The plain
loop is the one a careful user writes: an nn.Module, torch.optim.SGD, batches by index from a float32 array in
memory, the global model copied in and the average taken at the end. Contestants take turns in one process (A B A B
...), so whatever else the machine does meets all of them; figures are medians over the repeats. Before anything is
timed, both sides train on the same batches and must agree.

Beside these rounds, local steps of models of every kind (step_workload) are compared with the same loop: processor time
per client and step, and how far both are apart after twenty steps.
"""

from kinfed_papers.bench.printout import print_result
from kinfed_papers.bench.step_timing import StepComparison
from kinfed_papers.bench.step_workload import STEP_WORKLOADS, StepWorkload
from kinfed_papers.bench.timing import BenchComparison, BenchResult, run_benchmarks
from kinfed_papers.bench.workload import WORKLOADS, Workload

__all__ = [
    "STEP_WORKLOADS",
    "WORKLOADS",
    "BenchComparison",
    "BenchResult",
    "StepComparison",
    "StepWorkload",
    "Workload",
    "print_result",
    "run_benchmarks",
]
