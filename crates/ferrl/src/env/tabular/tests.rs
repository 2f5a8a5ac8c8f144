//! The language, the models and the metrics by hand; grades, limits and files.

use super::model::Matrix;
use super::*;
use serde_json::Value;

fn task(options: Value) -> Tabular {
    Tabular::new(serde_json::from_value(options).unwrap(), 7).unwrap()
}

fn shown(turn: &Turn) -> &str {
    match &turn.next {
        Next::Observation(text) => text.trim(),
        Next::State(_) => panic!("results are appended"),
    }
}

fn metric(name: &str) -> TabularMetric {
    TabularMetric::ALL.iter().find(|(n, _)| *n == name).unwrap().1
}

#[test]
fn metrics_by_hand() {
    let classes = |rows: &[usize]| PredictionTarget::Classes(vec!["no".into(), "yes".into()], rows.to_vec());
    let of = |p: f64| vec![1.0 - p, p];
    let outputs: Matrix = [0.9, 0.4, 0.6, 0.2].map(of).to_vec();
    let truth = classes(&[1, 1, 0, 0]);
    let value = |name: &str| metric(name).value(&outputs, &truth);
    assert_eq!((value("accuracy"), value("balanced_accuracy"), value("auc")), (0.5, 0.5, 0.75));
    let loss = -(0.9f64.ln() + 0.4f64.ln() + 0.4f64.ln() + 0.8f64.ln()) / 4.0;
    assert!((value("log_loss") - loss).abs() < 1e-12);
    let tied: Matrix = [0.5, 0.5, 0.5].map(of).to_vec();
    assert_eq!(metric("auc").value(&tied, &classes(&[1, 0, 0])), 0.5);
    let numbers = PredictionTarget::Numbers(vec![1.0, 2.0, 6.0]);
    let said: Matrix = vec![vec![1.0], vec![4.0], vec![4.0]];
    assert!((metric("rmse").value(&said, &numbers) - (8.0f64 / 3.0).sqrt()).abs() < 1e-12);
    assert!((metric("mae").value(&said, &numbers) - 4.0 / 3.0).abs() < 1e-12);
    assert!((metric("r2").value(&said, &numbers) - (1.0 - 8.0 / 14.0)).abs() < 1e-12);
    assert_eq!(metric("accuracy").improvement(0.8, 0.6), 0.5000000000000001);
    assert_eq!((metric("rmse").improvement(1.0, 2.0), metric("rmse").improvement(9.0, 2.0)), (0.5, -1.0));
}

#[test]
fn models_learn_what_they_can() {
    let x: Matrix = (0..40).map(|i| vec![f64::from(i % 8), f64::from(i / 8)]).collect();
    let line: Matrix = x.iter().map(|r| vec![2.0 * r[0] - 3.0 * r[1] + 1.0]).collect();
    let near =
        |a: &Matrix, b: &Matrix, within: f64| a.iter().zip(b).all(|(a, b)| (a[0] - b[0]).abs() < within);
    assert!(near(&TabularModel::Ridge { alpha: 0.0 }.predict(&x, &line, &x), &line, 1e-6));
    assert!(!near(&TabularModel::Ridge { alpha: 100.0 }.predict(&x, &line, &x), &line, 0.5));
    assert!(near(&TabularModel::Knn { k: 1 }.predict(&x, &line, &x), &line, 1e-12));
    let step: Matrix = x.iter().map(|r| vec![if r[0] > 3.5 { 1.0 } else { 0.0 }]).collect();
    assert!(near(&TabularModel::Tree { depth: 1 }.predict(&x, &step, &x), &step, 1e-12));
    // Two columns that say the same have a solution, too.
    let twice: Matrix = x.iter().map(|r| vec![r[0], r[0]]).collect();
    let half: Matrix = x.iter().map(|r| vec![r[0]]).collect();
    assert!(near(&TabularModel::Ridge { alpha: 0.0 }.predict(&twice, &half, &twice), &half, 1e-3));
}

#[test]
fn a_pipeline_is_built_validated_and_graded() {
    let task = task(json!({ "rows": 400 }));
    let mut episode = task.play(3, false);
    let first = episode.start().unwrap();
    assert!(
        first.starts_with("Predict target (no|yes) by accuracy: 300 rows, 100 graded.\na: numbers, "),
        "{first}"
    );
    assert!(first.contains("model tree DEPTH"));
    let turn = episode.step("submit").unwrap();
    assert_eq!((shown(&turn), turn.end, turn.reward), ("error: there is no model yet", None, 0.0));
    let turn = episode.step("First:\nimpute mean\nscale standard\nencode onehot\nmodel tree 6").unwrap();
    assert_eq!(shown(&turn), "ok\nok\nok\nok");
    let turn = episode.step("validate").unwrap();
    let validated: f64 = shown(&turn).strip_prefix("accuracy ").unwrap().parse().unwrap();
    let turn = episode.step("submit").unwrap();
    let (value, baseline) =
        (turn.extra["accuracy"].as_f64().unwrap(), turn.extra["baseline"].as_f64().unwrap());
    assert!((value - validated).abs() < 0.12 && value > baseline + 0.1, "{validated} {value} {baseline}");
    assert!((turn.reward - (value - baseline) / (1.0 - baseline)).abs() < 1e-12);
    assert_eq!((turn.score, turn.end), (Some(1.0), Some(EpisodeEnd::Terminated)));
}

