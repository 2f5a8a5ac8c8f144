//! A page of search trees: every node can be opened, with its value, visits and text. It needs no script.

use super::page::{MARK, escape};
use super::write;
use crate::search::{Figures, Node, Record};
use ferrl_engine::{Result, counted};
use std::collections::HashSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Trees in a page at most: a page of thousands opens slowly.
const MOST: usize = 200;
/// Characters of a step in its line; all of them are inside.
const LINE: usize = 100;

/// Writes a page with the trees of a search; returns its path.
pub fn trees(records: &[Record], path: &Path) -> Result<PathBuf> {
    write(&html(records), path)
}

fn html(records: &[Record]) -> String {
    let strategy = records.first().map_or("search", |r| r.strategy.as_str());
    let (title, css, own) = (escape(strategy), include_str!("page.css"), include_str!("trees.css"));
    let mut body = figures(records);
    for record in records.iter().take(MOST) {
        body += &tree(record);
    }
    if records.len() > MOST {
        let _ = write!(body, "<p>{} not shown.</p>", counted(records.len() - MOST, "more tree"));
    }
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}{MARK}\n\
         <style>\n{css}{own}</style>\n</head>\n<body>\n<header><h1>{title}</h1></header>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )
}

fn figures(records: &[Record]) -> String {
    let f = Figures::of(records);
    let percent = |x: Option<f64>| x.map_or("unknown".into(), |x| format!("{:.1} %", 100.0 * x));
    let tiles = [
        ("Accuracy", percent(f.accuracy.map(|a| a.0)), counted(f.prompts, "prompt")),
        ("One completion", percent(f.mean_completion), "mean over all in the trees".into()),
        ("Any completion", percent(f.any), "a right one is in the tree".into()),
        ("Tokens sampled", f.generated_tokens.to_string(), counted(f.nodes, "node")),
        ("Prefix tokens shared", f.shared_tokens.to_string(), "not computed again".into()),
    ];
    let tile = |(label, value, note): &(&str, String, String)| {
        format!("<div class=\"figure\"><span>{label}</span><b>{value}</b><i>{note}</i></div>\n")
    };
    format!("<section class=\"figures\">\n{}</section>\n", tiles.iter().map(tile).collect::<String>())
}

/// One tree, closed but for the path to its result.
fn tree(record: &Record) -> String {
    let chosen: HashSet<usize> =
        record.answer_node.map(|id| record.nodes.path(id).into_iter().collect()).unwrap_or_default();
    let verdict = match record.correct {
        Some(true) => "<span class=\"right\">right</span>",
        Some(false) => "<span class=\"wrong\">wrong</span>",
        None => "",
    };
    let mut out = format!(
        "<section class=\"tree\"><h2>{} {verdict}</h2>\n<pre>{}</pre>\n<p>Answer <b>{}</b> · {} sampled, {} shared</p>\n",
        record.index,
        escape(&record.prompt),
        escape(&record.answer),
        counted(record.generated_tokens as usize, "token"),
        record.shared_tokens
    );
    node(record, 0, &chosen, &mut out);
    out + "</section>\n"
}

/// A node and everything below it.
fn node(record: &Record, id: usize, chosen: &HashSet<usize>, out: &mut String) {
    let n = record.nodes.node(id);
    let step = if id == 0 { "prompt" } else { n.text.as_str() };
    let mut line: String = step.chars().take(LINE).collect();
    line = line.replace('\n', "⏎");
    if step.chars().count() > LINE {
        line.push('…');
    }
    let class = match (chosen.contains(&id), n.terminal) {
        (true, true) => "chosen end",
        (true, false) => "chosen",
        (false, true) => "end",
        (false, false) => "",
    };
    let kind = match (n.rollout, n.truncated, n.correct) {
        _ if n.lost.is_some() => " · lost",
        (_, true, _) => " · cut off",
        (_, _, Some(true)) => " · right",
        (_, _, Some(false)) => " · wrong",
        (true, ..) => " · rollout",
        _ => "",
    };
    let open = if chosen.contains(&id) { " open" } else { "" };
    let _ = writeln!(
        out,
        "<details class=\"{class}\"{open}><summary><meter min=\"0\" max=\"1\" value=\"{:.4}\"></meter> \
         <code>{}</code> <small>value {:.3} · visits {} · advantage {:+.3} · prior {:.3}{kind}</small></summary>",
        n.value,
        escape(&line),
        n.value,
        n.visits,
        n.advantage,
        n.prior
    );
    if id > 0 {
        let reward = n.reward.map_or(String::new(), |r| format!(" · reward {r:.3}"));
        let _ = writeln!(
            out,
            "<pre>{}</pre><small>{} · log-probability {:.3}{reward}</small>",
            escape(&n.text),
            counted(n.sampled(), "token"),
            n.logprob
        );
        turns(n, out);
    }
    for &child in record.nodes.children(id) {
        node(record, child, chosen, out);
    }
    out.push_str("</details>\n");
}

/// The turns of an episode that end in a node, and why it was lost.
fn turns(n: &Node, out: &mut String) {
    for t in &n.turns {
        let _ = writeln!(
            out,
            "<table><tr><th>action</th><td><pre>{}</pre></td></tr><tr><th>observation</th><td><pre>{}</pre></td></tr>\
             <tr><th>reward</th><td>{:.3}</td></tr></table>",
            escape(&t.action),
            escape(&t.observation),
            t.reward
        );
    }
    if let Some(lost) = &n.lost {
        let _ = writeln!(out, "<p class=\"wrong\">{}</p>", escape(lost));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::{NodeTurn, Tree};

    #[test]
    fn a_tree_opens_along_its_result_and_text_stays_text() {
        let mut tree = Tree::new(0);
        let turn = NodeTurn { action: "look".into(), observation: "<door>".into(), reward: 0.25 };
        let step = tree.add(0, Node { text: "a <b>".into(), turns: vec![turn], ..Default::default() });
        let end = tree.add(step, Node { text: "42".into(), terminal: true, ..Default::default() });
        let other = tree.add(0, Node { text: "no".into(), terminal: true, ..Default::default() });
        tree.evaluate(end, 1.0);
        tree.evaluate(other, 0.0);
        tree.recompute(Default::default(), Default::default());
        let saved = serde_json::json!({
            "index": 3, "prompt": "6 * 7 <", "strategy": "tree", "options": {}, "scorer": "oracle",
            "facts": crate::search::Facts::default(), "seed": 0, "nodes": tree, "answer": "42", "answer_node": end,
            "reward": 1.0, "correct": true, "generated_tokens": 9, "shared_tokens": 4, "seconds": 0.5,
        });
        let record: Record = serde_json::from_value(saved).unwrap();
        let page = html(&[record]);
        assert_eq!(page.matches("<details").count(), 4);
        assert_eq!(page.matches("<details class=\"chosen end\" open>").count(), 1);
        assert_eq!(page.matches(" open>").count(), 3, "the path to the result");
        assert!(page.contains("a &lt;b&gt;") && page.contains("6 * 7 &lt;") && !page.contains("a <b>"));
        assert!(page.contains("value 0.500 · visits 2") && page.contains("advantage -0.500"), "{page}");
        assert!(page.contains("100.0 %") && page.contains(MARK));
        assert!(page.contains("<pre>look</pre>") && page.contains("&lt;door&gt;") && page.contains("0.250"));
    }
}
