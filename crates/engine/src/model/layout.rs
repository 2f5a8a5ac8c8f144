//! The decoder's modules, as indices into the list of parameters.

use super::attention::SelfAttention;
use super::config::ModelConfig;
use super::experts::{Expert, MixtureOfExperts};
use super::ffn::{FeedForward, Network};
use super::linear::Linear;
use super::norm::NormLayer;
use super::param::{ParamId, Slot};
use ferrl_kernels::backend::{Attention, Heads};
use std::collections::HashMap;

/// The modules of a decoder.
pub(super) struct Layout {
    pub embed: usize,
    pub position: Option<usize>,
    pub layers: Vec<Layer>,
    pub final_norm: NormLayer,
    /// The language-model head; the embedding if tied.
    pub head: Option<Linear>,
    pub value: Option<Linear>,
}

pub(super) struct Layer {
    pub attention: SelfAttention,
    pub ffn: Network,
}

impl Layout {
    pub fn of(config: &ModelConfig) -> Layout {
        let index = Index(config.params().iter().enumerate().map(|(i, p)| (p.id, i)).collect());
        let embed = index.must(ParamId::model(Slot::Embed));
        let tied = config.tied && config.head.has_lm();
        let own_head = || index.linear(ParamId::model(Slot::Head));
        Layout {
            embed,
            position: index.find(ParamId::model(Slot::Position)),
            layers: (0..config.layers).map(|l| index.layer(config, l)).collect(),
            final_norm: index.norm(ParamId::model(Slot::FinalNorm)).expect("every model has a final norm"),
            head: if tied { Some(Linear { weight: embed, bias: None, rotated: false }) } else { own_head() },
            value: index.linear(ParamId::model(Slot::Value)),
        }
    }
}

/// Parameter index by id.
struct Index(HashMap<ParamId, usize>);

impl Index {
    fn find(&self, id: ParamId) -> Option<usize> {
        self.0.get(&id).copied()
    }
    fn must(&self, id: ParamId) -> usize {
        self.find(id).expect("every decoder has it")
    }
    fn linear(&self, id: ParamId) -> Option<Linear> {
        Some(Linear { weight: self.find(id)?, bias: self.find(id.bias()), rotated: false })
    }
    fn norm(&self, id: ParamId) -> Option<NormLayer> {
        Some(NormLayer { weight: self.find(id)?, bias: self.find(id.bias()) })
    }

    fn layer(&self, c: &ModelConfig, l: usize) -> Layer {
        let norm = |slot| self.norm(ParamId::layer(l, slot));
        let linear = |slot| self.linear(ParamId::layer(l, slot)).expect("every layer has it");
        let find = |slot| self.find(ParamId::layer(l, slot));
        let attention = SelfAttention {
            layer: l,
            rope: c.layer_ropes[l],
            norm: norm(Slot::AttnNorm),
            post_norm: norm(Slot::AttnPostNorm),
            qk_norm: find(Slot::QNorm).zip(find(Slot::KNorm)),
            qkv: linear(Slot::Qkv),
            out: linear(Slot::AttnOut),
            op: Attention {
                heads: Heads { heads: c.heads, kv_heads: c.kv_heads, head_dim: c.head_dim },
                scale: c.attention_scale,
                softcap: c.attention_softcap,
                window: c.windows[l],
            },
        };
        let (before, after, activation) = (norm(Slot::MlpNorm), norm(Slot::MlpPostNorm), c.activation.op());
        let ffn = match c.experts_of(l) {
            None => Network::Dense(FeedForward {
                norm: before,
                post_norm: after,
                up: linear(Slot::Up),
                down: linear(Slot::Down),
                activation,
            }),
            Some(options) => Network::Experts(MixtureOfExperts {
                norm: before,
                post_norm: after,
                router: linear(Slot::Router),
                experts: (0..options.count as u16)
                    .map(|e| Expert { up: linear(Slot::ExpertUp(e)), down: linear(Slot::ExpertDown(e)) })
                    .collect(),
                activation,
                options: options.clone(),
            }),
        };
        Layer { attention, ffn }
    }
}