#[test]
fn wrong_commands_are_answered_and_cost_a_turn() {
    let task = task(json!({ "turns": 9 }));
    let mut episode = task.play(0, false);
    for (action, part) in [
        ("hello", "no command"),
        ("", "no command"),
        ("impute", "none of zero, mean"),
        ("model forest", "none of linear"),
        ("model knn 0", "no number from 1"),
        ("model tree NaN", "no number from 1"),
        ("drop zzz", "none of a, b"),
        ("model knn k=3\ndrop a\ndrop b\ndrop c\ndrop d\nvalidate", "no features are left"),
    ] {
        let turn = episode.step(action).unwrap();
        assert!(
            shown(&turn).contains(part) && turn.end.is_none() && turn.reward == 0.0,
            "{action}: {turn:?}"
        );
    }
    let turn = episode.step("validate").unwrap();
    assert_eq!((turn.end, turn.score, turn.reward), (Some(EpisodeEnd::Terminated), Some(0.0), 0.0));
}

#[test]
fn random_players_repeat_by_seed_end_and_earn_within_bounds() {
    for name in ["accuracy", "rmse", "auc", "log_loss"] {
        let task = task(json!({ "metric": name, "rows": 60 }));
        let mut prompts = Vec::new();
        for index in 0..30 {
            let example = task.example(index, true).unwrap();
            assert_eq!(example, task.example(index, true).unwrap());
            assert!(example.turns.len() <= 10);
            let mut episode = task.play(index, true);
            assert_eq!(episode.start().unwrap(), example.prompt);
            let rewards: Vec<f64> =
                example.turns.iter().map(|(a, _)| episode.step(a).unwrap().reward).collect();
            assert!((-1.0..=1.0).contains(&rewards.iter().sum::<f64>()), "{rewards:?}");
            prompts.push(example.prompt);
        }
        prompts.dedup();
        assert!(prompts.len() > 1);
    }
}

/// Was possible by mistake: a scaler or an imputer that learns from the rows that are graded.
#[test]
fn nothing_is_learned_from_the_graded_rows() {
    let problem = make_up(MadeUp { rows: 80, regression: true }, &mut TaskDraw::new("leak", 1, 0));
    let mut other = problem.clone();
    let Column::Numbers(cells) = &mut other.test.columns[0] else { panic!("numbers first") };
    cells[1..].iter_mut().for_each(|cell| *cell = Some(1e6));
    other.test.target = PredictionTarget::Numbers(vec![0.0; problem.test.rows()]);
    for scale in [Scale::Standard, Scale::MinMax] {
        let (encode, impute) = (WordEncoding::OneHot, Impute::Median);
        let model = Some(TabularModel::Ridge { alpha: 1.0 });
        let pipeline = TabularPipeline { scale, encode, impute, model, ..Default::default() };
        let first = |p: &TabularProblem| pipeline.predict(&p.train, &p.test).unwrap().remove(0);
        assert_eq!(first(&problem), first(&other));
    }
}

#[test]
fn the_users_files_are_read_and_bad_ones_named() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let row = |i: usize| format!("{},{},{}\n", i, if i.is_multiple_of(5) { "" } else { "x" }, 2 * i);
    let train = write("train.csv", format!("n,w,price\n{}", (0..20).map(row).collect::<String>()));
    let test = write("test.csv", format!("n,w,price\n{}", (30..35).map(row).collect::<String>()));
    let options = json!({ "train": train, "test": test, "target": "price", "metric": "rmse" });
    let task = task(options);
    let mut episode = task.play(0, false);
    assert!(episode.start().unwrap().contains("Predict price (a number) by rmse: 20 rows, 5 graded.\nn: numbers, 0 % missing\nw: words, 20 % missing"));
    let turn = episode.step("model linear\nsubmit").unwrap();
    assert!(turn.reward > 0.999, "{turn:?}");
    let error = |options: Value| {
        let entry = ENTRY;
        (entry.build)(options.as_object().unwrap(), 0).err().unwrap().to_string()
    };
    assert!(error(json!({ "train": train, "target": "cost" })).contains("the file has n, w, price"));
    assert!(error(json!({ "metric": "acuracy" })).contains("data.task.metric = \"accuracy\""));
    assert!(error(json!({ "test": test })).contains("data.task.train"));
    let words =
        write("words.csv", format!("n,price\n{}", (0..9).map(|i| format!("{i},x{i}\n")).collect::<String>()));
    assert!(error(json!({ "train": words, "target": "price", "metric": "rmse" })).contains("words.csv:2"));
    assert!(error(json!({ "train": words, "target": "price", "metric": "auc" })).contains("two classes"));
}
