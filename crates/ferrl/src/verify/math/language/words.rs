//! What names mean: LaTeX commands, functions, Greek letters, English words.

use super::super::Tok;

/// Commands that set text: what they hold may be words.
pub fn is_text_command(name: &str) -> bool {
    matches!(
        name,
        "text"
            | "mbox"
            | "textbf"
            | "textit"
            | "textrm"
            | "textnormal"
            | "textsf"
            | "texttt"
            | "textsc"
            | "hbox"
            | "mathrm"
            | "rm"
            | "operatorname"
            | "emph"
            | "underline"
            | "textup"
            | "mathsf"
            | "mathtt"
    )
}

/// Commands that change the look of what follows.
pub fn is_font_command(name: &str) -> bool {
    matches!(
        name,
        "mathbf"
            | "mathit"
            | "mathcal"
            | "mathfrak"
            | "mathscr"
            | "boldsymbol"
            | "bm"
            | "pmb"
            | "bf"
            | "it"
            | "vec"
            | "hat"
            | "widehat"
            | "overrightarrow"
            | "tilde"
            | "widetilde"
            | "displaystyle"
            | "textstyle"
            | "scriptstyle"
            | "limits"
            | "nolimits"
            | "mathopen"
            | "mathclose"
            | "mathpunct"
            | "mathbin"
    )
}

/// Commands that only place things.
pub fn is_skipped(name: &str) -> bool {
    matches!(
        name,
        "left"
            | "right"
            | "middle"
            | "big"
            | "Big"
            | "bigg"
            | "Bigg"
            | "bigl"
            | "bigr"
            | "Bigl"
            | "Bigr"
            | "biggl"
            | "biggr"
            | "Biggl"
            | "Biggr"
            | "thinspace"
            | "medspace"
            | "thickspace"
            | "negthinspace"
            | "space"
            | "hfill"
            | "noindent"
            | "centering"
            | "nonumber"
            | "notag"
            | "allowbreak"
            | "hline"
            | "smallskip"
            | "enspace"
            | "null"
            | "par"
            | "strut"
            | "relax"
            | "bigm"
            | "protect"
            | "tiny"
            | "small"
            | "normalsize"
            | "large"
            | "Large"
            | "LARGE"
            | "huge"
            | "Huge"
            | "blacksquare"
            | "qed"
            | "qedsymbol"
            | "therefore"
    )
}

/// Functions and constructs, by the names they go by.
const FUNCTIONS: &str = "\
    arcsin arccos arctan arccot arcsec arccsc asin acos atan sinh cosh tanh coth sech csch arsinh arcosh \
    artanh asinh acosh atanh arcsinh arccosh arctanh sin cos tan cot sec csc cosec tg ctg arctg ln log lg \
    exp cis sqrt cbrt root frac dfrac tfrac cfrac binom dbinom tbinom floor ceil round gcd lcm min max sgn \
    sign abs Re Im arg Arg conj det overline bar sum prod int iint iiint oint lim mod bmod pmod choose over \
    stackrel overset underset xrightarrow substack angle measuredangle triangle odot overarc widehat \
    parallel perp sup inf pm nabla partial infty emptyset setR setZ setN setQ setC not underbrace overbrace \
    pi deg degree circ permil e";

const GREEK: &str = "\
    alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho varrho \
    sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar \
    imath jmath aleph";

/// Whether a list of words, parted by spaces, has a word.
fn is_in(list: &str, word: &str) -> bool {
    list.split(' ').any(|w| w == word)
}

fn function(name: &str) -> Option<Tok> {
    FUNCTIONS.split(' ').find(|f| *f == name).map(Tok::Cmd)
}

/// The symbol that a LaTeX command stands for.
fn symbol(name: &str) -> Option<char> {
    Some(match name {
        "cdot" | "times" | "ast" | "star" | "bullet" => '*',
        "div" => '/',
        "pm" => '±',
        "mp" => '∓',
        "le" | "leq" | "leqslant" | "leqq" => '≤',
        "ge" | "geq" | "geqslant" | "geqq" => '≥',
        "ne" | "neq" => '≠',
        "lt" => '<',
        "gt" => '>',
        "in" => '∈',
        "notin" => '∉',
        "cup" | "bigcup" => '∪',
        "cap" | "bigcap" => '∩',
        "setminus" | "backslash" | "smallsetminus" => '∖',
        "approx" | "approxeq" | "simeq" | "doteq" => '≈',
        "equiv" => '≡',
        "sim" => '~',
        "cong" => '≅',
        "propto" => '∝',
        "subset" | "subseteq" => '⊂',
        "to" | "rightarrow" | "Rightarrow" | "implies" | "longrightarrow" | "Longrightarrow" | "mapsto"
        | "iff" | "Leftrightarrow" | "leftrightarrow" => '→',
        "langle" => '⟨',
        "rangle" => '⟩',
        "lfloor" => '⌊',
        "rfloor" => '⌋',
        "lceil" => '⌈',
        "rceil" => '⌉',
        "lbrace" => '⦃',
        "rbrace" => '⦄',
        "lbrack" => '[',
        "rbrack" => ']',
        "lparen" => '(',
        "rparen" => ')',
        "mid" | "vert" | "lvert" | "rvert" => '|',
        "Vert" | "lVert" | "rVert" => '‖',
        "colon" => ':',
        "ldots" | "cdots" | "dots" | "dotsc" | "dotsb" | "vdots" | "ddots" | "dotsm" => '…',
        "prime" => '\'',
        "textdollar" | "dollar" => '$',
        "euro" | "texteuro" => '€',
        "pounds" | "textsterling" => '£',
        "yen" => '¥',
        "percent" => '%',
        "lnot" | "neg" => '¬',
        _ => return None,
    })
}

