//! What is true about a machine: the noise-free times of its twin without noise, dips and
//! artefacts.
//!
//! | fault | members are compared with |
//! |---|---|
//! | whole rows (cores, nodes) | the median of the unaffected rows, column by column |
//! | whole columns (devices, cores and nodes of rank 1) | the median of the unaffected columns, row by row |
//! | cells (blocks, same core, siblings) | row median × column median ÷ median, over unaffected cells |
//!
//! Its standard error at the largest size follows from the scenario's noise and the number of
//! visits in the blocks, confirmation not counted.

use cluster_health_core::backend::synthetic::World;
use cluster_health_core::{CpuId, DeviceId, PointContext, Scenario};
use cluster_health_matrix::stats::median;
use std::time::Duration;

use super::Result;
use super::generator::{Case, Planted, Shape};

/// Effects below this are too small to have to be found.
pub(crate) const SMALLEST_EFFECT: f64 = 0.05;
/// Standard errors below which an effect does not have to be found.
pub(crate) const SMALLEST_Z: f64 = 6.0;

/// Standard deviation of the median of three normal values, in units of one's.
const MEDIAN_OF_THREE: f64 = 0.6698;

/// A planted fault as it can be observed.
pub(crate) struct Truth {
    /// Rate of the members ÷ rate of the rest at the largest size, median over the members.
    pub(crate) ratio: f64,
    /// The same against the median of all unaffected cells, without regard to rows and columns.
    pub(crate) crude_ratio: f64,
    /// The ratio of the member that differs least.
    pub(crate) weakest: f64,
    /// Standard error of ln(ratio).
    pub(crate) error: f64,
    /// The same for one member alone: a row, a column, or a cell.
    pub(crate) member_error: f64,
}

impl Truth {
    /// True for a fault that has to be found.
    pub(crate) fn is_must(&self) -> bool {
        is_large(self.ratio, self.error)
    }

    /// True when each member has to be found even if it were alone.
    pub(crate) fn is_clear(&self) -> bool {
        self.is_must() && is_large(self.weakest, self.member_error)
    }
}

fn is_large(ratio: f64, error: f64) -> bool {
    (ratio - 1.0).abs() >= SMALLEST_EFFECT && ratio.ln().abs() >= SMALLEST_Z * error
}

/// The truth about each planted fault.
///
/// # Errors
/// When the twin cannot be measured: a mistake of the generator.
pub(crate) fn of(case: &Case) -> Result<Vec<Truth>> {
    if case.planted.is_empty() {
        return Ok(Vec::new());
    }
    let rates = rates(case)?;
    let healthy = healthy_cells(case);
    Ok(case.planted.iter().map(|planted| truth(case, planted, &rates, &healthy)).collect())
}

/// The cells that no fault affects.
pub(crate) fn healthy_cells(case: &Case) -> Vec<bool> {
    let cells = case.rows.len() * case.columns.len();
    (0..cells).map(|at| !case.planted.iter().any(|planted| planted.cells[at])).collect()
}

fn twin(scenario: &Scenario) -> Scenario {
    let mut twin = scenario.clone();
    for link in [&mut twin.h2d, &mut twin.all_gather] {
        link.noise = 0.0;
        link.visit_noise = 0.0;
        link.dip_probability = 0.0;
    }
    twin.artefact.clear();
    twin
}

/// Noise-free rates of all cells at the largest size, GB/s, row by row.
pub(crate) fn rates(case: &Case) -> Result<Vec<f64>> {
    const LONG: Duration = Duration::from_secs(3600);
    let mut world = World::new(twin(&case.scenario), None)?;
    let pair = case.plan.core_pair.as_ref().map(|plan| plan.device_pair);
    let bytes = case.largest.bytes();
    let mut rates = Vec::with_capacity(case.rows.len() * case.columns.len());
    for &row in &case.rows {
        for &column in &case.columns {
            let seq = rates.len() as u64;
            let sweep_is_pair = pair.is_some();
            world.begin_point(&PointContext { seq, visit: seq, sweep_is_pair, load: "idle" });
            world.bind(0, CpuId(row))?;
            let outcome = match pair {
                None => world.copy(DeviceId(column), bytes, LONG)?,
                Some(pair) => {
                    world.bind(1, CpuId(column))?;
                    world.all_gather(pair, bytes, LONG)?
                }
            };
            rates.push(bytes as f64 / outcome.ns as f64);
        }
    }
    Ok(rates)
}

