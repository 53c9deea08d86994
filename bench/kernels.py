"""Speed of the native matrix products: `python bench/kernels.py [--isa NAME ...] [--threads N] [--rows N ...] [--form NAME ...]`.

Multiply-adds a second and bytes of weights a second by form, shape and rows, the best of several rounds in processor time, since other
programs may share the machine. Weights are read from memory, as a step of a model does (`--cached`: one small matrix again and again).
"""

import argparse

from sterna.executor.native import _native

kernels = _native.kernels
FORMS = {
    "int4+min": (0, True, False, 32),
    "int4": (0, False, False, 32),
    "int8": (1, False, False, 32),
    "int8-g16": (1, False, True, 16),
    "bf16": (2, False, False, 32),
}
SHAPES = [(1536, 576), (576, 1536), (8192, 2048), (4096, 14336)]
MEMORY_BYTES = 96 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of the native matrix products.")
    parser.add_argument("--isa", nargs="+", default=_native.available_isas()[:1])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--form", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--cached", action="store_true")
    args = parser.parse_args()
    for isa in args.isa:
        for form in args.form:
            for rows, cols in SHAPES[: 1 if args.cached else None]:
                for count in args.rows:
                    size = kernels.matrix_bytes(FORMS[form], rows, cols)
                    copies = 1 if args.cached else max(1, MEMORY_BYTES // size)
                    taken = kernels.time_matmul(isa, FORMS[form], rows, cols, count, copies, args.threads, 50 if args.cached else 4)
                    speed = f"{count * rows * cols / taken / 1e9:7.1f} GMAC/s {size / taken / 1e9:6.1f} GB/s"
                    print(f"{isa:11} {args.threads} threads {form:8} {rows:5} x {cols:<5} rows {count:3} {speed}", flush=True)


if __name__ == "__main__":
    main()
