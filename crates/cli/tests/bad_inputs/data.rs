//! Data that cannot be learned from, and data that is probably not what its owner thinks it is.

use crate::case::Case;

/// A recipe for the model without a chat template, and what differs.
fn recipe(algo: &str, train: &str, more: &str) -> String {
    format!(
        "algo = {algo:?}\nmodel.path = \"{{model}}\"\ndata.train = {train}\ndata.max_length = 64\ntrain.steps = 1\n\
         train.batch = 2\nrollout = {{ prompts = 2, samples = 2, max_new_tokens = 4 }}\n{more}\n"
    )
}

/// Supervised fine-tuning on `rows.jsonl`.
fn sft(name: &'static str, rows: &str) -> Case {
    Case::new(name, "train r.toml")
        .file("r.toml", recipe("sft", "[\"rows.jsonl\"]", ""))
        .file("rows.jsonl", rows)
        .exit(3)
}

/// The same for the model with a chat template.
fn chat(name: &'static str, rows: &str) -> Case {
    let text = recipe("sft", "[\"rows.jsonl\"]", "").replace("{model}", "{chat}");
    Case::new(name, "train r.toml").file("r.toml", text).file("rows.jsonl", rows).exit(3)
}

/// Any recipe over `rows.jsonl`.
fn with(name: &'static str, text: String, rows: &str) -> Case {
    Case::new(name, "train r.toml").file("r.toml", text).file("rows.jsonl", rows)
}

const ROW: &str = "{\"prompt\": \"a \", \"response\": \"b\"}\n";
const PAIR: &str = "{\"prompt\": \"a \", \"chosen\": \"b\", \"rejected\": \"c\"}\n";

pub fn cases() -> Vec<Case> {
    [sources(), rows(), conversations(), fields(), doubts(), sizes(), models(), check()]
        .into_iter()
        .flatten()
        .collect()
}

