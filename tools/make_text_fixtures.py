"""Writes the fixtures of crates/engine/tests/text.rs: what tokenizers, jinja2 and transformers say.

Run from the repository root, with transformers and tokenizers installed; nothing is downloaded:
    python tools/make_text_fixtures.py
Check that transformers loads a tokenizer that Ferrl saved, and that it agrees on a list of strings:
    python tools/make_text_fixtures.py --load DIR
"""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils as templates

ROOT = Path("crates/engine/tests/fixtures/text")
CORPUS = [
    "You are a careful helper. The answer is 42, and the reason is simple.",
    "user assistant system model tool content role name arguments function",
    "Hello world! How are you today? I am fine, thank you very much.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "Grüße aus Köln, naïve café, 你好世界, Привет мир, שלום, 12345 67.89",
] * 3
STRINGS = [
    "", " ", "  ", "\n", "\n\n", " \n \n", "\t", "a", " a", "a ", "  leading", "trailing  ", "Hello world!",
    "Hello  world\n\n  again", "123 4567 3.14", "don't I'LL we've", "naïve café", "cafe\u0301", "你好，世界",
    "Привет", "שלום", "👍", "👨‍👩‍👧‍👦 family", "🏳️‍🌈", "a\u200bb", "\u00a0nbsp", "\ufeffbom", "\x00\x01", "x" * 60,
    "é" * 9, "<|im_start|>user\nhi<|im_end|>\n", "say <|im_end|> now", "<|im_end|><|im_end|>", "<|im_end", "|im_end|>",
    "<|im_<|im_end|>end|>", "<think>\nhm\n</think>\n\nyes", "<tool_call>\n{}\n</tool_call>", "<s>[INST] hi [/INST] ok</s>",
    "a</s>b <s> c", "<|eot_id|> <|begin_of_text|>", "<|assistant|>\n  x<|end|>\n\ny", "  <|end|>  ", "<start_of_turn>user\nq<end_of_turn>\n",
    "<0x41>", "▁under▁", "\r\n windows \r\n", "mixed 中文 and English 和 123", "\U0001F9D1\u200d\U0001F680", "Ġnot Ċ",
]
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


def config(**values):
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **values}


def byte_level(pattern, first):
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    t.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    t.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=first, initial_alphabet=alphabet, show_progress=False))
    return t


def qwen():
    t = byte_level(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+", 420)
    t.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False)
    t.add_special_tokens(CHATML)
    t.add_tokens([AddedToken(m, normalized=False) for m in MARKUP])
    return t, config(eos_token="<|im_end|>", pad_token="<|endoftext|>"), {"eos_token_id": [t.token_to_id("<|im_end|>"), t.token_to_id("<|endoftext|>")]}


def llama3():
    t = byte_level(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+", 400)
    t.normalizer = None
    t.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    bos = "<|begin_of_text|>"
    t.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=True),
        processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, t.token_to_id(bos))]),
    ])
    return t, config(bos_token={"content": bos, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "__type": "AddedToken"}, eos_token="<|eot_id|>"), {"eos_token_id": t.token_to_id("<|eot_id|>")}


