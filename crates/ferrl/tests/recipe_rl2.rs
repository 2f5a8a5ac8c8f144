//! RL2's option names resolve to the same settings as ours.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::algo::Algorithm;
use ferrl::experience::{ByRole, Experience, MicroBatch, Role, Sequence, UpdateCounts};
use ferrl::recipe::{Recipe, Resolved};
use ferrl_engine::train::Stats;
use serde_json::json;

fn load(overrides: &[&str]) -> Resolved {
    let overrides: Vec<String> = overrides.iter().map(|o| o.to_string()).collect();
    let resolved = Recipe::parse("model.path = \"m\"\n", "r.toml", "r", &overrides).unwrap();
    assert_eq!(resolved, Recipe::parse(&resolved.toml, "again.toml", "x", &[]).unwrap());
    resolved
}

fn algo(overrides: &[&str]) -> serde_json::Value {
    json!(load(overrides).stages[0].recipe.algo)
}

/// OpenAI's PPO and DeepSeek's GRPO as RL2's README lists them.
const PPO: &[&str] = &["kl.type=reward", "kl.reward_estimator=k1", "adv.estimator=gae"];
const GRPO: &[&str] =
    &["actor.avg_level=sequence", "kl.type=loss", "kl.loss_estimator=k3", "adv.norm_var=true"];

#[test]
fn the_readmes_recipes_are_our_algorithms() {
    assert_eq!(load(PPO), load(&["algo=ppo"]));
    assert_eq!(load(GRPO), load(&["algo=grpo"]));
    assert_eq!(load(&[PPO, &["kl.coef=0.05"]].concat()), load(&["algo=ppo"]));
    assert_eq!(load(&[GRPO, &["kl.coef=0.04"]].concat()), load(&["algo=grpo"]));
    assert_eq!(load(&[PPO, &["kl.coef=0.1"]].concat()), load(&["algo=ppo", "algo.kl.coef=0.1"]));
    // RL2's defaults are Dr. GRPO, and so are ours.
    let defaults = ["kl.type=null", "adv.estimator=reinforce", "actor.avg_level=token", "actor.clip=0.2"];
    assert_eq!(load(&defaults), load(&[]));
    // The order of options does not matter.
    let backwards: Vec<&str> = GRPO.iter().rev().copied().collect();
    assert_eq!(load(&backwards), load(GRPO));
}

fn column(tag: usize, n: usize, scale: f32) -> Vec<f32> {
    (0..n).map(|i| scale * ((tag * 37 + i * 11) % 17) as f32 / 17.0 - 0.7 * scale).collect()
}

/// What the algorithm makes of a fixed rollout: advantages, targets, loss, gradients.
fn behaviour(mut algorithm: Box<dyn Algorithm>) -> String {
    let sequences = (0..6usize).map(|k| {
        let n = 4 + k % 3;
        let trained: Vec<bool> = (0..n).map(|i| i >= 1).collect();
        let mut reward = vec![0.0; n];
        reward[n - 1] = (k % 4) as f32;
        Sequence {
            ids: vec![1; n],
            trained,
            trajectory: k,
            group: k / 3,
            weight: 1.0,
            trajectory_tokens: n - 1,
            reward,
            old_logp: column(k, n, 1.0),
            sampled_logp: column(k, n, 1.0),
            ref_logp: column(k + 40, n, 1.0),
            old_value: column(k + 80, n, 1.0),
            ..Default::default()
        }
    });
    let mut e = Experience { sequences: sequences.collect() };
    algorithm.prepare(&mut e).unwrap();
    let (mut policy, mut critic) = (Stats::default(), Stats::default());
    for (k, s) in e.sequences.iter().enumerate() {
        policy.logp.extend(column(k + 120, s.ids.len(), 1.2));
        policy.entropy.extend(column(k + 160, s.ids.len(), 1.0));
        critic.value.extend(column(k + 200, s.ids.len(), 2.0));
    }
    let mut stats = ByRole::default();
    stats.set(Role::Policy, policy);
    stats.set(Role::Critic, critic);
    let batch =
        MicroBatch { sequences: e.sequences.iter().collect(), counts: UpdateCounts::of(&e.sequences) };
    let loss = algorithm.loss(&batch, &stats);
    let grads: Vec<_> = [Role::Policy, Role::Critic]
        .iter()
        .map(|r| loss.grads.get(*r).map(|g| (g.logp.clone(), g.entropy.clone(), g.value.clone())))
        .collect();
    let columns: Vec<_> = e.sequences.iter().map(|s| (s.advantage.clone(), s.target_value.clone())).collect();
    let rest = (algorithm.needs(), algorithm.updates());
    format!("{} {grads:?} {columns:?} {rest:?} {}", loss.value, algorithm.state())
}

