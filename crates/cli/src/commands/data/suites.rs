//! `ferrl data suites`: lists the published data sets of the registry.

use crate::output::print;
use ferrl::suite::{self, Entry, SUITES, Use};
use ferrl_engine::Result;
use serde_json::{Value, json};

/// List the published data sets and benchmarks that suite:NAME reads
///
/// `suite:NAME` in data.train or eval.data reads the published files; `ferrl eval --suite NAME` evaluates a model on them. With
/// NAME: repository and splits, a sample row, and the prompt and columns made from it.
#[derive(clap::Args)]
pub struct Args {
    /// Name of a suite
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// JSON instead of text
    #[arg(long)]
    json: bool,
    /// Print the table of the manual's page on benchmarks
    #[arg(long, conflicts_with_all = ["json", "name"])]
    markdown: bool,
}

pub fn run(args: &Args) -> Result<()> {
    if args.markdown {
        return print(&suite::markdown());
    }
    let one = args.name.as_deref().map(suite::find).transpose()?;
    match (one, args.json) {
        (Some(entry), true) => print(&format!("{}\n", value(entry)?)),
        (Some(entry), false) => print(&detail(entry)?),
        (None, true) => {
            let all = SUITES.iter().map(|s| value(s)).collect::<Result<Vec<_>>>()?;
            print(&format!("{}\n", json!(all)))
        }
        (None, false) => print(&suite::table()),
    }
}

fn value(s: &Entry) -> Result<Value> {
    let (verifier, kind) = match s.rows {
        Use::Verified { verifier, .. } => (Some(verifier), "prompts"),
        Use::Pairs => (None, "pairs"),
        Use::Demonstrations => (None, "demonstrations"),
    };
    let sample = s.sample_row()?;
    Ok(json!({
        "name": s.name, "about": s.about, "repo": s.repo, "parts": s.parts, "train": s.train, "test": s.test,
        "license": s.license, "cite": s.cite, "rows": kind, "verifier": verifier, "options": s.options()?,
        "groups": s.groups, "temperature": s.sampling.temperature, "max_new_tokens": s.sampling.max_new_tokens,
        "stop": s.sampling.stop, "download": s.download(), "sample": sample, "row": s.row(&sample)?,
    }))
}

fn detail(s: &Entry) -> Result<String> {
    let sample = s.sample_row()?;
    let mut out = format!("{}: {}\n\n", s.name, s.about);
    let mut line = |name: &str, text: String| out.push_str(&format!("{name:<10}{text}\n"));
    line("rows", format!("{} {}", s.repo, s.parts.join(" ")).trim_end().to_string());
    let split = |s: Option<&str>| s.map_or("none".to_string(), |s| s.replace('*', "all rows"));
    line("train", split(s.train));
    line("test", split(s.test));
    line("license", s.license.into());
    line("cite", s.cite.into());
    line("download", s.download());
    if let Use::Verified { verifier, .. } = s.rows {
        line("verifier", format!("{verifier} {}", Value::Object(s.options()?)));
        line(
            "sampling",
            format!("temperature {}, {} new tokens", s.sampling.temperature, s.sampling.max_new_tokens),
        );
    }
    line("columns", sample.keys().cloned().collect::<Vec<_>>().join(", "));
    out.push_str("\na row of the published shape (made up):\n");
    out.push_str(&format!("{}\n", Value::Object(sample.clone())));
    out.push_str("\nwhat is added to it:\n");
    for (name, value) in s.row(&sample)?.iter().filter(|(name, value)| sample.get(*name) != Some(value)) {
        out.push_str(&format!("  {name} = {value}\n"));
    }
    if let [right, _] = s.completions
        && !right.is_empty()
    {
        out.push_str(&format!("\na right completion:\n{right}\n"));
    }
    Ok(out)
}
