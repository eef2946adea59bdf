"""Work in steps, so that many runs share one round: everything between two requests to clients is a step.

A loop, or a pool whose clients are far away, is a generator: it yields a request and is sent the answers. The caller
that drives one alone answers its requests one after the other; `in_step` drives many, and lets requests that can travel
together do so: those of twenty runs to the same nodes are one message to each.

    report = in_step([loop.steps()])[0]                    a round of one run
    reports = in_step([loop.steps() for loop in loops])    a round of every run, and one message to every client

No run sees another: what is sent back into a generator is what it would have been sent alone.
"""

from collections.abc import Generator, Hashable, Sequence
from typing import Any, Protocol, TypeVar


class Request(Protocol):
    """A request of one run."""

    @property
    def together(self) -> Hashable:
        """Requests with the same value may travel together."""

    def answers(self, requests: Sequence[Any]) -> list[Any]:
        """Answers to several requests that travel together, this one among them, in their order."""


Result = TypeVar("Result")
Steps = Generator[Request, Any, Result]


def stepwise(result: Result | Steps[Result]) -> Steps[Result]:
    """The steps to a result; none for one that is there already."""
    return (yield from result) if isinstance(result, Generator) else result


def in_step(runs: Sequence[Steps[Result]]) -> list[Result]:
    """Results of several generators, each resumed when all are at a request or at their end. An error in one ends all:
    a run that may fail by itself says so in its result."""
    results: dict[int, Result] = {}
    requests: dict[int, Request] = {}

    def resume(number: int, answer: Any) -> None:
        try:
            requests[number] = runs[number].send(answer)
        except StopIteration as end:
            results[number] = end.value

    try:
        for number in range(len(runs)):
            resume(number, None)
        while requests:
            groups: dict[Hashable, list[int]] = {}
            for number, request in requests.items():
                groups.setdefault(request.together, []).append(number)
            asked, requests = requests, {}
            for numbers in groups.values():
                answers = asked[numbers[0]].answers([asked[number] for number in numbers])
                for number, answer in zip(numbers, answers, strict=True):
                    resume(number, answer)
    finally:
        for run in runs:
            run.close()
    return [results[number] for number in range(len(runs))]
