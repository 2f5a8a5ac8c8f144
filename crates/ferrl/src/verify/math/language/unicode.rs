//! Unicode mathematics rewritten as LaTeX, so that one lexer reads both.

/// What a character is written as; none where it stays.
fn latex(c: char) -> Option<&'static str> {
    [operator, greek, symbol, bracket, fraction].iter().find_map(|table| table(c))
}

/// Operations and relations.
fn operator(c: char) -> Option<&'static str> {
    Some(match c {
        '−' | '–' | '—' | '‐' | '‑' | '﹣' | '－' | '﹘' => "-",
        '＋' => "+",
        '＝' => "=",
        '×' | '✕' | '✖' | '⨯' => "\\times ",
        '·' | '⋅' | '∙' | '•' | '∗' | '＊' | '⋆' => "\\cdot ",
        '÷' => "\\div ",
        '∕' | '⁄' | '／' => "/",
        '±' => "\\pm ",
        '∓' => "\\mp ",
        '≤' | '⩽' | '≦' | '⋜' => "\\le ",
        '≥' | '⩾' | '≧' | '⋝' => "\\ge ",
        '≠' => "\\ne ",
        '＜' => "<",
        '＞' => ">",
        '≈' | '≃' | '≅' | '≒' => "\\approx ",
        '≡' => "\\equiv ",
        '∼' => "\\sim ",
        '∈' | '∊' => "\\in ",
        '∉' => "\\notin ",
        '∪' | '⋃' => "\\cup ",
        '∩' | '⋂' => "\\cap ",
        '∖' => "\\setminus ",
        '⊂' | '⊆' => "\\subset ",
        '∧' => "\\land ",
        '∨' => "\\lor ",
        '∅' | '⌀' => "\\emptyset ",
        '∞' => "\\infty ",
        _ => return None,
    })
}

/// Greek letters, and the sums and products that look like them.
fn greek(c: char) -> Option<&'static str> {
    Some(match c {
        'π' | '𝜋' | '𝛑' | 'П' | 'ϖ' => "\\pi ",
        'α' => "\\alpha ",
        'β' => "\\beta ",
        'γ' => "\\gamma ",
        'δ' => "\\delta ",
        'ε' | 'ϵ' => "\\epsilon ",
        'ζ' => "\\zeta ",
        'η' => "\\eta ",
        'θ' | 'ϑ' => "\\theta ",
        'κ' => "\\kappa ",
        'λ' => "\\lambda ",
        'μ' | 'µ' => "\\mu ",
        'ν' => "\\nu ",
        'ξ' => "\\xi ",
        'ρ' => "\\rho ",
        'σ' => "\\sigma ",
        'τ' => "\\tau ",
        'φ' | 'ϕ' => "\\phi ",
        'χ' => "\\chi ",
        'ψ' => "\\psi ",
        'ω' => "\\omega ",
        'Γ' => "\\Gamma ",
        'Δ' | '△' => "\\Delta ",
        'Θ' => "\\Theta ",
        'Λ' => "\\Lambda ",
        'Σ' | '∑' => "\\sum ",
        'Π' | '∏' => "\\prod ",
        'Φ' => "\\Phi ",
        'Ψ' => "\\Psi ",
        'Ω' => "\\Omega ",
        _ => return None,
    })
}

/// Roots, marks, arrows, sets of numbers and what says nothing.
fn symbol(c: char) -> Option<&'static str> {
    Some(match c {
        '∫' => "\\int ",
        '√' => "\\sqrt",
        '∛' => "\\sqrt[3]",
        '∜' => "\\sqrt[4]",
        '°' | 'º' | '˚' => "^\\circ ",
        '′' | '’' | '‘' | '´' => "'",
        '″' => "''",
        '∠' => "\\angle ",
        '→' | '⟶' | '⇒' | '⟹' | '↦' => "\\to ",
        'ℝ' => "\\mathbb{R}",
        'ℤ' => "\\mathbb{Z}",
        'ℕ' => "\\mathbb{N}",
        'ℚ' => "\\mathbb{Q}",
        'ℂ' => "\\mathbb{C}",
        '\u{200b}' | '\u{200c}' | '\u{200d}' | '\u{2060}' | '\u{feff}' => "",
        '\u{2061}' | '\u{2062}' => " ",
        '“' | '”' => "\"",
        _ => return None,
    })
}