def metaspace():
    names = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    t = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    t.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    ascii_only = [s for s in CORPUS if s.isascii()]
    t.train_from_iterator(ascii_only, trainers.BpeTrainer(vocab_size=440, special_tokens=names, max_token_length=8, show_progress=False))
    raw = json.loads(t.to_str())
    raw["added_tokens"] = [a for a in raw["added_tokens"] if not a["content"].startswith("<0x")]
    t = Tokenizer.from_str(json.dumps(raw))
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    t.add_special_tokens(["[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"])
    t.add_special_tokens([AddedToken(n, rstrip=True, normalized=False) for n in ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"]])
    t.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", t.token_to_id("<s>"))])
    return t, config(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<|pad|>"), None


def prepend():
    t, settings, generation = metaspace()
    t.pre_tokenizer = None
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return t, settings, generation


def strings(directory):
    hf = AutoTokenizer.from_pretrained(directory)
    backend = hf.backend_tokenizer
    rows = []
    for text in STRINGS:
        backend.encode_special_tokens = True
        plain = backend.encode(text, add_special_tokens=False).ids
        backend.encode_special_tokens = False
        prompt, markup = hf(text)["input_ids"], hf(text, add_special_tokens=False)["input_ids"]
        rows.append({"text": text, "plain": plain, "markup": markup, "prompt": prompt,
                     "decoded": backend.decode(prompt, skip_special_tokens=False), "skipped": backend.decode(prompt, skip_special_tokens=True)})
    return rows


def tool(name, text):
    return {"type": "function", "function": {"name": name, "description": text, "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "description": "It's <a> \"city\" & more: Köln"}, "days": {"type": "array", "items": {"type": "integer"}}}, "required": ["city"]}}}


def call(**arguments):
    return [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]


U = lambda text: {"role": "user", "content": text}
A = lambda text, **more: {"role": "assistant", "content": text, **more}
S = lambda text: {"role": "system", "content": text}
CONVERSATIONS = {
    "one": [U("Hello world!")],
    "system": [S("  Be brief. "), U("What is 6 * 7?"), A(" The answer is 42. "), U("And 12345?")],
    "answered": [U("What is 6 * 7?"), A("42")],
    "long": [U("a"), A("b"), U("c\n"), A("d 👍"), U("é"), A("f")],
    "thinking": [U("q"), A("<think>\nhm, 1 + 1\n</think>\n\nIt is 2."), U("again"), A("<think>\nso\n</think>\n\nStill 2.")],
    "reasoning": [U("q"), A("It is 2.", reasoning_content="one and one")],
    "tools": [U("Weather?"), A("", tool_calls=call(city="Köln", days=[1, 2], deep={"x": 1.5, "y": None, "z": True})), {"role": "tool", "content": "{\"t\": 21}"}, A("It is 21.")],
    "loop": [U("Weather?"), A("Let me see.", reasoning="I need a tool", tool_calls=call(city="a<b>'c'")), {"role": "tool", "content": "21"}, {"role": "tool", "content": "22"}, A("It is 21.", reasoning="done")],
    "odd": [A("first")],
}
TEMPLATES = {"qwen25": "qwen", "qwen3": "qwen", "generation": "qwen", "llama3": "llama3", "mistral": "metaspace", "gemma2": "metaspace", "phi3": "metaspace"}
TOJSON = [
    ("{{ x | tojson }}", {"x": {"b": 1, "a": [1.0, 0.5, 1e22, 1e-7, 1.5e16, 123456789.125, -0.0, 10**15, 1e15]}}),
    ("{{ x | tojson }}", {"x": "<b> & 'q' \"d\" \\ \n\t\r\x08\x0c\x01\x7f é 👍 \u2028"}),
    ("{{ x | tojson(ensure_ascii=True) }}", {"x": "é 👍 <b> \x7f"}),
    ("{{ x | tojson(ensure_ascii=False) }}", {"x": "é 👍"}),
    ("{{ x | tojson(indent=2) }}", {"x": {"a": {"b": [1, {"c": []}]}, "d": {}, "e": None}}),
    ("{{ x | tojson(indent=0) }}", {"x": [1, 2]}),
    ("{{ x | tojson(indent='\t') }}", {"x": {"a": [1]}}),
    ("{{ x | tojson(separators=(',', ':')) }}", {"x": {"a": [1, 2], "b": "c"}}),
    ("{{ x | tojson(indent=2, separators=(' ;', ' = ')) }}", {"x": {"a": [1, 2]}}),
    ("{{ x | tojson(sort_keys=True) }}", {"x": {"b": {"z": 1, "y": 2}, "a": 0}}),
    ("{{ x | tojson }}", {"x": [True, False, None, -5, 18446744073709551615, ""]}),
    ("{{ missing | length }}|{{ x | length }}|{{ missing }}", {"x": [1]}),
    ("{{ x }} {{ y }} {{ z }} {{ 1 == 1 }}", {"x": True, "y": None, "z": 1.0}),
    ("{% for k, v in x.items() %}{{ k }}={{ v }};{% endfor %}", {"x": {"z": 1, "items": 2, "a": "3"}}),
    ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}", {}),
    ("a\r\n{% if true %}\r\n  b\r\n{% endif %}\r\nc\r\n", {}),
    ("  {% set x = 1 %}\n  {{ x }}\n  {%+ if true %} y{% endif %}\n", {}),
    ("{{ x.split('</think>')[-1].lstrip('\\n') }}|{{ x[:3] }}|{{ x[::-1] }}", {"x": "<think>a</think>\n\nb"}),
    ("{{ 'a' ~ 1 ~ none }} {{ x | join(', ') }} {{ x | map('upper') | list | last }} {{ x | selectattr('z') | list | length }}", {"x": ["a", "b"]}),
    ("{% set ns = namespace(n=0) %}{% for i in [1,2,3] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", {}),
    ("{% for v in x %}{{ v is iterable }}{{ v is sequence }}{{ v is mapping }}{{ v is string }}{{ v is number }}{{ v is integer }}{{ v is float }}{{ v is boolean }}{{ v is true }}{{ v is none }} {% endfor %}{{ missing is iterable }}",
     {"x": [None, True, False, 0, 1, 1.5, "", "a", [], [1], {}, {"a": 1}]}),
    ("{% for v in x %}{{ 'y' if v else 'n' }}{{ v | string }}|{{ v is in [1, 'a'] }}|{{ v == 1 }} {% endfor %}", {"x": [None, True, 0, 1, 1.0, "", "a", [], [1, "b", None], {}, {"a": 'q"\'', "b": 1.5}]}),
    ("{{ x.strip() }}|{{ x | trim }}|{{ x | upper }}|{{ x.replace('a', 'b', 1) }}|{{ x.split() }}|{{ x.split(',', 1) | last }}|{{ x.rfind('a') }}|{{ x | replace('a', 'c') }}|{{ x.count('a') }}|{{ x.splitlines() }}", {"x": " a,a b\n, c "}),
    ("{{ x | default('d') }}{{ y | default('d') }}{{ y | default('d', true) }}{{ z | default }}|{{ d.get('k') }}{{ d.get('q', 1) }}{{ d.k is defined }}{{ d | items | list }}{{ d.keys() | list }}|{{ (d | dictsort)[0] }}", {"y": "", "d": {"b": 1, "a": [1]}}),
    ("{{ (1, 2) }} {{ 7 // 2 }} {{ 7 / 2 }} {{ -7 % 3 }} {{ 2 ** 3 }} {{ 'a' * 3 }} {{ [1] + [2] }} {{ 1 if false }}|{{ 10000000000 * 10 }} {{ 'a' < 'b' }}|{{ x | selectattr('a', 'equalto', 1) | map(attribute='b') | list }} {{ x | rejectattr('a') | list }} {{ x | first }} {{ 'abc' | list }} {{ x | indent(2) if false }}", {"x": [{"a": 1, "b": 2}, {"a": 0, "b": 3}]}),
    ("{% set t %}  a\n b{% endset %}{{ t | indent(4) }}|{{ t | indent(2, true) }}|{{ ['b', 'a'] | sort | join }}|{{ [1, 2, 3] | sum }}|{{ '%.2f' | format(1.5) }}|{{ [1, [2]] | string | length }}|{{ loop is defined }}|{{ 'a\\nb' }}|{{ \"it's\" }}", {}),
    ("{% for v in x %}{{ v }} {{ v | string }} {{ '=' ~ v }} {{ v is number }}{{ v is float }}{{ v is integer }}{{ v is string }}{{ v is mapping }} {{ v | tojson }};{% endfor %}{{ x }} {{ x | join(',') }} {{ x | tojson }}",
     {"x": [1e-7, 1e16, 1.5e300, -2.5e-5, 0.0001, 1e15, {"a": 3e-9}]}),
    ("{% macro m(a, b=2) %}{{ a }}-{{ b }}{% endmacro %}{{ m(1) }} {{ m(1, b='x') }}", {}),
]


def render(name, messages, add_generation_prompt, tools, extra, hf):
    try:
        return {"text": hf.apply_chat_template(messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **extra)}
    except Exception as e:  # the template's own refusal, or a missing field
        return {"error": str(e)}


def chats():
    rows = []
    tools = [tool("weather", "Tells the weather."), tool("other", "Ünïcode </tools> 'x'")]
    for name, owner in TEMPLATES.items():
        hf = AutoTokenizer.from_pretrained(ROOT / owner)
        hf.chat_template = (ROOT / "templates" / f"{name}.jinja").read_text()
        extra = {"date_string": "15 Nov 2026"} if name == "llama3" else {}
        for conversation, messages in CONVERSATIONS.items():
            for prompt in (True, False):
                variants = [(None, extra)]
                if conversation == "tools":
                    variants.append((tools, extra))
                if name == "qwen3" and conversation == "one":
                    variants.append((None, {"enable_thinking": False}))
                for with_tools, more in variants:
                    row = {"template": name, "tokenizer": owner, "messages": messages, "add_generation_prompt": prompt, "tools": with_tools, "kwargs": more}
                    row |= render(name, messages, prompt, with_tools, more, hf)
                    if "text" in row:
                        row["ids"] = hf(row["text"], add_special_tokens=False)["input_ids"]
                        if name == "generation" and not prompt:
                            row["mask"] = hf.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)["assistant_masks"]
                    rows.append(row)
    return rows


def main():
    for name, make in {"qwen": qwen, "llama3": llama3, "metaspace": metaspace, "prepend": prepend}.items():
        backend, settings, generation = make()
        directory = ROOT / name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tokenizer.json").write_text(backend.to_str(pretty=False))
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
        if generation:
            (directory / "generation_config.json").write_text(json.dumps(generation) + "\n")
        (ROOT / f"{name}.strings.json").write_text(json.dumps(strings(directory), ensure_ascii=True))
    compact = {"ensure_ascii": True, "separators": (",", ":")}
    (ROOT / "chats.json").write_text(json.dumps(chats(), **compact))
    rows = [{"source": s, "context": c, "text": templates._compile_jinja_template(s).render(**c)} for s, c in TOJSON]
    (ROOT / "snippets.json").write_text(json.dumps(rows, **compact))
    size = sum(f.stat().st_size for f in ROOT.rglob("*") if f.is_file())
    print(f"{size} bytes in {ROOT}")


def load(directory):
    hf = AutoTokenizer.from_pretrained(directory)
    rows = json.loads((Path(directory) / "ids.json").read_text())
    for row in rows:
        got = hf(row["text"], add_special_tokens=False)["input_ids"]
        assert got == row["ids"], (row, got)
        assert hf.decode(got, clean_up_tokenization_spaces=False) == row["decoded"], row
    print(type(hf).__name__, len(hf), hf.special_tokens_map, f"{len(rows)} strings agree")
    if hf.chat_template:
        print(repr(hf.apply_chat_template([U("hi"), A("yo")], tokenize=False, add_generation_prompt=True)))


if __name__ == "__main__":
    load(sys.argv[2]) if sys.argv[1:2] == ["--load"] else main()
