"""`sterna pull MODEL`: fetch a model and prepare it, without serving."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sterna.config.model_config import ModelConfig
from sterna.files.cache import cache_root
from sterna.models.resolve import resolve_model


def run(argv: Sequence[str]) -> int:
    """Print where the resolved model lies."""
    parser = argparse.ArgumentParser(prog="sterna pull", description="Fetch a model into the cache.")
    parser.add_argument("model", nargs="?", default="smollm2", help="alias, .gguf file, folder, or hub id org/name[:file]")
    parser.add_argument("--cache-dir", help="where models are kept (also STERNA_CACHE_DIR; default ~/.cache/sterna)")
    args = parser.parse_args(argv)
    folder = resolve_model(args.model, cache_dir=cache_root(args.cache_dir), context_length=None)
    model = ModelConfig.load(folder)
    print(
        f"{model.name}: {model.family}, {model.num_parameters / 1e6:.0f} M parameters, {model.weights_dtype}, context {model.context_len}"
    )
    print(folder)
    return 0
