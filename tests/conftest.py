"""For every test: NumPy's BLAS on one thread, no deadline for an example of a property (it holds on slow machines too), and tests that are
coroutines run in an event loop of their own.

BLAS's threads wait by spinning, which on a busy machine makes small products many times slower.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy is first imported, hence before anything else here

import asyncio
import inspect

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any_speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_speed")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}), debug=False)
    return True
