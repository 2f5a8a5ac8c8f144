#!/usr/bin/env python3
"""Uploads an offline run of Weights & Biases to a server on this machine: tools/check_wandb_run.py RUN

RUN is a run folder in which `ferrl sync RUN --to wandb` has been called. `wandb sync` itself reads the folder and sends it to a
small server in this script, which answers as much of W&B's protocol as that needs; every number that arrives is compared with
metrics.jsonl. The records are also parsed by the classes of the wandb package. Prints a line of counts; exit status 1 where
something differs.
"""
import http.server
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import threading
import zlib

from wandb.proto import wandb_internal_pb2 as pb

BLOCK = 32768


def records(data):
    """Payloads of LevelDB's log format, checksums checked."""
    assert data[:7] == struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
    at, parts = 7, b""
    while at < len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        crc, length, kind = struct.unpack_from("<IHB", data, at)
        part = data[at + 7 : at + 7 + length]
        assert zlib.crc32(bytes([kind]) + part) == crc, f"checksum at {at}"
        parts += part
        if kind in (1, 4):
            yield parts
            parts = b""
        at += 7 + length


def items(list_of_items):
    return {item.key: json.loads(item.value_json) for item in list_of_items}


def same(a, b):
    return a == b or (isinstance(a, (int, float)) and isinstance(b, (int, float)) and float(a) == float(b))


def compare(got, step):
    """A history row against a line of metrics.jsonl."""
    renamed = {"seconds": "_runtime", "step": "_step"}
    for key, value in step.items():
        key = renamed.get(key, key)
        assert key in got and same(got[key], value), f"step {step['step']}: {key} is {got.get(key)}, expected {value}"


def parse(file, steps):
    """Every record, by the package's own classes."""
    found = []
    for data in records(file.read_bytes()):
        found.append(pb.Record())
        found[-1].ParseFromString(data)
    kinds = [r.WhichOneof("record_type") for r in found]
    assert kinds == ["header", "run"] + ["history"] * len(steps) + ["summary", "exit"], kinds[:4]
    assert [r.num for r in found] == list(range(1, len(kinds) + 1))
    run = found[1].run
    assert file.name == f"run-{run.run_id}.wandb" and run.project and run.display_name and run.start_time.seconds
    for record, step in zip(found[2:], steps):
        got = items(record.history.item)
        assert record.history.step.num == got["_step"] == step["step"]
        compare(got, step)
    assert found[-1].exit.exit_code == 0
    return items(run.config.update), items(found[-2].summary.update)


class Server(http.server.BaseHTTPRequestHandler):
    history, summary, config, complete = {}, {}, {}, False

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer({})

    def do_PUT(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.answer({})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
        self.answer(self.graphql(body) if self.path.endswith("graphql") else self.stream(body))

    def graphql(self, body):
        query, variables = body.get("query", ""), body.get("variables") or {}
        if "upsertBucket" in query:
            Server.config = json.loads(variables.get("config") or "{}") or Server.config
            project = {"name": variables.get("project"), "entity": {"name": "me"}}
            bucket = {"id": "b", "name": variables.get("name"), "displayName": variables.get("displayName"), "description": "",
                      "config": "{}", "sweepName": None, "project": project, "historyLineCount": 0}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if "createRunFiles" in query:
            run = {"runID": "b", "uploadHeaders": [], "files": []}
            return {"data": {"createRunFiles": run}}
        viewer = {"id": "v", "entity": "me", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}
        return {"data": {"viewer": viewer, "serverInfo": None, "model": None, "project": None}}

    def stream(self, body):
        for name, part in (body.get("files") or {}).items():
            for i, line in enumerate(part["content"]):
                if "history" in name:
                    Server.history[part["offset"] + i] = json.loads(line)
                elif "summary" in name:
                    Server.summary = json.loads(line)
        Server.complete = Server.complete or bool(body.get("complete"))
        return {}

    def answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def upload(folder, steps):
    """`wandb sync` to a server of ours."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "WANDB_API_KEY": "0" * 40, "HOME": home, "WANDB_ERROR_REPORTING": "false",
                       "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}", "NO_PROXY": "127.0.0.1"}
        command = [sys.executable, "-m", "wandb", "sync", "--yes", str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [Server.history[i] for i in sorted(Server.history)]
    assert len(rows) == len(steps), f"{len(rows)} history rows arrived, expected {len(steps)}:\n{done.stdout}{done.stderr}"
    for row, step in zip(rows, steps):
        compare(row, step)
    assert Server.complete, "the run was not finished"


def main(run):
    (file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    config, summary = parse(file, steps)
    assert all(same(summary[k], v) for k, v in steps[-1].items() if k not in ("step", "seconds")), summary
    upload(file.parent, steps)
    for key, value in config.items():
        assert Server.config.get(key, {}).get("value") == value, f"configuration: {key} is {Server.config.get(key)}"
    print(f"{len(steps)} steps, {len(config)} keys of configuration, {len(summary)} of summary")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
