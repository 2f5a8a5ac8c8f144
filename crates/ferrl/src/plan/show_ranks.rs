//! A plan for many cards, as text and JSON.

use super::advice::{changes_of, listed, other_training};
use super::ranks::{Cluster, RankPlan, choose, layouts, parts};
use super::show::duration;
use super::{Inputs, Plan, StagePlan};
use crate::parallel::RankLayout;
use crate::run::disk::size;
use ferrl_engine::{Error, Result};
use serde_json::{Value, json};
use std::fmt::Write;

/// As recipes write it.
fn settings(l: RankLayout) -> String {
    let ddp = if l.fsdp == 1 { 0 } else { l.ddp };
    format!("parallel.ddp_size = {ddp}, parallel.tp_size = {}, parallel.sp_size = {}", l.tp, l.sp)
}

/// A stage's table: layout, memory, exchanges, time, and the best layout.
fn table(stage: &StagePlan, own: &RankPlan, best: Option<&RankPlan>, cluster: &Cluster) -> String {
    let mut out = headline(stage, own.layout, cluster);
    memory_rows(&mut out, own, cluster);
    exchange_rows(&mut out, own);
    time_row(&mut out, own);
    best_row(&mut out, own, best);
    out
}

fn headline(stage: &StagePlan, l: RankLayout, cluster: &Cluster) -> String {
    format!(
        "{} ({}): {:.2} G weights on {} x {} (nodes: {}): {} in {}, tp {}, sp {}, {}\n",
        stage.name,
        stage.inputs.recipe.algorithm_name(),
        super::memory::weights(&stage.inputs.config) as f64 / 1e9,
        l.ranks,
        cluster.card.name,
        cluster.nodes,
        ferrl_kernels::counted(l.ddp, "copy"),
        ferrl_kernels::counted(l.fsdp * l.tp, "part"),
        l.tp,
        l.sp,
        ferrl_kernels::counted(l.dp(), "data rank"),
    )
}

fn memory_rows(out: &mut String, own: &RankPlan, cluster: &Cluster) {
    for p in &own.parts {
        let _ = writeln!(out, "  {:<12}{:>10}  {}", p.name, size(p.bytes), p.what);
    }
    let _ =
        writeln!(out, "  {:<12}{:>10}  of {} a rank", "memory", size(own.bytes()), size(cluster.card.memory));
    if own.host > 0 {
        let what = "of host memory per rank: offloaded moments or base";
        let _ = writeln!(out, "  {:<12}{:>10}  {what}", "host", size(own.host));
    }
}

fn exchange_rows(out: &mut String, own: &RankPlan) {
    for x in &own.exchanges {
        let _ = writeln!(
            out,
            "  {:<12}{:>10}{:>10}  {}",
            x.name,
            size(x.bytes as u64),
            duration(x.seconds),
            x.what
        );
    }
}

fn time_row(out: &mut String, own: &RankPlan) {
    let _ = writeln!(
        out,
        "  {:<12}{:>10}  a step: forward and backward {} ({:.0} % idle), sampling and scoring {}, exchanges {}; {} where these \
         come after what is computed",
        "time",
        duration(own.seconds()),
        duration(own.train),
        100.0 * own.idle,
        duration(own.sample),
        duration(own.exchanging()),
        duration(own.seconds_in_turn()),
    );
}

fn best_row(out: &mut String, own: &RankPlan, best: Option<&RankPlan>) {
    let _ = match best {
        Some(b) if b.layout == own.layout => writeln!(out, "  {:<12}this layout", "best"),
        Some(b) => writeln!(
            out,
            "  {:<12}{}: {} a rank, {} a step",
            "best",
            settings(b.layout),
            size(b.bytes()),
            duration(b.seconds())
        ),
        None => writeln!(out, "  {:<12}no layout fits", "best"),
    };
}

fn json_of(p: &RankPlan) -> Value {
    let l = p.layout;
    json!({
        "ddp_size": l.ddp, "fsdp": l.fsdp, "tp_size": l.tp, "sp_size": l.sp, "rollout_tp_size": l.rollout_tp, "data_ranks": l.dp(),
        "parts": p.parts.iter().map(|p| json!({"name": p.name, "bytes": p.bytes})).collect::<Vec<_>>(),
        "bytes": p.bytes(),
        "host_bytes": p.host,
        "exchanges": p.exchanges.iter()
            .map(|x| json!({"name": x.name, "bytes": x.bytes, "seconds": x.seconds})).collect::<Vec<_>>(),
        "seconds": p.seconds(),
        "seconds_in_turn": p.seconds_in_turn(),
        "train_seconds": p.train,
        "sample_seconds": p.sample,
        "idle": p.idle,
    })
}

/// What makes a stage fit on a card where no layout does: settings in its own layout, else in the smallest one.
fn savings(stage: &StagePlan, own: &RankPlan, cluster: &Cluster) -> String {
    let (i, available) = (&stage.inputs, cluster.card.memory);
    let found = |layout: RankLayout| {
        let bytes = |i: &Inputs| parts(i, layout).iter().map(|p| p.bytes).sum::<u64>();
        let all = [changes_of(i, &bytes, available), other_training(i, &bytes, available)];
        all.into_iter().find(|changes| !changes.is_empty()).map(|changes| listed(stage, &changes))
    };
    let smallest = || {
        let layout = layouts(stage, cluster).first()?.layout;
        Some(format!("{} with {}", settings(layout), found(layout)?))
    };
    match found(own.layout).or_else(smallest) {
        Some(changes) => format!("add {changes}, or more ranks"),
        None => "more ranks, a card with more memory, or a smaller model".into(),
    }
}

impl Plan {
    /// The plan on a cluster, as a table or as JSON.
    pub fn on(&self, cluster: &Cluster, as_json: bool) -> Result<String> {
        let mut stages = Vec::new();
        for stage in &self.stages {
            let (own, best) = choose(stage, cluster)?;
            stages.push((stage, own, best));
        }
        if !as_json {
            return Ok(stages.iter().map(|(s, own, best)| table(s, own, best.as_ref(), cluster)).collect());
        }
        let one = |(s, own, best): &(&StagePlan, RankPlan, Option<RankPlan>)| json!({"stage": s.name, "layout": json_of(own), "best": best.as_ref().map(json_of)});
        let all: Vec<Value> = stages.iter().map(one).collect();
        let card =
            json!({"name": cluster.card.name, "bytes": cluster.card.memory, "source": cluster.card.source});
        Ok(format!(
            "{}\n",
            json!({"ranks": cluster.ranks, "nodes": cluster.nodes, "card": card, "stages": all})
        ))
    }

    /// Refuses a stage whose layout does not fit on a card, and names one that does.
    pub fn fit_on(&self, cluster: &Cluster) -> Result<()> {
        for stage in &self.stages {
            let (own, best) = choose(stage, cluster)?;
            if own.bytes() > cluster.card.memory {
                let fix = match best {
                    Some(b) => format!("{}: {} a rank", settings(b.layout), size(b.bytes())),
                    None => savings(stage, &own, cluster),
                };
                let what = format!(
                    "{} a rank, and a {} has {}",
                    size(own.bytes()),
                    cluster.card.name,
                    size(cluster.card.memory)
                );
                return Err(Error::resource(what).at(format!("stage {}", stage.name)).fix(fix));
            }
        }
        Ok(())
    }
}