#[test]
fn what_rl2_lists_behaves_as_the_named_algorithm() {
    // Written out over the plain default, setting by setting, so that nothing rests on the name.
    let ppo = [
        "algo.kl.place=reward",
        "algo.kl.estimator=k1",
        "algo.kl.coef=0.05",
        "algo.advantage.baseline=critic",
        "algo.advantage.normalise=whiten",
    ];
    let grpo = [
        "algo.aggregate=sequence",
        "algo.kl.place=loss",
        "algo.kl.estimator=k3",
        "algo.kl.coef=0.04",
        "algo.advantage.divide_by_std=true",
    ];
    let of = |words: &[&str]| behaviour(load(words).stages[0].recipe.algorithm().unwrap());
    assert_eq!(of(&ppo), of(PPO));
    assert_eq!(of(&grpo), of(GRPO));
    assert_ne!(of(&ppo), of(&grpo));
    assert_ne!(of(&grpo), of(&[]));
    // The same lists over a named algorithm set each option by itself.
    let over_named = |words: &[&str]| of(&[&["algo=dr_grpo"], words].concat());
    assert_eq!(over_named(&[PPO, &["kl.coef=0.05"]].concat()), of(PPO));
    assert_eq!(over_named(&[GRPO, &["kl.coef=0.04"]].concat()), of(GRPO));
}

#[test]
fn single_options_are_mapped() {
    assert_eq!(
        algo(&["adv.global_norm=true", "adv.norm_var=true", "kl.type=reward", "kl.coef=0.01"]),
        json!({
            "name": "dr_grpo",
            "kl": { "estimator": "k1", "coef": 0.01, "place": "reward" },
            "advantage": { "baseline": "batch", "divide_by_std": true },
        })
    );
    // RL2's estimator in the loss is k2 unless told otherwise; place and estimator ours by default stay unsaid.
    assert_eq!(
        algo(&["kl.type=loss", "kl.coef=0.01"]),
        json!({ "name": "dr_grpo", "kl": { "estimator": "k2", "coef": 0.01 } })
    );
    assert_eq!(
        algo(&["adv.estimator=gae"]),
        json!({ "name": "ppo", "kl": { "coef": 0.0 } }),
        "without kl.type there is no KL"
    );
    // Without a critic nothing would be trained meanwhile.
    assert_eq!(algo(&["adv.estimator=gae", "actor.freeze_steps=4"])["critic_warmup"], 4);
    let alone = Recipe::parse("model.path = \"m\"", "r.toml", "r", &["actor.freeze_steps=4".into()]);
    assert!(alone.unwrap_err().to_string().contains("critic_warmup"));
    let words = ["actor.tis_coef=2.0", "actor.entropy.coef=0.01", "adv.lamda=0.95"];
    assert_eq!(
        algo(&[&words[..], &["actor.update_per_rollout=4", "critic.clip=0.3", "adv.gamma=0.99"]].concat()),
        json!({
            "name": "dr_grpo",
            "entropy_coef": 0.01,
            "minibatches": 4,
            "advantage": { "gamma": 0.99, "lambda": 0.95 },
            "critic": { "clip": 0.3 },
            "correction": { "kind": "truncate", "cap": 2.0 },
        })
    );
    assert_eq!(algo(&["actor.tis_coef=0"]), json!({ "name": "dr_grpo" }));
    let r = load(&[
        "data.prompts_per_rollout=128",
        "data.responses_per_prompt=4",
        "rollout.train_sampling_params.temperature=0.9",
        "rollout.train_sampling_params.max_new_tokens=1024",
        "rollout.train_sampling_params.stop=[\"</answer>\"]",
        "rollout.test_sampling_params.temperature=0.0",
        "data.train_data_path=train@countdown.json",
        "actor.model_name=Qwen/Qwen2.5-3B-Instruct",
        "actor.lr=1e-6",
        "critic.lr=5e-6",
        "trainer.experiment_name=count",
    ]);
    let s = &r.stages[0].recipe;
    assert_eq!((s.rollout.prompts, s.rollout.samples, s.rollout.max_new_tokens), (128, 4, 1024));
    assert_eq!((s.rollout.temperature, s.eval.temperature), (0.9, Some(0.0)));
    assert_eq!((s.optim.lr, s.critic.lr), (1e-6, Some(5e-6)));
    assert_eq!(
        (&s.rollout.stop[..], &s.data.train[..]),
        (&["</answer>".into()][..], &["train@countdown.json".into()][..])
    );
    assert!(s.rollout.include_stop, "RL2's rewards see the stop text");
    assert_eq!((r.name.as_str(), s.model.path.as_deref()), ("count", Some("Qwen/Qwen2.5-3B-Instruct")));
}

