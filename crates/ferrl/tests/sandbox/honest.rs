//! Honest completions: each row must get its reward, whatever else is refused.

use serde_json::{Value, json};

pub fn rows() -> Vec<(&'static str, Value, &'static str)> {
    let call = |entry: &str, args: Value, expect: Value| json!({"entry": entry, "cases": [{"args": args, "expect": expect}]});
    let io = |stdin: &str, stdout: &str| json!({"io": [{"stdin": stdin, "stdout": stdout}]});
    let big = json!({"entry": "f", "cases": "[{'args': [100000000000000000000000000], 'expect': 100000000000000000000000001}]"});
    let mbpp = json!({"test_list": ["assert f((3, 4, 5), (4, 5, 6)) == (4, 5)", "assert set(f((1, 2), (2,))) == set([2])"]});
    vec![
        (
            "recursion",
            call("fib", json!([20]), json!(6765)),
            "def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)",
        ),
        (
            "deep recursion",
            call("f", json!([20000]), json!(20000)),
            "import sys\nsys.setrecursionlimit(50000)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)",
        ),
        (
            "sorting",
            call("f", json!([[3, 1, 2]]), json!([1, 2, 3])),
            "```python\ndef f(xs):\n    return sorted(xs)\n```",
        ),
        (
            "a tuple where a list is written",
            call("f", json!([1]), json!([1, [2, 3]])),
            "def f(x): return (x, (2, 3))",
        ),
        ("2 == 2.0", call("f", json!([4]), json!(2)), "def f(x): return x ** 0.5"),
        (
            "floats in another order",
            call("f", json!([[0.1, 0.2, 0.3]]), json!(0.6)),
            "def f(xs): return sum(xs)",
        ),
        ("a whole number beyond 64 bits", big, "def f(n): return n + 1"),
        (
            "a factorial in a JSON row",
            call("f", json!([25]), json!(15511210043330985984000000.0)),
            "import math\ndef f(n): return math.factorial(n)",
        ),
        ("texts", call("f", json!(["añ😀"]), json!("😀ña")), "def f(s): return s[::-1]"),
        (
            "dictionaries with keys that are no texts",
            call("f", json!([[1, 1, 2]]), json!({"1": 2, "2": 1})),
            "from collections import Counter\ndef f(xs): return Counter(xs)",
        ),
        ("None", call("f", json!([[]]), Value::Null), "def f(xs): return None"),
        (
            "exceptions caught inside",
            call("f", json!([0]), json!(-1)),
            "def f(x):\n    try: return 1 // x\n    except ZeroDivisionError: return -1",
        ),
        (
            "prints while it works",
            call("f", json!([3]), json!(6)),
            "print('loading')\ndef f(x):\n    print('working', x)\n    return 2 * x",
        ),
        (
            "its own main is not run",
            call("f", json!([3]), json!(3)),
            "def f(x): return x\nif __name__ == '__main__': print(input())",
        ),
        (
            "a method",
            call("Solution.f", json!([3]), json!(9)),
            "class Solution:\n    def f(self, x): return x * x",
        ),
        (
            "modules of the library",
            call("f", json!(["a1b22"]), json!(["1", "22"])),
            "import re, json, itertools, functools, heapq, dataclasses, decimal, random, datetime\ndef f(s): return re.findall(r'\\d+', s)",
        ),
        (
            "threads",
            call("f", json!([8]), json!(28)),
            "from concurrent.futures import ThreadPoolExecutor\ndef f(n):\n    with ThreadPoolExecutor(4) as pool: return sum(pool.map(int, range(n)))",
        ),
        (
            "a file in the scratch folder",
            call("f", json!(["x"]), json!("x")),
            "import tempfile, os\ndef f(s):\n    with open('note', 'w') as out: out.write(s)\n    with tempfile.TemporaryFile('w+') as other: other.write(s); os.rename('note', 'note2')\n    return open('note2').read()",
        ),
        (
            "an event loop",
            call("f", json!([2]), json!(4)),
            "import asyncio\nasync def g(x):\n    await asyncio.sleep(0); return x * 2\ndef f(x): return asyncio.run(g(x))",
        ),
        (
            "a child process",
            call("f", json!([2]), json!("2\n")),
            "import subprocess, sys\ndef f(x): return subprocess.run([sys.executable, '-c', 'print(%d)' % x], capture_output=True, text=True).stdout",
        ),
        ("MBPP's assertions", mbpp, "def f(a, b): return tuple(sorted(set(a) & set(b)))"),
        (
            "stdin by input()",
            io("3\n1 2 3\n", "6\n"),
            "n = int(input()); print(sum(map(int, input().split())))",
        ),
        ("stdin as a whole", io("a b\nc\n", "3"), "import sys\nprint(len(sys.stdin.read().split()))"),
        (
            "stdin by lines",
            io("1\n2\n", "1\n4\n"),
            "import sys\nfor line in sys.stdin: print(int(line) ** 2)",
        ),
        ("blanks at the ends of lines", io("", "a\nb\n"), "print('a '); print('b'); print()"),
        ("exit with status 0", io("", "done\n"), "import sys\nprint('done')\nexit(0)"),
        ("large output", io("", &"x".repeat(200_000)), "print('x' * 200000)"),
        ("large input", io(&"7 ".repeat(100_000), "700000\n"), "print(sum(map(int, input().split())))"),
        (
            "main is run",
            io("5", "25"),
            "def main(): print(int(input()) ** 2)\nif __name__ == '__main__':\n    main()",
        ),
    ]
}
