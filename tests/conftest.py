"""Settings of every test: JAX on the CPU, with a few devices to spread over."""

import os

# Before jax is imported anywhere. Eight devices let one process stand for eight.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import hypothesis
from absl import flags

# Grain reads absl flags in mp_prefetch; without absl.app.run nobody parses them.
flags.FLAGS.mark_as_parsed()

# How long an example takes says more about what else the machine does.
hypothesis.settings.register_profile(
    "untimed",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("untimed")
