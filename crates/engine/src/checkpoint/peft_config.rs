//! PEFT's `adapter_config.json`.

use super::peft::{CONFIG, MERGE, stored_name};
use crate::model::adapter::{Adapter, AdapterOptions, BaseHome, Bias, Init, Modules};
use crate::model::{Head, Model};
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// Contents of the file.
#[derive(Clone)]
pub(super) struct PeftConfig {
    pub options: AdapterOptions,
    /// Whether parameters are adapted by name: those of experts, which PEFT stacks.
    pub by_parameter: bool,
    /// The base model: a directory, or a name on the Hub.
    pub base: String,
}

/// Reads an adapter directory's file.
pub(super) fn read(dir: &Path, json: &Value) -> Result<PeftConfig> {
    let f = File { json, place: dir.join(CONFIG).display().to_string() };
    f.refuse()?;
    let options = AdapterOptions {
        r: f.whole("r")?.unwrap_or(8),
        alpha: f.number("lora_alpha")?.unwrap_or(8.0),
        target_modules: f.modules("target_modules")?.unwrap_or(Modules::AllLinear),
        exclude_modules: f.modules("exclude_modules")?,
        rank_pattern: f.pairs("rank_pattern", |v| Some(v.as_u64()? as usize))?,
        alpha_pattern: f.pairs("alpha_pattern", Value::as_f64)?,
        layers_to_transform: f.layers()?,
        use_rslora: f.flag("use_rslora"),
        modules_to_save: f.texts("modules_to_save")?.unwrap_or_default(),
        bias: f.bias()?,
        init: if f.json["init_lora_weights"] == "gaussian" { Init::Gaussian } else { Init::Kaiming },
        base: BaseHome::Device,
    };
    let base = f.json["base_model_name_or_path"].as_str().unwrap_or_default().to_string();
    let by_parameter = f.texts("target_parameters")?.is_some_and(|list| !list.is_empty());
    Ok(PeftConfig { options, by_parameter, base })
}

struct File<'a> {
    json: &'a Value,
    place: String,
}

impl File<'_> {
    fn error(&self, what: String) -> Error {
        Error::model(what).at(&self.place)
    }

    /// Refuses unsupported kinds of adapters.
    fn refuse(&self) -> Result<()> {
        let kind = self.json["peft_type"].as_str().unwrap_or("LORA");
        if kind != "LORA" {
            let e = self.error(format!("peft_type is {kind:?}, expected \"LORA\""));
            return Err(e.fix(MERGE));
        }
        let set = |key: &&str| match &self.json[*key] {
            Value::Null | Value::Bool(false) => false,
            Value::Array(list) => !list.is_empty(),
            Value::Object(map) => !map.is_empty(),
            _ => true,
        };
        let others = [
            "use_dora",
            "lora_bias",
            "layer_replication",
            "trainable_token_indices",
            "alora_invocation_tokens",
            "use_qalora",
            "use_bdlora",
            "arrow_config",
            "velora_config",
            "monteclora_config",
            "kasa_config",
        ];
        if let Some(key) = others.iter().find(|key| set(key)) {
            let e = self.error(format!("{key} is set, which is not supported"));
            return Err(e.fix(MERGE));
        }
        let init = self.json["init_lora_weights"].as_str().unwrap_or_default();
        if ["pissa", "olora", "corda", "loftq", "lora_ga"].iter().any(|name| init.starts_with(name)) {
            let e =
                self.error(format!("init_lora_weights is {init:?}: this adapter belongs to a changed base"));
            return Err(e.fix(
                "save it again as plain LoRA: save_pretrained(..., path_initial_model_for_weight_conversion=...)",
            ));
        }
        Ok(())
    }

    fn whole(&self, key: &str) -> Result<Option<usize>> {
        match &self.json[key] {
            Value::Null => Ok(None),
            v => v
                .as_u64()
                .map(|n| Some(n as usize))
                .ok_or_else(|| self.error(format!("{key} is {v}, expected a whole number"))),
        }
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        match &self.json[key] {
            Value::Null => Ok(None),
            v => v.as_f64().map(Some).ok_or_else(|| self.error(format!("{key} is {v}, expected a number"))),
        }
    }

    fn flag(&self, key: &str) -> bool {
        self.json[key] == true
    }

    fn texts(&self, key: &str) -> Result<Option<Vec<String>>> {
        let wrong = || self.error(format!("{key} is {}, expected a list of names", self.json[key]));
        match &self.json[key] {
            Value::Null => Ok(None),
            Value::Array(list) => list
                .iter()
                .map(|v| v.as_str().map(String::from).ok_or_else(wrong))
                .collect::<Result<_>>()
                .map(Some),
            _ => Err(wrong()),
        }
    }

    fn modules(&self, key: &str) -> Result<Option<Modules>> {
        match &self.json[key] {
            Value::String(text) if text == "all-linear" => Ok(Some(Modules::AllLinear)),
            Value::String(text) => Ok(Some(Modules::Matching(text.clone()))),
            _ => Ok(self.texts(key)?.map(Modules::Named)),
        }
    }

    fn pairs<T>(&self, key: &str, value: impl Fn(&Value) -> Option<T>) -> Result<Vec<(String, T)>> {
        let wrong = || self.error(format!("{key} is {}, expected names with numbers", self.json[key]));
        let none = Map::new();
        let pairs = match &self.json[key] {
            Value::Null => &none,
            v => v.as_object().ok_or_else(wrong)?,
        };
        pairs.iter().map(|(k, v)| Ok((k.clone(), value(v).ok_or_else(wrong)?))).collect()
    }

    fn layers(&self) -> Result<Option<Vec<usize>>> {
        let key = "layers_to_transform";
        let wrong = || self.error(format!("{key} is {}, expected layer numbers", self.json[key]));
        match &self.json[key] {
            Value::Null => Ok(None),
            Value::Array(list) => list
                .iter()
                .map(|v| Ok(v.as_u64().ok_or_else(wrong)? as usize))
                .collect::<Result<_>>()
                .map(Some),
            v => Ok(Some(vec![v.as_u64().ok_or_else(wrong)? as usize])),
        }
    }

    fn bias(&self) -> Result<Bias> {
        match self.json["bias"].as_str().unwrap_or("none") {
            "none" => Ok(Bias::None),
            "all" => Ok(Bias::All),
            "lora_only" => Ok(Bias::LoraOnly),
            other => Err(self.error(format!("bias is {other:?}, expected none, all or lora_only"))),
        }
    }
}