#[test]
fn of_two_words_for_one_thing_the_later_wins() {
    assert_eq!(load(&["actor.lr=1e-6", "optim.lr=2e-6"]).stages[0].recipe.optim.lr, 2e-6);
    assert_eq!(load(&["optim.lr=2e-6", "actor.lr=1e-6"]).stages[0].recipe.optim.lr, 1e-6);
    assert_eq!(algo(&["kl.type=null", "algo.kl.coef=0.3"])["kl"]["coef"], 0.3);
    assert_eq!(algo(&["algo.kl.coef=0.3", "kl.type=null"])["kl"]["coef"], 0.0);
}

#[test]
fn options_may_stand_in_the_file_and_in_stages() {
    let text = r#"
model.path = "m"
[kl]
type = "reward"
reward_estimator = "k1"
[adv]
estimator = "gae"
"#;
    assert_eq!(Recipe::parse(text, "r.toml", "r", &[]).unwrap(), load(PPO));
    let staged = Recipe::parse(
        "model.path = \"m\"\n[[stage]]\nalgo = \"sft\"\n[[stage]]\nkl = { type = \"loss\", loss_estimator = \"k3\" }\n\
         actor.avg_level = \"sequence\"\nadv.norm_var = true\n",
        "r.toml",
        "r",
        &["stage.1.actor.clip=0.3".into()],
    );
    let staged = staged.unwrap();
    assert_eq!(json!(staged.stages[1].recipe.algo), algo(&["algo=grpo", "actor.clip=0.3"]));
    assert_eq!(Recipe::parse(&staged.toml, "x.toml", "x", &[]).unwrap(), staged);
}

/// The arguments of RL2's example scripts, in each of the ways its versions have spelled them.
const EXAMPLES: &[(&str, &str, &str)] = &[
    (
        "countdown_reinforce",
        "",
        "train_data.path=train@Chenmien/Countdown train_data.responses_per_prompt=4 \
         train_data.sampling_params.max_new_tokens=1024 test_data.path=test@Chenmien/Countdown \
         actor.model_name=Qwen/Qwen2.5-3B-Instruct actor.max_length_per_device=8192 rollout.train_prompts_per_rollout=128 \
         rollout.train_sampling_params.stop=['</answer>'] rollout.env_path=envs/countdown.py trainer.project=Countdown \
         trainer.experiment_name=qwen2.5-3b_reinforce trainer.total_steps=512 trainer.test_freq=8 trainer.save_freq=32",
    ),
    (
        "orz_ppo",
        "",
        "train_data.path=Chenmien/OpenReasonerZero train_data.responses_per_prompt=64 \
         train_data.sampling_params.max_new_tokens=8192 test_data.path=Chenmien/OlympiadBench \
         actor.model_name=Qwen/Qwen2.5-7B actor.cp_size=2 actor.max_length_per_device=8192 actor.freeze_steps=4 \
         rollout.train_prompts_per_rollout=128 rollout.env_path=envs/orz.py adv.estimator=gae \
         trainer.project=OpenReasonerZero trainer.experiment_name=qwen2.5-7b-ppo trainer.total_steps=512",
    ),
    (
        "searchr1",
        "",
        "train_data.path=train@Chenmien/SearchR1 train_data.prompts_per_rollout=256 train_data.responses_per_prompt=8 \
         test_data.path=test@Chenmien/SearchR1 actor.model_name=Qwen/Qwen2.5-3B actor.max_length_per_device=8192 \
         rollout.train_sampling_params.max_new_tokens=512 rollout.max_turns=4 rollout.env_path=envs/searchr1.py \
         trainer.project=SearchR1 trainer.experiment_name=qwen2.5-3b_reinforce trainer.test_freq=8",
    ),
    (
        "gem_reinforce",
        "",
        "train_data.sampling_params.max_new_tokens=1024 actor.model_name=Qwen/Qwen3-1.7B-Base \
         actor.max_length_per_device=8192 rollout.train_prompts_per_rollout=64 rollout.test_prompts_per_rollout=64 \
         rollout.env_path=envs/gem.py adv.global_norm=true adv.norm_var=true trainer.project=GEM \
         trainer.experiment_name=letter-counting trainer.total_steps=512 trainer.save_freq=64",
    ),
    (
        "limo_sft",
        "algo = \"sft\"",
        "data.train.path=Chenmien/LIMO data.train.max_length=16384 data.train.batch_size=32 \
         actor.model_name=Qwen/Qwen2.5-7B-Instruct actor.cp_size=4 actor.max_length_per_device=4096 trainer.project=LIMO \
         trainer.experiment_name=qwen2.5-7b-inst trainer.n_epochs=15",
    ),
    (
        "skywork_rm",
        "algo = \"rm\"",
        "data.train.path=Chenmien/SkyworkRM data.train.max_length=2048 critic.model_name=meta-llama/Llama-3.1-8B-Instruct \
         critic.max_length_per_device=8192 trainer.project=SkyworkRM trainer.experiment_name=llama-3.1-8b-inst",
    ),
    (
        "ultrafeedback_dpo",
        "algo = \"dpo\"",
        "data.train.path=Chenmien/UltraFeedback data.train.max_length=1024 \
         actor.model_name=allenai/Llama-3.1-Tulu-3-8B-SFT actor.max_length_per_device=4096 trainer.project=UltraFeedback \
         trainer.experiment_name=tulu-3-8b",
    ),
];