/// Columns and fields of messages that other tools write.
fn fields() -> Vec<Case> {
    let talk = |more: &str, answer: &str| {
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"a\"}}, {{\"role\": \"assistant\", \"content\": \"b\"{answer}}}]{more}}}\n"
        )
    };
    let shown = |name, rows: &str| {
        Case::new(name, "data check rows.jsonl").file("rows.jsonl", rows).exit(0).never_says(&["warning"])
    };
    let from = |speaker: &str| {
        format!(
            "{{\"conversations\": [{{\"from\": \"human\", \"value\": \"a\"}}, {{\"from\": \"{speaker}\", \"value\": \"b\"}}]}}\n"
        )
    };
    let pairs = "{\"prompt\": \"c\", \"chosen\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}], \
                 \"rejected\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"d\"}]}\n";
    vec![
        shown("a column with the system message", &talk(", \"system\": \"be short\"", ""))
            .says(&["<|im_start|>system", "be short"]),
        shown("a column with earlier turns", "{\"instruction\": \"a\", \"output\": \"b\", \"history\": [[\"c\", \"d\"]]}\n")
            .says(&["<|im_start|>user\n  c", "<|im_start|>assistant\n  d"]),
        chat("two system messages", "{\"system\": \"a\", \"messages\": [{\"role\": \"system\", \"content\": \"b\"}, {\"role\": \"user\", \"content\": \"c\"}, {\"role\": \"assistant\", \"content\": \"d\"}]}\n")
            .says(&["rows.jsonl:1", "system"]),
        chat("the only turn has no weight", &talk("", ", \"weight\": 0")).says(&["rows.jsonl:1", "loss"]),
        chat("the only turn is not to be trained", &talk("", ", \"train\": false")).says(&["rows.jsonl:1", "loss"]),
        // Was: trained, as every value but the word false.
        chat("a text that says whether a turn is trained", &talk("", ", \"train\": \"false\""))
            .says(&["rows.jsonl:1", "message 2", "train", "true or false"]),
        chat("the only turn is without loss", &talk("", ", \"loss\": false")).says(&["rows.jsonl:1", "loss"]),
        // Was: the weight was dropped with the form of the row, and the turn trained.
        chat(
            "the only turn of a ShareGPT row has no weight",
            "{\"conversations\": [{\"from\": \"human\", \"value\": \"a\"}, {\"from\": \"gpt\", \"value\": \"b\", \"weight\": 0}]}\n",
        )
        .says(&["rows.jsonl:1", "loss"]),
        // Was: "the row has messages", which it has not.
        with(
            "a template asked for and none there",
            recipe("sft", "[\"rows.jsonl\"]", "data.apply_chat_template = true"),
            ROW,
        )
        .exit(4)
        .says(&["rows.jsonl:1", "data.apply_chat_template", "chat template"]),
        // Were: left out without a word, and the model trained without them.
        chat("a system message that is a list", "{\"prompt\": \"a\", \"response\": \"b\", \"system\": [\"c\"]}\n")
            .says(&["rows.jsonl:1", "system", "text"]),
        chat("earlier turns that are a text", "{\"instruction\": \"a\", \"output\": \"b\", \"history\": \"[[1, 2]]\"}\n")
            .says(&["rows.jsonl:1", "history", "list"]),
        chat("a weight of a half", &talk("", ", \"weight\": 0.5")).says(&["rows.jsonl:1", "message 2", "weight", "0.5"]),
        chat("reasoning that the template does not show", &talk("", ", \"reasoning_content\": \"c\""))
            .says(&["rows.jsonl:1", "message 2", "reasoning_content"]),
        chat("another format's word for a role", &talk("", "").replace("assistant", "bot"))
            .says(&["rows.jsonl:1", "message 2", "bot", "assistant"]),
        chat("a function call that the template does not show", &talk("", ", \"function_call\": {\"name\": \"f\"}"))
            .says(&["rows.jsonl:1", "message 2", "function_call"]),
        chat("images beside the messages", &talk(", \"images\": [\"a.png\"]", "")).says(&["rows.jsonl:1", "images"]),
        with("pairs that all have no difference", recipe("dpo", "[\"rows.jsonl\"]", ""), &PAIR.replace("\"c\"", "\"b\"").repeat(3))
            .exit(3)
            .says(&["rows.jsonl", "chosen", "rejected"]),
        with("one example to compare, for KTO", recipe("kto", "[\"rows.jsonl\"]", ""), "{\"prompt\": \"a \", \"completion\": \"b\", \"label\": true}\n")
            .exit(2)
            .says(&["train.batch", "kto"]),
        with(
            "a template with a hundred thousand signs",
            recipe("sft", "[\"rows.jsonl\"]", &format!("data.template = \"{{{{ {}1 }}}}\"", "-".repeat(100_000))),
            ROW,
        )
        .exit(2)
        .says(&["data.template"]),
        Case::new("no JSON on standard input", "score --model {model} --input -").input("x\n").exit(3).says(&["1"]),
        chat("a speaker that nobody knows", &from("chatbox")).says(&["rows.jsonl:1", "message 2", "chatbox"]),
        chat("a role that no template knows", &talk("", "").replace("[", "[{\"role\": \"referee\", \"content\": \"e\"}, "))
            .exit(0)
            .says(&["warning", "role", "rows.jsonl:1"]),
        chat("an empty turn of the assistant", &talk("", "").replace("\"b\"", "\"\""))
            .exit(0)
            .says(&["warning", "an empty response", "rows.jsonl:1"]),
        sft("words that run into each other", "{\"instruction\": \"a b\", \"output\": \"c\"}\n")
            .exit(0)
            .says(&["warning", "rows.jsonl:1", "data.template"]),
        Case::new("a prompt that the pair does not begin with", "data check rows.jsonl")
            .file("rows.jsonl", pairs)
            .exit(0)
            .says(&["warning", "chosen", "rows.jsonl:1"]),
        Case::new("a pair that lacks its other half", "data check rows.jsonl")
            .file("rows.jsonl", "{\"prompt\": \"a\", \"chosen\": \"b\"}\n")
            .exit(3)
            .says(&["chosen", "rejected"]),
    ]
}

