"""Properties hold on slow machines too: no deadline for an example."""

from hypothesis import HealthCheck, settings

settings.register_profile("any_speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_speed")
