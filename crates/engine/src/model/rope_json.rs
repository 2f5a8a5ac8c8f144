//! RoPE settings of `config.json`, in the older style (`rope_theta`, `rope_scaling`) and in that of transformers 5
//! (`rope_parameters`).

use serde_json::{Map, Value, json};

use super::config::{Rope, RopeScaling};
use super::fields::Fields;
use crate::math::ln;
use crate::{Error, Result, nearest};

const TYPES: [&str; 5] = ["default", "linear", "llama3", "yarn", "longrope"];

pub(crate) struct RopeRules {
    /// Default of `original_max_position_embeddings`; `None` falls back to other fields.
    pub(crate) original: Option<usize>,
    /// Default `partial_rotary_factor`; `None`: always 1.
    pub(crate) partial: Option<f64>,
    /// Default `rope_theta`.
    pub(crate) theta: f64,
    /// Whether layers may be without RoPE (`no_rope_layers`).
    pub(crate) by_layer: bool,
    /// Whether `rope_parameters` has an entry per layer type; `full_attention` is read here.
    pub(crate) by_layer_type: bool,
    /// Whether `su` and `yarn` are old names of `longrope`.
    pub(crate) longrope_aliases: bool,
}

impl RopeRules {
    /// The rules of most families.
    pub(crate) const USUAL: RopeRules = RopeRules {
        original: None,
        partial: None,
        theta: 10_000.0,
        by_layer: false,
        by_layer_type: false,
        longrope_aliases: false,
    };
}

/// Reads either style.
pub(crate) fn read(f: &Fields, head_dim: usize, max_positions: usize, rules: &RopeRules) -> Result<Rope> {
    let (style, dict) = match f.object("rope_scaling", "config.json: rope_scaling")? {
        Some(dict) => ("rope_scaling", Some(dict)),
        None => ("rope_parameters", f.object("rope_parameters", "config.json: rope_parameters")?),
    };
    let dict = match dict {
        Some(dict) if rules.by_layer_type && dict.has("full_attention") => {
            dict.object("full_attention", "config.json: rope_parameters.full_attention")?
        }
        dict => dict,
    };
    let dict = &dict.unwrap_or(*f);
    dict.refuse(&["full_attention", "sliding_attention", "mrope_section", "short_mscale", "long_mscale"])?;
    let theta = match dict.opt_positive("rope_theta")? {
        Some(theta) => theta,
        None => f.opt_positive("rope_theta")?.unwrap_or(rules.theta),
    };
    let partial = match dict.opt_positive("partial_rotary_factor")? {
        Some(partial) => partial,
        None => f.opt_positive("partial_rotary_factor")?.or(rules.partial).unwrap_or(1.0),
    };
    if partial > 1.0 || (partial != 1.0 && rules.partial.is_none()) {
        return Err(f.error(format!("partial_rotary_factor {partial} is not supported in this family")));
    }
    let rotary_dim = (head_dim as f64 * partial) as usize;
    let original = match f.opt_size("original_max_position_embeddings")?.or(rules.original) {
        Some(n) => n,
        None => dict.opt_size("original_max_position_embeddings")?.unwrap_or(max_positions),
    };
    let context = RopeContext { rotary_dim, original, stretched: max_positions as f64 / original as f64 };
    let mut kind = dict.text("rope_type")?.or(dict.text("type")?).unwrap_or("default");
    if rules.longrope_aliases && matches!(kind, "su" | "yarn") {
        kind = "longrope";
    }
    Ok(Rope {
        theta,
        rotary_dim,
        scaling: scaling(dict, kind, &context, |what| f.error(format!("{style} {what}")))?,
    })
}

/// Model-wide values that a scaling depends on.
struct RopeContext {
    rotary_dim: usize,
    /// Context of pre-training.
    original: usize,
    /// `max_positions / original`.
    stretched: f64,
}

fn scaling(
    dict: &Fields,
    kind: &str,
    context: &RopeContext,
    error: impl Fn(String) -> Error,
) -> Result<RopeScaling> {
    let &RopeContext { rotary_dim, original, stretched } = context;
    Ok(match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: dict.positive("factor")? },
        "llama3" => RopeScaling::Llama3 {
            factor: dict.positive("factor")?,
            low_freq_factor: dict.positive("low_freq_factor")?,
            high_freq_factor: dict.positive("high_freq_factor")?,
            original: original as f64,
        },
        "yarn" => {
            let factor = dict.opt_positive("factor")?.unwrap_or(stretched);
            RopeScaling::Yarn {
                factor,
                beta_fast: dict.opt_positive("beta_fast")?.unwrap_or(32.0),
                beta_slow: dict.opt_positive("beta_slow")?.unwrap_or(1.0),
                original: original as f64,
                attention_factor: yarn_gain(dict, factor)?,
                truncate: dict.flag("truncate", true)?,
            }
        }
        "longrope" => {
            let factor = dict.opt_positive("factor")?.unwrap_or(stretched);
            let gain = if factor <= 1.0 { 1.0 } else { (1.0 + ln(factor) / ln(original as f64)).sqrt() };
            RopeScaling::PerDimension {
                short: dict.positives("short_factor", rotary_dim / 2)?,
                long: dict.positives("long_factor", rotary_dim / 2)?,
                original,
                attention_factor: dict.opt_positive("attention_factor")?.unwrap_or(gain),
            }
        }
        "dynamic" => {
            let what = "of type dynamic changes the frequencies as a sequence grows, \
                        so a token's logp would depend on what follows it";
            let fix = "use yarn or linear scaling, or remove the field to stay within the trained context";
            return Err(error(what.into()).fix(fix));
        }
        other => {
            let near = nearest(other, TYPES).map_or(String::new(), |n| format!("{n}? "));
            let e = error(format!("has the unknown type {other:?}"));
            return Err(e.fix(format!("{near}supported are {}", TYPES.join(", "))));
        }
    })
}

fn yarn_gain(dict: &Fields, factor: f64) -> Result<f64> {
    if let Some(given) = dict.opt_positive("attention_factor")? {
        return Ok(given);
    }
    let gain = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * ln(factor) + 1.0 };
    let m = (dict.opt_number("mscale")?, dict.opt_number("mscale_all_dim")?);
    Ok(match m {
        (Some(over), Some(under)) if over != 0.0 && under != 0.0 => gain(over) / gain(under),
        _ => gain(1.0),
    })
}

/// Writes the older style, which every version of transformers reads.
pub(crate) fn write(rope: &Rope, head_dim: usize, out: &mut Map<String, Value>) {
    out.insert("rope_theta".into(), json!(rope.theta));
    if rope.rotary_dim != head_dim {
        let partial = rope.rotary_dim as f64 / head_dim as f64;
        out.insert("partial_rotary_factor".into(), json!(partial));
    }
    let scaling = match &rope.scaling {
        RopeScaling::None => Value::Null,
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": *original as u64,
        }),
        RopeScaling::Yarn { factor, beta_fast, beta_slow, original, attention_factor, truncate } => json!({
            "rope_type": "yarn",
            "factor": factor,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "original_max_position_embeddings": *original as u64,
            "attention_factor": attention_factor,
            "truncate": truncate,
        }),
        RopeScaling::PerDimension { short, long, original, attention_factor } => {
            out.insert("original_max_position_embeddings".into(), json!(original));
            json!({
                "rope_type": "longrope",
                "short_factor": short,
                "long_factor": long,
                "attention_factor": attention_factor,
            })
        }
    };
    out.insert("rope_scaling".into(), scaling);
}
