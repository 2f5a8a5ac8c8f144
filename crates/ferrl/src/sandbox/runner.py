# Runs a completion inside the sandbox. It is given arguments and returns values; it is never given what they are
# compared with, so that nothing in this process is worth finding.
import os, sys

sys.path[:] = sys.argv[1].split(":")
sys.argv[:] = ["solution.py"]
import builtins

builtins.exit = builtins.quit = sys.exit  # what site.py adds
if hasattr(sys, "set_int_max_str_digits"):
    sys.set_int_max_str_digits(0)


def read(n):
    parts = []
    while n:
        part = os.read(0, n)
        if not part:
            break
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def load(text):
    try:  # the parser in C alone: the package json imports twenty modules
        import _json

        class Context:
            strict, object_hook, object_pairs_hook = True, None, None
            parse_float, parse_int, parse_constant, memo = float, int, float, {}

        return _json.make_scanner(Context)(text, 0)[0]
    except (ImportError, AttributeError, TypeError):
        import json

        return json.loads(text)


def quote(text):
    try:
        from _json import encode_basestring_ascii
    except ImportError:
        from json.encoder import encode_basestring_ascii
    return encode_basestring_ascii(text)


def decode(value):
    kind = value[0]
    if kind in "nbs":
        return value[1] if len(value) > 1 else None
    if kind == "i":
        return int(value[1])
    if kind == "f":
        return float(value[1])
    if kind == "c":
        return complex(float(value[1]), float(value[2]))
    if kind == "y":
        return bytes(value[1])
    if kind == "d":
        return {decode(k): decode(v) for k, v in value[1]}
    return {"l": list, "t": tuple, "S": set}[kind](decode(v) for v in value[1])


def encode(value, depth=0):
    if depth > 40:
        raise ValueError("a value nested too deeply")
    inner = lambda values: "[" + ",".join(encode(v, depth + 1) for v in values) + "]"
    if value is None:
        return '["n"]'
    if isinstance(value, bool):
        return '["b",true]' if value else '["b",false]'
    if isinstance(value, int):
        return '["i","%s"]' % int.__repr__(value)
    if isinstance(value, float):
        return '["f","%s"]' % float.__repr__(value)
    if isinstance(value, str):
        return '["s",%s]' % quote(str.__str__(value))
    if isinstance(value, (bytes, bytearray)):
        return '["y",%s]' % list(value)
    if isinstance(value, complex):
        return '["c","%r","%r"]' % (value.real, value.imag)
    if isinstance(value, list):
        return '["l",%s]' % inner(value)
    if isinstance(value, tuple):
        return '["t",%s]' % inner(value)
    if isinstance(value, (set, frozenset)):
        return '["S",%s]' % inner(value)
    if isinstance(value, dict):
        pairs = ("[%s,%s]" % (encode(k, depth + 1), encode(v, depth + 1)) for k, v in value.items())
        return '["d",[%s]]' % ",".join(pairs)
    if hasattr(value, "__index__"):  # whole numbers of numpy
        return encode(value.__index__(), depth + 1)
    if hasattr(value, "tolist"):  # its arrays
        return encode(value.tolist(), depth + 1)
    raise TypeError("a value of type %s cannot be returned" % type(value).__name__)


def module(name):
    made = type(sys)(name)
    sys.modules[name] = made
    return made.__dict__


def described(error):
    return quote(("%s: %s" % (type(error).__name__, error))[:300])


def calls(work):
    channel = os.dup(1)
    os.dup2(2, 1)  # what is printed is no answer

    def say(line):
        line = (line + "\n").encode()
        while line:
            line = line[os.write(channel, line) :]

    try:
        space = module("solution")
        exec(compile(work["code"], "solution.py", "exec"), space)
        owner, _, method = work["entry"].partition(".")
        function = getattr(space[owner](), method) if method else space[owner]
    except KeyError:
        say('{"load":%s}' % quote("it defines no %s" % work["entry"]))
        return
    except BaseException as error:
        say('{"load":%s}' % described(error))
        return
    for i, (args, kwargs) in enumerate(work["calls"]):
        try:
            value = function(*[decode(a) for a in args], **{k: decode(v) for k, v in kwargs})
            line = '{"case":%d,"value":%s}' % (i, encode(value))
        except BaseException as error:
            try:
                line = '{"case":%d,"error":%s}' % (i, described(error))
            except BaseException:
                line = '{"case":%d,"error":"an exception that cannot be shown"}' % i
        say(line)


def script(code, show):
    space = module("__main__")
    try:
        if show:  # the value of the last line too, as an interactive session does
            tree = compile(code, "solution.py", "exec", 0x400)  # PyCF_ONLY_AST
            last = tree.body.pop() if tree.body and type(tree.body[-1]).__name__ == "Expr" else None
            exec(compile(tree, "solution.py", "exec"), space)
            if last is not None:
                import _ast

                value = eval(compile(_ast.Expression(last.value), "solution.py", "eval"), space)
                if value is not None:
                    print(repr(value))
        else:
            exec(compile(code, "solution.py", "exec"), space)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        sys.stdout.flush()
        sys.excepthook(type(error), error.with_traceback(trace and trace.tb_next), trace and trace.tb_next)
        sys.exit(1)


kind, size = read(32).decode().split()
text = read(int(size)).decode()
if kind == "calls":
    calls(load(text))
    sys.stdout.flush()
    os._exit(0)  # whatever threads or exit handlers it left
script(text, kind == "show")
