//! Rules and rewards of the games, by hand-made plays and by properties that hold for random ones.

use super::*;
use crate::recipe::task_keys;
use crate::task::TASKS;
use serde_json::Value;

fn game(name: &str, options: Value, index: u64) -> Box<dyn Environment> {
    let entry = TASKS.iter().find(|entry| entry.name == name).unwrap();
    (entry.build)(options.as_object().unwrap(), 7).unwrap().episode(index, false).unwrap()
}

fn shown(turn: &Turn) -> &str {
    match &turn.next {
        Next::Observation(text) => text.trim(),
        Next::State(_) => panic!("games append"),
    }
}

/// All rewards of a random play, and how it ended.
fn random_play(name: &str, index: u64) -> (Vec<String>, Vec<f64>, Option<f64>) {
    let mut episode = game(name, Value::Object(Map::new()), index);
    let (mut texts, mut rewards) = (vec![episode.start().unwrap()], Vec::new());
    loop {
        let action = episode.random_action().unwrap();
        let turn = episode.step(&action).unwrap();
        texts.extend([action, shown(&turn).to_string()]);
        rewards.push(turn.reward);
        if turn.end.is_some() {
            return (texts, rewards, turn.score);
        }
    }
}

#[test]
fn every_game_ends_repeats_by_seed_and_earns_between_0_and_1() {
    for entry in GAMES {
        let turns = task_keys(entry).into_iter().find(|k| k.path == "data.task.turns").unwrap();
        let limit = turns.default.as_u64().unwrap() as usize;
        let mut first = Vec::new();
        for index in 0..40 {
            let (texts, rewards, score) = random_play(entry.name, index);
            assert_eq!(
                (texts.clone(), rewards.clone(), score),
                random_play(entry.name, index),
                "{}",
                entry.name
            );
            assert!(rewards.len() <= limit, "{}: {} turns", entry.name, rewards.len());
            let total: f64 = rewards.iter().sum();
            assert!((-1e-9..=1.0 + 1e-9).contains(&total), "{}: {total}\n{}", entry.name, texts.join("\n"));
            assert!(
                score == Some(0.0) || score == Some(1.0) && total > 1.0 - 1e-9,
                "{}: {score:?}",
                entry.name
            );
            first.push(texts);
        }
        first.dedup();
        assert!(first.len() > 1, "{} plays differ", entry.name);
    }
}

#[test]
fn interleaved_games_are_those_played_alone() {
    for entry in GAMES {
        let alone = [random_play(entry.name, 1).0, random_play(entry.name, 2).0];
        let mut both = [1, 2].map(|index| game(entry.name, Value::Object(Map::new()), index));
        let mut texts = both.each_mut().map(|episode| vec![episode.start().unwrap()]);
        let mut open = [true; 2];
        while open.contains(&true) {
            for i in [0, 1].into_iter().filter(|&i| open[i]).collect::<Vec<_>>() {
                let action = both[i].random_action().unwrap();
                let turn = both[i].step(&action).unwrap();
                texts[i].extend([action, shown(&turn).to_string()]);
                open[i] = turn.end.is_none();
            }
        }
        assert_eq!(texts, alone, "{}", entry.name);
    }
}

#[test]
fn a_completion_without_an_action_ends_every_game_with_minus_a_tenth() {
    for entry in GAMES {
        for silent in ["", "I do not know", "\\boxed{", "\\boxed{ }"] {
            let mut episode = game(entry.name, Value::Object(Map::new()), 3);
            episode.start().unwrap();
            let turn = episode.step(silent).unwrap();
            assert_eq!(
                (turn.reward, turn.score, turn.end),
                (-0.1, Some(0.0), Some(EpisodeEnd::Terminated)),
                "{}",
                entry.name
            );
        }
    }
}

