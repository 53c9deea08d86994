"""The native sampler: microseconds a row on one core, by what the row asks for.

    python bench/sampler.py [--vocab 49152] [--isa avx512] [--rounds 300] [--logits rows.npy]

Unless given, logits have the shape of a chat model's: a bulk of unlikely tokens, and a few that share most of the mass. Each round has
other logits; the median counts.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from numpy.typing import NDArray

from sterna.executor.native import _native
from sterna.executor.native.sampling import to_options
from sterna.protocol.sampling import SamplingParams

CASES = {
    "greedy": (SamplingParams(temperature=0.0), -1),
    "temperature 1": (SamplingParams(seed=1), -1),
    "temperature 0.7": (SamplingParams(temperature=0.7, seed=1), -1),
    "temperature 0.8, top_p 0.95": (SamplingParams(temperature=0.8, top_p=0.95, seed=1), -1),
    "temperature 1, top_p 0.9": (SamplingParams(top_p=0.9, seed=1), -1),
    "top_k 40, top_p 0.95": (SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=1), -1),
    "min_p 0.05": (SamplingParams(min_p=0.05, seed=1), -1),
    "hot: temperature 5": (SamplingParams(temperature=5.0, seed=1), -1),
    "hot: temperature 5, top_p 0.95": (SamplingParams(temperature=5.0, top_p=0.95, seed=1), -1),
    "penalties over 1,000 tokens": (SamplingParams(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.1), -1),
    "temperature 1, logprobs of 5": (SamplingParams(seed=1), 5),
}


def chat_logits(rows: int, vocab: int) -> NDArray[np.float32]:
    """(rows, vocab): a normal bulk, and twelve candidates of falling weight at random places."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((rows, vocab)) * 2.6
    for row in logits:
        row[rng.integers(0, vocab, 12)] = 18 - rng.exponential(2.0, 12)
    return logits.astype(np.float32)


def microseconds(params: SamplingParams, top_logprobs: int, logits: NDArray[np.float32], isa: str, rounds: int) -> float:
    vocab = logits.shape[1]
    sampler = _native.Sampler(vocab, isa)
    options = to_options(params, vocab, ())
    options.top_logprobs = top_logprobs
    sampler.bind(0, options, np.arange(1000, dtype=np.int32) * 7 % vocab, np.zeros(0, dtype=np.int32))
    times = []
    for at in range(rounds):
        row = logits[at % len(logits)].copy()  # warm, as the product that made it leaves it
        start = time.perf_counter()
        sampler.sample(0, row)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--isa", default=None, help="one of those that this machine has; all by default")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--logits", default=None, help="float32 (rows, vocab) of a real model, as NumPy saves them")
    args = parser.parse_args()
    isas = [args.isa] if args.isa else _native.available_isas()
    logits = np.load(args.logits) if args.logits else chat_logits(16, args.vocab)
    print(f"{'µs a row':32}" + "".join(f"{isa:>12}" for isa in isas))
    for name, (params, top_logprobs) in CASES.items():
        times = [microseconds(params, top_logprobs, logits, isa, args.rounds) for isa in isas]
        print(f"{name:32}" + "".join(f"{each:12.1f}" for each in times))


if __name__ == "__main__":
    main()
