"""For every test: NumPy's BLAS on one thread.

Its threads wait by spinning, which on a busy machine makes small products many times slower.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy is first imported, hence before anything else here