/// What `data.train` names.
fn sources() -> Vec<Case> {
    let train = |name, list: &str, more: &str| with(name, recipe("sft", list, more), ROW);
    vec![
        train("a missing file after a generated task", "[\"task:countdown\", \"no_such_file.jsonl\"]", "")
            .exit(3)
            .says(&["no_such_file.jsonl"]),
        train("a missing file", "[\"rows.jsnl\"]", "").exit(3).says(&["rows.jsnl", "rows.jsonl"]),
        // Was: the number of the row in one message, that of the line in another.
        train("an empty cell of a CSV file", "[\"a.csv\"]", "")
            .file("a.csv", "prompt,response\n\"a\nb\",c\nd,\n")
            .exit(3)
            .says(&["a.csv:4", "no value in response"]),
        train("a column twice in a CSV file", "[\"a.csv\"]", "")
            .file("a.csv", "prompt,response,response\na,b,c\n")
            .exit(3)
            .says(&["a.csv:1", "\"response\""]),
        train("a column twice in a JSON file", "[\"a.json\"]", "")
            .file(
                "a.json",
                "[{\"prompt\": \"a\", \"response\": \"b\"},\n\n{\"prompt\": \"a\", \"prompt\": \"b\"}]",
            )
            .exit(3)
            .says(&["a.json:2", "\"prompt\" occurs twice"]),
        // Was: "rename it to .csv".
        train("data compressed with Zstandard", "[\"a.jsonl.zst\"]", "")
            .file("a.jsonl.zst", [0x28, 0xb5, 0x2f, 0xfd, 0, 0])
            .exit(3)
            .says(&["a.jsonl.zst", "Zstandard", "zstd -d", "gzip"])
            .never_says(&["rename"]),
        train("a misspelt task", "[\"rows.jsonl\", \"task:countdwn\"]", "").says(&["countdwn", "countdown"]),
        train("the same task twice", "[\"task:chain\", \"task:chain\"]", "eval.every = 1")
            .says(&["task:chain", "data.train"]),
        train(
            "settings that could be of two tasks",
            "[\"task:chain\", \"task:countdown\"]",
            "data.task.noise = 0.1",
        )
        .says(&["data.task.noise", "data.task.chain.noise"]),
        train("a setting of a task misspelt", "[\"task:chain\"]", "data.task.stpes = 2")
            .says(&["stpes", "steps"]),
        train("more weights than sources", "[\"rows.jsonl\"]", "data.weights = [1.0, 2.0]")
            .says(&["data.weights"]),
        train("a weight of 1e18", "[\"rows.jsonl\"]", "data.weights = [1e18]")
            .says(&["data.weights", "data.weights"]),
        train("a weight that is no number", "[\"rows.jsonl\"]", "data.weights = [nan]")
            .says(&["data.weights", "nan"]),
        train("a negative weight", "[\"rows.jsonl\"]", "data.weights = [-1.0]").says(&["data.weights", "-1"]),
        train("a weight of 0", "[\"rows.jsonl\"]", "data.weights = [0.0]").says(&["data.weights"]),
        train(
            "a weight so small that a source is never drawn",
            "[\"rows.jsonl\", \"task:chain\"]",
            "data.weights = [1.0, 1e-9]",
        )
        .exit(0)
        .says(&["warning", "task:chain", "data.weights"]),
        with(
            "1e300 epochs",
            recipe("sft", "[\"rows.jsonl\"]", "train.epochs = 1e300").replace("train.steps = 1\n", ""),
            ROW,
        )
        .says(&["train.epochs", "1000000"]),
        with(
            "a task without steps",
            recipe("sft", "[\"task:chain\"]", "").replace("train.steps = 1\n", ""),
            ROW,
        )
        .says(&["train.steps"]),
        with(
            "rows that nothing rewards beside a task",
            recipe("grpo", "[\"task:chain\", \"rows.jsonl\"]", ""),
            ROW,
        )
        .says(&["reward", "rows.jsonl"]),
        train("settings of a task that is not named", "[\"rows.jsonl\"]", "data.task.numbers = 3")
            .exit(0)
            .says(&["warning", "data.task", "numbers"]),
        train("a day that does not exist", "[\"rows.jsonl\"]", "data.date = \"2023-02-29\"")
            .says(&["data.date", "2023-02-29"]),
    ]
}