/// The token of a LaTeX command.
pub fn command_exact(name: &str) -> Option<Tok> {
    if let Some(symbol) = symbol(name) {
        return Some(Tok::Sym(symbol));
    }
    match name {
        "land" | "wedge" => return Some(Tok::Word("and".into())),
        "lor" | "vee" => return Some(Tok::Word("or".into())),
        "varnothing" | "O" => return Some(Tok::Cmd("emptyset")),
        "R" | "reals" | "Reals" => return Some(Tok::Cmd("setR")),
        "Z" => return Some(Tok::Cmd("setZ")),
        "N" => return Some(Tok::Cmd("setN")),
        _ => {}
    }
    function(name).or_else(|| is_in(GREEK, name).then(|| Tok::Name(name.replace("var", ""))))
}

/// The token of a whole run of letters without a backslash.
pub fn command_whole(run: &str) -> Option<Tok> {
    Some(match run {
        "infinity" | "Infinity" | "infty" | "oo" | "inf" | "Inf" => Tok::Cmd("infty"),
        "union" | "Union" => Tok::Sym('∪'),
        "intersection" => Tok::Sym('∩'),
        "and" | "AND" | "And" => Tok::Word("and".into()),
        "or" | "OR" | "Or" => Tok::Word("or".into()),
        "Pi" | "PI" => Tok::Cmd("pi"),
        "Sqrt" => Tok::Cmd("sqrt"),
        "Abs" => Tok::Cmd("abs"),
        "percent" | "percentage" | "pct" | "Percent" => Tok::Sym('%'),
        "degree" | "degrees" | "deg" | "Degrees" => Tok::Cmd("degree"),
        "e" | "over" | "root" | "angle" | "triangle" | "not" | "bar" | "sum" | "round" | "min" | "int"
        | "parallel" | "sec" => return None,
        "cdot" | "times" => Tok::Sym('*'),
        "leq" | "le" => Tok::Sym('≤'),
        "geq" | "ge" => Tok::Sym('≥'),
        "neq" => Tok::Sym('≠'),
        "pm" => return None,
        _ => {
            let name = run.to_ascii_lowercase();
            let capital = run.len() > 2 && run.get(1..).is_some_and(|tail| Some(tail) == name.get(1..));
            return function(run)
                .or_else(|| if capital { function(&name) } else { None })
                .or_else(|| (run.len() > 2 && is_in(GREEK, run)).then(|| Tok::Name(run.to_string())));
        }
    })
}

/// Functions and Greek letters that people write without a backslash next to letters: `sinx`, `2pir`.
const INLINE: &str = "\
    arcsin arccos arctan sinh cosh tanh sqrt sin cos tan cot sec csc log exp ln theta alpha beta gamma \
    lambda omega sigma phi pi";

/// The function or Greek letter that a run of letters starts with.
pub fn command_prefix(rest: &str) -> Option<(Tok, usize)> {
    let name = INLINE.split(' ').find(|name| rest.starts_with(name))?;
    Some((function(name).unwrap_or_else(|| Tok::Name(name.to_string())), name.len()))
}

/// Short words, which would otherwise be products of variables.
const SHORT: &str = "\
    no is at am to if we he it by on as so be do not all any the for are was has had yes odd one two six ten \
    red day men man boy box set sum can may jan feb mar apr jun jul aug sep oct nov dec mon tue wed thu fri \
    sat sun new old and but its per out way who why how sec min pen cat dog egg car bus cow hen pig low big \
    pm th st nd rd rs let get use only cost since tank pink pipe pint cosine sine pies pie logs tans secs \
    costs tanks";

/// Whether a run of letters is a word rather than a product of variables.
pub fn is_word(run: &str) -> bool {
    let lower = run.to_ascii_lowercase();
    if is_in(SHORT, &lower) {
        return true;
    }
    let capitalised = run.len() >= 3
        && run.as_bytes()[0].is_ascii_uppercase()
        && run.bytes().skip(1).all(|b| b.is_ascii_lowercase());
    let has_vowel = lower.bytes().any(|b| b"aeiouy".contains(&b));
    if run.len() < 4 || !has_vowel {
        return capitalised && has_vowel;
    }
    // A function's name with a variable or two beside it is no word.
    let glued = INLINE.split(' ').any(|name| {
        run.len() <= name.len() + 2 && (run.starts_with(name) || run.ends_with(name)) || run == name
    });
    let upper = run.bytes().filter(u8::is_ascii_uppercase).count();
    !glued && (upper == 0 || capitalised || upper == run.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_products_of_variables_are_distinguished() {
        for word in ["even", "Monday", "odd", "cost", "hexagon", "weeks", "no", "Evelyn"] {
            assert!(is_word(word), "{word}");
        }
        for product in ["xy", "abc", "sinx", "pir", "xsin", "wxz", "AB", "lnab"] {
            assert!(!is_word(product), "{product}");
        }
    }
}
