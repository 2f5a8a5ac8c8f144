//! Models of the tabular task: ridge regression, a decision tree, nearest neighbours. Each maps features to one output in
//! regression, or to one per class.

/// Rows of numbers.
pub(super) type Matrix = Vec<Vec<f64>>;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum TabularModel {
    /// Least squares with the penalty `alpha` on the squared weights.
    Ridge { alpha: f64 },
    /// Binary splits that reduce the squared error most.
    Tree { depth: usize },
    /// Mean of the `k` nearest rows.
    Knn { k: usize },
}

/// Minimum number of rows of a leaf.
const LEAF: usize = 3;
/// Number of split candidates of a feature.
const CUTS: usize = 32;

impl TabularModel {
    /// Outputs for `test` after training on `x` and `y`.
    pub(super) fn predict(self, x: &Matrix, y: &Matrix, test: &Matrix) -> Matrix {
        match self {
            TabularModel::Ridge { alpha } => ridge(x, y, test, alpha),
            TabularModel::Tree { depth } => {
                let rows: Vec<usize> = (0..x.len()).collect();
                let tree = TreeSplit::grow(x, y, rows, depth);
                test.iter().map(|row| tree.output(row).to_vec()).collect()
            }
            TabularModel::Knn { k } => test.iter().map(|row| nearest(x, y, row, k)).collect(),
        }
    }
}

fn mean(y: &Matrix, rows: &[usize]) -> Vec<f64> {
    let width = y.first().map_or(0, Vec::len);
    let sum = |j: usize| rows.iter().map(|&i| y[i][j]).sum::<f64>();
    (0..width).map(|j| sum(j) / rows.len().max(1) as f64).collect()
}

/// Solves `(X'X + alpha I) w = X'y` for each output; the intercept has no penalty.
fn ridge(x: &Matrix, y: &Matrix, test: &Matrix, alpha: f64) -> Matrix {
    let rows: Vec<usize> = (0..x.len()).collect();
    let (center_x, center_y) = (mean(x, &rows), mean(y, &rows));
    let width = center_x.len();
    let centered = |row: &Vec<f64>| -> Vec<f64> { row.iter().zip(&center_x).map(|(v, c)| v - c).collect() };
    let own: Matrix = x.iter().map(centered).collect();
    let mut gram = vec![vec![0.0; width]; width];
    let mut right = vec![vec![0.0; center_y.len()]; width];
    for (row, y) in own.iter().zip(y) {
        for i in 0..width {
            (0..width).for_each(|j| gram[i][j] += row[i] * row[j]);
            (0..center_y.len()).for_each(|j| right[i][j] += row[i] * (y[j] - center_y[j]));
        }
    }
    // Without any penalty collinear columns would have no unique solution.
    let floor = 1e-9 * (1.0 + gram.iter().enumerate().map(|(i, row)| row[i]).fold(0.0, f64::max));
    (0..width).for_each(|i| gram[i][i] += alpha.max(floor));
    let weights = solve(gram, right);
    let output = |row: &Vec<f64>| {
        let row = centered(row);
        let sum = |j: usize| row.iter().zip(&weights).map(|(v, w)| v * w[j]).sum::<f64>();
        (0..center_y.len()).map(|j| center_y[j] + sum(j)).collect()
    };
    test.iter().map(output).collect()
}

/// Gaussian elimination with partial pivoting.
fn solve(mut a: Matrix, mut b: Matrix) -> Matrix {
    let n = a.len();
    for k in 0..n {
        let pivot = (k..n).max_by(|&i, &j| a[i][k].abs().total_cmp(&a[j][k].abs())).unwrap_or(k);
        a.swap(k, pivot);
        b.swap(k, pivot);
        if a[k][k] == 0.0 {
            continue;
        }
        for i in (0..n).filter(|&i| i != k) {
            let factor = a[i][k] / a[k][k];
            if factor != 0.0 {
                (k..n).for_each(|j| a[i][j] -= factor * a[k][j]);
                (0..b[k].len()).for_each(|j| b[i][j] -= factor * b[k][j]);
            }
        }
    }
    for (k, row) in b.iter_mut().enumerate() {
        row.iter_mut().for_each(|v| *v = if a[k][k] == 0.0 { 0.0 } else { *v / a[k][k] });
    }
    b
}

enum TreeSplit {
    Leaf(Vec<f64>),
    Split { feature: usize, cut: f64, low: Box<TreeSplit>, high: Box<TreeSplit> },
}

impl TreeSplit {
    fn grow(x: &Matrix, y: &Matrix, rows: Vec<usize>, depth: usize) -> TreeSplit {
        let Some((feature, cut)) = (depth > 0).then(|| best_split(x, y, &rows)).flatten() else {
            return TreeSplit::Leaf(mean(y, &rows));
        };
        let (low, high) = rows.into_iter().partition(|&i| x[i][feature] <= cut);
        let grow = |rows| Box::new(TreeSplit::grow(x, y, rows, depth - 1));
        TreeSplit::Split { feature, cut, low: grow(low), high: grow(high) }
    }

    fn output(&self, row: &[f64]) -> &[f64] {
        match self {
            TreeSplit::Leaf(output) => output,
            TreeSplit::Split { feature, cut, low, high } => {
                if row[*feature] <= *cut { low } else { high }.output(row)
            }
        }
    }
}

/// The split with the largest sum of `|sum of y|^2 / rows` on both sides, which is the smallest squared error.
fn best_split(x: &Matrix, y: &Matrix, rows: &[usize]) -> Option<(usize, f64)> {
    let width = y.first().map_or(0, Vec::len);
    let gain = |sum: &[f64], n: usize| sum.iter().map(|s| s * s).sum::<f64>() / n as f64;
    let mut total = vec![0.0; width];
    rows.iter().for_each(|&i| (0..width).for_each(|j| total[j] += y[i][j]));
    let mut best = (gain(&total, rows.len().max(1)) + 1e-9, None);
    for feature in 0..x.first().map_or(0, Vec::len) {
        let mut order = rows.to_vec();
        order.sort_by(|&a, &b| x[a][feature].total_cmp(&x[b][feature]).then(a.cmp(&b)));
        let (mut low, every) = (vec![0.0; width], (rows.len() / CUTS).max(1));
        for at in 1..order.len() {
            (0..width).for_each(|j| low[j] += y[order[at - 1]][j]);
            let (here, next) = (x[order[at - 1]][feature], x[order[at]][feature]);
            if at < LEAF || order.len() - at < LEAF || here == next || at % every != 0 {
                continue;
            }
            let high: Vec<f64> = total.iter().zip(&low).map(|(t, l)| t - l).collect();
            let found = gain(&low, at) + gain(&high, order.len() - at);
            if found > best.0 {
                best = (found, Some((feature, (here + next) / 2.0)));
            }
        }
    }
    best.1
}

fn nearest(x: &Matrix, y: &Matrix, row: &[f64], k: usize) -> Vec<f64> {
    let distance = |other: &Vec<f64>| other.iter().zip(row).map(|(a, b)| (a - b) * (a - b)).sum::<f64>();
    let mut order: Vec<(f64, usize)> = x.iter().enumerate().map(|(i, other)| (distance(other), i)).collect();
    order.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let rows: Vec<usize> = order.iter().take(k).map(|(_, i)| *i).collect();
    mean(y, &rows)
}
