"""The contract of a method, as checks that any method can be put to, one's own included.

    from kinfed.testing import check_algorithm

    check_algorithm("ditto")                         # a registered method
    check_algorithm(MyMethod(training=LocalTraining(lr=0.1)))     # one of your own

Each check is a function of a `Bench` (the method on a tiny federation) and can be run by itself, under pytest:

    @pytest.mark.parametrize("check", CHECKS)
    def test_my_method(check):
        CHECKS[check](bench)

A broken promise raises `ContractError`: which check, what was found, what the contract asks for.
"""

from kinfed.core.door import open_door

__getattr__, __dir__, __all__ = open_door(__name__, __file__)
