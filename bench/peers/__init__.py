"""Other servers, each installed in an environment of its own and driven by the same load as Sterna. `compare.py` runs them all."""
