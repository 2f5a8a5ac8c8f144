//! Episodes with tools, by hand-made plays.

use super::*;
use crate::task::{Task, find};
use crate::{tool, verify};

fn task(name: &str, options: Value) -> Box<dyn Task> {
    (find(name).unwrap().build)(options.as_object().unwrap(), 7).unwrap()
}

fn episode(max_calls: usize) -> ToolEpisode {
    let index = tool::SearchIndex::new(vec![tool::Document {
        title: "Emma".into(),
        text: "Jane Austen wrote Emma.".into(),
    }]);
    let search: Arc<dyn Tool> = Arc::new(tool::SearchTool::over(Arc::new(index), 1));
    let tools = vec![search, tool::build("calculator", &Map::new()).unwrap()];
    let exact = json!({ "take": "answer" });
    let verifier = Arc::from(verify::build("exact", exact.as_object().unwrap()).unwrap());
    let columns = json!({ "answer": "Jane Austen" }).as_object().unwrap().clone();
    let limits = ToolLimits { max_calls, ..Default::default() };
    ToolEpisode::new("Who wrote Emma?\n".into(), columns, tools.into(), Some(verifier), limits)
}

fn shown(turn: &Turn) -> &str {
    match &turn.next {
        Next::Observation(text) => text,
        Next::State(_) => panic!("results are appended"),
    }
}

#[test]
fn a_call_gets_its_result_and_the_answer_its_reward() {
    let mut episode = episode(2);
    assert_eq!(episode.start().unwrap(), "Who wrote Emma?\n");
    let turn = episode.step("<search>author of Emma</search>").unwrap();
    let want = "\n\n<information>Doc 1(Title: Emma) Jane Austen wrote Emma.</information>\n\n";
    assert_eq!((shown(&turn), turn.reward, turn.end), (want, 0.0, None));
    let turn = episode.step("<answer>Jane Austen</answer>").unwrap();
    assert_eq!((turn.reward, turn.score, turn.end), (1.0, Some(1.0), Some(EpisodeEnd::Terminated)));
    assert_eq!((&turn.extra["tool_calls"], &turn.extra["tool_errors"]), (&json!(1), &json!(0)));
}

#[test]
fn results_are_written_as_the_call_was() {
    let hermes = "<tool_call>{\"name\": \"calculator\", \"arguments\": {\"expression\": \"2*3\"}}</tool_call>\n\
                  <tool_call>{\"name\": \"calculator\", \"arguments\": {\"expression\": \"1/0\"}}</tool_call>";
    let turn = episode(2).step(hermes).unwrap();
    let want = "\n<tool_response>\n6\n</tool_response>\n<tool_response>\nerror: division by zero\n</tool_response>\n";
    assert_eq!(shown(&turn), want);
    assert_eq!(turn.extra["tool_errors"], json!(1));
    let llama = "{\"name\": \"calculator\", \"parameters\": {\"expression\": \"2*3\"}}";
    assert_eq!(shown(&episode(2).step(llama).unwrap()), "\n6\n");
}

#[test]
fn a_call_that_cannot_be_read_gets_a_hint_and_counts() {
    let mut episode = episode(1);
    let turn = episode.step("<tool_call>{\"name\": \"serch\"}</tool_call>").unwrap();
    assert!(shown(&turn).contains("did you mean search?") && turn.end.is_none(), "{turn:?}");
    let turn = episode.step("<search>Emma</search>").unwrap();
    assert_eq!((turn.reward, turn.score, turn.end), (0.0, Some(0.0), Some(EpisodeEnd::Terminated)));
    assert!(shown(&turn).contains("no calls are left"));
}

#[test]
fn what_comes_first_decides_and_no_call_is_an_answer() {
    let first = episode(2).step("<answer>Jane Austen</answer> <search>x</search>").unwrap();
    assert_eq!((first.reward, first.end), (1.0, Some(EpisodeEnd::Terminated)));
    let late = episode(2).step("<search>Emma</search><answer>Jane Austen</answer>").unwrap();
    assert_eq!((late.reward, late.end), (0.0, None));
    let silent = episode(2).step("I do not know").unwrap();
    assert_eq!((silent.reward, silent.end), (0.0, Some(EpisodeEnd::Terminated)));
}

