//! Analyses as one HTML page.

use super::Table;

/// A page with a table for each analysis, given as name, line for people and table; accuracies are drawn as bars, too.
pub fn page(run: &str, tables: &[(&str, &str, Table)]) -> String {
    let mut out = format!(
        "<!doctype html><meta charset=\"utf-8\"><title>Analyses of {0}</title><style>body{{font:15px/1.5 system-ui;margin:2em auto;\
         max-width:70em;padding:0 1em}}table{{border-collapse:collapse}}td,th{{padding:.2em .8em;text-align:right;\
         border-bottom:1px solid #ddd}}th{{font-weight:600}}</style><h1>Analyses of {0}</h1>",
        escaped(run)
    );
    for (name, about, table) in tables {
        out += &format!("<h2>{}</h2><p>{}</p><table><tr>", escaped(name), escaped(about));
        table.columns.iter().for_each(|c| out += &format!("<th>{}</th>", escaped(c)));
        out += "</tr>";
        for row in table.cells() {
            out += "<tr>";
            row.iter().for_each(|cell| out += &format!("<td>{}</td>", escaped(cell)));
            out += "</tr>";
        }
        out += "</table>";
        out += &bars(table);
    }
    out + "\n"
}

/// A bar chart of a table's `accuracy` column, labelled by its first column; nothing for a table without accuracies.
fn bars(table: &Table) -> String {
    let Some(at) = table.columns.iter().position(|c| *c == "accuracy") else { return String::new() };
    let rows: Vec<(String, f64)> = table
        .cells()
        .into_iter()
        .zip(&table.rows)
        .filter_map(|(cells, row)| Some((cells.first()?.clone(), row.get(at)?.as_f64()?)))
        .collect();
    let height = 24 * rows.len();
    let mut out = format!("<svg width=\"640\" height=\"{height}\" role=\"img\" aria-label=\"accuracy\">");
    for (i, (name, value)) in rows.iter().enumerate() {
        let (y, width) = (24 * i, 360.0 * value.clamp(0.0, 1.0));
        out += &format!(
            "<text x=\"0\" y=\"{0}\" font-size=\"13\">{1}</text><rect x=\"160\" y=\"{2}\" width=\"{width:.1}\" height=\"16\" \
             fill=\"#4a7ab5\"/><text x=\"{3:.1}\" y=\"{0}\" font-size=\"13\">{4:.1} %</text>",
            y + 17,
            escaped(name),
            y + 4,
            168.0 + width,
            100.0 * value
        );
    }
    out + "</svg>"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn text_of_a_run_stays_text() {
        let table = Table { columns: vec!["a"], rows: vec![vec![json!("<b>")]] };
        let page = page("<run>", &[("a", "b", table)]);
        assert!(page.contains("&lt;run&gt;") && page.contains("<td>&lt;b&gt;</td>"), "{page}");
    }

    #[test]
    fn accuracies_are_bars() {
        let rows = vec![vec![json!("step 5"), json!(0.5)], vec![json!("none"), json!(null)]];
        let page = page("r", &[("a", "b", Table { columns: vec!["model", "accuracy"], rows })]);
        assert!(
            page.contains("width=\"180.0\"") && page.contains("50.0 %") && page.matches("<rect").count() == 1
        );
    }
}