fn example(name: &str, recipe: &str) -> Resolved {
    let (_, algo, line) = EXAMPLES.iter().find(|e| e.0 == name).unwrap();
    let words: Vec<String> = line.split_whitespace().map(String::from).collect();
    let text = format!("{recipe}\n{algo}\n");
    Recipe::parse(&text, "r.toml", "r", &words).unwrap_or_else(|e| panic!("{name}: {e}"))
}

#[test]
fn the_command_lines_of_rl2s_examples_are_read() {
    // Over an empty recipe, and over one that names data and a model already.
    for recipe in ["", "data.train = [\"a.jsonl\", \"b.jsonl\"]\nmodel.path = \"m\""] {
        let r = |name: &str| example(name, recipe).stages[0].recipe.clone();
        let s = r("countdown_reinforce");
        assert_eq!((s.rollout.prompts, s.rollout.samples, s.rollout.max_new_tokens), (128, 4, 1024));
        assert_eq!(s.data.train, ["train@Chenmien/Countdown"]);
        assert_eq!(s.eval.data, ["test@Chenmien/Countdown"]);
        assert_eq!((s.train.steps, s.eval.every, s.checkpoint.every), (Some(512), 8, 32));
        assert_eq!(
            (s.env.path.as_deref(), &s.rollout.stop[..]),
            (Some("envs/countdown.py"), &["</answer>".into()][..])
        );
        let s = r("orz_ppo");
        assert_eq!(
            (s.parallel.sp_size, s.train.micro_batch_tokens),
            (2, 16384),
            "8192 tokens on each of two ranks"
        );
        assert_eq!(s.algorithm_name(), "ppo");
        let s = r("searchr1");
        assert_eq!((s.rollout.max_turns, s.rollout.prompts), (4, 256));
        assert_eq!(r("gem_reinforce").eval.prompts, 64);
        let s = r("limo_sft");
        assert_eq!(s.data.train, ["Chenmien/LIMO"]);
        assert_eq!((s.data.max_length, s.train.batch, s.train.epochs), (16384, 32, 15.0));
        assert_eq!((s.parallel.sp_size, s.train.micro_batch_tokens), (4, 16384));
        let s = r("skywork_rm");
        assert_eq!(
            s.model.path.as_deref(),
            Some("meta-llama/Llama-3.1-8B-Instruct"),
            "its critic is the model that is trained"
        );
        assert_eq!((s.train.micro_batch_tokens, s.critic.path), (8192, None));
        assert_eq!(r("ultrafeedback_dpo").data.max_length, 1024);
    }
}

