"""Settings that hold for all tests."""

from hypothesis import HealthCheck, settings

# Decisions are exact whatever the speed of the machine: no deadline for an example.
settings.register_profile("headgate", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("headgate"), max_examples=3000)
settings.load_profile("headgate")