/// Single rows.
fn rows() -> Vec<Case> {
    let pairs = |name, rows: &str| with(name, recipe("dpo", "[\"rows.jsonl\"]", ""), rows).exit(3);
    vec![
        sft("a row without its response", &format!("{ROW}{{\"prompt\": \"x\"}}\n"))
            .says(&["rows.jsonl:2", "response"]),
        sft("a bad row far behind", &format!("{}{{\"prompt\": \"x\"}}\n", ROW.repeat(600)))
            .says(&["rows.jsonl:601"]),
        sft("a misspelt column", "{\"promt\": \"a\", \"response\": \"b\"}\n")
            .says(&["rows.jsonl:1", "prompt = \"promt\""]),
        sft("columns of other names", "{\"question\": \"a\", \"answer\": \"b\"}\n")
            .says(&["rows.jsonl:1", "data.columns", "prompt = \"question\"", "response = \"answer\""]),
        sft("a line that is cut short", &format!("{ROW}{{\"prompt\": \"x")).says(&["rows.jsonl:2", "JSON"]),
        // Was: the last value counted, and the model trained on it.
        sft("a column twice in a row", "{\"prompt\": \"a\", \"response\": \"b\", \"response\": \"c\"}\n")
            .says(&["rows.jsonl:1", "\"response\" occurs twice"]),
        sft("NaN in a row", "{\"prompt\": \"a\", \"response\": \"b\", \"x\": NaN}\n")
            .says(&["rows.jsonl:1", "NaN", "null"]),
        sft("half of a character", "{\"prompt\": \"a\", \"response\": \"\\ud800\"}\n")
            .says(&["rows.jsonl:1", "\\ufffd"]),
        // Was: "got columns prompt", as if the column was not there.
        sft("a column without a value", &format!("{ROW}{{\"prompt\": \"a\", \"response\": null}}\n"))
            .says(&["rows.jsonl:2", "no value in response", "fill in response"]),
        sft("a line that is a list", "[1, 2]\n").says(&["rows.jsonl:1", "list"]),
        sft("a character that the tokenizer does not know", "{\"prompt\": \"a\", \"response\": \"é\"}\n")
            .says(&["rows.jsonl:1", "é"]),
        sft(
            "a prompt that fills data.max_length",
            &format!("{{\"prompt\": \"{}\", \"response\": \"b\"}}\n", "a".repeat(80)),
        )
        .says(&["rows.jsonl:1", "data.max_length", "data.overlong"]),
        sft("an empty file", "").says(&["rows.jsonl", "empty"]),
        sft("a prompt that is an object", "{\"prompt\": {\"a\": 1}, \"response\": \"b\"}\n")
            .says(&["rows.jsonl:1", "prompt"]),
        pairs("chosen without rejected", "{\"prompt\": \"a\", \"chosen\": \"b\"}\n")
            .says(&["rows.jsonl:1", "rejected"]),
        pairs("a margin that is text", &PAIR.replace('}', ", \"margin\": \"x\"}"))
            .says(&["rows.jsonl:1", "margin"]),
        with(
            "a reward beyond the range of numbers",
            recipe("grpo", "[\"rows.jsonl\"]", ""),
            "{\"prompt\": \"a\", \"completions\": [\"b\", \"c\"], \"rewards\": [1, 1e300]}\n",
        )
        .exit(3)
        .says(&["rows.jsonl:1", "rewards", "item 2", "1e+300"]),
        with(
            "more rewards than completions",
            recipe("grpo", "[\"rows.jsonl\"]", ""),
            "{\"prompt\": \"a\", \"completions\": [\"b\"], \"rewards\": [1, 2]}\n",
        )
        .exit(3)
        .says(&["rows.jsonl:1", "rewards"]),
        with(
            "a group with a single completion",
            recipe("grpo", "[\"rows.jsonl\"]", ""),
            "{\"prompt\": \"a\", \"completions\": [\"b\"], \"rewards\": [1]}\n",
        )
        .exit(3)
        .says(&["rows.jsonl:1", "completions"]),
    ]
}

