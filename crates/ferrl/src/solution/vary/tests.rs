use super::*;

fn read(question: &str, solution: &str) -> ExerciseTemplate {
    match ExerciseTemplate::read(question, solution) {
        Ok(template) => template,
        Err(why) => panic!("{question}: {}", why.text()),
    }
}

const CLIPS: (&str, &str) = (
    "Ada sold 46 clips on Monday and half as many on Tuesday, for $1,200 in all. How many did she sell?",
    "On Tuesday she sold 46/2=<<46/2=23>>23 clips.\nTogether she sold 46 + 23 = <<46+23=69>>69 clips.\n#### 69",
);

#[test]
fn the_same_numbers_give_the_same_text() {
    let template = read(CLIPS.0, CLIPS.1);
    let same = template.inputs.iter().map(|i| i.value.clone()).collect();
    assert_eq!(template.computed(same), Some((CLIPS.0.into(), CLIPS.1.into())));
}

#[test]
fn every_later_number_is_computed_again() {
    let template = read(CLIPS.0, CLIPS.1);
    let (question, solution) = template.computed(vec![Rational::from(50)]).expect("another exercise");
    assert!(
        question.starts_with("Ada sold 50 clips on Monday and half as many on Tuesday, for $1,200"),
        "{question}"
    );
    assert_eq!(
        solution,
        "On Tuesday she sold 50/2=<<50/2=25>>25 clips.\nTogether she sold 50 + 25 = <<50+25=75>>75 clips.\n#### 75"
    );
    assert_eq!(template.computed(vec![Rational::from(51)]), None, "half of 51 is no number of clips");
}

/// Whether each calculation of a solution has the value it says.
fn holds(solution: &str) -> bool {
    CALCULATION.captures_iter(solution).all(|c| calculated(&c[1], &c[2]).is_some())
}

#[test]
fn variants_hold_whatever_is_drawn() {
    let exercises = [
        CLIPS,
        (
            "A book costs $40. With a discount of 20% it is cheaper. What do 3 books cost then?",
            "The discount is 40*20/100=$<<40*20/100=8>>8.\nA book costs 40-8=$<<40-8=32>>32.\n\
             So 3 books cost 32 x 3=$<<32*3=96>>96.\n#### 96",
        ),
        (
            "Bo has 15 cards and wins 9. He gives 8 away. How many are left?",
            "He has 15+9=<<15+9=24>>24 cards.\nThen 24-8=<<24-8=16>>16 are left.\n#### 16",
        ),
    ];
    for (question, solution) in exercises {
        let template = read(question, solution);
        let mut random = TaskDraw::new("vary", 1, 2);
        for _ in 0..200 {
            let (q, s) =
                template.vary(&mut random).unwrap_or_else(|why| panic!("{question}: {}", why.text()));
            assert!(q != question && holds(&s), "{q}\n{s}");
            let answer = s.rsplit("#### ").next().expect("an answer");
            let last = CALCULATION.captures_iter(&s).last().expect("a calculation");
            assert_eq!(&last[2], answer, "{s}");
        }
    }
}

#[test]
fn a_number_that_may_be_two_things_varies_only_where_both_are_equal() {
    // The 6 of the question and the 6 that a step gives: which of them the last step takes is unclear.
    let question = "Cy has 6 nets, 15 hooks and 9 lines. He loses as many hooks as he has lines. How many more hooks than nets?";
    let solution = "He has 15-9=<<15-9=6>>6 hooks.\nThat is 6-6=<<6-6=0>>0 more.\n#### 0";
    let template = read(question, solution);
    let mut random = TaskDraw::new("vary", 5, 0);
    for _ in 0..50 {
        if let Ok((q, s)) = template.vary(&mut random) {
            let nets = NUMBER.find(&q).expect("a number").as_str();
            assert!(s.contains(&format!(">>{nets} hooks")), "{q}\n{s}");
        }
    }
}

#[test]
fn what_says_a_number_in_words_or_is_a_unit_stays() {
    let inputs = |question: &str| -> Vec<String> {
        number::varying(question).into_iter().map(|(n, _)| n.like(&n.value).expect("text")).collect()
    };
    assert_eq!(inputs("He reads 2 pages twice, 35 pages a week"), ["35"]);
    assert_eq!(inputs("7 days, 24 hours, 60 minutes, 365 days, 100 percent"), Vec::<String>::new());
    assert_eq!(inputs("at 3:30, 1/4 of it, the 5th, in 1999, 8-9 of them, 16 boats"), ["16"]);
    assert_eq!(inputs("14 cats and 14 dogs and 15 birds"), ["15"]);
    assert_eq!(inputs("1,250 coins, 25%, 0.75 l"), ["1,250", "25", "0.75"]);
}

#[test]
fn numbers_are_written_as_before() {
    for (like, value, want) in [
        ("1,200", (34_000, 1), Some("34,000")),
        ("1200", (34_000, 1), Some("34000")),
        ("12.50", (7, 2), Some("3.50")),
        ("12.00", (7, 1), Some("7.00")),
        (".5", (1, 4), Some(".25")),
        ("0.5", (1, 4), Some("0.25")),
        ("3", (1, 3), None),
        ("1,200", (12, 1), Some("12")),
    ] {
        let value = Rational::new(value.0, value.1).expect("a number");
        assert_eq!(WrittenNumber::read(like).and_then(|w| w.like(&value)).as_deref(), want, "{like}");
    }
}

#[test]
fn what_cannot_vary_says_why() {
    let why = |question: &str, solution: &str| ExerciseTemplate::read(question, solution).err();
    assert_eq!(why("Di has 14 pens.", "She has 14 pens.\n#### 14"), Some(Unvaried::Calculations));
    assert_eq!(why("Di has 14 pens.", "14+1=<<14+1=16>>16\n#### 16"), Some(Unvaried::Calculations));
    // What is written as a result was computed elsewhere.
    let stated = "Half are 14/2=<<14/2=7>>7, and 7+5 = <<12=12>>12.\n#### 12";
    assert_eq!(why("Di has 14 pens and 5 caps.", stated), Some(Unvaried::Calculations));
    assert_eq!(why("Di has some pens.", "14+1=<<14+1=15>>15\n#### 15"), Some(Unvaried::Inputs));
    assert_eq!(
        why("Di has 14 pens and 5 caps.", "14+5=<<14+5=19>>19, less 3 is 16.\n#### 16"),
        Some(Unvaried::Unexplained)
    );
}
