//! What evaluations read and what other models must take: looked at before any step of any stage, and before any question.

use crate::case::Case;
use crate::rewards::{ROWS, grpo};

pub fn cases() -> Vec<Case> {
    let held_out = |name, rows: &str| {
        Case::new(name, "train r.toml --dry-run")
            .file(
                "r.toml",
                grpo("reward = { verifier = \"exact\" }\neval = { every = 1, data = [\"e.jsonl\"] }\n"),
            )
            .file("rows.jsonl", ROWS)
            .file("e.jsonl", rows)
            .exit(3)
    };
    let lacks = "{\"prompt\": \"5+1=\", \"answer\": \"6\"}\n{\"prompt\": \"x\"}\n";
    let second = |name, more: &str| {
        let stages = format!(
            "model.path = \"{{model}}\"\ntrain = {{ steps = 9, batch = 2 }}\ndata.max_length = 32\n\
             rollout = {{ prompts = 2, samples = 2, max_new_tokens = 4, cache_mib = 4 }}\n\
             [[stage]]\nname = \"imitate\"\nalgo = \"sft\"\ndata.train = \"given.jsonl\"\n\
             [[stage]]\nname = \"second\"\n{more}"
        );
        Case::new(name, "train r.toml")
            .file("r.toml", stages)
            .file("given.jsonl", "{\"prompt\": \"a \", \"response\": \"b\"}\n")
            .file("rows.jsonl", ROWS)
            .file("e.jsonl", lacks)
            .says(&["stage second"])
            .leaves_no(&["runs"])
    };
    let many: String =
        (0..3000).map(|i| format!("{{\"prompt\": \"{i}=\", \"answer\": \"{i}\"}}\n")).collect();
    let beside = |name, algo: &str, more: &str| {
        Case::new(name, "train r.toml --dry-run")
            .file("r.toml", grpo(more).replace("dr_grpo", algo))
            .file("rows.jsonl", ROWS.replace("1+1=", "1+1+1+1+1+1+1=") + ROWS)
            .exit(3)
            .says(&["rows.jsonl:1", "16"])
    };
    vec![
        held_out("an evaluation row without the answer", lacks).says(&["e.jsonl:2", "answer"]),
        held_out("the last of many evaluation rows without the answer", &(many + "{\"prompt\": \"x\"}\n"))
            .says(&["e.jsonl:3001", "answer"]),
        second(
            "an evaluation row of a later stage without the answer",
            "algo = \"grpo\"\ndata.train = \"rows.jsonl\"\nreward = { verifier = \"exact\" }\neval = { every = 1, data = [\"e.jsonl\"] }\n",
        )
        .exit(3)
        .says(&["e.jsonl:2", "answer"]),
        second(
            "a later stage whose evaluation nothing rewards",
            "algo = \"grpo\"\ndata.train = \"task:countdown\"\neval = { every = 1, data = [\"task:countdown\", \"nope.jsonl\"] }\n",
        )
        .says(&["eval.data", "nope.jsonl"]),
        second(
            "a later stage whose reward function asks for a column that is not there",
            "algo = \"grpo\"\ndata.train = \"rows.jsonl\"\nreward = { python = \"my.py\" }\n",
        )
        .file("my.py", "def reward(completions, solution, **kw):\n    return [1.0 for c in completions]\n")
        .says(&["rows.jsonl:1", "my.py", "solution"]),
        beside("a reward model of fewer positions", "dr_grpo", "reward = { model = \"{judge}\" }\n")
            .says(&["reward.0.model"]),
        beside("a teacher of fewer positions", "distill", "teacher.path = \"{short}\"\n").says(&["teacher.path"]),
        beside(
            "a critic of fewer positions",
            "ppo",
            "critic.path = \"{short}\"\nreward = { verifier = \"exact\" }\n",
        )
        .says(&["critic.path"]),
        Case::new("a critic of fewer tokens", "train r.toml --dry-run")
            .file("r.toml", grpo("critic.path = \"{few}\"\nreward = { verifier = \"exact\" }\n").replace("dr_grpo", "ppo"))
            .file("rows.jsonl", ROWS)
            .exit(4)
            .says(&["critic.path", "the critic's model 20"]),
        Case::new(
            "eval of a row without the answer",
            "eval {model} --data e.jsonl --verifier exact --max-new-tokens 3",
        )
        .file("e.jsonl", lacks)
        .exit(3)
        .says(&["e.jsonl:2", "answer"]),
        Case::new("eval beyond learned positions", "eval {short} --data rows.jsonl --verifier exact --max-new-tokens 14")
            .file("rows.jsonl", ROWS)
            .exit(3)
            .says(&["rows.jsonl:1", "16", "max_new_tokens = 13"]),
        Case::new("eval to the last learned position", "eval {short} --data rows.jsonl --verifier exact --max-new-tokens 13")
            .file("rows.jsonl", ROWS)
            .exit(0)
            .says(&["2 prompts"]),
    ]
}