#[test]
fn one_action_with_many_calls_makes_no_more_than_the_limit() {
    let turn = episode(2).step(&"<calculator>1+1</calculator>".repeat(5)).unwrap();
    assert_eq!(shown(&turn), "\n\n<information>2\n2\nerror: no calls are left</information>\n\n");
}

#[test]
fn demonstrations_are_right_with_the_tool_and_without() {
    for (name, options) in [
        ("calculator", json!({})),
        ("calculator", json!({ "digits": 9, "numbers": 8, "instructions": false })),
        ("calculator", json!({ "tool": false })),
        ("search", json!({ "people": 200 })),
        ("search", json!({ "people": 200, "instructions": false, "topk": 1 })),
    ] {
        let task = task(name, options.clone());
        let mut called = 0;
        for index in 0..200 {
            for held_out in [false, true] {
                let example = task.example(index, held_out).unwrap();
                assert_eq!(example, task.example(index, held_out).unwrap());
                let mut episode = task.episode(index, held_out).unwrap();
                assert_eq!(episode.start().unwrap(), example.prompt);
                called += example.turns.len() - 1;
                for (i, (action, observation)) in example.turns.iter().enumerate() {
                    let turn = episode.step(action).unwrap();
                    assert_eq!(shown(&turn), observation);
                    let last = i + 1 == example.turns.len();
                    assert_eq!(
                        (turn.reward, turn.end.is_some()),
                        (f64::from(u8::from(last)), last),
                        "{example:?}"
                    );
                    let answer = example.columns["answer"].as_str().unwrap();
                    assert!(last || observation.contains(answer), "{example:?}");
                }
            }
        }
        let tool = options["tool"] != json!(false);
        assert!(if tool { (120..280).contains(&called) } else { called == 0 }, "{name}: {called} of 400");
    }
}

#[test]
fn people_have_names_of_their_own_and_evaluations_ask_about_others() {
    let task = task("search", json!({ "people": 100, "instructions": false }));
    let asked = |held_out| -> std::collections::HashSet<String> {
        let name = |i| {
            let prompt = task.example(i, held_out).unwrap().prompt;
            prompt.split(' ').find(|word| word.len() >= 8).unwrap().to_string()
        };
        (0..500).map(name).collect()
    };
    assert!(asked(false).is_disjoint(&asked(true)));
    assert!(asked(false).len() > 80 && asked(true).len() == 10);
}

#[test]
fn the_users_documents_and_questions_are_asked() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let documents = write("d.jsonl", "{\"text\": \"Jane Austen wrote Emma.\"}\n{\"text\": \"Cats purr.\"}\n");
    let questions = write(
        "q.jsonl",
        "{\"question\": \"Who wrote Emma?\", \"golden_answers\": [\"Jane Austen\", \"Austen\"]}\n",
    );
    let task = task("search", json!({ "documents": documents, "questions": questions, "topk": 1 }));
    let mut episode = task.episode(0, true).unwrap();
    assert!(
        episode.start().unwrap().starts_with("Who wrote Emma?\nCall search with <search>query</search>.")
    );
    assert!(shown(&episode.step("<search>Emma</search>").unwrap()).contains("Doc 1 Jane Austen wrote Emma."));
    assert_eq!(episode.step("<answer>austen.</answer>").unwrap().reward, 1.0);
    let build = |options: Value| {
        (find("search").unwrap().build)(options.as_object().unwrap(), 7).err().unwrap().to_string()
    };
    assert!(build(json!({ "documents": documents })).contains("data.task.questions"));
    assert!(
        build(json!({ "documents": documents, "questions": documents })).contains("`question` and `answer`")
    );
    assert!(build(json!({ "people": 3 })).contains("people"));
}
