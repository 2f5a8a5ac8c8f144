//! Fuzzed pairs: each gets a verdict, in time, without a panic.

use super::extract;
use super::extract::Take;
use super::modes::{Mode, grade};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

const MODES: [Mode; 5] = [Mode::Equal, Mode::Hendrycks, Mode::Prm800k, Mode::Minerva, Mode::MathVerify];

/// No pair may take longer.
const LIMIT: Duration = Duration::from_millis(10);

/// What answers are made of, parted by spaces; `␣` is a space.
static PIECES: LazyLock<Vec<String>> = LazyLock::new(|| {
    let pieces = "\
    \\frac \\sqrt \\sqrt[3] { } { } ( ) [ ] \\{ \\} | ^ _ ^{ + - * / = < \\le␣ , ; : ! ' % \\% $ \\pm␣ \
    \\cup␣ \\infty␣ \\pi␣ e i x y n f( sin \\sin␣ \\cos^2 \\log_2␣ ln( exp( \\text{ \\text{␣cm} ␣and␣ ␣or␣ 0 \
    1 2 9 10 99999 0.5 1e9 1,000 12345678901234567890 \\binom \\sum_{k=1}^{ \\prod_{i=1}^{9} \\int_0^1␣ \
    \\lim_{x\\to␣0} \\begin{pmatrix} \\end{pmatrix} & \\\\ \\begin{cases} \\overline{ ^\\circ \\angle␣ \
    \\boxed{ \\mathbb{R} \\emptyset \\left \\right \\ \u{221e} \u{bd} \u{b2} \u{221a} \u{2264} \u{3c0} \
    \u{e9} \u{4f60} \u{1f600} ␣ ␣ the␣answer␣is␣ #### <answer> </answer> mod \\pmod{7} _{16} !! \\cdot ~ \
    12:30 March␣3 \\ldots p.m. (A) million \\ne␣ \\in␣ \\setminus ** \u{0} \\quad";
    let mut pieces: Vec<String> = pieces.split(' ').map(|piece| piece.replace('␣', " ")).collect();
    pieces.push("\n".into());
    pieces
});

/// Answers that are well formed, to be damaged.
static GOLDS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let golds = "\
    \\frac{1}{2} 2\\sqrt{3} (-\\infty,3]\\cup[5,\\infty) x^2-2x+1 \\{1,2,3\\} y=2x+1 1\\pm\\sqrt{5} \
    \\begin{pmatrix}1&2\\\\3&4\\end{pmatrix} (1,2,3) 12\\text{␣cm}^2 30\\% \\sin^2␣x e^{i\\pi} 5! \\log_2␣8 \
    x\\le␣3 3+4i \\$1,250.50 \\text{even} 1011_2 \\sum_{k=1}^{100}k^2 2^{2^{2^{2^2}}} \\binom{50}{25} \
    9^{9^{9}} \\frac{x^{100}-1}{x-1} (x+y+z)^{20}";
    golds.split(' ').map(|gold| gold.replace('␣', " ")).collect()
});

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn pick<'a, T: AsRef<str>>(&mut self, from: &'a [T]) -> &'a str {
        from[self.below(from.len())].as_ref()
    }

    fn soup(&mut self) -> String {
        let most = if self.below(20) == 0 { 300 } else { 14 };
        let len = 1 + self.below(most);
        (0..len).map(|_| self.pick(&PIECES)).collect()
    }

    fn nested(&mut self) -> String {
        let (open, close) = [
            ("(", ")"),
            ("{", "}"),
            ("\\frac{1}{1+", "}"),
            ("\\sqrt{", "}"),
            ("2^{", "}"),
            ("|", "|"),
            ("-", ""),
            ("\\sin ", ""),
            ("[", "]"),
            ("\\{", "\\}"),
            ("x+(", ")^2"),
            ("f(", ")"),
            ("9^", ""),
            ("1/(1+", ")"),
        ][self.below(14)];
        let most = if self.below(8) == 0 { 3_000 } else { 60 };
        let depth = 1 + self.below(most);
        format!("{}{}{}", open.repeat(depth), self.pick(&["1", "x", "2.5", "\\pi", ""]), close.repeat(depth))
    }

    fn mutated(&mut self, gold: &str) -> String {
        let mut chars: Vec<char> = gold.chars().collect();
        for _ in 0..1 + self.below(3) {
            let at = self.below(chars.len() + 1);
            match self.below(4) {
                0 if at < chars.len() => {
                    chars.remove(at);
                }
                1 => {
                    let piece = self.pick(&PIECES);
                    chars.splice(at..at, piece.chars());
                }
                2 if at + 1 < chars.len() => chars.swap(at, at + 1),
                _ => {
                    let end = (at + self.below(6)).min(chars.len());
                    let part: Vec<char> = chars[at..end].to_vec();
                    chars.splice(at..at, part);
                }
            }
        }
        chars.into_iter().collect()
    }

    fn unicode(&mut self) -> String {
        (0..self.below(40)).filter_map(|_| char::from_u32(self.below(0x1_1000) as u32)).collect()
    }

    fn text(&mut self) -> String {
        match self.below(8) {
            0..=2 => self.soup(),
            3 => self.nested(),
            4 | 5 => {
                let gold = self.pick(&GOLDS);
                self.mutated(gold)
            }
            6 => self.unicode(),
            _ => self.pick(&GOLDS).to_string(),
        }
    }
}

