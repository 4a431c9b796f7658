"""Errors of the operations.

KernelArgumentError    an argument has a shape, dtype, device or layout that the op does not take
"""


class KernelArgumentError(ValueError):
    """An op was called with an argument it does not take; names it, what it got, what it takes."""

    def __init__(self, argument: str, got: object, expected: object) -> None:
        super().__init__(f"{argument} is {got}; expected {expected}.")
        self.argument = argument
