//! Generation programs.

use crate::help::World;
use ferrl::episode::Environments;
use ferrl::program::{Finished, Program};
use ferrl::rollout::Actor;
use ferrl_engine::Result;
use ferrl_engine::generate::{CacheOptions, GenerationRequest, Generator, Sampler, SamplingParams};
use ferrl_engine::train::{Batch, stats};
use ferrl_kernels::Ranks;
use serde_json::{Map, Value, json};

fn run(world: &World, source: &str, rows: &[Value]) -> Result<Vec<Finished>> {
    let mut sampler =
        Sampler::new(&world.model, CacheOptions::default())?.with_tokenizer(world.tokenizer.clone());
    let mut actor = Actor {
        generator: &mut sampler,
        policy: &world.model,
        tokenizer: &world.tokenizer,
        stops: &world.stops,
        environments: &Environments::default(),
        ranks: Ranks::ALONE,
    };
    let rows: Vec<Map<String, Value>> = rows.iter().map(|r| r.as_object().cloned().unwrap()).collect();
    Program::new(source)?.run(&mut actor, &rows, &params(world))
}

fn params(world: &World) -> SamplingParams {
    SamplingParams { stop_ids: world.stops.ids().to_vec(), max_new_tokens: 5, seed: 9, ..Default::default() }
}

#[test]
fn gen_completes_what_stands_before_it() {
    let world = World::new(1);
    let rows = [json!({"q": "ab"}), json!({"q": "bbaa"})];
    let got =
        run(&world, "{{ q }}\n{{ gen('x') }}\nb{{ gen('y', stop='\\n', max_tokens=4) }}a{{ x }}", &rows)
            .unwrap();
    for (i, f) in got.iter().enumerate() {
        let (x, y) = (f.variables["x"].as_str().unwrap(), f.variables["y"].as_str().unwrap());
        assert_eq!(f.text, format!("{}\n{x}\nb{y}a{x}", rows[i]["q"].as_str().unwrap()));
        assert!(!y.contains('\n') && y.len() <= 4 && f.generated_tokens <= 9, "{f:?}");
        // The first call is the completion that the generator gives for the text before it.
        let mut sampler = Sampler::new(&world.model, CacheOptions::default()).unwrap();
        let prompt = world.tokenizer.encode_prompt(&format!("{}\n", rows[i]["q"].as_str().unwrap())).unwrap();
        let request =
            GenerationRequest { prompt, params: params(&world), stream: [0x7072_6f67, i as u32, 0] };
        let want = sampler.generate(&world.model, vec![request]).unwrap().remove(0);
        assert_eq!(x, world.stops.text(&world.tokenizer, &want).unwrap());
    }
    assert_eq!(
        run(&world, "{{ q }}\n{{ gen('x') }}", &rows).unwrap()[1].variables["x"],
        got[1].variables["x"]
    );
}

#[test]
fn select_takes_the_most_probable_option() {
    let world = World::new(1);
    let options = ["ab", "ba", "bbb", "a"];
    let got =
        run(&world, "abba{{ select(['ab', 'ba', 'bbb', 'a'], 'best') }}", &[json!({})]).unwrap().remove(0);
    let logp = |option: &str| {
        let prefix = world.tokenizer.encode_prompt("abba").unwrap();
        let own = world.tokenizer.encode_text(option).unwrap();
        let all =
            stats(&world.model, &Batch::of([[prefix.clone(), own.clone()].concat()]), 1.0).unwrap().logp;
        all[prefix.len() - 1..prefix.len() - 1 + own.len()].iter().sum::<f32>()
    };
    let want = options.iter().max_by(|a, b| logp(a).total_cmp(&logp(b))).unwrap();
    assert_eq!(got.variables["best"], *want);
    assert_eq!((got.text, got.generated_tokens), (format!("abba{want}"), 0), "nothing is sampled");
}

#[test]
fn a_program_branches_and_loops_on_what_was_written() {
    let world = World::new(1);
    let source = "abababababababababababababababababababababababababababababababababab\n{% for i in range(3) %}{{ gen(stop='\\n', max_tokens=3) }}\n{% endfor %}\
                  {% set pick = select(['a', 'b']) %}{% if pick == 'a' %}yes{% else %}no{% endif %}";
    let f = run(&world, source, &[json!({})]).unwrap().remove(0);
    assert_eq!(f.text.lines().count(), 5, "{:?}", f.text);
    assert!(f.text.ends_with("yes") || f.text.ends_with("no"));
    assert!(f.shared_tokens > 0, "the second call continues the first: {f:?}");
}

#[test]
fn mistakes_in_programs_are_named() {
    let world = World::new(1);
    let fails = |source: &str, part: &str| {
        let e = run(&world, source, &[json!({})]).err().unwrap().to_string();
        assert!(e.contains(part), "{source}: {e}");
    };
    fails("a{{ gen( }}", "does not compile");
    fails("a{{ nothing }}", "fix: every variable is a column");
    fails("{{ gen('x') }}", "text before the first call");
    fails("a{{ select([]) }}", "one option at least");
    fails("a{{ gen('x', max_tokens=0) }}", "at least 1");
    fails("a{{ gen('x', tokens=3) }}", "fix: text, and between {{ and }} columns, gen(");
    fails("a{{ gem('x') }}", "gem is unknown");
    fails("a{% for i in range(2000) %}{{ select(['a']) }}{% endfor %}", "more than 1000");
}