#[test]
fn sizes_are_the_parallel_section() {
    let words = ["actor.ddp_size=2", "actor.tp_size=4", "actor.sp_size=2", "rollout.tp_size=8"];
    let s = load(&words).stages[0].recipe.clone();
    assert_eq!(
        (s.parallel.ddp_size, s.parallel.tp_size, s.parallel.sp_size, s.rollout.tp_size),
        (2, 4, 2, 8)
    );
    let bare = load(&["ddp_size=1", "tp_size=2", "cp_size=4"]).stages[0].recipe.clone();
    assert_eq!((bare.parallel.ddp_size, bare.parallel.tp_size, bare.parallel.sp_size), (1, 2, 4));
    let equal = load(&[
        "actor.tp_size=2", "critic.tp_size=2", "ref_actor.tp_size=2", "actor.model_name=m",
        "rollout.model_name=m",
    ]);
    assert_eq!(equal.stages[0].recipe.parallel.tp_size, 2);
}

#[test]
fn options_without_a_key_are_answered_with_the_difference() {
    let error = |words: &[&str]| {
        let words: Vec<String> = words.iter().map(|w| w.to_string()).collect();
        Recipe::parse("model.path = \"m\"\n", "r.toml", "r", &words).unwrap_err().to_string()
    };
    let resume = error(&["trainer.load_ckpt_from=latest"]);
    assert!(resume.contains("trainer.load_ckpt_from") && resume.contains("--resume"), "{resume}");
    assert!(error(&["trainer.eval_only=true"]).contains("ferrl eval"));
    assert!(error(&["actor.apply_len_norm=true"]).contains("simpo"));
    let layout = error(&["actor.tp_size=2", "critic.tp_size=4"]);
    assert!(layout.contains("critic.tp_size is 4 and parallel.tp_size 2"), "{layout}");
    assert!(error(&["ref_actor.model_name=other"]).contains("the reference is the initial policy"));
    assert!(error(&["trainer.n_epoch=2"]).contains("did you mean trainer.n_epochs?"));
    // Switched off, or of no consequence for what is learned.
    let words = [
        "trainer.load_ckpt_from=null",
        "trainer.eval_only=false",
        "trainer.project=P",
        "trainer.use_wandb=false",
    ];
    let more =
        ["actor.offload_model=true", "actor.use_liger_kernel=false", "rollout.gpu_memory_utilization=0.5"];
    let resolved = load(&[&words[..], &more[..]].concat());
    assert_eq!(resolved, load(&[]));
    let warnings = ferrl::warnings::Warnings::default();
    resolved.warn_unused(&resolved.stages[0], &warnings);
    let said = warnings.take().into_iter().find(|w| w.name == "rl2-options").unwrap().to_string();
    for part in ["trainer.project: `ferrl sync", "actor.offload_model: ", "rollout.cache_mib"] {
        assert!(said.contains(part), "{said}");
    }
    assert!(
        !said.contains("use_wandb") && !said.contains("liger"),
        "what is switched off needs no word: {said}"
    );
}

/// Every option of RL2's PPO trainer with its default, as RL2 prints a resolved configuration.
const RESOLVED: &str = "train_data.experience.responses_per_prompt=4 train_data.experience.max_turns=1 \
    train_data.experience.max_new_tokens=64 train_data.experience.mask_offpolicy_data=true \
    test_data.experience.responses_per_prompt=1 test_data.experience.max_turns=1 test_data.experience.max_new_tokens=64 \
    actor.model_name=m actor.use_liger_kernel=false actor.dtype=bfloat16 actor.enable_gradient_checkpointing=true \
    actor.ddp_size=1 actor.tp_size=1 actor.cp_size=1 actor.max_length_per_device=8192 actor.optimizer.lr=1e-6 \
    actor.optimizer.weight_decay=1e-2 actor.max_grad_norm=1.0 actor.scheduler.name=constant \
    actor.scheduler.warmup_ratio=0.1 actor.offload_optimizer=true actor.max_inference_length_per_device=8192 \
    actor.temperature=1.0 actor.update_per_rollout=1 actor.clip=0.2 actor.tis_coef=0.0 actor.avg_level=token \
    actor.freeze_steps=0 actor.offload_model=true actor.adv_estimator=reinforce actor.kl.coef=0.0 actor.kl.type=null \
    actor.kl.reward_estimator=k1 actor.kl.loss_estimator=k2 actor.entropy.coef=0.0 rollout.server_args.model_path=m \
    rollout.server_args.dtype=bfloat16 rollout.server_args.tp_size=1 rollout.server_args.mem_fraction_static=0.6 \
    rollout.train_prompts_per_rollout=32 rollout.test_prompts_per_rollout=null rollout.responses_per_prompt=4 \
    rollout.train_sampling_params.temperature=1.0 rollout.train_sampling_params.stop=null \
    rollout.train_sampling_params.no_stop_trim=true rollout.test_sampling_params.temperature=0.0 \
    rollout.test_sampling_params.no_stop_trim=true rollout.env_path=null rollout.partial_rollout=false \
    rollout.dynamic_filtering=true ref_actor.model_name=m ref_actor.temperature=1.0 critic.model_name=m \
    critic.dtype=bfloat16 critic.enable_gradient_checkpointing=true critic.ddp_size=1 critic.tp_size=1 critic.cp_size=1 \
    critic.max_length_per_device=8192 critic.optimizer.lr=5e-6 critic.optimizer.weight_decay=1e-2 critic.max_grad_norm=1.0 \
    critic.scheduler.name=constant critic.scheduler.warmup_ratio=0.1 critic.offload_optimizer=true \
    critic.max_inference_length_per_device=8192 critic.update_per_rollout=1 critic.clip=0.5 critic.avg_level=token \
    critic.offload_model=true adv.estimator=reinforce adv.gamma=1.0 adv.lamda=1.0 adv.responses_per_prompt=4 \
    adv.global_norm=false adv.norm_var=false trainer.project=P trainer.experiment_name=e trainer.load_ckpt_from=null \
    trainer.total_steps=512 trainer.test_freq=null trainer.save_dir=ckpts/e trainer.save_freq=null trainer.use_wandb=true";