fn median_of(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    if values.is_empty() { f64::NAN } else { median(&mut values) }
}

/// What each cell's rate would be if it were one of the rest, for members of this shape.
pub(crate) fn expected(case: &Case, shape: Shape, rates: &[f64], healthy: &[bool]) -> Vec<f64> {
    let (n, m) = (case.rows.len(), case.columns.len());
    let row = |row: usize| {
        let cells = (0..m).map(|column| case.at(row, column));
        median_of(cells.filter(|at| healthy[*at]).map(|at| rates[at]))
    };
    let column = |column: usize| {
        let cells = (0..n).map(|row| case.at(row, column));
        median_of(cells.filter(|at| healthy[*at]).map(|at| rates[at]))
    };
    let all = median_of((0..n * m).filter(|at| healthy[*at]).map(|at| rates[at]));
    let by_row: Vec<f64> = (0..n).map(row).collect();
    let by_column: Vec<f64> = (0..m).map(column).collect();
    (0..n * m)
        .map(|at| match shape {
            Shape::Rows => by_column[at % m],
            Shape::Columns => by_row[at / m],
            Shape::Cells => by_row[at / m] * by_column[at % m] / all,
        })
        .collect()
}

/// Rate ÷ expected rate, median over these cells.
pub(crate) fn ratio(rates: &[f64], expected: &[f64], cells: impl Fn(usize) -> bool) -> f64 {
    median_of((0..rates.len()).filter(|at| cells(*at)).map(|at| rates[at] / expected[at]))
}

fn truth(case: &Case, planted: &Planted, rates: &[f64], healthy: &[bool]) -> Truth {
    let (n, m) = (case.rows.len(), case.columns.len());
    let is_member = |at: usize| planted.cells[at];
    let expected = expected(case, planted.shape, rates, healthy);
    let median_ratio = ratio(rates, &expected, is_member);
    let all = median_of((0..n * m).filter(|at| healthy[*at]).map(|at| rates[at]));
    let crude_ratio = median_of((0..n * m).filter(|at| is_member(*at)).map(|at| rates[at] / all));

    // One member is a row, a column or a cell.
    let member_of = |at: usize| match planted.shape {
        Shape::Rows => at / m,
        Shape::Columns => at % m,
        Shape::Cells => at,
    };
    let mut members: Vec<usize> = (0..n * m).filter(|at| is_member(*at)).map(member_of).collect();
    members.sort_unstable();
    members.dedup();
    let weakest = members
        .iter()
        .map(|member| ratio(rates, &expected, |at| is_member(at) && member_of(at) == *member))
        .min_by(|a, b| (a - 1.0).abs().total_cmp(&(b - 1.0).abs()))
        .unwrap_or(f64::NAN);

    let variance = member_variance(case, planted.shape);
    let (count, of) = (
        members.len() as f64,
        match planted.shape {
            Shape::Rows => n as f64,
            Shape::Columns => m as f64,
            Shape::Cells => (n * m) as f64,
        },
    );
    let against = |members: f64| (variance * (1.0 / members + 1.0 / (of - count))).sqrt();
    Truth {
        ratio: median_ratio,
        crude_ratio,
        weakest,
        error: against(count),
        member_error: against(1.0),
    }
}

/// Variance of ln(rate) of one row, column or cell at the largest size, over all blocks.
fn member_variance(case: &Case, shape: Shape) -> f64 {
    let (n, m) = (case.rows.len() as f64, case.columns.len() as f64);
    let blocks = f64::from(case.blocks);
    let link = if case.sweep.is_pair() { &case.scenario.all_gather } else { &case.scenario.h2d };
    let (point, visit) = ((MEDIAN_OF_THREE * link.noise).powi(2), link.visit_noise.powi(2));
    let each = match (case.sweep.is_pair(), shape) {
        (true, Shape::Rows) => (point + visit) / m,
        (true, Shape::Columns) => (point + visit) / n,
        // All devices are measured in one visit of a core: its noise is the row's alone.
        (false, Shape::Rows) => visit + point / m,
        (false, Shape::Columns) => point / n,
        (_, Shape::Cells) => point + visit,
    };
    each / blocks
}