/// Messages and chat templates.
fn conversations() -> Vec<Case> {
    let talk =
        |second: &str| format!("{{\"messages\": [{{\"role\": \"user\", \"content\": \"a\"}}, {second}]}}\n");
    vec![
        chat("a misspelt role", &talk("{\"role\": \"assistent\", \"content\": \"b\"}"))
            .says(&["rows.jsonl:1", "message 2", "assistent", "assistant"]),
        chat("a conversation that nobody answers", &talk("{\"role\": \"user\", \"content\": \"b\"}"))
            .says(&["rows.jsonl:1", "messages", "user"]),
        chat("a message without a role", &talk("{\"content\": \"b\"}")).says(&["rows.jsonl:1", "message 2", "role"]),
        chat(
            "an image in a message",
            &talk("{\"role\": \"assistant\", \"content\": [{\"type\": \"image\", \"url\": \"x\"}]}"),
        )
        .says(&["rows.jsonl:1", "message 2", "part 1", "image"]),
        chat(
            "a tool call that the template does not show",
            &talk("{\"role\": \"assistant\", \"content\": \"\", \"tool_calls\": [{\"function\": {\"name\": \"f\"}}]}"),
        )
        .says(&["rows.jsonl:1", "message 2", "tool_calls"]),
        chat(
            "tools that the template does not show",
            &talk("{\"role\": \"assistant\", \"content\": \"b\"}").replace("]}", "], \"tools\": [{\"name\": \"f\"}]}"),
        )
        .says(&["rows.jsonl:1", "tools"]),
        sft("messages for a model without a chat template", &talk("{\"role\": \"assistant\", \"content\": \"b\"}"))
            .exit(4)
            .says(&["rows.jsonl:1", "chat template"]),
        chat("plain text for a model with a chat template", ROW)
            .exit(0)
            .says(&["warning", "rows.jsonl:1", "data.apply_chat_template"]),
        with(
            "messages with apply_chat_template = false",
            recipe("sft", "[\"rows.jsonl\"]", "data.apply_chat_template = false").replace("{model}", "{chat}"),
            &talk("{\"role\": \"assistant\", \"content\": \"b\"}"),
        )
        .says(&["rows.jsonl:1", "data.apply_chat_template"]),
        with(
            "a prompt template that loops without end",
            recipe(
                "sft",
                "[\"rows.jsonl\"]",
                "data.template = \"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}\"",
            ),
            ROW,
        )
        .exit(3)
        .says(&["rows.jsonl:1", "data.template"]),
    ]
}

/// Rows that can be learned from, with a warning.
fn doubts() -> Vec<Case> {
    let doubt = |name, algo: &str, more: &str, rows: &str| {
        with(name, recipe(algo, "[\"rows.jsonl\"]", more), rows).exit(0)
    };
    let same = PAIR.replace("\"c\"", "\"b\"");
    vec![
        doubt("chosen = rejected", "dpo", "", &format!("{PAIR}{same}"))
            .says(&["warning", "1 of 2", "rows.jsonl:2", "rejected"]),
        doubt("an empty response", "sft", "", &format!("{ROW}{}", ROW.replace("\"b\"", "\"\"")))
            .says(&["warning", "1 of 2", "rows.jsonl:2"]),
        doubt(
            "a response that ends in the end-of-text token",
            "sft",
            "",
            &ROW.replace("\"b\"", "\"b<eos>\""),
        )
        .says(&["warning", "rows.jsonl:1"]),
        doubt(
            "a response longer than data.max_length",
            "sft",
            "",
            &ROW.replace("\"b\"", &format!("\"{}\"", "b".repeat(90))),
        )
        .says(&["warning", "1 of 1", "rows.jsonl:1", "data.max_length = 64", "93"]),
        doubt(
            "rows that are too long and dropped",
            "sft",
            "data.overlong = \"drop\"",
            &format!("{ROW}{}", ROW.replace("a ", &"a".repeat(90))),
        )
        .says(&["warning", "rows.jsonl:2", "data.max_length"]),
        doubt(
            "evaluation rows that are training rows",
            "sft",
            "eval = { every = 1, data = [\"rows.jsonl\"] }",
            ROW,
        )
        .says(&["warning", "1 of 1", "rows.jsonl:1"]),
        doubt(
            "duplicates on both sides of a split",
            "sft",
            "eval = { every = 1, split = 0.5 }",
            &ROW.repeat(2),
        )
        .says(&["warning", "1 of 1", "rows.jsonl:"]),
        doubt("a batch larger than an epoch", "sft", "", ROW).says(&["1/1"]),
    ]
}