/// Brackets and punctuation.
fn bracket(c: char) -> Option<&'static str> {
    Some(match c {
        '⌊' => "\\lfloor ",
        '⌋' => "\\rfloor ",
        '⌈' => "\\lceil ",
        '⌉' => "\\rceil ",
        '⟨' | '〈' => "\\langle ",
        '⟩' | '〉' => "\\rangle ",
        '∣' | '｜' => "|",
        '（' => "(",
        '）' => ")",
        '［' | '【' => "[",
        '］' | '】' => "]",
        '｛' => "\\{",
        '｝' => "\\}",
        '，' | '、' => ",",
        '；' => ";",
        '：' | '∶' => ":",
        '。' | '．' => ".",
        '％' | '﹪' => "%",
        '！' => "!",
        '…' | '⋯' => "\\ldots ",
        _ => return None,
    })
}

/// Fractions of one character.
fn fraction(c: char) -> Option<&'static str> {
    Some(match c {
        '½' => "\\frac{1}{2}",
        '⅓' => "\\frac{1}{3}",
        '⅔' => "\\frac{2}{3}",
        '¼' => "\\frac{1}{4}",
        '¾' => "\\frac{3}{4}",
        '⅕' => "\\frac{1}{5}",
        '⅖' => "\\frac{2}{5}",
        '⅗' => "\\frac{3}{5}",
        '⅘' => "\\frac{4}{5}",
        '⅙' => "\\frac{1}{6}",
        '⅚' => "\\frac{5}{6}",
        '⅛' => "\\frac{1}{8}",
        '⅜' => "\\frac{3}{8}",
        '⅝' => "\\frac{5}{8}",
        '⅞' => "\\frac{7}{8}",
        _ => return None,
    })
}

const SUPERSCRIPTS: &str = "⁰0¹1²2³3⁴4⁵5⁶6⁷7⁸8⁹9⁺+⁻-⁽(⁾)ⁿnⁱi";
const SUBSCRIPTS: &str = "₀0₁1₂2₃3₄4₅5₆6₇7₈8₉9₊+₋-₍(₎)ₙnᵢiⱼjₖkₘm";

fn raised(table: &str, c: char) -> Option<char> {
    let mut pairs = table.chars();
    while let (Some(from), Some(to)) = (pairs.next(), pairs.next()) {
        if from == c {
            return Some(to);
        }
    }
    None
}

/// The text with every mathematical character written as LaTeX, full-width digits as ASCII.
pub fn to_latex(text: &str) -> String {
    if text.is_ascii() {
        return text.to_string();
    }
    let mut out = String::with_capacity(text.len() + 16);
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c.is_ascii() {
            out.push(c);
            continue;
        }
        if let Some(digit @ '０'..='９') = Some(c) {
            out.push((b'0' + (digit as u32 - '０' as u32) as u8) as char);
            continue;
        }
        for (table, mark) in [(SUPERSCRIPTS, "^{"), (SUBSCRIPTS, "_{")] {
            if let Some(first) = raised(table, c) {
                out.push_str(mark);
                out.push(first);
                while let Some(next) = chars.peek().and_then(|c| raised(table, *c)) {
                    out.push(next);
                    chars.next();
                }
                out.push('}');
            }
        }
        if raised(SUPERSCRIPTS, c).is_some() || raised(SUBSCRIPTS, c).is_some() {
            continue;
        }
        match latex(c) {
            Some(latex) => out.push_str(latex),
            None if c.is_whitespace() => out.push(' '),
            None => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unicode_becomes_latex() {
        assert_eq!(to_latex("x²⁰ ≤ ½√2"), "x^{20} \\le  \\frac{1}{2}\\sqrt2");
        assert_eq!(to_latex("a₁₂ − ３°"), "a_{12} - 3^\\circ ");
    }
}
