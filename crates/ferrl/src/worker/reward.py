

def host():
    """Runs a user's reward functions, one call at a time."""
    import faulthandler
    import json
    import math
    import queue
    import signal

    guard = Guard()
    start, answer, inbox = guard.start, guard.answer, queue.Queue()
    guard.listen(inbox.put)
    late = guard.loading(start["file"])
    try:
        module = load(start["file"])
    except BaseException:
        answer(start, refused=guard.trace(start["file"])["trace"])
        return
    late.cancel()
    functions = {}
    for name in start["functions"]:
        functions[name] = getattr(module, name, None)
        if not callable(functions[name]):
            there = [n for n, f in vars(module).items() if callable(f) and not n.startswith("_")]
            answer(start, missing=name, there=there)
            return
    answer(start, ready=True)

    def number(value):
        """A finite number, None, the text of one that is not finite, or what it is instead."""
        if value is None:
            return None
        try:
            if isinstance(value, (str, bytes, bytearray, complex)):
                raise TypeError
            value = float(value)
        except OverflowError:
            value = math.inf
        except (TypeError, ValueError):
            return {"bad": f"{type(value).__name__} {value!r:.80}"}
        return value if math.isfinite(value) else str(value)

    def of_steps(value, steps):
        """The rewards of a completion's steps, or one for all of it."""
        if hasattr(value, "tolist"):
            value = value.tolist()
        if not isinstance(value, (list, tuple)):
            return number(value)
        if len(value) != len(steps):
            return {"bad": f"{len(value)} rewards for {len(steps)} steps"}
        rewards = [number(reward) for reward in value]
        wrong = [r for r in rewards if not isinstance(r, float)]
        return ({"bad": "None among the rewards of steps"} if wrong[0] is None else wrong[0]) if wrong else rewards

    def numbers(result, count, steps):
        """The rewards, or what is wrong with them; `steps` are those of each completion, where steps are rewarded."""
        items = "1 item" if count == 1 else f"{count} items"
        expected = f"a list of {items}, each a number or None"
        kind = type(result).__name__
        if hasattr(result, "tolist"):
            result = result.tolist()
        if not isinstance(result, (list, tuple)):
            return {"contract": [f"{kind} {result!r:.80}", expected]}
        if len(result) != count:
            return {"contract": [f"{kind} of {len(result)}", expected]}
        if steps is not None:
            return {"rewards": [of_steps(*both) for both in zip(result, steps)]}
        return {"rewards": [number(value) for value in result]}

    while True:
        request = json.loads(inbox.get())
        # Shortly before the deadline a hanging call shows where it hangs; long after it, the kernel ends it.
        faulthandler.dump_traceback_later(max(request["timeout"] * 0.5, request["timeout"] - 1), file=2)
        signal.alarm(int(request["timeout"]) + 5)
        logged = Logged()
        try:
            arguments = dict(request["arguments"])
            arguments["trainer_state"] = State(request.get("state") or {})
            arguments["log_extra"], arguments["log_metric"] = logged.extra, logged.metric
            if request.get("bind"):  # only whether it could be called so
                bound(functions[request["function"]], arguments)
                fields = {"rewards": [], "absent": absent(functions[request["function"]], arguments)}
            else:
                result = call(functions[request["function"]], arguments)
                fields = numbers(result, request["count"], arguments["steps"] if request.get("steps") else None)
                fields.update(extra=logged.columns(request["count"]), metrics=logged.metrics)
        except Signature as mismatch:
            fields = {"signature": [str(mismatch), ", ".join(arguments)]}
        except BaseException:
            fields = {"raised": guard.trace(start["file"])}
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        sys.stdout.flush()
        answer(request, **fields)


class Signature(Exception):
    """The function cannot take the arguments."""


class State:
    """What TRL's `trainer_state` says that a reward function may ask for."""

    def __init__(self, fields):
        self.global_step, self.max_steps, self.epoch = 0, 0, 0.0
        self.is_world_process_zero = self.is_local_process_zero = True
        self.log_history = []
        self.__dict__.update(fields)


class Logged:
    """What a function logs with TRL's `log_extra` and `log_metric`."""

    def __init__(self):
        self.listed, self.metrics = {}, {}

    def extra(self, column, values):
        self.listed.setdefault(str(column), []).extend(plain(value) for value in values)

    def metric(self, name, value):
        value = float(value)
        if value - value == 0.0:  # finite
            self.metrics.setdefault(str(name), []).append(value)
        else:
            print(f"log_metric({name!r}): got {value}, not logged")

    def columns(self, count):
        for column, values in self.listed.items():
            if len(values) != count:
                print(f"log_extra({column!r}): got {len(values)} values for {count} completions, not logged")
        return {column: values for column, values in self.listed.items() if len(values) == count}


def bound(function, arguments):
    """Those of the arguments that it can take, if it can be called with them."""
    import inspect

    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        signature = None
    if signature is not None:
        parameters = signature.parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            arguments = {k: v for k, v in arguments.items() if k in signature.parameters}
        try:
            signature.bind(**arguments)
        except TypeError as problem:
            raise Signature(f"{getattr(function, '__name__', 'reward')}{signature}: {problem}") from None
    return arguments


def absent(function, arguments):
    """Arguments that stay None, their default, because nothing of that name is there."""
    import inspect

    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is None and p.name not in arguments]


def call(function, arguments):
    """Calls it with the arguments it can take; a coroutine is run to its end."""
    import inspect

    result = function(**bound(function, arguments))
    if inspect.isawaitable(result):
        import asyncio

        async def whole():
            return await result

        result = asyncio.run(whole())
    return result


host()
