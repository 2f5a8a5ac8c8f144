//! Where the decoder's fused parameters are found in a checkpoint.

use super::config::{Config, Head, ParamShape};

/// One parameter of the decoder and the stored tensors it is made of, stacked row on row.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Name and shape in the decoder.
    pub param: ParamShape,
    /// What it is made of, in order.
    pub parts: Vec<Part>,
}

/// A tensor as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Name in the checkpoint.
    pub name: String,
    /// Shape in the checkpoint.
    pub shape: Vec<usize>,
    /// Whether it is stored as `[in, out]`, the other way round than the decoder holds it.
    pub transposed: bool,
}

impl Part {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// How many of a parameter's rows (or of a vector's elements) one stored tensor holds.
#[derive(Clone, Copy)]
pub(crate) enum Rows {
    /// All of them.
    All,
    /// Those of the queries.
    Query,
    /// Those of the keys, or of the values.
    KeyOrValue,
    /// Half of them: the gate, or the up projection.
    Half,
}

/// The names a family uses. Inside a layer, each canonical stem lists what it is stacked from.
pub(crate) struct Naming {
    pub(crate) prefix: &'static str,
    pub(crate) embed: &'static str,
    pub(crate) position: &'static str,
    pub(crate) layers: &'static str,
    pub(crate) final_norm: &'static str,
    /// Whether the matrices inside layers are stored as `[in, out]`.
    pub(crate) transposed: bool,
    pub(crate) stems: &'static [(&'static str, &'static [(&'static str, Rows)])],
}

impl Naming {
    /// The map for every parameter of a decoder.
    pub(crate) fn tensors(&self, config: &Config) -> Vec<Tensor> {
        config.params().into_iter().map(|p| Tensor { parts: self.parts(config, &p), param: p }).collect()
    }

    fn parts(&self, config: &Config, param: &ParamShape) -> Vec<Part> {
        let whole =
            |name: String, shape: &[usize]| vec![Part { name, shape: shape.into(), transposed: false }];
        let (rows, cols) = (param.rows, param.cols);
        let prefix = self.prefix;
        let value = if config.head == Head::Score { "score" } else { "v_head.summary" };
        match param.name.as_str() {
            "embed" => whole(format!("{prefix}{}.weight", self.embed), &[rows, cols]),
            "position" => whole(format!("{prefix}{}.weight", self.position), &[rows, cols]),
            "final_norm.weight" => whole(format!("{prefix}{}.weight", self.final_norm), &[cols]),
            "final_norm.bias" => whole(format!("{prefix}{}.bias", self.final_norm), &[cols]),
            "head" => whole("lm_head.weight".into(), &[rows, cols]),
            "value.weight" => whole(format!("{value}.weight"), &[1, cols]),
            "value.bias" => whole(format!("{value}.bias"), &[1]),
            inside => self.layer_parts(config, inside, rows, cols),
        }
    }

    /// The parts of `layers.<n>.<stem>.<weight or bias>`. A stem the family does not list has none; the test
    /// over all families checks that this never happens.
    fn layer_parts(&self, config: &Config, name: &str, rows: usize, cols: usize) -> Vec<Part> {
        let mut words = name.splitn(4, '.').skip(1);
        let (Some(layer), Some(stem), Some(kind)) = (words.next(), words.next(), words.next()) else {
            return Vec::new();
        };
        let Some((_, sources)) = self.stems.iter().find(|(s, _)| *s == stem) else { return Vec::new() };
        let vector = kind == "bias" || stem.ends_with("norm");
        let total = if vector { cols } else { rows };
        let part = |&(source, share): &(&str, Rows)| {
            let rows = match share {
                Rows::All => total,
                Rows::Query => config.attention_width(),
                Rows::KeyOrValue => config.kv_heads * config.head_dim,
                Rows::Half => total / 2,
            };
            let transposed = self.transposed && !vector;
            let shape = match (vector, transposed) {
                (true, _) => vec![rows],
                (false, false) => vec![rows, cols],
                (false, true) => vec![cols, rows],
            };
            let name = format!("{}{}.{layer}.{source}.{kind}", self.prefix, self.layers);
            Part { name, shape, transposed }
        };
        sources.iter().map(part).collect()
    }
}

/// The names of Llama and of the many families that took them over.
pub(crate) const LLAMA_NAMES: Naming = Naming {
    prefix: "model.",
    embed: "embed_tokens",
    position: "",
    layers: "layers",
    final_norm: "norm",
    transposed: false,
    stems: &[
        ("attn_norm", &[("input_layernorm", Rows::All)]),
        ("mlp_norm", &[("post_attention_layernorm", Rows::All)]),
        ("q_norm", &[("self_attn.q_norm", Rows::All)]),
        ("k_norm", &[("self_attn.k_norm", Rows::All)]),
        (
            "qkv",
            &[
                ("self_attn.q_proj", Rows::Query),
                ("self_attn.k_proj", Rows::KeyOrValue),
                ("self_attn.v_proj", Rows::KeyOrValue),
            ],
        ),
        ("attn_out", &[("self_attn.o_proj", Rows::All)]),
        ("up", &[("mlp.gate_proj", Rows::Half), ("mlp.up_proj", Rows::Half)]),
        ("down", &[("mlp.down_proj", Rows::All)]),
    ],
};
