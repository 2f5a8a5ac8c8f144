//! The HTML around a page's data.

use serde_json::Value;

/// In every page, also of earlier versions; a file without it is not written over.
pub(super) const MARK: &str = " · Ferrl</title>";

const SCRIPT: &str = concat!(
    include_str!("base.js"),
    include_str!("curves.js"),
    include_str!("rewards.js"),
    include_str!("table.js"),
    include_str!("main.js"),
);

/// What a page shows.
pub(super) struct Page<'a> {
    pub title: &'a str,
    /// Level, message and fix.
    pub warnings: &'a [[String; 3]],
    /// Label, value and note.
    pub figures: &'a [[String; 3]],
    /// Of a single run.
    pub recipe: Option<&'a str>,
    pub data: &'a Value,
}

impl Page<'_> {
    pub fn html(&self) -> String {
        let title = escape(self.title);
        let css = include_str!("page.css");
        // Inside a script element only "<" could end it early.
        let data = self.data.to_string().replace('<', "\\u003c");
        let data = data.replace('\u{2028}', "\\u2028").replace('\u{2029}', "\\u2029");
        let (links, sections) = match self.recipe {
            Some(recipe) => (RUN_LINKS, format!("{RUN_SECTIONS}<pre>{}</pre></section>\n", escape(recipe))),
            None => (COMPARE_LINKS, COMPARE_SECTIONS.to_string()),
        };
        let (warnings, figures) = (self.warnings(), self.figures());
        format!(
            r##"<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}{MARK}
<style>
{css}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<nav>{links}</nav>
<label class="control">x axis <select id="axis"></select></label>
<label class="control">Smoothing <input id="smooth" type="range" min="0" max="0.98" step="0.02" value="0.6"><output id="smooth-value"></output></label>
<button id="theme" type="button" title="Light or dark">◐</button>
</header>
<main>
{warnings}{figures}<section id="curves"><h2>Curves</h2><div id="legend"></div><div id="main-charts" class="charts"></div>
<details id="more"><summary>More metrics</summary><div id="more-charts" class="charts"></div></details></section>
{sections}</main>
<noscript><p>Curves and tables are drawn by a script in this file, and scripts are switched off.</p></noscript>
<div id="tip" hidden></div>
<script id="data" type="application/json">{data}</script>
<script>
{SCRIPT}</script>
</body>
</html>
"##
        )
    }

    fn warnings(&self) -> String {
        let item = |[level, message, fix]: &[String; 3]| {
            let (level, message) = (escape(level), escape(message));
            let fix = if fix.is_empty() { String::new() } else { format!("<i>{}</i>", escape(fix)) };
            format!("<li class=\"{level}\"><b>{level}</b> {message}{fix}</li>\n")
        };
        let items: String = self.warnings.iter().map(item).collect();
        if items.is_empty() { items } else { format!("<ul class=\"warnings\">\n{items}</ul>\n") }
    }

    fn figures(&self) -> String {
        let tile = |parts: &[String; 3]| {
            let [label, value, note] = parts.each_ref().map(|text| escape(text));
            format!("<div class=\"figure\"><span>{label}</span><b>{value}</b><i>{note}</i></div>\n")
        };
        let tiles: String = self.figures.iter().map(tile).collect();
        if tiles.is_empty() { tiles } else { format!("<section class=\"figures\">\n{tiles}</section>\n") }
    }
}

const RUN_LINKS: &str = "<a href=\"#curves\">Curves</a><a href=\"#rewards\">Rewards</a><a href=\"#rollouts\">Completions</a><a href=\"#recipe\">Recipe</a>";
const COMPARE_LINKS: &str =
    "<a href=\"#curves\">Curves</a><a href=\"#runs\">Runs</a><a href=\"#differences\">Recipes</a>";

const RUN_SECTIONS: &str = "<section id=\"rewards\"><h2>Rewards</h2><div id=\"histograms\" class=\"charts\"></div></section>
<section id=\"rollouts\"><h2>Completions</h2><div id=\"controls\"></div><div class=\"scroll\"><table id=\"table\"></table></div><p id=\"more-rows\"></p></section>
<section id=\"recipe\"><h2>Recipe</h2>";
const COMPARE_SECTIONS: &str = "<section id=\"runs\"><h2>Runs</h2><div id=\"controls\"></div><div class=\"scroll\"><table id=\"table\"></table></div><p id=\"more-rows\"></p></section>
<section id=\"differences\"><h2>Recipe keys that differ</h2><div class=\"scroll\"><table id=\"keys\"></table></div></section>
";

/// Text that stays text.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() && !"\n\t".contains(c) => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}