#[test]
fn garbage_in_the_box_costs_a_turn_and_nothing_else() {
    for entry in GAMES {
        let mut episode = game(entry.name, serde_json::json!({ "turns": 100 }), 3);
        episode.start().unwrap();
        for garbage in [
            "\\boxed{%&}",
            "\\boxed{-1 -1 -1}",
            "\\boxed{99999999999999999999}",
            "\\boxed{ünïcode}",
            "\\boxed{?}}",
        ] {
            let turn = episode.step(garbage).unwrap();
            assert!(turn.end.is_none() && turn.reward == 0.0, "{}: {garbage} {turn:?}", entry.name);
        }
    }
}

#[test]
fn the_last_box_counts_and_a_line_needs_none() {
    assert_eq!(ActionFormat::Boxed.action("\\boxed{3} no, \\boxed{4}."), Some("4"));
    assert_eq!(ActionFormat::Line.action("\n 4 \nthen 5"), Some("4"));
}

#[test]
fn halving_finds_the_number_in_four_turns_and_the_middle_earns_what_gem_pays() {
    let (mut won, mut middle) = (0, 0.0);
    for index in 0..400 {
        let mut episode = game("guess", serde_json::json!({}), index);
        assert!(
            episode.start().unwrap().contains("between 1 and 10")
                && episode.start().unwrap().contains("4 turns")
        );
        let (mut low, mut high) = (1, 10);
        loop {
            let guess = (low + high) / 2;
            let turn = episode.step(&format!("\\boxed{{{guess}}}")).unwrap();
            match shown(&turn) {
                "larger" => low = guess + 1,
                "smaller" => high = guess - 1,
                _ => won += 1,
            }
            if turn.end.is_some() {
                break;
            }
        }
        let mut always = game("guess", serde_json::json!({}), index);
        always.start().unwrap();
        loop {
            let turn = always.step("\\boxed{5}").unwrap();
            middle += turn.reward;
            if turn.end.is_some() {
                break;
            }
        }
    }
    assert_eq!(won, 400);
    // Over all secrets from 1 to 10, answering 5 every time earns (1 + 2 * (8 + 7 + 6 + 5) / 9 + 4 / 9) / 10.
    let expected = (1.0 + 2.0 * 26.0 / 9.0 + 4.0 / 9.0) / 10.0;
    assert!((middle / 400.0 - expected).abs() < 0.03, "{}", middle / 400.0);
}

#[test]
fn hanoi_is_solved_in_seven_moves_and_pays_once() {
    let mut episode = game("hanoi", serde_json::json!({}), 0);
    episode.start().unwrap();
    let moves = ["A C", "A B", "C B", "A C", "B A", "B C", "A C"];
    let rewards: Vec<f64> =
        moves.iter().map(|m| episode.step(&format!("\\boxed{{{m}}}")).unwrap().reward).collect();
    assert_eq!(rewards, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]);
    let mut other = game("hanoi", serde_json::json!({ "turns": 2 }), 0);
    other.start().unwrap();
    assert!(shown(&other.step("\\boxed{B C}").unwrap()).contains("not allowed"));
    assert_eq!(other.step("\\boxed{A C}").unwrap().reward, 1.0 / 3.0);
}

#[test]
fn a_sudoku_has_one_solution_and_every_right_number_pays_alike() {
    for (size, clues) in [(4, 6), (9, 30)] {
        let mut episode =
            game("sudoku", serde_json::json!({ "size": size, "clues": clues, "turns": 10000 }), 5);
        let text = episode.start().unwrap();
        let dots = text.lines().skip(1).map(|line| line.matches('.').count()).sum::<usize>()
            - text.lines().last().unwrap().matches('.').count();
        let mut total = 0.0;
        let mut right = 0;
        'cells: for row in 1..=size {
            for column in 1..=size {
                for number in 1..=size {
                    let turn = episode.step(&format!("\\boxed{{{row} {column} {number}}}")).unwrap();
                    total += turn.reward;
                    right += usize::from(turn.reward > 0.0);
                    if turn.end.is_some() {
                        break 'cells;
                    }
                }
            }
        }
        assert!((total - 1.0).abs() < 1e-9, "{total}");
        assert!(right >= 1 && right <= size * size - 4, "{right} of {dots}");
    }
}
