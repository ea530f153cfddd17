"""``python -m decodekit.testing.mutants``: how many seeded faults a test suite notices."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, NamedTuple

from decodekit.testing.mutants import planted
from decodekit.testing.mutants.faults import FAULTS
from decodekit.testing.mutants.plugins import faults_of, spoiled


class Trial(NamedTuple):
    """A fault, how to put it in place, and what pytest is to run."""

    name: str
    fault: Any
    arguments: Sequence[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials; 0 if every fault was noticed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    own, pytest_arguments = given[:cut], given[cut + 1 :]
    parser = argparse.ArgumentParser(prog="python -m decodekit.testing.mutants", description=__doc__)
    parser.add_argument("-k", dest="name", default="", help="only faults whose name or place holds this")
    parser.add_argument("--of", metavar="MODULE:CLASS", help="faults of this rule or token-level strategy")
    parser.add_argument("--list", action="store_true", help="name the faults, and run nothing")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds after which a fault counts as noticed: it hung"
    )
    options = parser.parse_args(own)
    trials = _trials(options.of, pytest_arguments)
    trials = [trial for trial in trials if options.name in trial.name]
    if options.list or not trials:
        print("\n".join(trial.name for trial in trials) or f"no fault is called {options.name!r}")
        return 0 if trials else 2
    missed = 0
    for trial in trials:
        outcome = _outcome(trial, options.timeout)
        missed += outcome == "MISSED"
        print(f"{outcome:<7}  {trial.name}", flush=True)
    print(f"{len(trials) - missed} of {len(trials)} faults were noticed ({1 - missed / len(trials):.1%})")
    return 1 if missed else 0


def _trials(plugin: str | None, arguments: Sequence[str]) -> list[Trial]:
    if plugin is None:
        return [
            Trial(
                f"{fault.name} ({fault.target.removeprefix('decodekit.')})",
                partial(planted, fault),
                arguments or fault.mirrored,
            )
            for fault in FAULTS
        ]
    module, _, name = plugin.partition(":")
    sys.path.insert(0, os.getcwd())
    found = getattr(importlib.import_module(module), name)
    return [Trial(f"{fault} ({plugin})", partial(spoiled, found, fault), arguments) for fault in faults_of(found)]


def _outcome(trial: Trial, timeout: float) -> Literal["noticed", "hung", "MISSED"]:
    """Whether pytest fails with the fault in place, in a process of its own."""
    with trial.fault():
        pass  # a line that is no longer there is no fault that was noticed
    # A fork has everything imported already; elsewhere a fresh process imports it again.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=_run, args=(trial.fault, list(trial.arguments)))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        return "hung"
    # 3 and above: pytest found a fault of its own, wrong arguments, or no tests.
    if process.exitcode > 2:
        raise SystemExit(f"pytest could not run {' '.join(trial.arguments)} (exit code {process.exitcode})")
    return "noticed" if process.exitcode else "MISSED"


def _run(fault: Any, arguments: list[str]) -> None:
    import pytest

    context: AbstractContextManager[None] = fault()
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        context,
    ):
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments])
    sys.stdout.flush()
    os._exit(int(code))


if __name__ == "__main__":
    import decodekit.testing.strategies  # noqa: F401  what every trial needs is imported once

    sys.exit(main())
