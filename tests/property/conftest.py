"""Profiles of the property tests: `pytest tests/property --hypothesis-profile=long` looks for as long as you have time."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

# The same examples in every run: a red build must be red for the next person too. The long profile looks for new ones.
settings.register_profile(
    "short",
    derandomize=True,
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.generate, Phase.shrink],
)
settings.register_profile(
    "long", settings.get_profile("short"), derandomize=False, max_examples=2000, stateful_step_count=100
)
