"""Runs a user's Python functions for Ferrl: one JSON request per line in, one JSON answer per line out."""

import os
import sys


def host():
    import faulthandler
    import json
    import math
    import queue
    import signal
    import threading
    import time
    import traceback

    # The pipes are ours alone: whatever the user's code prints goes to stderr, whatever it reads is empty.
    me, group = os.getpid(), os.getpgrp()
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)

    def end():
        if group == me:
            os.killpg(group, signal.SIGKILL)
        os._exit(1)

    def answer(request, **fields):
        if os.getpid() != me:  # a fork that returned from the user's function
            os._exit(0)
        fields.update(id=request["id"], nonce=request["nonce"])
        data = memoryview(json.dumps(fields).encode() + b"\n")
        while data:
            data = data[os.write(answers, data) :]

    start = json.loads(requests.readline())
    inbox = queue.Queue()

    def read():
        for line in requests:
            inbox.put(line)
        end()

    def watch():
        while os.getppid() == start["parent"]:
            time.sleep(0.5)
        end()

    for body in (read, watch):
        threading.Thread(target=body, daemon=True).start()

    def trace():
        return traceback.format_exc(limit=-8)[-3000:].encode("utf-8", "replace").decode()

    try:
        module = load(start["file"])
    except BaseException:
        answer(start, refused=trace())
        return
    functions = {}
    for name in start["functions"]:
        functions[name] = getattr(module, name, None)
        if not callable(functions[name]):
            there = [n for n, f in vars(module).items() if callable(f) and not n.startswith("_")]
            answer(start, missing=name, there=there)
            return
    answer(start, ready=True)

    def number(value):
        if value is None:
            return None
        if isinstance(value, (str, bytes, bytearray, complex)):
            raise TypeError
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        return value if math.isfinite(value) else str(value)

    def numbers(result, count):
        """The rewards, or what is wrong with them."""
        expected = f"a list of {count} numbers or None"
        kind = type(result).__name__
        if hasattr(result, "tolist"):
            result = result.tolist()
        if not isinstance(result, (list, tuple)):
            return {"contract": [f"{kind} {result!r:.80}", expected]}
        if len(result) != count:
            return {"contract": [f"{kind} of {len(result)}", expected]}
        rewards = []
        for i, value in enumerate(result):
            try:
                rewards.append(number(value))
            except (TypeError, ValueError):
                return {"contract": [f"{type(value).__name__} {value!r:.80} at place {i}", expected]}
        return {"rewards": rewards}

    while True:
        request = json.loads(inbox.get())
        # Shortly before the deadline a hanging call shows where it hangs; long after it, the kernel ends it.
        faulthandler.dump_traceback_later(max(request["timeout"] * 0.5, request["timeout"] - 1), file=2)
        signal.alarm(int(request["timeout"]) + 5)
        try:
            result = call(functions[request["function"]], request["arguments"])
            fields = numbers(result, request["count"])
        except BaseException:
            fields = {"raised": trace()}
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        answer(request, **fields)


def load(file):
    """The user's file as a module; its folder can be imported from."""
    import importlib.util

    folder, name = os.path.split(file)
    sys.path[0] = folder
    name = os.path.splitext(name)[0]
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def call(function, arguments):
    """Calls it with the arguments it can take; a coroutine is run to its end."""
    import inspect

    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    if parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        names = {p.name for p in parameters}
        arguments = {k: v for k, v in arguments.items() if k in names}
    result = function(**arguments)
    if inspect.isawaitable(result):
        import asyncio

        async def whole():
            return await result

        result = asyncio.run(whole())
    return result


host()
