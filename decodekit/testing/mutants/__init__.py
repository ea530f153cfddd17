"""Seeded faults: one wrong line at a time, which a good test suite notices.

``python -m decodekit.testing.mutants [-k NAME] [--of MODULE:CLASS] [-- PYTEST ARGUMENTS]`` puts each fault in place and runs
the tests. Without arguments those run that mirror the faulty module; with ``--of`` the faults are ones that any rule or
token-level strategy can have, put into this class, so that the author of a plugin sees how much its tests notice.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import FunctionType
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """A fault of one function.

    Attributes:
        name: what goes wrong.
        target: ``module:function`` or ``module:Class.method``.
        right: a piece of its source, which occurs once.
        wrong: what stands there instead.
        tests: paths that should notice; those that mirror the module if empty.
    """

    name: str
    target: str
    right: str
    wrong: str
    tests: tuple[str, ...] = ()

    @property
    def mirrored(self) -> tuple[str, ...]:
        """Tests that should notice, as paths from the root of the repository."""
        if self.tests:
            return self.tests
        module = PurePosixPath(*self.target.partition(":")[0].split(".")[1:])
        return (str(PurePosixPath("tests", module.parent, f"test_{module.name}.py")),)


def function_at(target: str) -> FunctionType:
    """The function that ``module:name`` or ``module:Class.name`` names, without its decorators."""
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    function = inspect.unwrap(found)
    assert isinstance(function, FunctionType), f"{target} is no function of Python"
    return function


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """A context in which the fault is there, for everyone who has the function already, too.

    Raises:
        ValueError: the line that is to be wrong is not there, or not once.
    """
    function = function_at(mutant.target)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutant.right) != 1:
        raise ValueError(f"{mutant.name!r}: {mutant.right!r} is {source.count(mutant.right)} times in {mutant.target}")
    # Decorators stay where they are: only what is inside them changes.
    source = source[source.index("def ") :].replace(mutant.right, mutant.wrong)
    scope: dict[str, Any] = {}
    code = compile(f"from __future__ import annotations\n{source}", function.__code__.co_filename, "exec")
    exec(code, {**function.__globals__}, scope)
    honest = function.__code__
    function.__code__ = scope[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = honest