/// The file's contents for a model's adapter.
pub(super) fn write(model: &Model, adapter: &Adapter, base: &Path, prefix: Option<&str>) -> Result<Value> {
    let outer = prefix.map(|prefix| outer_options(adapter, prefix)).transpose()?;
    let o = outer.as_ref().unwrap_or(&adapter.options);
    let choice = |modules: &Modules| match modules {
        // The module names that all-linear stands for.
        Modules::AllLinear => {
            let last = |name: &str| name.rsplit('.').next().unwrap_or_default().to_string();
            json!(adapter.modules().map(|m| last(&m.name)).collect::<BTreeSet<_>>())
        }
        Modules::Matching(pattern) => json!(pattern),
        Modules::Named(names) => json!(names),
    };
    // PEFT refuses a regular expression beside layer numbers.
    let chosen_by_name = matches!(o.target_modules, Modules::Matching(_)) && o.layers_to_transform.is_some();
    let score = model.config.head == Head::Score;
    let mut whole = o.modules_to_save.clone();
    if score && !whole.iter().any(|name| name == "score") {
        whole.push("score".into());
    }
    Ok(json!({
        "peft_type": "LORA",
        "task_type": if score { "SEQ_CLS" } else { "CAUSAL_LM" },
        "base_model_name_or_path": base.display().to_string(),
        "r": o.r,
        "lora_alpha": o.alpha,
        "lora_dropout": 0.0,
        "target_modules": match chosen_by_name {
            true => json!(adapter.modules().map(|m| &m.name).collect::<Vec<_>>()),
            false => choice(&o.target_modules),
        },
        "exclude_modules": o.exclude_modules.as_ref().map(choice),
        // In the order of the settings: the first pattern that matches a module counts.
        "rank_pattern": o.rank_pattern.iter().cloned().map(|(k, v)| (k, json!(v))).collect::<Map<_, _>>(),
        "alpha_pattern": o.alpha_pattern.iter().cloned().map(|(k, v)| (k, json!(v))).collect::<Map<_, _>>(),
        "layers_to_transform": if chosen_by_name { None } else { o.layers_to_transform.as_ref() },
        "layers_pattern": null,
        "use_rslora": o.use_rslora,
        "use_dora": false,
        "lora_bias": false,
        "bias": match o.bias { Bias::None => "none", Bias::All => "all", Bias::LoraOnly => "lora_only" },
        "modules_to_save": (!whole.is_empty()).then_some(whole),
        "fan_in_fan_out": adapter.modules().any(|module| module.transposed),
        "init_lora_weights": match o.init { Init::Kaiming => json!(true), Init::Gaussian => json!("gaussian") },
        "inference_mode": true,
        "layer_replication": null,
        "auto_mapping": null,
        "revision": null,
    }))
}

/// The options of an adapter of a multimodal model's text part: every module by its whole name, since shorter ones would name
/// modules of the vision part too.
fn outer_options(adapter: &Adapter, prefix: &str) -> Result<AdapterOptions> {
    let own = &adapter.options;
    let names: Vec<&str> = adapter.modules().map(|m| m.name.as_str()).collect();
    let mut out = AdapterOptions {
        target_modules: Modules::Named(names.iter().map(|name| stored_name(name, Some(prefix))).collect()),
        exclude_modules: None,
        rank_pattern: Vec::new(),
        alpha_pattern: Vec::new(),
        layers_to_transform: None,
        ..own.clone()
    };
    for (name, (r, alpha)) in names.iter().zip(own.ranks(names.iter().copied())?) {
        let pattern = || regex::escape(&stored_name(name, Some(prefix)));
        out.rank_pattern.extend((r != own.r).then(|| (pattern(), r)));
        out.alpha_pattern.extend((alpha != own.alpha).then(|| (pattern(), alpha)));
    }
    let whole = adapter.saved.iter().map(|t| t.name.trim_end_matches(".weight").trim_end_matches(".bias"));
    let named = |name: &&str| own.modules_to_save.iter().any(|end| name.ends_with(end.as_str()));
    out.modules_to_save = whole
        .filter(named)
        .map(|name| stored_name(name, Some(prefix)))
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect();
    Ok(out)
}
