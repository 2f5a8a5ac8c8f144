"""Whole trainings from Python: several at a time on their own cores, kept when finished, resumed when broken off."""
import concurrent.futures
import json
import os
import pathlib
import queue
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Runs:
    """Trainings under one folder: NAME.json is the record of a finished one, runs/NAME its run folder."""

    def __init__(self, out, ferrl, jobs):
        cores = sorted(os.sched_getaffinity(0))
        if not 1 <= jobs <= len(cores):
            sys.exit(f"--jobs is at least 1 and at most the number of cores, {len(cores)} here")
        if not ferrl.exists():
            sys.exit(f"{ferrl} does not exist; build it with: cargo build --release")
        self.out, self.ferrl, self.jobs, self.share = out, ferrl, jobs, len(cores) // jobs
        self.cores = queue.SimpleQueue()
        for job in range(jobs):
            self.cores.put(set(cores[job * self.share : (job + 1) * self.share]))
        out.mkdir(parents=True, exist_ok=True)

    def train(self, name, recipe, changes=()):
        """Runs one training to its end and returns its record, None where it failed."""
        record = self.out / f"{name}.json"
        if record.exists():
            return json.loads(record.read_text())
        folder = self.out / "runs" / name
        command = [self.ferrl, "train", ROOT / "recipes" / recipe, "--runs", self.out / "runs", "--name", name]
        if any((folder / "checkpoints").glob("step_*")):
            command.append("--resume")
        elif folder.exists():
            # It ended before its first checkpoint: begin again, beside the old one.
            folder.rename(folder.with_name(f"{name}.abandoned.{int(time.time())}"))
        cores = self.cores.get()
        print(f"{name} ...", file=sys.stderr, flush=True)
        with open(self.out / f"{name}.log", "ab") as log:
            started = time.monotonic()
            process = subprocess.Popen([str(c) for c in [*command, *changes]], stdout=log, stderr=log, cwd=ROOT,
                                       preexec_fn=lambda: os.sched_setaffinity(0, cores))
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        self.cores.put(cores)
        if process.returncode != 0:
            tail = (self.out / f"{name}.log").read_text(errors="replace").strip().splitlines()[-3:]
            print(f"{name}: exit status {process.returncode}: {' '.join(tail)}", file=sys.stderr)
            return None
        result = {"peak_mib": usage.ru_maxrss / 1024, "seconds": time.monotonic() - started}
        record.write_text(json.dumps(result) + "\n")
        return result

    def train_all(self, runs):
        """The records of [(name, recipe, changes)], in their order."""
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(lambda run: self.train(*run), runs))

    def steps(self, name):
        """The lines of a run's metrics.jsonl."""
        return [json.loads(line) for line in (self.out / "runs" / name / "metrics.jsonl").read_text().splitlines()]
