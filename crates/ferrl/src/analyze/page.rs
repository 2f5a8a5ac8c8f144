//! Analyses as one HTML page.

use super::{Analysis, Table};

/// A page with a table for each analysis.
pub fn page(run: &str, tables: &[(&Analysis, Table)]) -> String {
    let mut out = format!(
        "<!doctype html><meta charset=\"utf-8\"><title>Analyses of {0}</title><style>body{{font:15px/1.5 system-ui;margin:2em auto;\
         max-width:70em;padding:0 1em}}table{{border-collapse:collapse}}td,th{{padding:.2em .8em;text-align:right;\
         border-bottom:1px solid #ddd}}th{{font-weight:600}}</style><h1>Analyses of {0}</h1>",
        escaped(run)
    );
    for (analysis, table) in tables {
        out += &format!("<h2>{}</h2><p>{}</p><table><tr>", escaped(analysis.name), escaped(analysis.about));
        table.columns.iter().for_each(|c| out += &format!("<th>{}</th>", escaped(c)));
        out += "</tr>";
        for row in table.cells() {
            out += "<tr>";
            row.iter().for_each(|cell| out += &format!("<td>{}</td>", escaped(cell)));
            out += "</tr>";
        }
        out += "</table>";
    }
    out + "\n"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::super::ANALYSES;
    use super::*;
    use serde_json::json;

    #[test]
    fn text_of_a_run_stays_text() {
        let table = Table { columns: vec!["a"], rows: vec![vec![json!("<b>")]] };
        let page = page("<run>", &[(&ANALYSES[0], table)]);
        assert!(page.contains("&lt;run&gt;") && page.contains("<td>&lt;b&gt;</td>"), "{page}");
    }
}