/// Was: `actor.temperature` and the critic's own options were refused where they repeat a default, and the critic's scheduler
/// was compared as a table.
#[test]
fn a_resolved_configuration_of_rl2_is_read() {
    let words: Vec<&str> = RESOLVED.split_whitespace().collect();
    let recipe = load(&words).stages[0].recipe.clone();
    assert_eq!((recipe.algorithm_name(), recipe.train.steps), ("dr_grpo", Some(512)));
    assert_eq!((recipe.optim.lr, recipe.optim.warmup, recipe.critic.lr), (1e-6, 0.1, Some(5e-6)));
    assert_eq!((recipe.rollout.prompts, recipe.rollout.samples, recipe.rollout.max_turns), (32, 4, 1));
    assert_eq!((recipe.eval.temperature, recipe.eval.samples), (Some(0.0), 1));
    assert!(recipe.rollout.include_stop && recipe.model.recompute);
    assert_eq!(recipe.parallel.ddp_size, 1);
}

#[test]
fn options_of_rl2s_history_are_read_or_answered() {
    let error = |words: &[&str]| {
        let words: Vec<String> = words.iter().map(|w| w.to_string()).collect();
        Recipe::parse("model.path = \"m\"\n", "r.toml", "r", &words).unwrap_err().to_string()
    };
    assert!(error(&["adv.estimator=zeros"]).contains("algo=distill"));
    assert!(error(&["critic.scheduler.warmup_ratio=0.2"]).contains("critic.scheduler.warmup_ratio is 0.2"));
    assert!(error(&["critic.optimizer.weight_decay=0.1"]).contains("optim.weight_decay 0.01"));
    assert!(error(&["actor.optimizer.min_lr=1e-7"]).contains("optim.min_ratio"), "a rate is no fraction");
    assert!(error(&["rollout.gem_env.rollout_batch_size=128"]).contains("rollout.prompts=128"));
    assert!(error(&["trainer.n_gpus_per_node=8"]).contains("ferrl launch"), "verl's table of the same name");
    assert!(error(&["actor.tf_config.pipeline_model_parallel_size=2"]).contains("ZeRO-3"));
    let words = [
        "actor.tf_config.tensor_model_parallel_size=2",
        "actor.tf_config.context_parallel_size=4",
        "actor.optimizer.clip_grad=0.5",
        "actor.scheduler.lr_decay_style=cosine",
        "rollout.gem_env.env_id=game:GuessTheNumber-v0",
        "rollout.gem_env.num_env=16",
        "rollout.gem_env.async_env=true",
        "rollout.gem_env.wrappers=\"\"",
        "trainer.disable_wandb=true",
        "test_data.response_per_prompt=2",
        "data.test.prompt_key=prompt",
    ];
    let recipe = load(&words).stages[0].recipe.clone();
    assert_eq!((recipe.parallel.tp_size, recipe.parallel.sp_size, recipe.optim.max_grad_norm), (2, 4, 0.5));
    assert_eq!(
        (recipe.optim.schedule.as_str(), recipe.env.concurrency, recipe.eval.samples),
        ("cosine", 16, 2)
    );
    assert_eq!(recipe.env.gem.as_deref(), Some("game:GuessTheNumber-v0"));
}
