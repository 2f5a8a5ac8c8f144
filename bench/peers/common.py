"""What the peer workers share: options, the line protocol, peak memory.

Protocol: for every line `run N` on standard input a worker does its work N times and prints one line of JSON,
    {"seconds": [N numbers], "tokens_per_s": tokens of one time / median seconds, "peak_rss_mib": number}
or {"error": "..."}; it ends at the end of its input. Only these lines go to standard output: whatever libraries print
is sent to standard error.
"""
import json
import os
import resource
import statistics
import sys
import time

EXIT_MISSING = 3


def need(*packages):
    """Imports the packages or says which are missing."""
    import importlib
    loaded = []
    for package in packages:
        try:
            loaded.append(importlib.import_module(package))
        except ImportError as error:
            print(f"{error}\npip install {' '.join(packages)}", file=sys.stderr)
            sys.exit(EXIT_MISSING)
    return loaded


def limit_threads(count):
    """To be called before torch is imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(count)


def model_options(parser):
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--inter", type=int, default=1024)
    parser.add_argument("--attn", choices=["sdpa", "eager"], default="sdpa")
    parser.add_argument("--worker", action="store_true", help="accepted for symmetry; a peer is always a worker")


def small_qwen2(transformers, options, positions):
    config = transformers.Qwen2Config(
        vocab_size=options.vocab, hidden_size=options.hidden, num_hidden_layers=options.layers,
        num_attention_heads=options.heads, num_key_value_heads=options.kv_heads, intermediate_size=options.inter,
        max_position_embeddings=max(1024, positions), rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        attn_implementation=options.attn)
    return transformers.Qwen2ForCausalLM(config)


def peak_rss_mib():
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def claim_stdout():
    """Keeps standard output for the protocol; everything else printed from here on goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def requests(answers):
    """The N of every line `run N`; other lines are answered with an error."""
    for line in sys.stdin:
        words = line.split()
        if len(words) == 2 and words[0] == "run" and words[1].isdigit() and int(words[1]) > 0:
            yield int(words[1])
        elif words:
            reply(answers, {"error": f"expected `run N` with N >= 1, got {line.strip()!r}"})


def reply(answers, answer):
    if "error" not in answer:
        answer["peak_rss_mib"] = round(peak_rss_mib(), 1)
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def serve(answers, handle):
    """Answers every `run N` with the object that handle(N) returns."""
    for count in requests(answers):
        try:
            answer = handle(count)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        reply(answers, answer)


def rates(seconds, tokens):
    return {"seconds": seconds, "tokens_per_s": tokens / statistics.median(seconds)}


def serve_work(answers, work, tokens):
    serve(answers, lambda count: rates([timed(work) for _ in range(count)], tokens))
