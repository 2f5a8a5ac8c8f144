"""The start of every Python worker: pipes that user code cannot reach, and an end that comes with the parent's."""

import os
import sys


class Guard:
    """The pipe to Ferrl: one JSON request per line in, one JSON answer per line out."""

    def __init__(self):
        import json
        import signal
        import threading
        import time

        self.json, self.signal = json, signal
        # The pipes are ours alone: whatever the user's code prints goes to stderr, whatever it reads is empty.
        self.me, self.group = os.getpid(), os.getpgrp()
        self.requests = os.fdopen(os.dup(0), "rb")
        self.answers = os.dup(1)
        self.lock = threading.Lock()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        sys.stdout.reconfigure(line_buffering=True)
        self.start = json.loads(self.requests.readline())

        def watch():
            while os.getppid() == self.start["parent"]:
                time.sleep(0.5)
            self.end()

        threading.Thread(target=watch, daemon=True).start()

    def end(self):
        if self.group == self.me:
            os.killpg(self.group, self.signal.SIGKILL)
        os._exit(1)

    def listen(self, take):
        """Gives every request to `take`, on a thread of its own; the end of the pipe is ours."""
        import threading

        def read():
            for line in self.requests:
                take(line)
            self.end()

        threading.Thread(target=read, daemon=True).start()

    def answer(self, request, **fields):
        if os.getpid() != self.me:  # a fork that returned from the user's function
            os._exit(0)
        fields.update(id=request["id"], nonce=request["nonce"])
        data = memoryview(self.json.dumps(fields, default=repr).encode() + b"\n")
        with self.lock:
            while data:
                data = data[os.write(self.answers, data) :]

    def watch(self, seconds, file):
        """Says on stderr where the main thread is after so many seconds, unless it is cancelled before."""
        import threading
        import traceback

        def show():
            frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
            own = [i for i, frame in enumerate(frames) if frame.filename == file]
            print(f"still at work after {seconds:.1f} s:", file=sys.stderr)
            sys.stderr.write("".join(traceback.format_list(frames[own[0] if own else -3 :][-4:])))
            sys.stderr.flush()

        timer = threading.Timer(seconds, show)
        timer.daemon = True
        timer.start()
        return timer

    def loading(self, file):
        """As `watch`, for loading the file: shortly before its time is up."""
        limit = self.start["timeout"]
        return self.watch(max(limit * 0.5, limit - 1), file)

    def trace(self, file):
        """The traceback from the user's code on, and the last line of the user's file that it goes through."""
        import traceback

        error = sys.exc_info()[1]
        tb = error.__traceback__
        # From the user's file on, where it goes through it; else without our own frames in front.
        inside = tb
        while inside is not None and inside.tb_frame.f_code.co_filename != file:
            inside = inside.tb_next
        while inside is None and tb.tb_next is not None and tb.tb_frame.f_code.co_filename == "<string>":
            tb = tb.tb_next
        tb = inside or tb
        text = "".join(traceback.format_exception(type(error), error, tb, limit=-8))
        own = [f for f in traceback.extract_tb(tb) if f.filename == file]
        line = own[-1].lineno if own else getattr(error, "lineno", None)
        place = os.path.basename(file) + (f":{line}" if line else "")
        return {"trace": text[-3000:].encode("utf-8", "replace").decode(), "place": place}


def plain(value):
    """The value if JSON can say it, else its text."""
    import json

    try:
        json.dumps(value, allow_nan=False)
        return value
    except (TypeError, ValueError, RecursionError):
        return repr(value)


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