/// A fuzzed pair, how it is graded, and its verdict.
fn pair(seed: u64, number: u64) -> (String, impl Fn() -> bool) {
    let mut random = Random(seed.wrapping_mul(1 << 40) + number);
    let (gold, answer) = (random.text(), random.text());
    // Mode `equal` most of the time; the answer as it stands or as a completion.
    let mode = MODES[if random.below(3) == 0 { random.below(MODES.len()) } else { 0 }];
    let take = if random.below(2) == 0 { Take::Whole } else { Take::Auto };
    let shown = format!("{mode:?}: {gold:?} and {answer:?}");
    let run = move || {
        let gold = extract::expected(&gold);
        let answer = extract::answer(&answer, take).unwrap_or_default();
        grade(mode, &gold, &answer, "")
    };
    (shown, run)
}

/// How long a verdict takes: the shortest of several times where the first is long, since another process may have held
/// the core. Times that the system accounts to the thread are of no use here: they stand still between its ticks.
fn time(shown: &str, run: impl Fn() -> bool) -> Duration {
    let once = || {
        let start = Instant::now();
        (run(), start.elapsed())
    };
    let (verdict, mut time) = once();
    for _ in 0..8 {
        if time * 4 < LIMIT {
            break;
        }
        let (again, next) = once();
        assert_eq!(again, verdict, "a verdict depends on nothing but the pair: {shown}");
        time = time.min(next);
    }
    assert!(time > Duration::ZERO && time <= LIMIT, "{time:?} for {shown}");
    time
}

/// Grades fuzzed pairs; the slowest of them.
fn timed(pairs: u64, seed: u64) -> (Duration, String) {
    let mut slowest = (Duration::ZERO, String::new());
    for number in 0..pairs {
        let (shown, run) = pair(seed, number);
        let time = time(&shown, run);
        if time > slowest.0 {
            slowest = (time, shown);
        }
    }
    slowest
}

/// Pairs that make as much work as they can. The sum of big fractions took 45 ms when steps were estimated instead of
/// counted where they are made.
fn costly() -> Vec<(String, String)> {
    let fractions = |n: u32| -> String {
        let term = |p: &u32| format!("+\\frac{{{p}^{{{n}}}+1}}{{{}^{{{n}}}}}", p + 2);
        [3, 5, 7, 11, 13, 17, 19, 23].iter().map(term).collect()
    };
    let mut pairs: Vec<(String, String)> =
        [300, 900, 3_000, 9_000].map(|n| (fractions(n), "5".to_string())).into();
    for [gold, answer] in [
        ["\\binom{10000}{5000}", "\\binom{10000}{5001}"],
        ["\\sum_{k=0}^{1000}\\binom{1000}{k}", "2^{1001}"],
        ["\\sum_{k=1}^{2000}\\frac{1}{k}", "\\sum_{k=1}^{2000}\\frac{1}{k+1}"],
        ["\\sum_{k=1}^{2000}\\sin k", "\\sum_{k=1}^{2000}\\cos k"],
        ["\\prod_{k=1}^{2000}(k^2+1)", "\\prod_{k=1}^{2000}(k^2+2)"],
        ["\\frac{3^{9000}+1}{7^{9000}+2}", "\\frac{3^{9000}+2}{7^{9000}+1}"],
        ["\\frac{20000!}{19998!}", "5000!"],
        ["\\sqrt[7]{3^{2000}+1}+\\sqrt[5]{7^{900}+1}", "\\sqrt[7]{3^{2000}+2}"],
        [
            "(1+\\sqrt{2}+\\sqrt{3}+\\sqrt{5}+\\sqrt{7})^{40}",
            "(1+\\sqrt{2}+\\sqrt{3}+\\sqrt{5}+\\sqrt{7})^{39}",
        ],
        [
            "\\frac{1}{(\\frac{12345}{67891})^{999}+(\\frac{9876}{54321})^{999}}",
            "\\frac{1}{(\\frac{12345}{67891})^{999}}",
        ],
    ] {
        pairs.push((gold.to_string(), answer.to_string()));
    }
    pairs
}

/// On a small stack: threads that grade have no more.
fn on_small_stack<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    let thread = std::thread::Builder::new().stack_size(1 << 20).spawn(run);
    thread.expect("a thread").join().expect("no panic")
}

#[test]
fn fuzzed_pairs_get_a_verdict() {
    on_small_stack(|| {
        for number in 0..3_000 {
            let (shown, run) = pair(1, number);
            assert_eq!(run(), run(), "{shown}");
        }
    });
}

#[test]
#[ignore = "a million pairs take a minute or two, and the clock only means something in an optimised build"]
fn a_million_fuzzed_and_a_few_costly_pairs_get_a_verdict_in_time() {
    let threads: Vec<_> =
        (2..4).map(|seed| std::thread::spawn(move || on_small_stack(move || timed(500_000, seed)))).collect();
    for (gold, answer) in costly() {
        for mode in MODES {
            let shown = format!("{mode:?}: {gold:?} and {answer:?}");
            let time = time(&shown, || grade(mode, &gold, &answer, ""));
            println!("{time:?}: {}", shown.chars().take(80).collect::<String>());
        }
    }
    for thread in threads {
        let (time, pair) = thread.join().expect("no panic");
        println!("slowest of 500000: {time:?}: {}", pair.chars().take(300).collect::<String>());
    }
}
