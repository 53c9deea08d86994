"""`sterna pull MODEL`: fetch a model and prepare it, without serving."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sterna.config.memory import show_bytes
from sterna.config.model_config import ModelConfig
from sterna.errors import ModelError
from sterna.files.cache import cache_root, say
from sterna.models.resolve import resolve_model

if TYPE_CHECKING:
    from sterna.executor.native.formats import Quantization


def run(argv: Sequence[str]) -> int:
    """Print where the resolved model lies, and its packed weights where the native executor can serve it."""
    args = _parser().parse_args(argv)
    root = cache_root(args.cache_dir)
    folder = resolve_model(args.model, cache_dir=root, context_length=None)
    model = ModelConfig.load(folder)
    print(
        f"{model.name}: {model.family}, {model.num_parameters / 1e6:.0f} M parameters, {model.weights_dtype}, context {model.context_len}"
    )
    print(folder)
    if args.pack:
        _pack(folder, root, args.quantization)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sterna pull", description="Fetch a model into the cache, and prepare it for the first start.")
    parser.add_argument("model", nargs="?", default="smollm2", help="alias, .gguf file, folder, or hub id org/name[:file]")
    parser.add_argument("--cache-dir", help="where models are kept (also STERNA_CACHE_DIR; default ~/.cache/sterna)")
    parser.add_argument(
        "--pack",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="pack the weights as the native executor maps them, which its first start does otherwise [True]",
    )
    parser.add_argument(
        "--quantization", choices=("none", "int8", "int4"), default="none", help="pack for a server that is started with the same [none]"
    )
    return parser


def _pack(folder: Path, root: Path, quantization: Quantization) -> None:
    """Raises ModelError for weights that are damaged or that the cache can't keep, ConfigError for a quantization that can't be."""
    try:
        from sterna.executor.native.pack import load_spec, pack_into_cache, plan
    except ImportError as fault:
        say(f"weights not packed: the native executor can't be loaded here: {fault}")
        return
    from sterna.models.weights import WeightIndex

    try:
        plan(WeightIndex.load(folder), load_spec(folder), quantization)
    except ModelError as reason:  # a model for another executor, perhaps
        say(f"weights not packed: {reason}")
        return
    packed = pack_into_cache(folder, root, quantization)
    print(f"{packed.path} ({show_bytes(packed.nbytes)} packed)")