/// Lengths and sizes.
fn sizes() -> Vec<Case> {
    let long = ROW.replace("\"b\"", &format!("\"{}\"", "b".repeat(9 << 20)));
    vec![
        sft("data that are a device", ROW)
            .arg("data.train=/dev/null")
            .says(&["/dev/null", "device"])
            .never_says(&["did you mean"]),
        sft("a row of megabytes", &format!("{ROW}{long}")).says(&["rows.jsonl:2", "MiB"]),
        with(
            "a prompt longer than data.max_length",
            recipe("grpo", "[\"rows.jsonl\"]", "reward = [{ verifier = \"exact\" }]"),
            &ROW.replace("a ", &"a".repeat(90)),
        )
        .exit(3)
        .says(&["rows.jsonl:1", "90", "data.max_length"]),
        with(
            "every row dropped",
            recipe("sft", "[\"rows.jsonl\"]", "data.overlong = \"drop\""),
            &ROW.replace("a ", &"a".repeat(90)),
        )
        .exit(3)
        .says(&["rows.jsonl", "data.max_length"]),
    ]
}

/// Models that are none.
fn models() -> Vec<Case> {
    let named = |name, path: &str| {
        Case::new(name, "train r.toml")
            .file("r.toml", recipe("sft", "[\"rows.jsonl\"]", "").replace("{model}", path))
            .file("rows.jsonl", ROW)
            .exit(4)
    };
    vec![
        named("a GGUF file as the model", "m.gguf")
            .file("m.gguf", "GGUF....")
            .says(&["m.gguf", "GGUF", "transformers"]),
        named("a folder of GGUF files as the model", "m")
            .file("m/q4.gguf", "GGUF....")
            .says(&["q4.gguf", "GGUF", "transformers"]),
        named("a pickle as the model", "pytorch_model.bin")
            .file("pytorch_model.bin", "PK")
            .says(&["pytorch_model.bin", "transformers"]),
        named("a file of weights as the model", "m/model.safetensors")
            .file("m/model.safetensors", "x")
            .says(&["model.safetensors", "directory"]),
    ]
}

/// `ferrl data check`.
fn check() -> Vec<Case> {
    let bad = "{\"question\": \"a\", \"answer\": \"b\"}\n".repeat(50);
    vec![
        Case::new("one fault in many rows", "data check rows.jsonl")
            .file("rows.jsonl", &bad)
            .exit(3)
            .says(&["50 rows", "rows.jsonl:1", "rows.jsonl:3", "prompt = \"question\""])
            .never_says(&["rows.jsonl:4"]),
        Case::new("a misspelt setting of data check", "data check rows.jsonl data.max_lenght=3")
            .file("rows.jsonl", ROW)
            .says(&["max_lenght", "max_length"]),
        Case::new("data check of rows without a reward's column", "data check --recipe r.toml")
            .file("r.toml", recipe("grpo", "[\"rows.jsonl\"]", "reward = { verifier = \"exact\" }"))
            .file("rows.jsonl", "{\"prompt\": \"a\", \"answer\": \"b\"}\n{\"prompt\": \"a\"}\n")
            .exit(3)
            .says(&["rows.jsonl:2", "answer", "1 problem"]),
        Case::new("data check with an unknown verifier", "data check --recipe r.toml")
            .file("r.toml", recipe("grpo", "[\"rows.jsonl\"]", "reward = { verifier = \"exactly\" }"))
            .file("rows.jsonl", "{\"prompt\": \"a\", \"answer\": \"b\"}\n")
            .says(&["reward", "exactly", "exact"]),
        Case::new(
            "data check with an unknown verifier as a change",
            "data check rows.jsonl --algo grpo reward.0.verifier=exactly",
        )
        .file("rows.jsonl", "{\"prompt\": \"a\", \"answer\": \"b\"}\n")
        .says(&["reward", "exactly", "exact"]),
        Case::new("data check with an unknown algorithm as a change", "data check rows.jsonl algo=bogus")
            .file("rows.jsonl", ROW)
            .says(&["algo", "bogus"]),
        Case::new("a text file without text", "data check rows.txt")
            .file("rows.txt", "\n\n")
            .exit(3)
            .says(&["rows.txt"]),
        Case::new("control characters in data", "data check rows.jsonl")
            .file("rows.jsonl", "{\"prompt\": {\"\\u001b[31mred\": 1}, \"response\": \"b\"}\n")
            .exit(3)
            .says(&["rows.jsonl:1"]),
    ]
}
