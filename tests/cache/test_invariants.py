from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.cache.machine import PoolMachine


def machine_settings(examples, steps=40):
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def test_invariants_hold():
    run_state_machine_as_test(PoolMachine, settings=machine_settings(150))
