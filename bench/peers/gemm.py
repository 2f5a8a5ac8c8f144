#!/usr/bin/env python3
"""PyTorch worker: matrix products at the shapes of a training step and of decoding.

The line protocol of common.py with another answer: for `run N`,
    {"results": [{"table": "training" | "skinny", "m": M, "n": N, "k": K, "layout": "nt" | "nn" | "tn",
                  "dtype": "f32" | "bf16", "seconds": [N numbers], "gflops": 2*M*N*K / median / 1e9}, ...],
     "peak_rss_mib": number}
where a number of seconds is that of one product, averaged over enough products to last --window seconds.
Layouts: nt is x[M,K] times W[N,K] transposed (a linear layer), nn is x[M,K] times W[K,N] (its input gradient), tn is
x[K,M] transposed times y[K,N] (its weight gradient).
"""
import argparse
import statistics
import time

import common

TRAINING = [(2048, 256, 256, "nt"), (2048, 1024, 256, "nt"), (2048, 256, 1024, "nt"), (2048, 896, 896, "nt"),
            (2048, 4864, 896, "nt"), (2048, 896, 4864, "nt"), (2048, 32000, 256, "nt"), (2048, 896, 4864, "nn"),
            (2048, 256, 1024, "nn"), (4864, 896, 2048, "tn"), (1024, 256, 2048, "tn")]
SKINNY = [(rows, n, k, "nt")
          for n, k in [(256, 256), (1024, 256), (896, 896), (4864, 896), (32000, 256), (151936, 896)]
          for rows in (1, 8, 32)]


def main():
    parser = argparse.ArgumentParser(description="matrix product worker")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--table", choices=["training", "skinny", "all"], default="all")
    parser.add_argument("--max-elements", type=int, default=1 << 62, help="leave out shapes with a larger N*K")
    parser.add_argument("--window", type=float, default=0.05, help="seconds a measurement lasts at least")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the answer is always JSON")
    options = parser.parse_args()
    answers = common.claim_stdout()
    common.limit_threads(options.threads)
    (torch,) = common.need("torch")
    torch.set_num_threads(options.threads)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    shapes = [(table, *shape) for table, shapes in (("training", TRAINING), ("skinny", SKINNY)) for shape in shapes
              if options.table in (table, "all") and shape[1] * shape[2] <= options.max_elements]

    def random(*size):
        return torch.empty(size, dtype=dtype).uniform_(-1, 1)

    def measure(m, n, k, layout, count):
        left, right = {"nt": (lambda: random(m, k), lambda: random(n, k).t()),
                       "nn": (lambda: random(m, k), lambda: random(k, n)),
                       "tn": (lambda: random(k, m).t(), lambda: random(k, n))}[layout]
        left, right, out = left(), right(), torch.empty(m, n, dtype=dtype)

        def product():
            torch.matmul(left, right, out=out)
        product()
        once = max(common.timed(product), 1e-7)
        times = max(1, int(options.window / once))
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            for _ in range(times):
                product()
            seconds.append((time.perf_counter() - start) / times)
        return seconds

    def handle(count):
        results = []
        for table, m, n, k, layout in shapes:
            seconds = measure(m, n, k, layout, count)
            results.append({"table": table, "m": m, "n": n, "k": k, "layout": layout, "dtype": options.dtype,
                            "seconds": seconds, "gflops": 2e-9 * m * n * k / statistics.median(seconds)})
        return {"results": results}

    with torch.no_grad():
        common.serve(answers, handle)


if __name__ == "__main__":
    main()
