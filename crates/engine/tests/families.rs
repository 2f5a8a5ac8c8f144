//! Every family's `config.json`, as older and newer versions of transformers write it.

#![allow(clippy::unwrap_used)]

use ferrl_engine::model::config::{FfnActivation, LayerRope, NormKind, Position, QkNorm, Rope, RopeScaling};
use ferrl_engine::model::{FAMILIES, Head, ModelConfig, family, family_of};
use serde_json::{Value, json};

fn parse(json: &Value) -> Result<ModelConfig, String> {
    let family = family_of(json).map_err(|e| e.to_string())?;
    family.config(json).map_err(|e| e.to_string())
}

fn rope(config: &ModelConfig) -> &Rope {
    match &config.position {
        Position::Rotary(rope) => rope,
        Position::Learned => panic!("no rope"),
    }
}

/// What all examples have in common.
fn base(extra: Value) -> Value {
    let mut out = json!({
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    });
    for (key, value) in extra.as_object().unwrap() {
        out[key] = value.clone();
    }
    out
}

/// One example for each family: the older style, the newer style.
fn examples() -> Vec<(Value, Value)> {
    let scaling = json!({"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"});
    let mut newer = scaling.clone();
    newer["rope_theta"] = json!(500000.0);
    let llama = |rope: Value| {
        let mut out = base(json!({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": true, "attention_bias": false, "mlp_bias": false}));
        out.as_object_mut().unwrap().extend(rope.as_object().unwrap().clone());
        out
    };
    let kinds = json!(["full_attention", "full_attention", "sliding_attention", "sliding_attention"]);
    let alternating = json!(["sliding_attention", "full_attention", "sliding_attention", "full_attention"]);
    let short = json!([1.0, 1.1, 1.2, 1.3, 1.4, 1.5]);
    let long = json!([2.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    vec![
        (
            llama(json!({"rope_theta": 500000.0, "rope_scaling": scaling, "torch_dtype": "bfloat16"})),
            llama(json!({"rope_parameters": newer, "head_dim": 16, "dtype": "bfloat16"})),
        ),
        (
            base(json!({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e6,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
                "use_sliding_window": true, "sliding_window": 16, "max_window_layers": 2,
                "tie_word_embeddings": true, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6})),
            base(json!({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
                "layer_types": kinds, "max_position_embeddings": 32768, "max_window_layers": 2,
                "pad_token_id": null, "rms_norm_eps": 1e-6, "sliding_window": 16, "use_sliding_window": true,
                "rope_parameters": {"factor": 4.0, "original_max_position_embeddings": 8192,
                    "rope_theta": 1000000.0, "rope_type": "yarn"}, "tie_word_embeddings": true})),
        ),
        (
            base(json!({"model_type": "qwen3", "head_dim": 128, "rope_theta": 1000000, "rope_scaling": null,
                "use_sliding_window": false, "sliding_window": null, "max_window_layers": 4})),
            base(
                json!({"model_type": "qwen3", "layer_types": vec!["full_attention"; 4], "sliding_window": null,
                "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}}),
            ),
        ),
        (
            base(json!({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 32,
                "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": true,
                "decoder_sparse_step": 2, "mlp_only_layers": [3], "max_window_layers": 4, "rope_theta": 1e6,
                "use_sliding_window": false, "sliding_window": null})),
            base(json!({"model_type": "qwen3_moe", "head_dim": 32, "num_local_experts": 6,
                "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": true,
                "mlp_only_layers": [0, 2, 3], "router_aux_loss_coef": 0.001, "output_router_logits": false,
                "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}})),
        ),
        (
            base(json!({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "rope_theta": 1e6,
                "sliding_window": 32})),
            base(json!({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 16,
                "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}, "sliding_window": 32})),
        ),
        (
            base(json!({"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "head_dim": 32,
                "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 24, "sliding_window": 8,
                "attn_logit_softcapping": null, "rope_theta": 10000.0})),
            base(json!({"architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "head_dim": 32,
                "attn_logit_softcapping": null, "final_logit_softcapping": 30.0, "layer_types": alternating,
                "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "pad_token_id": 0,
                "model_type": "gemma2", "query_pre_attn_scalar": 24, "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "sliding_window": 8,
                "tie_word_embeddings": true, "use_bidirectional_attention": null})),
        ),
        (
            base(json!({"model_type": "gemma3_text", "head_dim": 32, "query_pre_attn_scalar": 24,
                "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 8, "sliding_window_pattern": 2,
                "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}})),
            base(json!({"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "head_dim": 32,
                "attn_logit_softcapping": null, "final_logit_softcapping": null, "layer_types": alternating,
                "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072,
                "model_type": "gemma3_text", "query_pre_attn_scalar": 24, "rms_norm_eps": 1e-6,
                "rope_parameters": {
                    "full_attention": {"factor": 8.0, "rope_theta": 1000000.0, "rope_type": "linear"},
                    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
                "sliding_window": 8, "tie_word_embeddings": true, "use_bidirectional_attention": false})),
        ),
        (
            base(json!({"model_type": "phi3", "partial_rotary_factor": 0.75, "sliding_window": 20,
                "max_position_embeddings": 32768, "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "su", "short_factor": short, "long_factor": long}})),
            base(json!({"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "rms_norm_eps": 1e-5,
                "max_position_embeddings": 32768, "original_max_position_embeddings": 4096,
                "rope_parameters": {"long_factor": long, "original_max_position_embeddings": 4096,
                    "partial_rotary_factor": 0.75, "rope_theta": 10000.0, "rope_type": "longrope",
                    "short_factor": short}, "sliding_window": 20, "tie_word_embeddings": false})),
        ),
        (
            base(json!({"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "rope_theta": 500000})),
            base(json!({"model_type": "olmo2", "attention_bias": false, "rms_norm_eps": 1e-5,
                "max_position_embeddings": 2048, "tie_word_embeddings": false,
                "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}})),
        ),
        (
            base(json!({"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "rope_theta": 5e6,
                "no_rope_layer_interval": 2, "rope_scaling": null})),
            base(json!({"model_type": "smollm3", "no_rope_layers": [1, 0, 1, 0], "sliding_window": null,
                "layer_types": vec!["full_attention"; 4], "use_sliding_window": false,
                "rope_parameters": {"rope_theta": 5000000.0, "rope_type": "default"}})),
        ),
        (
            base(json!({"architectures": ["GraniteForCausalLM"], "model_type": "granite", "rope_theta": 1e4,
                "embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22,
                "logits_scaling": 8.0, "tie_word_embeddings": true})),
            base(json!({"model_type": "granite", "embedding_multiplier": 12, "attention_bias": false,
                "attention_multiplier": 0.015625, "residual_multiplier": 0.22, "logits_scaling": 8,
                "mlp_bias": false, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
                "tie_word_embeddings": true})),
        ),
        (
            base(json!({"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "head_dim": 16,
                "attention_bias": true, "rope_theta": 10000.0, "partial_rotary_factor": 0.5})),
            base(json!({"model_type": "glm4", "head_dim": 16, "rms_norm_eps": 1.5625e-7,
                "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0,
                    "rope_type": "default"}})),
        ),
        (
            json!({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 96, "n_ctx": 32,
                "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "layer_norm_epsilon": 1e-5}),
            json!({"activation_function": "gelu_new", "add_cross_attention": false, "model_type": "gpt2",
                "layer_norm_epsilon": 1e-5, "n_embd": 64, "n_head": 4, "n_inner": null, "n_layer": 2,
                "n_positions": 32, "reorder_and_upcast_attn": false, "scale_attn_weights": true,
                "scale_attn_by_inverse_layer_idx": false, "tie_word_embeddings": true, "vocab_size": 96}),
        ),
    ]
}

#[test]
fn both_styles_mean_the_same_in_every_family() {
    let examples = examples();
    assert_eq!(examples.len(), FAMILIES.len());
    for ((older, newer), family) in examples.iter().zip(FAMILIES) {
        let config = parse(older).unwrap();
        assert_eq!(config.family, family.name());
        assert_eq!(config, parse(newer).unwrap());
    }
}

#[test]
fn what_is_written_is_read_back_as_it_was() {
    for (older, _) in examples() {
        for head in [Head::Lm, Head::Score] {
            let mut config = parse(&older).unwrap();
            config.head = head;
            let family = family(config.family).unwrap();
            assert_eq!(family.config(&family.to_json(&config)).unwrap(), config);
        }
    }
}

#[test]
fn stored_tensors_add_up_to_the_parameters_of_the_decoder() {
    for (older, _) in examples() {
        let mut config = parse(&older).unwrap();
        for (tied, head) in [(true, Head::LmAndValue), (false, Head::LmAndValue), (false, Head::Score)] {
            (config.tied, config.head) = (tied, head);
            let tensors = family(config.family).unwrap().tensors(&config);
            assert_eq!(tensors.iter().map(|t| t.param).collect::<Vec<_>>(), config.params());
            let mut names = std::collections::HashSet::new();
            for tensor in &tensors {
                let stored: usize = tensor.parts.iter().map(|p| p.len()).sum();
                assert_eq!(stored, tensor.param.len(), "{}", tensor.param.name());
                assert!(tensor.parts.iter().all(|p| names.insert(p.name.clone())));
            }
        }
    }
}

#[test]
fn options_of_each_family() {
    let all: Vec<ModelConfig> = examples().iter().map(|(older, _)| parse(older).unwrap()).collect();
    let [llama, qwen2, qwen3, qwen3_moe, mistral, gemma2, gemma3, phi3, olmo2, smollm3, granite, glm4, gpt2] =
        &all[..]
    else {
        panic!()
    };
    assert_eq!((llama.head_dim, llama.tied, llama.qkv_bias), (16, true, false));
    assert_eq!(llama.norm.eps, 1e-5);
    assert!(matches!(rope(llama).scaling, RopeScaling::Llama3 { original: 8192.0, .. }));

    assert_eq!((qwen2.qkv_bias, qwen2.out_bias), (true, false));
    assert_eq!(qwen2.windows, [None, None, Some(16), Some(16)]);
    let RopeScaling::Yarn { attention_factor, truncate: true, .. } = rope(qwen2).scaling else { panic!() };
    assert!((attention_factor - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-12);

    assert_eq!((qwen3.head_dim, qwen3.qk_norm, qwen3.tied), (128, Some(QkNorm::PerHead), false));
    assert_eq!(qwen3.windows, [None; 4]);
    assert_eq!(mistral.windows, [Some(32); 4]);
    let experts = qwen3_moe.experts.as_ref().unwrap();
    assert_eq!((experts.count, experts.per_token, experts.width, experts.normalized), (6, 2, 24, true));
    assert_eq!((experts.sparse.clone(), experts.balance), (vec![false, true, false, false], 0.001));
    assert_eq!((qwen3_moe.windows.clone(), qwen3_moe.qk_norm), (vec![None; 4], Some(QkNorm::PerHead)));
    let all_weights: usize = qwen3_moe.params().iter().map(|p| p.len()).sum();
    assert_eq!(all_weights - qwen3_moe.active_weights(), 4 * 3 * 24 * 64, "four of six experts of one layer");

    assert_eq!(gemma2.norm.kind, NormKind::RmsPlusOne);
    assert_eq!(gemma2.windows, [Some(8), None, Some(8), None]);
    assert_eq!((gemma2.attention_softcap, gemma2.final_softcap), (None, Some(30.0)));
    assert_eq!((gemma2.embedding_scale, gemma2.tied), (8.0, true));
    assert_eq!(gemma2.attention_scale, 24f64.powf(-0.5) as f32);
    assert_eq!(gemma2.activation, FfnActivation::GeluGated);

    assert_eq!((gemma3.qk_norm, gemma3.attention_softcap), (Some(QkNorm::PerHead), None));
    assert_eq!(gemma3.windows, gemma2.windows);
    let (local, global) = (LayerRope::Local, LayerRope::Global);
    assert_eq!(gemma3.layer_ropes, [local, global, local, global]);
    assert_eq!((gemma3.local_rope.as_ref().unwrap().theta, rope(gemma3).theta), (1e4, 1e6));
    assert_eq!(rope(gemma3).scaling, RopeScaling::Linear { factor: 8.0 });

    assert_eq!((olmo2.pre_norms, olmo2.post_norms, olmo2.qk_norm), (false, true, Some(QkNorm::Whole)));
    assert_eq!(olmo2.qk_norm_widths(), Some((64, 32)));
    assert_eq!(smollm3.layer_ropes, [global, LayerRope::None, global, LayerRope::None]);
    assert_eq!((granite.embedding_scale, granite.attention_scale), (12.0, 0.015625));
    assert_eq!((granite.residual_scale, granite.logits_divisor), (0.22, 8.0));
    assert_eq!((rope(glm4).rotary_dim, glm4.qkv_bias, glm4.out_bias), (8, true, false));

    assert_eq!((rope(phi3).rotary_dim, phi3.head_dim), (12, 16));
    let RopeScaling::PerDimension { attention_factor, original, .. } = rope(phi3).scaling else { panic!() };
    assert_eq!(original, 4096);
    assert!((attention_factor - (1.0 + 8f64.ln() / 4096f64.ln()).sqrt()).abs() < 1e-12);

    assert_eq!((gpt2.position.clone(), gpt2.norm.kind), (Position::Learned, NormKind::Layer));
    assert_eq!((gpt2.ffn, gpt2.max_positions, gpt2.tied), (256, 32, true));
}

#[test]
fn yarn_with_both_mscales_divides_them() {
    let json = base(json!({"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 40.0,
        "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": false}}));
    let config = parse(&json).unwrap();
    let RopeScaling::Yarn { attention_factor, truncate: false, .. } = rope(&config).scaling else { panic!() };
    assert!((attention_factor - 1.0879546075066122).abs() < 1e-12);
}

#[test]
fn a_classifier_with_one_label_is_a_score() {
    let class = json!(["Qwen2ForSequenceClassification"]);
    let json = |extra: Value| {
        let mut out = base(extra);
        out["model_type"] = json!("qwen2");
        out["architectures"] = class.clone();
        out
    };
    assert_eq!(parse(&json(json!({"id2label": {"0": "LABEL_0"}}))).unwrap().head, Head::Score);
    assert_eq!(parse(&json(json!({"num_labels": 1}))).unwrap().head, Head::Score);
    for extra in [json!({}), json!({"id2label": {"0": "a", "1": "b"}})] {
        let message = parse(&json(extra)).unwrap_err();
        assert!(message.contains("num_labels is 2, expected 1"), "{message}");
    }
}

/// transformers' Gemma reads `hidden_activation` alone: `hidden_act` beside it, or in its place, had decided here.
#[test]
fn hidden_act_does_not_choose_the_activation_of_gemma() {
    for kind in ["gemma2", "gemma3_text"] {
        for extra in [json!({}), json!({"hidden_activation": "gelu_pytorch_tanh"})] {
            let mut json = base(json!({"model_type": kind, "hidden_act": "silu"}));
            json.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            assert_eq!(parse(&json).unwrap().activation, FfnActivation::GeluGated, "{kind}");
        }
    }
}

#[test]
fn what_cannot_be_computed_is_refused_by_name() {
    let llama = |extra: Value| {
        let mut out = base(extra);
        let kind = out.get("model_type").cloned().unwrap_or(json!("llama"));
        out["model_type"] = kind;
        out
    };
    let cases = [
        (json!({"hidden_act": "relu"}), "hidden_act \"relu\""),
        (json!({"quantization_config": {"bits": 4}}), "quantization_config"),
        (json!({"num_local_experts": 8}), "num_local_experts"),
        (json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}), "dynamic"),
        (json!({"rope_parameters": {"rope_type": "yarm", "factor": 2.0}}), "yarn?"),
        (json!({"rope_scaling": {"type": "linear"}}), "factor is missing"),
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (json!({"num_key_value_heads": 3}), "num_attention_heads (4) must be a multiple"),
        (json!({"hidden_size": -1}), "hidden_size must be a whole number"),
        (json!({"hidden_size": 1e30}), "hidden_size must be a whole number"),
        (json!({"vocab_size": "96"}), "vocab_size must be a whole number"),
        (json!({"hidden_size": null}), "hidden_size is missing"),
        (json!({"head_dim": 15}), "must be even"),
        (json!({"attention_bias": 1}), "attention_bias must be true or false"),
        (json!({"architectures": ["LlamaForQuestionAnswering"]}), "LlamaForQuestionAnswering"),
        (json!({"model_type": "qwen2_moe"}), "nearest is \"qwen3_moe\""),
        (json!({"model_type": "quen3"}), "nearest is \"qwen3\""),
        (
            json!({"model_type": "gpt2", "n_positions": 8, "num_key_value_heads": 2}),
            "num_key_value_heads is 2",
        ),
        (json!({"model_type": "mistral", "layer_types": vec!["full_attention"; 4]}), "layer_types"),
        (json!({"model_type": "gemma2", "layer_types": ["full_attention"]}), "layer_types has 1 entries"),
        (json!({"model_type": "smollm3", "no_rope_layers": [1, 0]}), "no_rope_layers must hold 0 or 1"),
        (json!({"no_rope_layers": [1, 0, 1, 1]}), "no_rope_layers"),
        (
            json!({"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_theta": 1e6},
            "sliding_attention": {"rope_type": "linear", "factor": 2.0}}}),
            "sliding_attention has rope_type",
        ),
        (
            json!({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}),
            "attn_logit_softcapping is set",
        ),
        (
            json!({"model_type": "smollm3", "sliding_window": 8, "layer_types": ["sliding_attention",
            "full_attention", "full_attention", "full_attention"]}),
            "use_sliding_window is false",
        ),
        (
            json!({"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0],
            "long_factor": [1.0]}}),
            "short_factor must hold 8 numbers, got 1",
        ),
    ];
    for (extra, expected) in cases {
        let message = parse(&llama(extra)).unwrap_err();
        assert!(message.contains(expected), "{message}");
        assert!(message.starts_with("config.json"), "{message}");
    }
    assert!(parse(&json!([])).unwrap_err().contains("not a JSON object"));
    assert!(parse(&json!({})).unwrap_err().contains("model_type is missing"));
}
